//! SparQ attention (Ribar et al., "SparQ Attention: Bandwidth-Efficient LLM Inference", ICML 2024, arXiv
//! 2312.04985): scores all tokens by the largest query components, attends to the best tokens exactly, and
//! approximates the rest by the mean value, weighted by the estimated remaining softmax mass.
//!
//! As in the authors' code, a group of query heads shares its components and its tokens. Sinks and window are
//! always attended to exactly. All rows are kept: the method saves memory traffic, not memory. PQCache
//! compares it at one component per head, for an equal number of bytes that are read to score.

use std::sync::Arc;

use kv_llama::ops::softmax;
use kv_llama::{Fetched, Footprint};
use kv_model::Config;
use pq_core::{TokenBudget, top_k_into};
use svd_core::SoftmaxStats;

use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use crate::cache::{DenseStore, FetchCounter, Geometry, Store, Sums};
use crate::{Error, Result};

pub(super) const SPARQ: Registration = Registration {
    names: &["sparq"],
    help: "\
  sparq             top-k by the queries' r largest components, the mean  ratio=0.2 r=32 (a quarter of the head)
                      value for the rest (SparQ); saves reads, not bytes;
                      PQCache compares r=1
",
    examples: &["sparq:ratio=1:exact=f32:window=4"],
    parse: |s| {
        let ratio = s.fraction("ratio", 0.2)?;
        Ok(Arc::new(SparQ { ratio, components: s.positive("r", (s.head_dim / 4).max(1))? }))
    },
};

#[derive(Debug)]
struct SparQ {
    ratio: f64,
    components: usize,
}

impl Kind for SparQ {
    fn check(&self, config: &Config) -> Result<()> {
        if self.components > config.head_dim {
            let (r, dim) = (self.components, config.head_dim);
            return Err(Error::Argument(format!("method sparq: r={r}: a head has {dim} components")));
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Err(Limit::without_kernels("pqcache"))
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        let Geometry { n_kv_heads, head_dim, .. } = context.geometry;
        context.layers(|l| {
            Ok(SparQStore {
                geometry: context.geometry,
                exact: context.dense(l),
                sums: vec![vec![0.0; head_dim]; n_kv_heads],
                ratio: self.ratio,
                reserved: context.reserved,
                components: self.components,
                fetched: FetchCounter::default(),
            })
        })
    }
}

/// Exact rows with the sum of the values.
#[derive(Clone)]
struct SparQStore {
    geometry: Geometry,
    exact: DenseStore,
    sums: Vec<Vec<f64>>, // per head: (head_dim,) of the values
    ratio: f64,          // attended fraction of all tokens
    reserved: usize,     // tokens in sinks and window, which count towards the ratio
    components: usize,   // used for scoring
    fetched: FetchCounter,
}

/// Lower bound of the attended tokens' estimated softmax mass, a divisor: at this bound the mean value is
/// practically the whole result.
const LEAST_MASS: f32 = 1e-6;

impl SparQStore {
    /// Adds values from token `first` on to the sums.
    fn add_values(&mut self, first: usize) {
        let mut value = vec![0.0; self.geometry.head_dim];
        for (head, sum) in self.sums.iter_mut().enumerate() {
            for t in first..self.exact.tokens() {
                self.exact.head(head).read(t, &mut [], &mut value);
                sum.iter_mut().zip(&value).for_each(|(sum, &x)| *sum += f64::from(x));
            }
        }
    }

    /// The mean of one head's values from token `first` on.
    fn mean(&self, head: usize, first: usize) -> Vec<f32> {
        let mut value = vec![0.0; self.geometry.head_dim];
        let mut sum = self.sums[head].clone();
        for t in 0..first {
            self.exact.head(head).read(t, &mut [], &mut value);
            sum.iter_mut().zip(&value).for_each(|(sum, &x)| *sum -= f64::from(x));
        }
        let n = (self.exact.tokens() - first) as f64;
        sum.iter().map(|sum| (sum / n) as f32).collect()
    }

