//! Rows of reduced rank.

use std::sync::Arc;

use kv_attend::{Backend, Element};
use kv_llama::{Footprint, PromptRows};
use kv_model::Rope;
use svd_core::{HeadMaps, ReducedRows, Reduction};

use crate::Result;
use crate::cache::{Geometry, RotatedStore, Store, Sums};

/// ZACK: rotated keys and values truncated to each head's rank; attention in the rotated space.
///
/// Queries and keys are rotated here, after RoPE (paper 5.1). Values enter and leave rotated, since their
/// maps are folded into the model's `W_V` and `W_O`: a truncated value is its first components, with the rest
/// zero.
#[derive(Clone)]
pub(crate) struct ZackStore<E> {
    geometry: Geometry,
    rope: Arc<Rope>,
    cuts_prompts: bool, // whether prompt tokens attend to each other's truncated rows
    heads: Vec<ReducedRows<E>>,
}

impl<E: Element> ZackStore<E> {
    pub fn new(geometry: Geometry, rope: Arc<Rope>, maps: &[Arc<HeadMaps>], cuts_prompts: bool) -> Self {
        let heads = maps.iter().cloned().map(ReducedRows::new).collect();
        Self { geometry, rope, cuts_prompts, heads }
    }
}

impl<E: Element> RotatedStore for ZackStore<E> {
    fn push_rotated(&mut self, k: &[f32], v: &[f32]) -> Result<()> {
        for (head, rows) in self.heads.iter_mut().enumerate() {
            let [keys, values] = [k, v].map(|rows| self.geometry.head(head, rows));
            rows.append(Backend::detect(), keys?, values?)?;
        }
        Ok(())
    }
}

impl<E: Element> Store for ZackStore<E> {
    fn prompt_rows(&self, keys: &[f32], values: &[f32]) -> Result<Option<PromptRows>> {
        if !self.cuts_prompts {
            return Ok(None);
        }
        let (Geometry { head_dim, .. }, backend) = (self.geometry, Backend::detect());
        let cut = |side: fn(&HeadMaps) -> &Reduction, all: &[f32]| -> Result<Vec<f32>> {
            let mut cut = vec![0.0; all.len()];
            for (head, rows) in self.heads.iter().enumerate() {
                let reduced = side(rows.maps()).reduce(backend, self.geometry.head(head, all)?)?;
                let mut full = vec![0.0; all.len() / self.heads.len()];
                let rows = side(rows.maps()).reconstruct(backend, &reduced, &mut full)?;
                for (cut, row) in cut.chunks_exact_mut(self.geometry.kv_dim()).zip(rows.iter()) {
                    cut[head * head_dim..][..row.len()].copy_from_slice(row);
                }
            }
            Ok(cut)
        };
        Ok(Some((cut(HeadMaps::keys, keys)?, cut(HeadMaps::values, values)?)))
    }

    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.push_rotated(&self.rope.rotated(k, self.geometry.kv_dim(), pos), v)
    }

    fn len(&self) -> usize {
        self.heads[0].len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads.iter_mut().for_each(|rows| rows.truncate(len));
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let rows = &self.heads[head];
        let mut scratch = vec![0.0; rows.scratch_len(sums.stats.len())];
        let Sums { out, stats } = sums;
        Ok(rows.attend_into(Backend::detect(), q, first..rows.len(), None, &mut scratch, out, stats)?)
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            kept: self.heads.iter().map(ReducedRows::size).sum(),
            shared: self.heads.iter().map(|rows| rows.maps().size()).sum(),
            ..Footprint::default()
        }
    }
}
