//! SnapKV (Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024, arXiv
//! 2404.14469): each head keeps the prompt's last tokens, the observation window, those before it with the
//! most attention from the window's queries, averaged over neighbouring tokens, and all decoded tokens.
//! Tokens keep their positions.
//!
//! As in the authors' code, the window has 32 tokens, and the average is over 5. There is one difference: a
//! group of query heads shares its tokens, which the code selects apart. Sinks and window of this project,
//! which the method does not need and by default has not, are not part of the softmax.

use std::sync::Arc;

use kv_llama::ops::{dot, softmax};
use kv_llama::{Fetched, Footprint};
use kv_model::Rope;

use super::budget::part;
use super::kind::{BuildContext, Kind, Registration};
use crate::Result;
use crate::cache::{FetchCounter, Geometry, KeptRows, Store, Sums};

pub(super) const SNAP_KV: Registration = Registration {
    names: &["snapkv"],
    help: "\
  snapkv            the prompt's last 32 tokens, and what they attend to, tokens=0.5 kernel=5
                      per head, averaged over KERNEL tokens (SnapKV); a
                      fraction of the prompt. Sinks and window are 0
",
    examples: &["snapkv:tokens=0.3:exact=f32:window=4", "snapkv:tokens=1:exact=f32:window=4"],
    parse: |s| {
        Ok(Arc::new(SnapKv { tokens: s.fraction("tokens", 0.5)?, kernel: s.common_count("kernel", 5)? }))
    },
};

#[derive(Clone, Copy, Debug)]
struct SnapKv {
    tokens: f64,   // fraction of the prompt's tokens to keep
    kernel: usize, // tokens over which attention is averaged
}

impl Kind for SnapKv {
    fn sinks_and_window(&self) -> [usize; 2] {
        [0, 0]
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        let BuildContext { geometry, exact, .. } = *context;
        context.layers(|l| {
            let heads = vec![KeptRows::new(exact, geometry.head_dim); geometry.n_kv_heads];
            Ok(SnapKvStore::new(*self, geometry, context.rope(l), heads))
        })
    }
}

/// The tokens that each head keeps.
#[derive(Clone)]
struct SnapKvStore {
    settings: SnapKv,
    geometry: Geometry,
    rope: Arc<Rope>,
    heads: Vec<KeptRows>,
    queries: Vec<f32>, // (n, n_heads * head_dim), rotated: the prompt's last queries, until it is pushed
    observed: usize,   // position of the first of them
    whole: usize,      // index from which on all tokens are kept
    len: usize,        // tokens so far
    fetched: FetchCounter,
}

impl SnapKvStore {
    fn new(settings: SnapKv, geometry: Geometry, rope: Arc<Rope>, heads: Vec<KeptRows>) -> Self {
        let fetched = FetchCounter::default();
        Self { settings, geometry, rope, heads, queries: vec![], observed: 0, whole: 0, len: 0, fetched }
    }

    /// Indices of the prompt's tokens that a head keeps, given its rotated keys (n, head_dim), the first at
    /// position `pos`.
    fn choose(&self, head: usize, keys: &[f32], pos: usize) -> Vec<usize> {
        let Geometry { n_heads, n_kv_heads, head_dim } = self.geometry;
        let (n, group) = (keys.len() / head_dim, n_heads / n_kv_heads * head_dim);
        let stay = part(self.settings.tokens, n);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let mut attention = vec![0.0; n];
        for (query, row) in (self.observed..).zip(self.queries.chunks_exact(self.geometry.q_dim())) {
            let visible = (query + 1).saturating_sub(pos).min(n);
            for q in row[head * group..][..group].chunks_exact(head_dim) {
                let keys = keys.chunks_exact(head_dim).take(visible);
                let mut weights: Vec<f32> = keys.map(|key| scale * dot(q, key)).collect();
                softmax(&mut weights);
                attention.iter_mut().zip(&weights).for_each(|(sum, x)| *sum += x);
            }
        }
        // The observation window is always kept.
        let before = self.observed.saturating_sub(pos).clamp(n - stay, n);
        let (left, right) = (self.settings.kernel / 2, (self.settings.kernel - 1) / 2);
        let pooled =
            |i: usize| -> f32 { attention[i.saturating_sub(left)..before.min(i + right + 1)].iter().sum() };
        let pooled: Vec<f32> = (0..before).map(pooled).collect();
        let mut order: Vec<usize> = (0..before).collect();
        order.sort_by(|&a, &b| pooled[b].total_cmp(&pooled[a]));
        order.truncate(stay - (n - before));
        order.sort_unstable();
        order.extend(before..n);
        order
    }
}

