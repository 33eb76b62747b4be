//! Top-k attention: units of consecutive tokens, such as single tokens or pages, are scored cheaply, and the
//! best ones are attended to exactly. A method is a [`Scorer`]; `oracle` scores by the exact inner product.

use std::sync::Arc;

use kv_llama::ops::dot;
use kv_llama::{Fetched, Footprint};
use kv_model::Rope;
use pq_core::{GroupRule, TokenBudget, combine_group_into, top_k_into};
use svd_core::SoftmaxStats;

use super::budget::take_budget;
use super::kind::{BuildContext, Kind, Registration};
use super::offload::OffloadSettings;
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use crate::Result;
use crate::cache::{Geometry, OffloadedRows, Store, Sums};

pub(super) const ORACLE: Registration = Registration {
    names: &["oracle"],
    help: "\
  oracle            exact top-k, this fraction of the tokens              ratio=0.2 or tokens=N
",
    examples: &["oracle:ratio=1:exact=f32:window=4"],
    parse: |s| Ok(Arc::new(TopK { budget: take_budget(s)? })),
};

#[derive(Debug)]
struct TopK {
    budget: TokenBudget,
}

impl Kind for TopK {
    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Err(Limit::without_kernels("pqcache"))
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| RetrievalStore::new(context, l, self.budget, &OffloadSettings::NONE, Oracle))
    }
}

/// Scores of units of consecutive tokens, by which a head's query group chooses the units that it attends to.
pub(super) trait Scorer: Clone + Send + Sync + 'static {
    /// Tokens of a unit. The last unit may have fewer.
    fn unit(&self) -> usize {
        1
    }

    /// See [`Store::watch`].
    fn watch(&mut self, _pos: usize, _queries: &[f32]) {}

    /// See [`Store::watches_all`].
    fn watches_all(&self) -> bool {
        false
    }

    /// Takes the last tokens of `exact`: rotated keys (n, n_kv_heads * head_dim), the first at position
    /// `pos`.
    fn push(&mut self, pos: usize, rotated: &[f32], exact: &OffloadedRows) -> Result<()>;

    /// Forgets the tokens that `exact` has no more.
    fn truncate(&mut self, exact: &OffloadedRows) -> Result<()>;

    /// Scores of all units for the scaled queries (group, head_dim) of a KV head: (group, units), or (units,)
    /// for the group as a whole.
    fn scores(&self, exact: &OffloadedRows, head: usize, q: &[f32]) -> Result<Vec<f32>>;

    /// Bytes that [`Self::scores`] reads of one head.
    fn scored_bytes(&self, exact: &OffloadedRows) -> usize;

    /// The bytes of the rows, and of what is kept to score them.
    fn footprint(&self, exact: &OffloadedRows) -> Footprint;
}

/// Exact rows; each step attends to the units with the highest scores.
#[derive(Clone)]
pub(super) struct RetrievalStore<S> {
    exact: OffloadedRows, // rotated keys, values
    rope: Arc<Rope>,
    scorer: S,
    budget: TokenBudget,
    reserved: usize, // tokens in sinks and window
}

impl<S: Scorer> RetrievalStore<S> {
    /// An empty store of layer `l`.
    pub fn new(
        context: &BuildContext<'_>,
        l: usize,
        budget: TokenBudget,
        offload: &OffloadSettings,
        scorer: S,
    ) -> Result<Self> {
        let (exact, rope) = (offload.rows(context)?, context.rope(l));
        Ok(Self { exact, rope, scorer, budget, reserved: context.reserved })
    }

    #[cfg(test)]
    pub const fn scorer(&self) -> &S {
        &self.scorer
    }

