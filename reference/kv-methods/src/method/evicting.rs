//! Eviction in front of another store: the prompt's tokens with the most attention from the prompt's last
//! queries stay, and all decoded ones; all heads of a layer keep the same tokens.
//!
//! It stands in for Keyformer (ZACK's 6.2), which also selects by accumulated scores.

use std::sync::Arc;

use kv_llama::ops::{dot, softmax};
use kv_llama::{Footprint, PromptRows};
use kv_model::Rope;

use super::budget::part;
use crate::Result;
use crate::cache::{Geometry, RotatedStore, Store, Sums};

/// Eviction in front of another store.
#[derive(Clone)]
pub(super) struct EvictingStore<S> {
    inner: S,
    geometry: Geometry,
    rope: Arc<Rope>,
    part: f64,         // fraction of the prompt's tokens to keep; 1 or more for all
    queries: Vec<f32>, // (n, n_heads, head_dim) rotated: the prompt's last queries, until it is pushed
    kept: Vec<usize>,  // indices of the tokens in the inner store, ascending
    whole: usize,      // index from which on all tokens are in the inner store
    len: usize,
}

impl<S: RotatedStore> EvictingStore<S> {
    pub fn new(inner: S, geometry: Geometry, rope: Arc<Rope>, part: f64) -> Self {
        Self { inner, geometry, rope, part, queries: vec![], kept: vec![], whole: 0, len: 0 }
    }

    /// Indices of the tokens to keep, given rotated `keys`.
    fn choose(&self, keys: &[f32]) -> Vec<usize> {
        let Geometry { n_heads, n_kv_heads, head_dim } = self.geometry;
        let n = keys.len() / self.geometry.kv_dim();
        let stay = part(self.part, n);
        let group = n_heads / n_kv_heads * head_dim;
        let scale = 1.0 / (head_dim as f32).sqrt();
        let (mut attention, mut scores) = (vec![0.0; n], vec![0.0; n]);
        for head in 0..n_kv_heads {
            let keys = self.geometry.head_rows(head, keys);
            let rows = self.queries.chunks_exact(n_heads * head_dim);
            for q in rows.flat_map(|row| row[head * group..][..group].chunks_exact(head_dim)) {
                for (score, key) in scores.iter_mut().zip(keys.chunks_exact(head_dim)) {
                    *score = scale * dot(q, key);
                }
                softmax(&mut scores);
                attention.iter_mut().zip(&scores).for_each(|(sum, x)| *sum += x);
            }
        }
        let mut order: Vec<usize> = (0..n).collect();
        order.sort_by(|&a, &b| attention[b].total_cmp(&attention[a]));
        order.truncate(stay);
        order.sort_unstable();
        order
    }
}

impl<S: RotatedStore + Clone + 'static> Store for EvictingStore<S> {
    fn watch(&mut self, _pos: usize, queries: &[f32]) {
        self.queries = queries.to_vec();
    }

    fn prompt_rows(&self, keys: &[f32], values: &[f32]) -> Result<Option<PromptRows>> {
        self.inner.prompt_rows(keys, values)
    }

    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_dim = self.geometry.kv_dim();
        let rotated = self.rope.rotated(k, kv_dim, pos);
        let n = k.len() / kv_dim;
        let stay = if self.queries.is_empty() || self.part >= 1.0 {
            (0..n).collect()
        } else {
            self.choose(&rotated)
        };
        let rows = |rows: &[f32]| -> Vec<f32> {
            stay.iter().flat_map(|&i| &rows[i * kv_dim..][..kv_dim]).copied().collect()
        };
        self.inner.push_rotated(&rows(&rotated), &rows(v))?;
        self.kept.extend(stay.iter().map(|i| self.len + i));
        self.len += n;
        if stay.len() < n {
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
        self.kept.truncate(self.kept.partition_point(|&token| token < len));
        (self.len, self.whole) = (len, self.whole.min(len));
        self.inner.truncate(self.kept.len())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        self.inner.attend(head, self.kept.partition_point(|&token| token < first), q, sums)
    }

    fn footprint(&self) -> Footprint {
        self.inner.footprint()
    }
}

#[cfg(test)]
mod tests {
    use svd_core::SoftmaxStats;

    use super::*;
    use crate::cache::DenseStore;
    use kv_attend::ElementType;

    #[test]
    fn what_the_queries_look_for_stays() {
        let config = crate::fixture::model().config;
        let geometry = Geometry::of(&config);
        let rope = Arc::new(Rope::new(&config, 16));
        let dense = DenseStore::new(ElementType::F32, geometry, rope.clone());
        let mut store = EvictingStore::new(dense, geometry, rope.clone(), 0.25);
        // Eight tokens: the keys of 2 and 5 are the query, at their positions.
        let kv_dim = geometry.kv_dim();
        let mut k = vec![0.0; 8 * kv_dim];
        for token in [2, 5] {
            k[token * kv_dim..][..kv_dim].fill(2.0);
        }
        let v: Vec<f32> = (0..8).flat_map(|token| vec![token as f32; kv_dim]).collect();
        let q_dim = geometry.n_heads * geometry.head_dim;
        let queries = rope.rotated(&vec![2.0; 2 * q_dim], q_dim, 2);
        store.watch(6, &queries);
        store.push(0, &k, &v).unwrap();
        assert_eq!((store.len(), &store.kept[..]), (8, &[2, 5][..]));
        // Tokens after the prompt are all kept.
        store.push(8, &k[..2 * kv_dim], &v[..2 * kv_dim]).unwrap();
        assert_eq!((store.len(), &store.kept[..]), (10, &[2, 5, 8, 9][..]));
        // Tokens of the prompt may be missing, later ones are not.
        assert!(store.can_truncate(9, 8) && !store.can_truncate(9, 7) && !store.can_truncate(5, 5));
        store.truncate(9).unwrap();
        assert_eq!((store.len(), &store.kept[..], store.inner.len()), (9, &[2, 5, 8][..], 3));
        let (mut out, mut stats) = (vec![0.0; geometry.head_dim], [SoftmaxStats::EMPTY]);
        let mut sums = Sums { out: &mut out, stats: &mut stats };
        store.attend(0, 0, &vec![0.0; geometry.head_dim], &mut sums).unwrap();
        stats[0].normalize(&mut out);
        assert!(out.iter().all(|&x| (x - 7.0 / 3.0).abs() < 1e-6), "{out:?}"); // the third value is 0
    }
}
