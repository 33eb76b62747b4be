//! Top-k attention: score all tokens cheaply, attend to the best exactly.

use std::sync::Arc;

use pq_core::{Codebook, Codes, Lut, PqShape, TrainOptions, lut_into, scan_into, top_k_into, train};

use crate::Result;
use crate::cache::accumulate::Accumulator;
use crate::cache::codes::append_codes;
use crate::cache::exact::attend_rows;
use crate::cache::{DenseStore, ElementType, Footprint, Geometry, Store};
use crate::model::Rope;
use crate::ops::{dot, softmax};

/// How tokens are scored.
#[derive(Clone)]
pub(crate) enum Scorer {
    /// By the exact product: the upper bound for every top-k method.
    Oracle,
    /// By product-quantized keys; the codebooks are trained on the first keys that arrive, that is on the prompt (PQCache
    /// 3.3).
    Pq {
        shape: PqShape,
        options: TrainOptions,
        heads: Vec<PqHead>, // one per kv head; empty before the first keys
    },
}

/// One head's codebook and the codes of its keys.
#[derive(Clone)]
pub(crate) struct PqHead {
    centroids: Arc<Vec<f32>>,
    codes: Vec<u8>,
}

/// Exact rows of which each step attends only to the highest-scored ones.
#[derive(Clone)]
pub(crate) struct RetrievalStore {
    geometry: Geometry,
    exact: DenseStore,
    scorer: Scorer,
    ratio: f64,      // attended part of all tokens
    reserved: usize, // sinks and window, which count towards that part
}

impl RetrievalStore {
    pub fn new(
        geometry: Geometry,
        element: ElementType,
        rope: Arc<Rope>,
        scorer: Scorer,
        ratio: f64,
        reserved: usize,
    ) -> Self {
        Self { geometry, exact: DenseStore::new(element, geometry, rope), scorer, ratio, reserved }
    }

    /// Tokens to retrieve for one step.
    fn k(&self) -> usize {
        let attended = (self.ratio * (self.exact.tokens() + self.reserved) as f64).ceil() as usize;
        attended.saturating_sub(self.reserved).clamp(1, self.exact.tokens())
    }

    /// Scores of all tokens for one query.
    fn scores(&self, head: usize, q: &[f32]) -> Result<Vec<f32>> {
        let mut scores = vec![0.0; self.exact.tokens()];
        match &self.scorer {
            Scorer::Oracle => {
                let mut key = vec![0.0; q.len()];
                for (t, score) in scores.iter_mut().enumerate() {
                    self.exact.rows().read_keys(head, t, &mut key);
                    *score = dot(q, &key);
                }
            }
            Scorer::Pq { shape, heads, .. } => {
                let mut table = vec![0.0; shape.lut_len()];
                lut_into(&Codebook::new(*shape, &heads[head].centroids)?, q, &mut table)?;
                scan_into(&Lut::new(*shape, &table)?, &Codes::new(*shape, &heads[head].codes)?, &mut scores)?;
            }
        }
        Ok(scores)
    }

    /// The tokens that the whole group fetches: the top of the sum of its queries' softmaxed scores (the rule of
    /// PQCache's released code).
    fn select(&self, head: usize, q: &[f32]) -> Result<Vec<u32>> {
        let mut total = vec![0.0; self.exact.tokens()];
        for q in q.chunks_exact(self.geometry.head_dim) {
            let mut scores = self.scores(head, q)?;
            softmax(&mut scores);
            crate::ops::add(&mut total, &scores);
        }
        let mut indices = vec![0; total.len()];
        let k = top_k_into(&total, self.k(), &mut indices)?;
        indices.truncate(k);
        Ok(indices)
    }
}

impl Scorer {
    /// Encodes keys (n, head_dim) of every head, training first where there is no codebook yet.
    fn push(&mut self, geometry: Geometry, rotated: &[f32]) -> Result<()> {
        let Self::Pq { shape, options, heads } = self else { return Ok(()) };
        if heads.is_empty() {
            *heads = (0..geometry.n_kv_heads)
                .map(|head| {
                    let trained = train(*shape, &geometry.head_rows(head, rotated), options)?;
                    Ok(PqHead { centroids: Arc::new(trained.centroids), codes: vec![] })
                })
                .collect::<Result<_>>()?;
        }
        for (i, head) in heads.iter_mut().enumerate() {
            let keys = geometry.head_rows(i, rotated);
            append_codes(&Codebook::new(*shape, &head.centroids)?, &keys, &mut head.codes)?;
        }
        Ok(())
    }
}

impl Store for RetrievalStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let rotated = self.exact.rope().rotated(k, self.geometry.kv_dim(), pos);
        self.scorer.push(self.geometry, &rotated)?;
        self.exact.push_rotated(&rotated, v);
        Ok(())
    }

    fn len(&self) -> usize {
        self.exact.tokens()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        if let Scorer::Pq { shape, heads, .. } = &mut self.scorer {
            heads.iter_mut().for_each(|head| head.codes.truncate(len * shape.code_size()));
        }
        self.exact.truncate(len)
    }

    fn attend(&self, head: usize, q: &[f32], group: &mut [Accumulator]) -> Result<()> {
        if self.exact.tokens() == 0 {
            return Ok(());
        }
        let selected = self.select(head, q)?;
        let head_dim = self.geometry.head_dim;
        let (mut keys, mut values) =
            (vec![0.0; selected.len() * head_dim], vec![0.0; selected.len() * head_dim]);
        for ((&t, k), v) in
            selected.iter().zip(keys.chunks_exact_mut(head_dim)).zip(values.chunks_exact_mut(head_dim))
        {
            self.exact.rows().read(head, t as usize, k, v);
        }
        attend_rows(q, &keys, &values, head_dim, group)
    }

    fn footprint(&self) -> Footprint {
        let exact = self.exact.footprint();
        match &self.scorer {
            Scorer::Oracle => exact,
            Scorer::Pq { heads, .. } => Footprint {
                kept: heads.iter().map(|head| head.codes.len() + 4 * head.centroids.len()).sum(),
                offloaded: exact.kept,
                ..Footprint::default()
            },
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
