//! The layout that the caches of all methods share.
//!
//! A sequence has three parts: the first tokens (sinks) and the most recent ones (window) stay exact; a
//! `Store`, in which the methods differ, holds the tokens between them. Every part adds its tokens to the
//! same softmax.

mod coding_error;
mod exact;
mod fetch_counter;
mod head_store;
mod kept;
mod offloaded;
mod store;

use std::sync::Arc;

use kv_attend::owner::ExactRows;
use kv_attend::{Element, Rows};
use kv_llama::{Fetched, Footprint, HeadFit, KvCache, PromptRows};
use kv_model::{Config, LayerAttention, Rope};
use pq_core::Window;
use rayon::prelude::*;
use svd_core::SoftmaxStats;

pub(crate) use coding_error::{CodingError, head_fits};
pub(crate) use exact::{DenseStore, HeadRows, attend_rows, rounded};
use exact::{attend_before_rope, widened};
pub(crate) use fetch_counter::FetchCounter;
pub(crate) use head_store::HeadStore;
pub(crate) use kept::KeptRows;
pub(crate) use offloaded::{BlockRule, Offload, OffloadedRows, RowFormat};
pub(crate) use store::{Geometry, Grouped, RotatedStore, Store, Sums, merge_part};

use crate::Result;

/// The cache of every method: per layer sinks, a store, a window.
#[derive(Clone)]
pub(crate) struct WindowedCache<E> {
    method: &'static str,
    geometry: Geometry,
    window: Window,
    rope: Arc<Rope>,
    layers: Vec<Layer<E>>,
}

struct Layer<E> {
    attention: LayerAttention,
    rope: Arc<Rope>,     // the layer's own
    exact: ExactRows<E>, // (n, n_kv_heads * head_dim), keys before RoPE
    store: Box<dyn Store>,
    watched: Vec<f32>, // (n, n_heads * head_dim): the last queries of the tokens that come next
}

impl<E: Clone> Clone for Layer<E> {
    fn clone(&self) -> Self {
        Self {
            attention: self.attention,
            rope: self.rope.clone(),
            exact: self.exact.clone(),
            store: self.store.clone_box(),
            watched: self.watched.clone(),
        }
    }
}

impl<E: Element> Layer<E> {
    fn len(&self) -> usize {
        self.exact.sinks() + self.store.len() + self.exact.recent()
    }

    /// Adds the attention of one KV head's scaled queries at position `pos`.
    fn attend(&self, head: usize, pos: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        let first = self.attention.first_visible(pos);
        let (sinks, stored) = (self.exact.sinks(), self.store.len());
        let first_of = |start: usize, len: usize| first.saturating_sub(start).min(len);
        let (head_dim, [kv_dim, _]) = (q.len() / sums.stats.len(), self.exact.dims());
        for (rows, start) in [(self.exact.sink_rows(), 0), (self.exact.recent_rows(), sinks + stored)] {
            let of_head = |all| Rows::contiguous(all, kv_dim)?.columns(head * head_dim, head_dim);
            let [keys, values] = rows.map(of_head);
            let (keys, values) = (keys?, values?);
            let seen = first_of(start, keys.rows())..keys.rows();
            attend_before_rope(&self.rope, start, [keys, values], seen, q, sums)?;
        }
        // The store comes last: it may depend on the softmax mass of the exact tokens.
        self.store.attend(head, first_of(sinks, stored), q, sums)
    }
}

impl<E: Element> WindowedCache<E> {
    /// An empty cache with one store per layer.
    pub fn new(
        method: &'static str,
        config: &Config,
        window: Window,
        rope: &Arc<Rope>,
        stores: Vec<Box<dyn Store>>,
    ) -> Self {
        let geometry = Geometry::of(config);
        let layers = stores.into_iter().zip(&config.attention).enumerate().map(|(l, (store, &attention))| {
            let exact = ExactRows::new([geometry.kv_dim(); 2], window);
            Layer { attention, rope: rope.shared_layer(l), exact, store, watched: vec![] }
        });
        Self { method, geometry, window, layers: layers.collect(), rope: rope.clone() }
    }

    fn layer(&self, l: usize) -> kv_llama::Result<&Layer<E>> {
        self.layers.get(l).ok_or_else(|| self.error(format!("layer {l} of {}", self.layers.len())))
    }

    fn error(&self, what: impl Into<String>) -> kv_llama::Error {
        kv_llama::Error::Cache { method: self.method, what: what.into() }
    }
}

impl<E: Element> KvCache for WindowedCache<E> {
    fn watch(&mut self, layer: usize, queries: &[f32]) {
        if let Some(layer) = self.layers.get_mut(layer) {
            layer.watched = queries.to_vec();
        }
    }

    fn watches_all(&self) -> bool {
        self.layers.iter().any(|layer| layer.store.watches_all())
    }

    fn prompt_rows(
        &self,
        layer: usize,
        keys: &[f32],
        values: &[f32],
    ) -> kv_llama::Result<Option<PromptRows>> {
        Ok(self.layer(layer)?.store.prompt_rows(keys, values)?)
    }