impl Store for SnapKvStore {
    fn watch(&mut self, pos: usize, queries: &[f32]) {
        (self.queries, self.observed) = (queries.to_vec(), pos);
    }

    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (geometry, n) = (self.geometry, k.len() / self.geometry.kv_dim());
        let rotated = self.rope.rotated(k, geometry.kv_dim(), pos);
        let evicts = !self.queries.is_empty() && part(self.settings.tokens, n) < n;
        for h in 0..geometry.n_kv_heads {
            let stay = evicts.then(|| self.choose(h, &geometry.head_rows(h, &rotated), pos));
            let head = &mut self.heads[h];
            let before = head.tokens().len();
            head.push(self.len, geometry.head(h, &rotated)?, geometry.head(h, v)?)?;
            if let Some(stay) = stay {
                head.retain(&(0..before).chain(stay.iter().map(|i| before + i)).collect::<Vec<_>>())?;
            }
        }
        self.len += n;
        if evicts {
            self.whole = self.len;
        }
        self.queries.clear();
        Ok(())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn can_truncate(&self, len: usize, window: usize) -> bool {
        len == 0 || window >= self.whole
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads.iter_mut().for_each(|head| _ = head.truncate(len));
        (self.len, self.whole) = (len, self.whole.min(len));
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        self.fetched.add(self.heads[head].attend(first, q, sums)?);
        Ok(())
    }

    fn fetched(&self) -> Fetched {
        self.fetched.get()
    }

    fn footprint(&self) -> Footprint {
        Footprint { kept: self.heads.iter().map(KeptRows::bytes).sum(), ..Footprint::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_attend::ElementType;
    use kv_llama::Rng;
    use svd_core::SoftmaxStats;

    /// The authors' rule in `f64`, after a prompt of 60 tokens of which 8 are observed, and two steps.
    #[test]
    fn what_the_window_attends_to_stays() {
        let config = crate::fixture::model().config;
        let (geometry, dim, group) = (Geometry::of(&config), config.head_dim, config.gqa_group());
        let rope = Arc::new(Rope::new(&config, 64));
        let (prompt, observed, n, kv_dim, q_dim) = (60, 52, 62, config.kv_dim(), config.q_dim());
        let settings = SnapKv { tokens: 0.3, kernel: 5 };
        let heads = vec![KeptRows::new(ElementType::F32, dim); geometry.n_kv_heads];
        let mut store = SnapKvStore::new(settings, geometry, rope.clone(), heads);
        let mut rng = Rng(7);
        let mut random =
            |dim: usize| -> Vec<f32> { (0..n * dim).map(|_| 4.0 * rng.uniform() as f32 - 2.0).collect() };
        let [q, k, v] = [q_dim, kv_dim, kv_dim].map(&mut random);
        let rotated = rope.rotated(&k, kv_dim, 0);
        store.watch(observed, &q[observed * q_dim..prompt * q_dim]);
        store.push(0, &k[..prompt * kv_dim], &v[..prompt * kv_dim]).unwrap();
        store.push(prompt, &k[prompt * kv_dim..], &v[prompt * kv_dim..]).unwrap();

        let of = |rows: &[f32], row: usize, dims: usize, head: usize| -> Vec<f64> {
            rows[row * dims + head * dim..][..dim].iter().map(|&x| x.into()).collect()
        };
        let softmax = |q: &[f64], head: usize, tokens: &[usize]| -> Vec<f64> {
            let product =
                |&t: &usize| -> f64 { q.iter().zip(of(&rotated, t, kv_dim, head)).map(|(q, k)| q * k).sum() };
            let weights: Vec<f64> = tokens.iter().map(|t| (product(t) / (dim as f64).sqrt()).exp()).collect();
            weights.iter().map(|x| x / weights.iter().sum::<f64>()).collect()
        };
        for head in 0..geometry.n_kv_heads {
            let mut attention = vec![0.0; prompt];
            for t in observed..prompt {
                for g in 0..group {
                    let q = of(&q, t, q_dim, head * group + g);
                    let weights = softmax(&q, head, &(0..=t).collect::<Vec<_>>());
                    attention.iter_mut().zip(weights).for_each(|(sum, x)| *sum += x);
                }
            }
            let pooled = |i: usize| -> f64 {
                (i.saturating_sub(2)..=(i + 2).min(observed - 1)).map(|j| attention[j] / 5.0).sum()
            };
            let mut kept: Vec<usize> = (0..observed).collect();
            kept.sort_by(|&a, &b| pooled(b).total_cmp(&pooled(a)));
            kept.truncate(18 - (prompt - observed));
            kept.sort_unstable();
            kept.extend(observed..n);
            assert!(store.heads[head].tokens().iter().map(|&t| t as usize).eq(kept.iter().copied()));
            let query = of(&q, 3, q_dim, head * group);
            let scaled: Vec<f32> = query.iter().map(|&x| (x / (dim as f64).sqrt()) as f32).collect();
            let (mut out, mut stats) = (vec![0.0; dim], [SoftmaxStats::EMPTY]);
            store.attend(head, 0, &scaled, &mut Sums { out: &mut out, stats: &mut stats }).unwrap();
            stats[0].normalize(&mut out);
            let weights = softmax(&query, head, &kept);
            for (c, &x) in out.iter().enumerate() {
                let value = |(&t, w): (&usize, &f64)| w * of(&v, t, kv_dim, head)[c];
                let expected: f64 = kept.iter().zip(&weights).map(value).sum();
                assert!((f64::from(x) - expected).abs() < 1e-4, "{x}, not {expected}");
            }
        }
        // Tokens of the prompt may be missing, later ones are not.
        assert!(store.can_truncate(61, 60) && !store.can_truncate(61, 59) && store.can_truncate(0, 0));
        store.truncate(61).unwrap();
        assert!(
            store.heads.iter().all(|head| head.tokens().len() == 19 && *head.tokens().last().unwrap() == 60)
        );
    }
}
