//! RetroInfer (Chen et al., "RetroInfer: A Vector-Storage Approach for Scalable Long-Context LLM Inference",
//! arXiv 2505.02922): the keys of each segment of the sequence are clustered. The clusters with the best
//! centroid scores are attended to exactly, the next ones are estimated by their centroid, their size and the
//! mean of their values, and the rest are dropped.
//!
//! As in the paper, clusters are those of spherical k-means on centred keys, sinks and window are always
//! exact, and a group of query heads shares its clusters. There are two differences: the retrieval zone is a
//! share of the tokens, not of the clusters, so that methods are compared at equal rows; and tokens that
//! leave the window are clustered 64 at a time (`batch=`), not 1,024.

use std::sync::Arc;

use kv_attend::owner::Pair;
use kv_attend::{ElementType, Rows};
use kv_llama::ops::dot;
use kv_llama::{Fetched, Footprint};
use pq_core::{GroupRule, RowBudget, combine_group_into};
use svd_core::SoftmaxStats;

use super::budget::part;
use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use crate::Result;
use crate::cache::{DenseStore, FetchCounter, Geometry, HeadRows, Store, Sums};

pub(super) const RETRO_INFER: Registration = Registration {
    names: &["retroinfer"],
    help: "\
  retroinfer        clusters of keys: the best exactly (a fraction of     rows=0.018
                      the tokens), others by their centroids (a fraction  estimate=0.232 cluster=16
                      of the clusters), the rest not at all (RetroInfer)
",
    examples: &["retroinfer:rows=1:exact=f32:window=4"],
    parse: |s| {
        let rows = RowBudget::Share(s.fraction("rows", 0.018)? as f32);
        let estimate = s.fraction("estimate", 0.232)?;
        Ok(Arc::new(RetroInfer { rows, estimate, cluster: s.positive("cluster", 16)? }))
    },
};

#[derive(Clone, Copy, Debug)]
struct RetroInfer {
    rows: RowBudget, // of the retrieval zone
    estimate: f64,   // fraction of the clusters in the estimation zone
    cluster: usize,  // mean tokens per cluster
}

impl Kind for RetroInfer {
    fn batch(&self) -> usize {
        64
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Err(Limit::without_kernels("pqcache"))
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            Ok(RetroInferStore {
                settings: *self,
                geometry: context.geometry,
                exact: context.dense(l),
                heads: vec![
                    Clusters::new(context.exact, context.geometry.head_dim);
                    context.geometry.n_kv_heads
                ],
                fetched: FetchCounter::default(),
            })
        })
    }
}

/// Maximum tokens clustered together.
const SEGMENT: usize = 8192;

/// Iterations of k-means.
const ITERATIONS: usize = 10;

/// The clusters of one head.
#[derive(Clone)]
struct Clusters {
    element: ElementType,
    tokens: Vec<Vec<u32>>, // of each cluster, ascending, none empty
    means: HeadRows,       // of each cluster: the centroid of the keys, and the mean of the values
}

impl Clusters {
    fn new(element: ElementType, dim: usize) -> Self {
        Self { element, tokens: vec![], means: HeadRows::new(element, dim) }
    }

    fn push(&mut self, tokens: Vec<u32>, means: &Pair<Vec<f32>>) -> Result<()> {
        self.tokens.push(tokens);
        self.means.push(Rows::from(&means.keys[..]), Rows::from(&means.values[..]))
    }
}

/// Exact rows and their clusters.
#[derive(Clone)]
struct RetroInferStore {
    settings: RetroInfer,
    geometry: Geometry,
    exact: DenseStore,
    heads: Vec<Clusters>,
    fetched: FetchCounter,
}

