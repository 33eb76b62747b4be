//! H2O (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models",
//! NeurIPS 2023, arXiv 2306.14048): each head keeps the most recent tokens, and of the others those with the
//! largest sum of attention weights from all queries so far; half of its budget each. Eviction is final, so
//! that the cache does not roll back.
//!
//! As in the authors' code, a prompt attends to all of itself, and then tokens leave. There are two
//! differences: a group of query heads shares its tokens (the paper's models have no groups), and the budget
//! is a fraction of the tokens so far, not of the prompt. Sinks and window, which the method does not need
//! and by default has not, count as recent; their weights are not part of the softmax.

use std::sync::Arc;

use kv_llama::ops::{dot, softmax};
use kv_llama::{Fetched, Footprint};
use kv_model::{LayerAttention, Rope};
use pq_core::TokenBudget;
use rayon::prelude::*;

use super::budget::take_budget;
use super::kind::{BuildContext, Kind, Registration};
use crate::Result;
use crate::cache::{FetchCounter, Geometry, KeptRows, Store, Sums};

pub(super) const H2O: Registration = Registration {
    names: &["h2o"],
    help: "\
  h2o               half the most recent tokens, half those with most     ratio=0.2 or tokens=N
                      attention so far, per head (H2O); sinks and window
                      are 0. PQCache compares a ratio that is 1/128 more
",
    examples: &["h2o:ratio=0.3:exact=f32", "h2o:ratio=1:exact=f32:window=4"],
    parse: |s| Ok(Arc::new(H2o { budget: take_budget(s)? })),
};

#[derive(Debug)]
struct H2o {
    budget: TokenBudget,
}

impl Kind for H2o {
    fn sinks_and_window(&self) -> [usize; 2] {
        [0, 0]
    }

    fn watches_all(&self) -> bool {
        true
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        let BuildContext { geometry, exact, .. } = *context;
        context.layers(|l| {
            Ok(H2oStore {
                geometry,
                attention: context.config.attention[l],
                rope: context.rope(l),
                budget: self.budget,
                reserved: context.reserved,
                heads: vec![Head::new(KeptRows::new(exact, geometry.head_dim)); geometry.n_kv_heads],
                queries: vec![],
                queries_pos: 0,
                start: 0,
                len: 0,
                fetched: FetchCounter::default(),
            })
        })
    }
}

/// The tokens that each head keeps.
#[derive(Clone)]
struct H2oStore {
    geometry: Geometry,
    attention: LayerAttention,
    rope: Arc<Rope>,
    budget: TokenBudget,
    reserved: usize, // tokens in sinks and window
    heads: Vec<Head>,
    queries: Vec<f32>,  // (n, n_heads * head_dim), rotated: those that have not been counted
    queries_pos: usize, // position of the first of them
    start: usize,       // position of the first token
    len: usize,         // tokens so far
    fetched: FetchCounter,
}

/// The tokens that one head keeps.
#[derive(Clone)]
struct Head {
    kept: KeptRows,
    mass: Vec<f32>, // per token: the sum of its attention weights
}

impl Head {
    const fn new(kept: KeptRows) -> Self {
        Self { kept, mass: vec![] }
    }

    /// Adds the attention weights of queries (group, head_dim) over kept tokens `visible`, with keys (tokens,
    /// head_dim).
    fn count(&mut self, q: &[f32], keys: &[f32], dim: usize, visible: std::ops::Range<usize>) {
        let scale = 1.0 / (dim as f32).sqrt();
        let keys = &keys[visible.start * dim..visible.end * dim];
        for q in q.chunks_exact(dim) {
            let mut weights: Vec<f32> = keys.chunks_exact(dim).map(|key| scale * dot(q, key)).collect();
            softmax(&mut weights);
            self.mass[visible.clone()].iter_mut().zip(&weights).for_each(|(mass, x)| *mass += x);
        }
    }

