//! Top-k attention: all tokens are scored cheaply, the best are attended to exactly. `oracle` scores by the
//! exact product, `pqcache` by product-quantized keys; its exact rows are offloaded.

use std::sync::Arc;

use pq_core::{
    CodebookBuf, CodesBuf, GroupRule, Lut, PqShape, TrainOptions, combine_group_into, lut_into, scan_into,
    top_k_into, train_batch,
};
use svd_core::SoftmaxStats;

use super::cost::{Iterations, Resolved};
use super::kind::{Entry, Kind, SEED, Site};
use super::offload::{OffloadSettings, offload_help};
use super::pq_code::PqCode;
use crate::Result;
use crate::cache::{Fetched, Footprint, Geometry, OffloadedRows, Store};
use crate::model::{Config, Rope};
use crate::ops::dot;

pub(super) const ORACLE: Entry = Entry {
    names: &["oracle"],
    help: "\
  oracle            exact top-k, this part of the tokens                  ratio=0.2
",
    parse: |s| {
        let ratio = s.fraction("ratio", 0.2)?;
        Ok(Arc::new(TopK { ratio, quantizer: None, offload: OffloadSettings::NONE }))
    },
};

pub(super) const PQ_CACHE: Entry = Entry {
    names: &["pqcache"],
    help: concat!(
        "\
  pqcache           top-k by PQ codes;                                    ratio=0.2 code=16x8 iterations=10|FILE
",
        offload_help!()
    ),
    parse: |s| {
        let (ratio, code) = (s.fraction("ratio", 0.2)?, PqCode::take(s, "code", 8, 8)?);
        let quantizer = Some((code, s.own("iterations", Iterations::Count(10))?));
        Ok(Arc::new(TopK { ratio, quantizer, offload: OffloadSettings::take(s)? }))
    },
};

#[derive(Debug)]
struct TopK {
    ratio: f64,
    quantizer: Option<(PqCode, Iterations)>, // and the iterations of its training
    offload: OffloadSettings,
}

impl Kind for TopK {
    fn check(&self, config: &Config) -> Result<()> {
        if let Some((code, iterations)) = &self.quantizer {
            code.check("pqcache", config)?;
            iterations.resolve(code.shape(config.head_dim)?, Geometry::of(config))?;
        }
        self.offload.check()
    }

    fn prompt_quantizer(&self, geometry: Geometry) -> Option<Result<PqShape>> {
        self.quantizer.as_ref().map(|(code, _)| code.shape(geometry.head_dim))
    }

    fn stores(&self, site: &Site<'_>) -> Result<Vec<Box<dyn Store>>> {
        let scorer = match &self.quantizer {
            None => Scorer::Oracle,
            Some((code, iterations)) => {
                let shape = code.shape(site.geometry.head_dim)?;
                let iterations = iterations.resolve(shape, site.geometry)?;
                Scorer::Pq { shape, iterations, seed: SEED, heads: vec![] }
            }
        };
        site.layers(|l| {
            let (geometry, ratio, reserved) = (site.geometry, self.ratio, site.reserved);
            let (exact, rope, scorer) = (self.offload.rows(site)?, site.rope(l), scorer.clone());
            Ok(RetrievalStore { geometry, exact, rope, scorer, ratio, reserved })
        })
    }
}

/// How tokens are scored.
#[derive(Clone)]
enum Scorer {
    /// By the exact product: the upper bound for every top-k method.
    Oracle,
    /// By product-quantized keys; the codebooks are trained on the first keys that arrive, that is on the
    /// prompt (PQCache 3.3).
    Pq {
        shape: PqShape,
        iterations: Resolved,
        seed: u64,
        heads: Vec<PqHead>, // one per kv head; empty before the first keys
    },
}

/// One head's codebook and the codes of its keys.
#[derive(Clone)]
struct PqHead {
    codebook: Arc<CodebookBuf>,
    codes: CodesBuf,
}

/// Exact rows of which each step attends only to the highest-scored ones.
#[derive(Clone)]
struct RetrievalStore {
    geometry: Geometry,
    exact: OffloadedRows, // rotated keys, values
    rope: Arc<Rope>,
    scorer: Scorer,
    ratio: f64,      // attended part of all tokens
    reserved: usize, // sinks and window, which count towards that part
}