/// Clusters rows (n, dim) into at most `k` clusters by spherical k-means on the centred rows. Returns the
/// rows of each cluster.
fn cluster(mut rows: Vec<f32>, dim: usize, k: usize) -> Vec<Vec<u32>> {
    let n = rows.len() / dim;
    let mut mean = vec![0.0; dim];
    for row in rows.chunks_exact(dim) {
        mean.iter_mut().zip(row).for_each(|(mean, x)| *mean += x / n as f32);
    }
    for row in rows.chunks_exact_mut(dim) {
        row.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
        normalize(row);
    }
    let mut centroids: Vec<f32> = (0..k).flat_map(|c| &rows[c * n / k * dim..][..dim]).copied().collect();
    let mut clusters = vec![];
    for _ in 0..ITERATIONS {
        clusters = vec![vec![]; k];
        for (i, row) in rows.chunks_exact(dim).enumerate() {
            let (mut best, mut highest) = (0, f32::NEG_INFINITY);
            for (c, centroid) in centroids.chunks_exact(dim).enumerate() {
                let score = dot(row, centroid);
                if score > highest {
                    (best, highest) = (c, score);
                }
            }
            clusters[best].push(i as u32);
        }
        let members = clusters.iter().zip(centroids.chunks_exact_mut(dim));
        for (rows_of, centroid) in members.filter(|(rows_of, _)| !rows_of.is_empty()) {
            centroid.fill(0.0);
            for &i in rows_of {
                let row = &rows[i as usize * dim..][..dim];
                centroid.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
            }
            normalize(centroid);
        }
    }
    clusters.retain(|rows| !rows.is_empty());
    clusters
}

/// Scales a row to unit norm; zeros stay.
fn normalize(row: &mut [f32]) {
    let norm = dot(row, row).sqrt();
    if norm > 0.0 {
        row.iter_mut().for_each(|x| *x /= norm);
    }
}

impl RetroInferStore {
    /// The mean key and mean value of tokens of a head.
    fn means(&self, head: usize, tokens: &[u32]) -> Pair<Vec<f32>> {
        let dim = self.geometry.head_dim;
        let mut means = Pair::of(|_| vec![0.0; dim]);
        let (mut key, mut value) = (vec![0.0; dim], vec![0.0; dim]);
        let part = 1.0 / tokens.len() as f32;
        for &t in tokens {
            self.exact.head(head).read(t as usize, &mut key, &mut value);
            means.keys.iter_mut().zip(&key).for_each(|(mean, x)| *mean += part * x);
            means.values.iter_mut().zip(&value).for_each(|(mean, x)| *mean += part * x);
        }
        means
    }

    /// The clusters of a head without the tokens outside of `range`.
    fn clusters_of(&self, head: usize, range: std::ops::Range<usize>) -> Result<Clusters> {
        let (dim, all) = (self.geometry.head_dim, &self.heads[head]);
        let mut visible = Clusters::new(all.element, dim);
        for (c, tokens) in all.tokens.iter().enumerate() {
            let kept: Vec<u32> = tokens.iter().copied().filter(|&t| range.contains(&(t as usize))).collect();
            if kept.is_empty() {
                continue;
            }
            let means = if kept.len() == tokens.len() {
                let mut means = Pair::of(|_| vec![0.0; dim]);
                all.means.read(c, &mut means.keys, &mut means.values);
                means
            } else {
                self.means(head, &kept)
            };
            visible.push(kept, &means)?;
        }
        Ok(visible)
    }
}