    fn prefill(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> kv_llama::Result<()> {
        let kv_dim = self.geometry.kv_dim();
        let n = k.len() / kv_dim;
        let held = self.layer(layer)?.len();
        if k.len() != n * kv_dim || v.len() != k.len() {
            return Err(self.error(format!("{} keys and {} values for rows of {kv_dim}", k.len(), v.len())));
        }
        if pos != held {
            return Err(self.error(format!("tokens at position {pos} after {held} tokens")));
        }
        if held + n > self.rope.len() {
            return Err(self.error(format!("{} tokens for {} positions", held + n, self.rope.len())));
        }
        if k.iter().chain(v).any(|x| !x.is_finite()) {
            return Err(self.error("keys or values hold a NaN or an infinity"));
        }
        let (before, layer) = self.layers.split_at_mut(layer);
        let Layer { exact, store, watched, .. } = &mut layer[0];
        let watched = std::mem::take(watched);
        store.watch((held + n).saturating_sub(watched.len() / self.geometry.q_dim()), &watched);
        let rows = [k, v].map(|rows| rows.iter().map(|&x| rounded(x)).collect::<Vec<E>>());
        let [keys, values] = rows.each_ref().map(|rows| Rows::contiguous(rows, kv_dim));
        // If the store fails, for example on a full disk, nothing changes.
        let evicted = exact.append(store.len(), [keys?, values?], |evicted| -> Result<usize> {
            if evicted.tokens() > 0 {
                let [k, v] = evicted.sides().each_ref().map(|parts| widened(parts));
                store.push(evicted.first(), &k, &v)?;
            }
            Ok(evicted.tokens())
        })?;
        if evicted > 0 {
            let before = before.iter_mut().map(|layer| &mut *layer.store as &mut dyn Store);
            store.code_group(&mut before.collect::<Vec<_>>())?;
        }
        // The queries are of these tokens: a prompt that the window holds is not chosen from when others
        // leave it.
        store.watch(held + n, &[]);
        Ok(())
    }

    fn attend(&self, layer: usize, q: &[f32], out: &mut [f32]) -> kv_llama::Result<()> {
        let last = self.layer(layer)?.len().checked_sub(1);
        let last = last.ok_or_else(|| self.error("attention over nothing"))?;
        let Geometry { n_heads, head_dim, .. } = self.geometry;
        let mut stats = vec![SoftmaxStats::EMPTY; n_heads];
        out.fill(0.0);
        self.attend_into(layer, last, q, out, &mut stats)?;
        if stats.iter().any(|stats| stats.max == f32::NEG_INFINITY) {
            return Err(self.error("attention over nothing: all tokens have been dropped"));
        }
        for (stats, out) in stats.iter().zip(out.chunks_exact_mut(head_dim)) {
            stats.normalize(out);
        }
        Ok(())
    }

    fn attend_into(
        &self,
        layer: usize,
        pos: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> kv_llama::Result<()> {
        let Geometry { n_heads, n_kv_heads, head_dim } = self.geometry;
        let layer = self.layer(layer)?;
        if q.len() != stats.len() * head_dim || out.len() != q.len() || !stats.len().is_multiple_of(n_heads) {
            return Err(self.error(format!("{} queries for {n_heads} heads of {head_dim}", q.len())));
        }
        let scale = 1.0 / (head_dim as f32).sqrt();
        let group = n_heads / n_kv_heads;
        let groups = out.par_chunks_mut(group * head_dim).zip(stats.par_chunks_mut(group));
        groups.zip(q.par_chunks(group * head_dim)).enumerate().try_for_each(|(i, ((out, stats), q))| {
            let q: Vec<f32> = q.iter().map(|x| x * scale).collect();
            let (pos, mut sums) = (pos + i / n_kv_heads, Sums { out, stats });
            Ok(layer.attend(i % n_kv_heads, pos, &q, &mut sums)?)
        })
    }

    fn seq_len(&self) -> usize {
        // In the middle of a step only the first layers hold the new token.
        self.layers.last().map_or(0, Layer::len)
    }

    fn truncate(&mut self, len: usize) -> kv_llama::Result<()> {
        if len > self.seq_len() {
            return Err(self.error(format!("truncation to {len} of {} tokens", self.seq_len())));
        }
        let stays = |layer: &Layer<E>| len.saturating_sub(layer.exact.sinks()).min(layer.store.len());
        let can_truncate = |layer: &Layer<E>| {
            let evicted = self.window.to_evict(len.saturating_sub(layer.exact.sinks()));
            layer.store.can_truncate(stays(layer), evicted.min(stays(layer)))
        };
        if !self.layers.iter().all(can_truncate) {
            return Err(self.error(format!("{len} tokens would attend to some that have been dropped")));
        }
        for layer in &mut self.layers {
            let (stored, stays) = (layer.store.len(), stays(layer));
            layer.store.truncate(stays)?;
            layer.exact.truncate(len, stored);
            layer.store.watch(len, &[]);
        }
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        let mut total = Footprint::default();
        for layer in &self.layers {
            total += Footprint { kept: layer.exact.size(), ..Footprint::default() };
            total += layer.store.footprint();
        }
        total
    }

    fn fetched(&self) -> Fetched {
        let mut total = Fetched::default();
        self.layers.iter().for_each(|layer| total += layer.store.fetched());
        total
    }

    fn fits(&self) -> Vec<HeadFit> {
        self.layers.iter().enumerate().flat_map(|(l, layer)| layer.store.fits(l)).collect()
    }

    fn clone_box(&self) -> Box<dyn KvCache> {
        Box::new(self.clone())
    }
}
