//! InfLLM (Xiao et al., "InfLLM: Training-Free Long-Context Extrapolation for LLMs with an Efficient Context
//! Memory", NeurIPS 2024, arXiv 2402.04617): tokens are in blocks, whose representatives are the tokens with
//! the largest mean inner product with the queries of the tokens after them (equation 2); the blocks whose
//! representatives have the largest inner product with the query are attended to exactly, next to initial and
//! local tokens, here sinks and window. All rows are offloaded.
//!
//! There are four differences from the authors' code: each KV head chooses its own blocks, not all heads of a
//! layer together; tokens keep their positions, which matters only beyond the trained context; the queries
//! that score a token are those until it leaves the window, so that `window=` is the paper's local window;
//! and the last block, which is not full, is chosen as the others are.

use std::sync::Arc;

use kv_llama::Footprint;
use kv_llama::ops::dot;
use pq_core::TokenBudget;

use super::budget::take_budget;
use super::kind::{BuildContext, Kind, Registration};
use super::offload::OffloadSettings;
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::retrieval::{RetrievalStore, Scorer};
use crate::Result;
use crate::cache::{Geometry, OffloadedRows, Store};

pub(super) const INF_LLM: Registration = Registration {
    names: &["infllm"],
    help: "\
  infllm            top blocks by their representative tokens (InfLLM);   ratio=0.2 or tokens=N
                      a head chooses alone; PQCache compares r=1          block=128 r=4
",
    examples: &["infllm:ratio=1:exact=f32:window=4", "infllm:ratio=1:block=8:r=2:exact=f32:window=4"],
    parse: |s| {
        let budget = take_budget(s)?;
        Ok(Arc::new(InfLlm {
            budget,
            block: s.positive("block", 128)?,
            representatives: s.positive("r", 4)?,
        }))
    },
};

#[derive(Debug)]
struct InfLlm {
    budget: TokenBudget,
    block: usize,           // tokens
    representatives: usize, // of a block
}

impl Kind for InfLlm {
    fn watches_all(&self) -> bool {
        true
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Err(Limit::without_kernels("pqcache"))
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            let blocks = Blocks::new(self.block, self.representatives, context.recent, context.geometry);
            RetrievalStore::new(context, l, self.budget, &OffloadSettings::NONE, blocks)
        })
    }
}

/// The representatives of every block.
#[derive(Clone)]
struct Blocks {
    block: usize,           // tokens
    representatives: usize, // of a block
    local: usize,           // queries after a token that score it
    geometry: Geometry,
    queries: Vec<f32>, // (n, n_kv_heads * head_dim): sums over the groups, of tokens not pushed yet
    first: usize,      // position of the first of them
    heads: Vec<HeadBlocks>,
}

#[derive(Clone, Default)]
struct HeadBlocks {
    scores: Vec<f32>,      // (tokens,): mean inner products with the queries of the tokens after
    chosen: Vec<Vec<u32>>, // per block
}

impl Blocks {
    fn new(block: usize, representatives: usize, local: usize, geometry: Geometry) -> Self {
        let heads = vec![HeadBlocks::default(); geometry.n_kv_heads];
        Self { block, representatives, local, geometry, queries: vec![], first: 0, heads }
    }

    /// Sums of the queries of all positions from `pos` on before each: (n + 1, n_kv_heads * head_dim).
    fn query_sums(&self, pos: usize) -> Vec<f64> {
        let kv_dim = self.geometry.kv_dim();
        let start = (pos.saturating_sub(self.first) * kv_dim).min(self.queries.len());
        let mut sums = vec![0.0; kv_dim];
        for (i, &x) in self.queries[start..].iter().enumerate() {
            sums.push(sums[i] + f64::from(x));
        }
        sums
    }