    /// Keeps the last `recent` tokens and the `heavy` others with the largest mass.
    fn evict(&mut self, recent: usize, heavy: usize) -> Result<()> {
        let older = self.mass.len().saturating_sub(recent);
        if older <= heavy {
            return Ok(());
        }
        let mut order: Vec<usize> = (0..older).collect();
        order.sort_by(|&a, &b| self.mass[b].total_cmp(&self.mass[a]));
        order.truncate(heavy);
        order.sort_unstable();
        order.extend(older..self.mass.len());
        self.mass = order.iter().map(|&i| self.mass[i]).collect();
        self.kept.retain(&order)
    }
}

impl H2oStore {
    /// Adds the attention weights of the queries that are passed.
    fn count(&mut self) {
        let Geometry { n_heads, n_kv_heads, head_dim } = self.geometry;
        let (q_dim, group) = (self.geometry.q_dim(), n_heads / n_kv_heads * head_dim);
        let (queries, first, start) = (std::mem::take(&mut self.queries), self.queries_pos, self.start);
        let attention = self.attention;
        self.heads.par_iter_mut().enumerate().for_each(|(h, head)| {
            let keys = head.kept.keys(head_dim);
            for (pos, q) in (first..).zip(queries.chunks_exact(q_dim)) {
                let before = |pos: usize| head.kept.before(pos.saturating_sub(start));
                let visible = before(attention.first_visible(pos))..before(pos + 1);
                head.count(&q[h * group..][..group], &keys, head_dim, visible);
            }
        });
    }
}

impl Store for H2oStore {
    fn watch(&mut self, pos: usize, queries: &[f32]) {
        (self.queries, self.queries_pos) = (queries.to_vec(), pos);
    }