impl RetrievalStore {
    /// Tokens to retrieve for one step out of `n`.
    fn k(&self, n: usize) -> usize {
        let attended = (self.ratio * (n + self.reserved) as f64).ceil() as usize;
        attended.saturating_sub(self.reserved).clamp(1, n)
    }

    /// Scores of all tokens for every query of the group: (group, tokens).
    fn scores(&self, head: usize, q: &[f32]) -> Result<Vec<f32>> {
        let head_dim = self.geometry.head_dim;
        let n = self.exact.len();
        let mut scores = vec![0.0; q.len() / head_dim * n];
        match &self.scorer {
            Scorer::Oracle => {
                let mut key = vec![0.0; head_dim];
                for t in 0..n {
                    self.exact.key(head, t, &mut key)?;
                    for (g, q) in q.chunks_exact(head_dim).enumerate() {
                        scores[g * n + t] = dot(q, &key);
                    }
                }
            }
            Scorer::Pq { shape, heads, .. } => {
                let head = &heads[head];
                let mut luts = vec![0.0; q.len() / head_dim * shape.lut_len()];
                lut_into(&head.codebook.view(), q, &mut luts)?;
                for (lut, scores) in luts.chunks_exact(shape.lut_len()).zip(scores.chunks_exact_mut(n)) {
                    scan_into(&Lut::new(*shape, lut)?, &head.codes.view(), scores)?;
                }
            }
        }
        Ok(scores)
    }

    /// The tokens, from `first` on, that the whole group fetches.
    fn select(&self, head: usize, first: usize, q: &[f32]) -> Result<Vec<u32>> {
        let n = self.exact.len() - first;
        let scores = self.scores(head, q)?;
        let visible = scores.chunks_exact(first + n).flat_map(|scores| &scores[first..]);
        let scores: Vec<f32> = visible.copied().collect();
        let mut total = vec![0.0; n];
        let mut stats = vec![SoftmaxStats::EMPTY; q.len() / self.geometry.head_dim];
        combine_group_into(&scores, GroupRule::SumOfSoftmax, &mut stats, &mut total)?;
        let mut indices = vec![0; self.k(n)];
        top_k_into(&total, self.k(n), &mut indices)?;
        Ok(indices.into_iter().map(|i| first as u32 + i).collect())
    }
}

impl Scorer {
    /// Encodes keys (n, head_dim) of every head, training first where there is no codebook yet.
    fn push(&mut self, geometry: Geometry, rotated: &[f32]) -> Result<()> {
        let Self::Pq { shape, iterations, seed, heads } = self else { return Ok(()) };
        let rows: Vec<Vec<f32>> =
            (0..geometry.n_kv_heads).map(|head| geometry.head_rows(head, rotated)).collect();
        if heads.is_empty() {
            let n = rotated.len() / geometry.kv_dim();
            let options = TrainOptions { iterations: iterations.of(n), seed: *seed, ..Default::default() };
            let rows: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
            for trained in train_batch(*shape, &rows, &options)? {
                let codebook = Arc::new(CodebookBuf::new(*shape, &trained.centroids)?);
                heads.push(PqHead { codebook, codes: CodesBuf::new(*shape) });
            }
        }
        for (head, rows) in heads.iter_mut().zip(&rows) {
            head.codes.append(&head.codebook.view(), rows)?;
        }
        Ok(())
    }
}

impl Store for RetrievalStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (n, rotated) = (self.exact.len(), self.rope.rotated(k, self.geometry.kv_dim(), pos));
        self.exact.push(&rotated, v)?;
        self.scorer.push(self.geometry, &rotated).inspect_err(|_| self.exact.truncate(n))
    }

    fn len(&self) -> usize {
        self.exact.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        if let Scorer::Pq { heads, .. } = &mut self.scorer {
            heads.iter_mut().for_each(|head| head.codes.truncate(len));
        }
        self.exact.truncate(len);
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
        if self.exact.len() <= first {
            return Ok(());
        }
        self.exact.attend(head, &self.select(head, first, q)?, q, out, stats)
    }

    fn fetched(&self) -> Fetched {
        self.exact.fetched()
    }

    fn footprint(&self) -> Footprint {
        let exact = self.exact.footprint();
        match &self.scorer {
            Scorer::Oracle => Footprint { kept: exact.offloaded, ..Footprint::default() },
            Scorer::Pq { shape, heads, .. } => Footprint {
                kept: heads.iter().map(|head| head.codes.view().size() + 4 * shape.codebook_len()).sum(),
                ..exact
            },
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