impl Store for RetroInferStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (dim, start) = (self.geometry.head_dim, self.exact.tokens());
        self.exact.push(pos, k, v)?;
        let end = self.exact.tokens();
        for head in 0..self.heads.len() {
            for first in (start..end).step_by(SEGMENT) {
                let n = SEGMENT.min(end - first);
                let mut keys = vec![0.0; n * dim];
                self.exact.head(head).read(first, &mut keys, &mut []);
                for mut tokens in cluster(keys, dim, n.div_ceil(self.settings.cluster)) {
                    tokens.iter_mut().for_each(|t| *t += first as u32);
                    let means = self.means(head, &tokens);
                    self.heads[head].push(tokens, &means)?;
                }
            }
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.exact.tokens()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads =
            (0..self.heads.len()).map(|head| self.clusters_of(head, 0..len)).collect::<Result<_>>()?;
        self.exact.truncate(len)
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let (dim, n) = (self.geometry.head_dim, self.exact.tokens() - first);
        let clusters = self.clusters_of(head, first..first + n)?;
        let count = clusters.tokens.len();
        if count == 0 {
            return Ok(());
        }
        let mut means = Pair::of(|_| vec![0.0; count * dim]);
        clusters.means.read(0, &mut means.keys, &mut means.values);
        let scores: Vec<f32> = q
            .chunks_exact(dim)
            .flat_map(|q| means.keys.chunks_exact(dim).map(move |centroid| dot(q, centroid)))
            .collect();
        let (mut combined, mut combined_stats) =
            (vec![0.0; count], vec![SoftmaxStats::EMPTY; sums.stats.len()]);
        combine_group_into(&scores, GroupRule::SumOfSoftmax, &mut combined_stats, &mut combined)?;
        let mut order: Vec<usize> = (0..count).collect();
        order.sort_by(|&a, &b| combined[b].total_cmp(&combined[a]));

        let most = self.settings.rows.most(n);
        let mut retrieved = vec![];
        let mut left = order.into_iter();
        while retrieved.len() < most
            && let Some(c) = left.next()
        {
            retrieved.extend_from_slice(&clusters.tokens[c]);
        }
        retrieved.sort_unstable();
        let (rows, bytes) = (retrieved.len() as u64, (retrieved.len() * self.exact.row_bytes()) as u64);
        let scored_bytes = (count * self.exact.row_bytes() / 2) as u64; // centroids of keys
        self.fetched.add(Fetched { attentions: 1, rows, bytes, scored_bytes, ..Fetched::default() });
        self.exact.head(head).attend(0, Some(&retrieved), q, sums)?;

        let estimated: Vec<usize> = left.take(part(self.settings.estimate, count)).collect();
        let all = sums.out.chunks_exact_mut(dim).zip(sums.stats.iter_mut());
        for (scores, (out, stats)) in scores.chunks_exact(count).zip(all) {
            // A cluster has the weight of its tokens with the centroid as the key of each.
            let score = |c: usize| scores[c] + (clusters.tokens[c].len() as f32).ln();
            let max = estimated.iter().map(|&c| score(c)).fold(f32::NEG_INFINITY, f32::max);
            let (mut part, mut part_stats) = (vec![0.0; dim], SoftmaxStats { max, sum: 0.0 });
            for &c in &estimated {
                let weight = (score(c) - max).exp();
                part_stats.sum += weight;
                let mean = &means.values[c * dim..][..dim];
                part.iter_mut().zip(mean).for_each(|(x, mean)| *x += weight * mean);
            }
            stats.merge(out, part_stats, &part)?;
        }
        Ok(())
    }

    fn fetched(&self) -> Fetched {
        self.fetched.get()
    }

    fn footprint(&self) -> Footprint {
        let index = size_of::<u32>(); // a size per cluster, and a token per row
        let clusters: usize = self.heads.iter().map(|head| head.tokens.len()).sum();
        let tokens = self.exact.tokens() * self.geometry.n_kv_heads;
        Footprint {
            kept: clusters * (self.exact.row_bytes() + index),
            offloaded: self.exact.footprint().kept + tokens * index,
            ..Footprint::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_llama::Rng;
    use kv_model::Rope;

    #[test]
    fn attention_is_exact_in_the_best_clusters_and_estimated_in_the_next() {
        let config = crate::fixture::model().config;
        let (geometry, dim) = (Geometry::of(&config), config.head_dim);
        let mut rng = Rng(7);
        let mut random =
            |n: usize| -> Vec<f32> { (0..n).map(|_| 4.0 * rng.uniform() as f32 - 2.0).collect() };
        for (n, removed, first, rows, estimate) in
            [(1, 0, 0, 0.5, 1.0), (60, 0, 0, 0.1, 0.3), (60, 13, 9, 0.1, 0.3), (60, 5, 0, 0.2, 1.0)]
        {
            let settings = RetroInfer { rows: RowBudget::Share(rows), estimate, cluster: 4 };
            let exact = DenseStore::new(ElementType::F32, geometry, Arc::new(Rope::new(&config, 64)));
            let heads = vec![Clusters::new(ElementType::F32, dim); geometry.n_kv_heads];
            let fetched = FetchCounter::default();
            let mut store = RetroInferStore { settings, geometry, exact, heads, fetched };
            store.push(0, &random(n * geometry.kv_dim()), &random(n * geometry.kv_dim())).unwrap();
            store.truncate(n - removed).unwrap();
            let n = n - removed;
            for head in 0..geometry.n_kv_heads {
                let mut all = store.heads[head].tokens.concat();
                all.sort_unstable();
                assert!(all.into_iter().eq(0..n as u32), "every token is in one cluster");
                let q = random(config.gqa_group() * dim);
                let (mut out, mut stats) =
                    (vec![0.0; q.len()], vec![SoftmaxStats::EMPTY; config.gqa_group()]);
                store.attend(head, first, &q, &mut Sums { out: &mut out, stats: &mut stats }).unwrap();

                let row = |t: u32| {
                    let (mut key, mut value) = (vec![0.0; dim], vec![0.0; dim]);
                    store.exact.head(head).read(t as usize, &mut key, &mut value);
                    [key, value].map(|row| row.iter().map(|&x| x.into()).collect::<Vec<f64>>())
                };
                let clusters: Vec<Vec<u32>> = store.heads[head]
                    .tokens
                    .iter()
                    .map(|tokens| tokens.iter().copied().filter(|&t| t as usize >= first).collect())
                    .filter(|tokens: &Vec<u32>| !tokens.is_empty())
                    .collect();
                let mean = |tokens: &[u32], side: usize| {
                    let mut mean = vec![0.0; dim];
                    for row in tokens.iter().map(|&t| row(t)) {
                        mean.iter_mut().zip(&row[side]).for_each(|(m, x)| *m += x / tokens.len() as f64);
                    }
                    mean
                };
                let q: Vec<Vec<f64>> = q.chunks(dim).map(|q| q.iter().map(|&x| x.into()).collect()).collect();
                let ip = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
                let mut combined = vec![0.0; clusters.len()];
                for q in &q {
                    let scores: Vec<f64> = clusters.iter().map(|c| ip(q, &mean(c, 0)).exp()).collect();
                    let sum: f64 = scores.iter().sum();
                    combined.iter_mut().zip(scores).for_each(|(total, score)| *total += score / sum);
                }
                let mut order: Vec<usize> = (0..clusters.len()).collect();
                order.sort_by(|&a, &b| combined[b].total_cmp(&combined[a]));
                let (mut read, mut retrieved) = (0, 0);
                while read < RowBudget::Share(rows).most(n - first) && retrieved < order.len() {
                    read += clusters[order[retrieved]].len();
                    retrieved += 1;
                }
                let estimated = part(estimate, clusters.len());
                for (g, q) in q.iter().enumerate() {
                    let (mut sum, mut expected) = (0.0, vec![0.0; dim]);
                    let mut add = |weight: f64, value: &[f64]| {
                        sum += weight;
                        expected.iter_mut().zip(value).for_each(|(x, v)| *x += weight * v);
                    };
                    for (i, &c) in order.iter().enumerate().take(retrieved + estimated) {
                        if i < retrieved {
                            clusters[c].iter().map(|&t| row(t)).for_each(|[k, v]| add(ip(q, &k).exp(), &v));
                        } else {
                            let size = clusters[c].len() as f64;
                            add(size * ip(q, &mean(&clusters[c], 0)).exp(), &mean(&clusters[c], 1));
                        }
                    }
                    stats[g].normalize(&mut out[g * dim..][..dim]);
                    for (&x, expected) in out[g * dim..][..dim].iter().zip(&expected) {
                        assert!(
                            (f64::from(x) - expected / sum).abs() < 1e-4,
                            "{n} tokens: {x} {}",
                            expected / sum
                        );
                    }
                }
            }
        }
    }
}