    /// Chooses the representatives of the blocks from the one of token `changed` on.
    fn update(&mut self, changed: usize) {
        let first = changed / self.block;
        for HeadBlocks { scores, chosen } in &mut self.heads {
            chosen.truncate(first);
            for (b, block) in scores.chunks(self.block).enumerate().skip(first) {
                let mut order: Vec<usize> = (0..block.len()).collect();
                order.sort_by(|&a, &b| block[b].total_cmp(&block[a]));
                order.truncate(self.representatives);
                chosen.push(order.into_iter().map(|i| (b * self.block + i) as u32).collect());
            }
        }
    }
}

impl Scorer for Blocks {
    fn unit(&self) -> usize {
        self.block
    }

    fn watches_all(&self) -> bool {
        true
    }

    fn watch(&mut self, pos: usize, queries: &[f32]) {
        let Geometry { n_heads, n_kv_heads, head_dim } = self.geometry;
        let kv_dim = self.geometry.kv_dim();
        if (self.first..=self.first + self.queries.len() / kv_dim).contains(&pos) {
            self.queries.truncate((pos - self.first) * kv_dim);
        } else {
            self.queries.clear();
            self.first = pos;
        }
        for group in queries.chunks_exact(n_heads / n_kv_heads * head_dim) {
            self.queries.extend(group_sum(group, head_dim));
        }
    }

    fn push(&mut self, pos: usize, rotated: &[f32], exact: &OffloadedRows) -> Result<()> {
        let (kv_dim, dim) = (self.geometry.kv_dim(), self.geometry.head_dim);
        let (start, n) = (pos.max(self.first), rotated.len() / kv_dim);
        let sums = self.query_sums(start);
        let last = start + sums.len() / kv_dim - 1; // the position after the last query
        let mut mean = vec![0.0; kv_dim];
        for (t, keys) in (pos..).zip(rotated.chunks_exact(kv_dim)) {
            let after = [t + 1, t + 1 + self.local].map(|end| end.clamp(start, last));
            let [before, until] = after.map(|end| &sums[(end - start) * kv_dim..][..kv_dim]);
            let queries = (after[1] - after[0]).max(1) as f64;
            for ((mean, before), until) in mean.iter_mut().zip(before).zip(until) {
                *mean = ((until - before) / queries) as f32;
            }
            for (head, (key, mean)) in keys.chunks_exact(dim).zip(mean.chunks_exact(dim)).enumerate() {
                self.heads[head].scores.push(dot(key, mean));
            }
        }
        let past = ((pos + n).saturating_sub(self.first) * kv_dim).min(self.queries.len());
        self.queries.drain(..past);
        self.first += past / kv_dim;
        self.update(exact.len() - n);
        Ok(())
    }

    fn truncate(&mut self, exact: &OffloadedRows) -> Result<()> {
        self.heads.iter_mut().for_each(|head| head.scores.truncate(exact.len()));
        self.update(exact.len());
        Ok(())
    }

    fn scores(&self, exact: &OffloadedRows, head: usize, q: &[f32]) -> Result<Vec<f32>> {
        let dim = self.geometry.head_dim;
        let (q, mut key) = (group_sum(q, dim), vec![0.0; dim]);
        let mut score = |tokens: &Vec<u32>| -> Result<f32> {
            let mut sum = 0.0;
            for &t in tokens {
                exact.key(head, t as usize, &mut key)?;
                sum += dot(&q, &key);
            }
            Ok(sum / tokens.len() as f32)
        };
        self.heads[head].chosen.iter().map(&mut score).collect()
    }

    fn scored_bytes(&self, exact: &OffloadedRows) -> usize {
        self.heads[0].chosen.iter().map(|tokens| tokens.len() * exact.key_bytes()).sum()
    }

    /// Copies of the representatives' keys are kept; the scores that chose them are with the rows.
    fn footprint(&self, exact: &OffloadedRows) -> Footprint {
        let scores: usize = self.heads.iter().map(|head| size_of_val(&head.scores[..])).sum();
        let kept = self.geometry.n_kv_heads * self.scored_bytes(exact);
        let rows = exact.footprint();
        Footprint { kept, offloaded: rows.offloaded + scores, ..rows }
    }
}

