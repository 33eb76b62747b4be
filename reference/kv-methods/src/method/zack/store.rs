//! Rows of reduced rank.

use std::sync::Arc;

use kv_attend::owner::Pair;
use kv_llama::{Footprint, PromptRows};
use kv_model::Rope;
use svd_core::SoftmaxStats;

use crate::Result;
use crate::cache::{ElementType, Elements, Geometry, RotatedStore, Store, merge_part};
use crate::method::cut::HeadCut;

/// ZACK: rotated keys and values truncated to each head's rank; attention in the rotated space.
///
/// Queries and keys are rotated here, after RoPE (paper 5.1). Values enter and leave rotated, since their
/// maps are folded into the model's `W_V` and `W_O`: a truncated value is its first components, with the rest
/// zero.
#[derive(Clone)]
pub(crate) struct ZackStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    heads: Arc<Vec<HeadCut>>, // (n_kv_heads,)
    element: ElementType,
    cuts_prompts: bool,        // whether prompt tokens attend to each other's truncated rows
    rows: Vec<Pair<Elements>>, // per head: keys (len, key rank) and values (len, value rank)
    len: usize,
}

impl ZackStore {
    pub fn new(
        geometry: Geometry,
        rope: Arc<Rope>,
        heads: Arc<Vec<HeadCut>>,
        element: ElementType,
        cuts_prompts: bool,
    ) -> Self {
        let rows = (0..geometry.n_kv_heads).map(|_| Pair::of(|_| Elements::new(element))).collect();
        Self { geometry, rope, heads, element, cuts_prompts, rows, len: 0 }
    }
}

impl RotatedStore for ZackStore {
    fn push_rotated(&mut self, k: &[f32], v: &[f32]) -> Result<()> {
        for (h, (cut, Pair { keys, values })) in self.heads.iter().zip(&mut self.rows).enumerate() {
            keys.push(&cut.project_keys(&self.geometry.head_rows(h, k))?);
            values.push(&cut.cut_values(&self.geometry.head_rows(h, v)));
        }
        self.len += k.len() / self.geometry.kv_dim();
        Ok(())
    }
}

impl Store for ZackStore {
    fn prompt_rows(&self, keys: &[f32], values: &[f32]) -> Result<Option<PromptRows>> {
        if !self.cuts_prompts {
            return Ok(None);
        }
        let (mut keys, mut values) = (keys.to_vec(), values.to_vec());
        let Geometry { head_dim, .. } = self.geometry;
        for (head, cut) in self.heads.iter().enumerate() {
            let columns = head * head_dim..(head + 1) * head_dim;
            let reconstructed = cut.reconstruct_keys(&self.geometry.head_rows(head, &keys))?;
            let rows = keys.chunks_exact_mut(self.geometry.kv_dim());
            rows.zip(reconstructed.chunks_exact(head_dim))
                .for_each(|(row, k)| row[columns.clone()].copy_from_slice(k));
            let rows = values.chunks_exact_mut(self.geometry.kv_dim());
            rows.for_each(|row| row[columns.clone()][cut.value_rank..].fill(0.0));
        }
        Ok(Some((keys, values)))
    }

    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.push_rotated(&self.rope.rotated(k, self.geometry.kv_dim(), pos), v)
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        for (cut, Pair { keys, values }) in self.heads.iter().zip(&mut self.rows) {
            keys.truncate(len * cut.key_rank());
            values.truncate(len * cut.value_rank);
        }
        self.len = len;
        Ok(())
    }

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let (cut, Pair { keys, values }) = (&self.heads[head], &self.rows[head]);
        let mut cut_out = vec![0.0; stats.len() * cut.value_rank];
        let mut cut_stats = vec![SoftmaxStats::EMPTY; stats.len()];
        let starts = Pair::new(first * cut.key_rank(), first * cut.value_rank);
        keys.attend(values, starts, &cut.project_queries(q)?, &mut cut_out, &mut cut_stats)?;
        merge_part((&cut_out, &cut_stats), out, stats, |cut_out, _, row| {
            row[..cut_out.len()].copy_from_slice(cut_out);
            Ok(())
        })
    }

    fn footprint(&self) -> Footprint {
        let rows: usize = self.rows.iter().flat_map(Pair::iter).map(Elements::len).sum();
        let shared = self.heads.iter().map(HeadCut::size).sum();
        Footprint { kept: rows * self.element.size(), shared, ..Footprint::default() }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