    fn watches_all(&self) -> bool {
        true
    }

    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (kv_dim, geometry) = (self.geometry.kv_dim(), self.geometry);
        let (rotated, n) = (self.rope.rotated(k, kv_dim, pos), k.len() / kv_dim);
        if self.len == 0 {
            self.start = pos;
        }
        for (h, head) in self.heads.iter_mut().enumerate() {
            head.kept.push(self.len, geometry.head(h, &rotated)?, geometry.head(h, v)?)?;
            head.mass.resize(head.kept.tokens().len(), 0.0);
        }
        self.len += n;
        self.count();
        let kept = self.budget.k(self.len, self.reserved);
        let recent = ((kept + self.reserved) / 2).saturating_sub(self.reserved);
        self.heads.iter_mut().try_for_each(|head| head.evict(recent, kept - recent))
    }

    fn len(&self) -> usize {
        self.len
    }

    /// Neither what has been evicted nor what has been counted comes back; where nothing ever leaves, neither
    /// matters.
    fn can_truncate(&self, len: usize, window: usize) -> bool {
        len == 0 || window == self.len || self.budget == TokenBudget::Ratio(1.0)
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.len = len;
        for head in &mut self.heads {
            let left = head.kept.truncate(len);
            head.mass.truncate(left);
        }
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        self.fetched.add(self.heads[head].kept.attend(first, q, sums)?);
        Ok(())
    }

    fn fetched(&self) -> Fetched {
        self.fetched.get()
    }

    fn footprint(&self) -> Footprint {
        let of_head = |head: &Head| head.kept.bytes() + size_of_val(&head.mass[..]);
        Footprint { kept: self.heads.iter().map(of_head).sum(), ..Footprint::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_attend::ElementType;
    use kv_llama::Rng;
    use svd_core::SoftmaxStats;

    /// The paper's rule, token by token, in `f64`: after a prompt of 30 tokens, and 10 steps.
    #[test]
    fn half_are_recent_and_half_have_the_most_attention() {
        let config = crate::fixture::model().config;
        let (geometry, dim, group) = (Geometry::of(&config), config.head_dim, config.gqa_group());
        let rope = Arc::new(Rope::new(&config, 64));
        let budget = TokenBudget::Ratio(0.3);
        let mut store = H2oStore {
            geometry,
            attention: config.attention[0],
            rope: rope.clone(),
            budget,
            reserved: 0,
            heads: vec![Head::new(KeptRows::new(ElementType::F32, dim)); geometry.n_kv_heads],
            queries: vec![],
            queries_pos: 0,
            start: 0,
            len: 0,
            fetched: FetchCounter::default(),
        };
        let mut rng = Rng(7);
        let (prompt, n) = (30, 40);
        let mut random =
            |dim: usize| -> Vec<f32> { (0..n * dim).map(|_| 4.0 * rng.uniform() as f32 - 2.0).collect() };
        let [q, k, v] = [config.q_dim(), geometry.kv_dim(), geometry.kv_dim()].map(&mut random);
        let rotated = rope.rotated(&k, geometry.kv_dim(), 0);
        let push = |store: &mut H2oStore, tokens: std::ops::Range<usize>| {
            let of = |rows: &[f32], dim: usize| rows[tokens.start * dim..tokens.end * dim].to_vec();
            store.watch(tokens.start, &of(&q, config.q_dim()));
            store.push(tokens.start, &of(&k, geometry.kv_dim()), &of(&v, geometry.kv_dim())).unwrap();
        };
        push(&mut store, 0..prompt);
        (prompt..n).for_each(|t| push(&mut store, t..t + 1));

        let of = |rows: &[f32], row: usize, dims: usize, head: usize| -> Vec<f64> {
            rows[row * dims + head * dim..][..dim].iter().map(|&x| x.into()).collect()
        };
        for head in 0..geometry.n_kv_heads {
            let key = |t: usize| of(&rotated, t, geometry.kv_dim(), head);
            let weights = |q: &[f64], kept: &[usize]| -> Vec<f64> {
                let product = |t: &usize| q.iter().zip(key(*t)).map(|(q, k)| q * k).sum::<f64>();
                let weights: Vec<f64> =
                    kept.iter().map(|t| (product(t) / (dim as f64).sqrt()).exp()).collect();
                weights.iter().map(|x| x / weights.iter().sum::<f64>()).collect()
            };
            let (mut kept, mut mass) = (vec![], vec![0.0; n]);
            for t in 0..n {
                kept.push(t);
                for g in 0..group {
                    let q = of(&q, t, config.q_dim(), head * group + g);
                    kept.iter().zip(weights(&q, &kept)).for_each(|(&t, x)| mass[t] += x);
                }
                if t + 1 < prompt {
                    continue;
                }
                let stay = (0.3 * (t + 1) as f64).ceil() as usize;
                let recent = kept.split_off(kept.len() - stay / 2);
                kept.sort_by(|&a, &b| mass[b].total_cmp(&mass[a]));
                kept.truncate(stay - recent.len());
                kept.sort_unstable();
                kept.extend(recent);
            }
            assert!(store.heads[head].kept.tokens().iter().map(|&t| t as usize).eq(kept.iter().copied()));
            let query = of(&q, 3, config.q_dim(), head * group);
            let scaled: Vec<f32> = query.iter().map(|&x| (x / (dim as f64).sqrt()) as f32).collect();
            let (mut out, mut stats) = (vec![0.0; dim], [SoftmaxStats::EMPTY]);
            store.attend(head, 0, &scaled, &mut Sums { out: &mut out, stats: &mut stats }).unwrap();
            stats[0].normalize(&mut out);
            let weights = weights(&query, &kept);
            for (c, &x) in out.iter().enumerate() {
                let value = |(&t, w): (&usize, &f64)| w * of(&v, t, geometry.kv_dim(), head)[c];
                let expected: f64 = kept.iter().zip(&weights).map(value).sum();
                assert!((f64::from(x) - expected).abs() < 1e-4, "{x}, not {expected}");
            }
        }
        assert_eq!(
            store.fetched(),
            Fetched { attentions: 2, rows: 24, bytes: 24 * 8 * dim as u64, ..Fetched::default() }
        );
        // Nothing that has been evicted comes back.
        assert!(store.can_truncate(0, 0) && store.can_truncate(40, 40) && !store.can_truncate(39, 39));
    }
}