/// The sum of a group's queries (group, head_dim).
fn group_sum(group: &[f32], head_dim: usize) -> Vec<f32> {
    let mut sum = vec![0.0; head_dim];
    for q in group.chunks_exact(head_dim) {
        sum.iter_mut().zip(q).for_each(|(sum, x)| *sum += x);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::super::retrieval::tests::{Setup, largest, product};
    use super::*;

    #[test]
    fn attention_is_over_the_blocks_with_the_best_representatives() {
        let (block, r, local) = (8, 2, 12);
        let budget = TokenBudget::Ratio(0.3);
        for (n, removed, first) in [(1, 0, 0), (61, 0, 0), (61, 0, 19), (61, 9, 0)] {
            let mut setup = Setup::new(budget, |geometry| Blocks::new(block, r, local, geometry));
            let queries = setup.push(n);
            setup.store.truncate(n - removed).unwrap();
            let (all, n) = (n, n - removed);
            let k = (budget.k(n - first, 0) / block).max(1);
            setup.check(first, |setup, head, q| {
                let (dim, group) = (setup.config.head_dim, setup.config.gqa_group());
                let sum = |part: &dyn Fn(usize) -> f64| -> f64 { (0..group).map(part).sum() };
                // The mean over the next `local` queries, all of which were there before the truncation.
                let score = |t: usize| -> f64 {
                    let key = setup.key(head, t);
                    let after = t + 1..all.min(t + 1 + local);
                    let mean = 1.0 / after.len().max(1) as f64;
                    let of = |p: usize| {
                        sum(&|g| {
                            let start = (p * setup.config.n_heads + head * group + g) * dim;
                            let q: Vec<f64> = queries[start..][..dim].iter().map(|&x| x.into()).collect();
                            product(&q, &key)
                        })
                    };
                    after.map(of).sum::<f64>() * mean
                };
                let blocks: Vec<usize> = (first / block..n.div_ceil(block)).collect();
                let relevance = |&b: &usize| {
                    let tokens: Vec<usize> = (b * block..n.min(b * block + block)).collect();
                    let best = largest(&tokens.iter().map(|&t| score(t)).collect::<Vec<_>>(), r);
                    let of = |i: &usize| sum(&|g| product(&q[g], &setup.key(head, tokens[*i])));
                    best.iter().map(of).sum::<f64>() / best.len() as f64
                };
                let chosen = largest(&blocks.iter().map(relevance).collect::<Vec<_>>(), k);
                let tokens = |i: usize| (blocks[i] * block).max(first)..n.min(blocks[i] * block + block);
                chosen.into_iter().flat_map(tokens).collect()
            });
        }
    }

    #[test]
    fn steps_have_the_scores_of_a_prompt() {
        let new = |geometry| Blocks::new(8, 2, 12, geometry);
        let [mut whole, mut steps] = [0, 1].map(|_| Setup::new(TokenBudget::Ratio(0.3), new));
        let [q, k] = [whole.config.q_dim(), whole.config.kv_dim()].map(|dim| whole.random(40 * dim));
        whole.store.watch(0, &q);
        whole.store.push(0, &k, &k).unwrap();
        // As with a window of 12 tokens, all of which leave it in the end.
        let (q_dim, kv_dim) = (steps.config.q_dim(), steps.config.kv_dim());
        for t in 0..40 {
            steps.store.watch(t, &q[t * q_dim..][..q_dim]);
            if t >= 12 {
                let row = &k[(t - 12) * kv_dim..][..kv_dim];
                steps.store.push(t - 12, row, row).unwrap();
            }
        }
        let rest = &k[28 * kv_dim..];
        steps.store.push(28, rest, rest).unwrap();
        let heads = |setup: &Setup<Blocks>| setup.store.scorer().heads.clone();
        for (a, b) in heads(&whole).iter().zip(heads(&steps)) {
            assert!(a.scores.iter().zip(&b.scores).all(|(a, b)| (a - b).abs() < 1e-4));
            assert_eq!(a.chosen, b.chosen);
        }
    }
}