    /// The tokens, from `first` on, that the whole group fetches: no more than the budget, or one unit.
    fn select(&self, head: usize, first: usize, q: &[f32]) -> Result<Vec<u32>> {
        let (len, unit) = (self.exact.len(), self.scorer.unit());
        let (units, hidden) = (len.div_ceil(unit), first / unit);
        let scores = self.scorer.scores(&self.exact, head, q)?;
        self.exact.count_scored(self.scorer.scored_bytes(&self.exact));
        let visible: Vec<f32> =
            scores.chunks_exact(units).flat_map(|scores| &scores[hidden..]).copied().collect();
        let mut total = vec![0.0; units - hidden];
        let mut stats = vec![SoftmaxStats::EMPTY; scores.len() / units];
        combine_group_into(&visible, GroupRule::SumOfSoftmax, &mut stats, &mut total)?;
        let tokens = self.budget.k(len - first, self.reserved);
        let k = if tokens == len - first { total.len() } else { (tokens / unit).clamp(1, total.len()) };
        let mut chosen = vec![0; k];
        top_k_into(&total, k, &mut chosen)?;
        let tokens = |i: u32| {
            let start = (hidden + i as usize) * unit;
            start.max(first) as u32..(start + unit).min(len) as u32
        };
        Ok(chosen.into_iter().flat_map(tokens).collect())
    }
}

impl<S: Scorer> Store for RetrievalStore<S> {
    fn watch(&mut self, pos: usize, queries: &[f32]) {
        self.scorer.watch(pos, queries);
    }

    fn watches_all(&self) -> bool {
        self.scorer.watches_all()
    }

    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (n, rotated) = (self.exact.len(), self.rope.rotated(k, self.exact.geometry().kv_dim(), pos));
        self.exact.push(&rotated, v)?;
        self.scorer.push(pos, &rotated, &self.exact).inspect_err(|_| self.exact.truncate(n))
    }

    fn len(&self) -> usize {
        self.exact.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.exact.truncate(len);
        self.scorer.truncate(&self.exact)
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        if self.exact.len() <= first {
            return Ok(());
        }
        self.exact.attend(head, &self.select(head, first, q)?, q, sums)
    }

    fn fetched(&self) -> Fetched {
        self.exact.fetched()
    }

    fn footprint(&self) -> Footprint {
        self.scorer.footprint(&self.exact)
    }
}

/// The exact inner product: the upper bound for every top-k method.
#[derive(Clone)]
struct Oracle;

impl Scorer for Oracle {
    fn push(&mut self, _: usize, _: &[f32], _: &OffloadedRows) -> Result<()> {
        Ok(())
    }

    fn truncate(&mut self, _: &OffloadedRows) -> Result<()> {
        Ok(())
    }

    fn scores(&self, exact: &OffloadedRows, head: usize, q: &[f32]) -> Result<Vec<f32>> {
        let (n, Geometry { head_dim, .. }) = (exact.len(), exact.geometry());
        let (mut scores, mut key) = (vec![0.0; q.len() / head_dim * n], vec![0.0; head_dim]);
        for t in 0..n {
            exact.key(head, t, &mut key)?;
            for (g, q) in q.chunks_exact(head_dim).enumerate() {
                scores[g * n + t] = dot(q, &key);
            }
        }
        Ok(scores)
    }

    fn scored_bytes(&self, exact: &OffloadedRows) -> usize {
        exact.len() * exact.key_bytes()
    }

    fn footprint(&self, exact: &OffloadedRows) -> Footprint {
        Footprint { kept: exact.footprint().offloaded, ..Footprint::default() }
    }
}