    /// Estimated softmax of every query of the group over the tokens from `first` on: (group, tokens).
    ///
    /// Scores over a subset of the components have a smaller spread; the fraction of the query's magnitude in
    /// the subset gives the correction.
    fn estimates(&self, head: usize, first: usize, q: &[f32]) -> Result<Vec<f32>> {
        let (dim, n) = (self.geometry.head_dim, self.exact.tokens() - first);
        let mut magnitudes = vec![0.0; dim];
        for q in q.chunks_exact(dim) {
            magnitudes.iter_mut().zip(q).for_each(|(sum, x)| *sum += x.abs());
        }
        let mut components = vec![0; self.components];
        top_k_into(&magnitudes, self.components, &mut components)?;
        let mut estimates = vec![0.0; q.len() / dim * n];
        let mut key = vec![0.0; dim];
        for t in 0..n {
            self.exact.head(head).read(first + t, &mut key, &mut []);
            for (q, row) in q.chunks_exact(dim).zip(estimates.chunks_exact_mut(n)) {
                row[t] = components.iter().map(|&c| q[c as usize] * key[c as usize]).sum();
            }
        }
        for (q, row) in q.chunks_exact(dim).zip(estimates.chunks_exact_mut(n)) {
            let part: f32 = components.iter().map(|&c| q[c as usize].abs()).sum();
            let whole: f32 = q.iter().map(|x| x.abs()).sum();
            let scale = if part > 0.0 { (whole / part).sqrt() } else { 1.0 };
            row.iter_mut().for_each(|x| *x *= scale);
            softmax(row);
        }
        Ok(estimates)
    }
}

impl Store for SparQStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let first = self.exact.tokens();
        self.exact.push(pos, k, v)?;
        self.add_values(first);
        Ok(())
    }

    fn len(&self) -> usize {
        self.exact.tokens()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.exact.truncate(len)?;
        self.sums.iter_mut().for_each(|sum| sum.fill(0.0));
        self.add_values(0);
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let (dim, n) = (self.geometry.head_dim, self.exact.tokens() - first);
        if n == 0 {
            return Ok(());
        }
        let estimates = self.estimates(head, first, q)?;
        let mut total = vec![0.0; n];
        for row in estimates.chunks_exact(n) {
            total.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        }
        let k = TokenBudget::Ratio(self.ratio).k(n, self.reserved);
        let mut selected = vec![0; k];
        top_k_into(&total, k, &mut selected)?;
        let (rows, bytes) = (k as u64, (k * self.exact.row_bytes()) as u64);
        // Components of keys, stored by component as the authors' code does.
        let scored_bytes = (n * self.components * self.exact.row_bytes() / (2 * dim)) as u64;
        self.fetched.add(Fetched { attentions: 1, rows, bytes, scored_bytes, ..Fetched::default() });
        let mut part = vec![0.0; sums.out.len()];
        let mut part_stats = vec![SoftmaxStats::EMPTY; sums.stats.len()];
        let tokens: Vec<u32> = selected.iter().map(|t| first as u32 + t).collect();
        self.exact.head(head).attend(
            0,
            Some(&tokens),
            q,
            &mut Sums { out: &mut part, stats: &mut part_stats },
        )?;
        let mean = self.mean(head, first);
        let parts = part.chunks_exact_mut(dim).zip(part_stats).zip(estimates.chunks_exact(n));
        let all = sums.out.chunks_exact_mut(dim).zip(sums.stats.iter_mut());
        for (((part, mut part_stats), estimates), (out, stats)) in parts.zip(all) {
            let mass: f32 = selected.iter().map(|&t| estimates[t as usize]).sum();
            let mass = mass.clamp(LEAST_MASS, 1.0);
            let rest = part_stats.sum * (1.0 - mass) / mass;
            part.iter_mut().zip(&mean).for_each(|(x, mean)| *x += rest * mean);
            part_stats.sum += rest;
            stats.merge(out, part_stats, part)?;
        }
        Ok(())
    }

    fn fetched(&self) -> Fetched {
        self.fetched.get()
    }

    fn footprint(&self) -> Footprint {
        let sums: usize = self.sums.iter().map(|sum| size_of_val(&sum[..])).sum();
        let exact = self.exact.footprint();
        Footprint { kept: exact.kept + sums, ..exact }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_attend::ElementType;
    use kv_llama::Rng;
    use kv_model::Rope;

    /// Indices of the `k` largest.
    fn largest(values: &[f64], k: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order.truncate(k);
        order
    }

    fn probabilities(scores: &[f64]) -> Vec<f64> {
        let sum: f64 = scores.iter().map(|x| x.exp()).sum();
        scores.iter().map(|x| x.exp() / sum).collect()
    }

    #[test]
    fn attention_is_the_papers_formula() {
        let config = crate::fixture::model().config;
        let (geometry, dim) = (Geometry::of(&config), config.head_dim);
        let mut rng = Rng(7);
        let mut random =
            |n: usize| -> Vec<f32> { (0..n).map(|_| 4.0 * rng.uniform() as f32 - 2.0).collect() };
        for (n, removed, components, ratio) in
            [(1, 0, 4, 0.5), (40, 0, 4, 0.2), (40, 9, 1, 0.1), (33, 0, dim, 1.0)]
        {
            let rope = Arc::new(Rope::new(&config, 64));
            let exact = DenseStore::new(ElementType::F32, geometry, rope);
            let sums = vec![vec![0.0; dim]; geometry.n_kv_heads];
            let fetched = FetchCounter::default();
            let mut store = SparQStore { geometry, exact, sums, ratio, reserved: 0, components, fetched };
            store.push(0, &random(n * geometry.kv_dim()), &random(n * geometry.kv_dim())).unwrap();
            store.truncate(n - removed).unwrap();
            let n = n - removed;
            let k = TokenBudget::Ratio(ratio).k(n, 0);
            for head in 0..geometry.n_kv_heads {
                let q = random(config.gqa_group() * dim);
                let (mut out, mut stats) =
                    (vec![0.0; q.len()], vec![SoftmaxStats::EMPTY; config.gqa_group()]);
                store.attend(head, 0, &q, &mut Sums { out: &mut out, stats: &mut stats }).unwrap();
                // Queries are scaled already: 1 / sqrt(head_dim) appears nowhere.
                let q: Vec<Vec<f64>> = q.chunks(dim).map(|q| q.iter().map(|&x| x.into()).collect()).collect();
                let rows: Vec<[Vec<f64>; 2]> = (0..n)
                    .map(|t| {
                        let (mut key, mut value) = (vec![0.0; dim], vec![0.0; dim]);
                        store.exact.head(head).read(t, &mut key, &mut value);
                        [key, value].map(|row| row.iter().map(|&x| x.into()).collect())
                    })
                    .collect();
                let magnitudes: Vec<f64> = (0..dim).map(|c| q.iter().map(|q| q[c].abs()).sum()).collect();
                let chosen = largest(&magnitudes, components);
                let estimates: Vec<Vec<f64>> = q
                    .iter()
                    .map(|q| {
                        let part: f64 = chosen.iter().map(|&c| q[c].abs()).sum();
                        let scale = (part / q.iter().map(|x| x.abs()).sum::<f64>()).sqrt();
                        let score = |row: &[Vec<f64>; 2]| {
                            chosen.iter().map(|&c| q[c] * row[0][c]).sum::<f64>() / scale
                        };
                        probabilities(&rows.iter().map(score).collect::<Vec<_>>())
                    })
                    .collect();
                let total: Vec<f64> = (0..n).map(|t| estimates.iter().map(|row| row[t]).sum()).collect();
                let tokens = largest(&total, k);
                for (g, q) in q.iter().enumerate() {
                    let score = |&t: &usize| q.iter().zip(&rows[t][0]).map(|(q, k)| q * k).sum::<f64>();
                    let p = probabilities(&tokens.iter().map(score).collect::<Vec<_>>());
                    let alpha: f64 = tokens.iter().map(|&t| estimates[g][t]).sum();
                    stats[g].normalize(&mut out[g * dim..][..dim]);
                    for c in 0..dim {
                        let exact: f64 = tokens.iter().zip(&p).map(|(&t, p)| p * rows[t][1][c]).sum();
                        let mean = rows.iter().map(|row| row[1][c]).sum::<f64>() / n as f64;
                        let expected = alpha * exact + (1.0 - alpha) * mean;
                        let got = f64::from(out[g * dim + c]);
                        assert!((got - expected).abs() < 1e-4, "{n} tokens: {got}, not {expected}");
                    }
                }
            }
        }
    }
}