/// What the tests of scorers share.
#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::cache::RowFormat;
    use kv_attend::ElementType;
    use kv_llama::Rng;
    use kv_model::Config;

    /// A store of a small model's first layer without sinks or window, and random rows.
    pub struct Setup<S> {
        pub config: Config,
        pub store: RetrievalStore<S>,
        rng: Rng,
    }

    impl<S: Scorer> Setup<S> {
        pub fn new(budget: TokenBudget, scorer: impl FnOnce(Geometry) -> S) -> Self {
            let config = crate::fixture::model().config;
            let geometry = Geometry::of(&config);
            let exact = OffloadedRows::new(geometry, RowFormat::Exact(ElementType::F32), None, 0).unwrap();
            let rope = Arc::new(Rope::new(&config, 256));
            let store = RetrievalStore { exact, rope, scorer: scorer(geometry), budget, reserved: 0 };
            Self { config, store, rng: Rng(7) }
        }

        pub fn random(&mut self, n: usize) -> Vec<f32> {
            (0..n).map(|_| 4.0 * self.rng.uniform() as f32 - 2.0).collect()
        }

        /// Pushes random tokens with their queries; returns the queries (n, n_heads * head_dim).
        pub fn push(&mut self, n: usize) -> Vec<f32> {
            let (pos, kv_dim) = (self.store.len(), self.config.kv_dim());
            let [q, k, v] = [self.config.q_dim(), kv_dim, kv_dim].map(|dim| self.random(n * dim));
            self.store.watch(pos, &q);
            self.store.push(pos, &k, &v).unwrap();
            q
        }

        pub fn key(&self, head: usize, t: usize) -> Vec<f64> {
            let mut key = vec![0.0; self.config.head_dim];
            self.store.exact.key(head, t, &mut key).unwrap();
            key.into_iter().map(f64::from).collect()
        }

        /// Asserts that attention from token `first` on is the softmax over the tokens that `choose` returns,
        /// given a head and its queries.
        pub fn check(&mut self, first: usize, choose: impl Fn(&Self, usize, &[Vec<f64>]) -> Vec<usize>) {
            let (dim, group) = (self.config.head_dim, self.config.gqa_group());
            for head in 0..self.config.n_kv_heads {
                let q = self.random(group * dim);
                let (mut out, mut stats) = (vec![0.0; q.len()], vec![SoftmaxStats::EMPTY; group]);
                let mut sums = Sums { out: &mut out, stats: &mut stats };
                self.store.attend(head, first, &q, &mut sums).unwrap();
                let q: Vec<Vec<f64>> = q.chunks(dim).map(|q| q.iter().map(|&x| x.into()).collect()).collect();
                let tokens = choose(self, head, &q);
                let values = self.store.exact.values(head, 0..self.store.len()).unwrap();
                for (g, q) in q.iter().enumerate() {
                    stats[g].normalize(&mut out[g * dim..][..dim]);
                    let weights: Vec<f64> =
                        tokens.iter().map(|&t| product(q, &self.key(head, t)).exp()).collect();
                    let sum: f64 = weights.iter().sum();
                    for c in 0..dim {
                        let value = |(&t, w): (&usize, &f64)| w / sum * f64::from(values[t * dim + c]);
                        let expected: f64 = tokens.iter().zip(&weights).map(value).sum();
                        let got = f64::from(out[g * dim + c]);
                        assert!((got - expected).abs() < 1e-4, "{got}, not {expected}: {tokens:?}");
                    }
                }
            }
        }
    }

    pub fn product(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(a, b)| a * b).sum()
    }

    /// Indices of the `k` largest, ascending.
    pub fn largest(values: &[f64], k: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|&a, &b| values[b].total_cmp(&values[a]));
        order.truncate(k);
        order.sort_unstable();
        order
    }

    /// The sum over queries of the softmax of their scores (units,).
    pub fn combined(scores: &[Vec<f64>]) -> Vec<f64> {
        let mut total = vec![0.0; scores[0].len()];
        for scores in scores {
            let sum: f64 = scores.iter().map(|x| x.exp()).sum();
            total.iter_mut().zip(scores).for_each(|(total, x)| *total += x.exp() / sum);
        }
        total
    }

    #[test]
    fn the_oracle_attends_to_the_best_tokens() {
        for (n, removed, first) in [(1, 0, 0), (40, 0, 0), (40, 7, 9)] {
            let mut setup = Setup::new(TokenBudget::Ratio(0.2), |_| Oracle);
            setup.push(n);
            setup.store.truncate(n - removed).unwrap();
            let k = TokenBudget::Ratio(0.2).k(n - removed - first, 0);
            setup.check(first, |setup, head, q| {
                let tokens: Vec<usize> = (first..setup.store.len()).collect();
                let scores: Vec<Vec<f64>> = q
                    .iter()
                    .map(|q| tokens.iter().map(|&t| product(q, &setup.key(head, t))).collect())
                    .collect();
                largest(&combined(&scores), k).into_iter().map(|i| tokens[i]).collect()
            });
        }
    }
}
