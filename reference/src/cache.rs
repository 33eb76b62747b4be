//! KV caches: one trait, and the layout that all methods share.
//!
//! A sequence has three parts: the first tokens (sinks) and the most recent ones (window) stay exact; a `Store`, in which the
//! methods differ, holds the tokens between them. Every part adds its tokens to the same softmax.

mod exact;
mod store;

use std::sync::Arc;

use pq_core::Window;
use rayon::prelude::*;
use svd_core::SoftmaxStats;

pub use exact::ElementType;
pub(crate) use exact::{DenseStore, Elements, ExactRows, attend_rows, saturating_f16};
pub use store::Footprint;
pub(crate) use store::{Geometry, RotatedStore, Store, merge_part};

use crate::model::Rope;
use crate::{Error, Result};

/// The keys and values of one sequence, in whatever form a method keeps them.
///
/// Keys arrive before RoPE with the position of their first token; the cache decides what it stores. All layers are filled
/// in turn: positions must follow what the layer holds.
pub trait KvCache: Send + Sync {
    /// Shows the last queries of the prompt whose keys and values come next, rotated: (n, n_heads * head_dim). Caches that
    /// choose tokens by attention need them.
    fn watch(&mut self, _layer: usize, _queries: &[f32]) {}

    /// Takes the keys and values of a prompt: (n, n_kv_heads * head_dim) each, the first at position `pos`.
    ///
    /// # Errors
    /// [`Error::Cache`] for a position that does not follow; errors of the method's core.
    fn prefill(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> Result<()>;

    /// Takes one token's keys and values: (n_kv_heads * head_dim) each.
    ///
    /// # Errors
    /// As [`Self::prefill`].
    fn append(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.prefill(layer, pos, k, v)
    }

    /// Attention of one token's queries, rotated to its position, over all tokens of the layer.
    ///
    /// `q` and `out` (n_heads, head_dim); `out` is fully written.
    ///
    /// # Errors
    /// [`Error::Cache`] for an empty layer; errors of the method's core.
    fn attend(&self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<()>;

    /// Tokens that every layer holds.
    fn seq_len(&self) -> usize;

    /// Forgets all tokens from position `len` on.
    ///
    /// # Errors
    /// [`Error::Cache`] when `len` is beyond the end or the method has dropped what it would need.
    fn truncate(&mut self, len: usize) -> Result<()>;

    /// Its bytes by purpose, counted exactly.
    fn footprint(&self) -> Footprint;

    /// An independent copy.
    fn clone_box(&self) -> Box<dyn KvCache>;
}

/// The cache of every method: per layer sinks, a store, a window.
#[derive(Clone)]
pub(crate) struct WindowedCache {
    method: &'static str,
    geometry: Geometry,
    window: Window,
    rope: Arc<Rope>,
    layers: Vec<Layer>,
}

struct Layer {
    sinks: ExactRows,
    store: Box<dyn Store>,
    recent: ExactRows,
}

impl Clone for Layer {
    fn clone(&self) -> Self {
        Self { sinks: self.sinks.clone(), store: self.store.clone_box(), recent: self.recent.clone() }
    }
}

impl Layer {
    fn len(&self) -> usize {
        self.sinks.len() + self.store.len() + self.recent.len()
    }
}

impl WindowedCache {
    /// An empty cache with one store per layer; `exact` is how sinks and window are held.
    pub fn new(
        method: &'static str,
        geometry: Geometry,
        window: Window,
        exact: ElementType,
        rope: Arc<Rope>,
        stores: Vec<Box<dyn Store>>,
    ) -> Self {
        let rows = || ExactRows::new(exact, geometry);
        let layers = stores.into_iter().map(|store| Layer { sinks: rows(), store, recent: rows() }).collect();
        Self { method, geometry, window, rope, layers }
    }

    fn error(&self, what: impl Into<String>) -> Error {
        Error::Cache { method: self.method, what: what.into() }
    }
}

impl KvCache for WindowedCache {
    fn watch(&mut self, layer: usize, queries: &[f32]) {
        if let Some(layer) = self.layers.get_mut(layer) {
            layer.store.watch(queries);
        }
    }

    fn prefill(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_dim = self.geometry.kv_dim();
        let n = k.len() / kv_dim;
        let Some(held) = self.layers.get(layer).map(Layer::len) else {
            return Err(self.error(format!("layer {layer} of {}", self.layers.len())));
        };
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
        let layer = &mut self.layers[layer];
        let sinks = self.window.to_sinks(held, n) * kv_dim;
        layer.sinks.push(&k[..sinks], &v[..sinks]);
        layer.recent.push(&k[sinks..], &v[sinks..]);
        let evicted = self.window.to_evict(layer.recent.len());
        if evicted > 0 {
            let (k, v) = layer.recent.pop_front(evicted);
            layer.store.push(layer.sinks.len() + layer.store.len(), &k, &v)?;
        }
        Ok(())
    }

    fn attend(&self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<()> {
        let Geometry { n_heads, n_kv_heads, head_dim } = self.geometry;
        let Some(layer) = self.layers.get(layer).filter(|layer| layer.len() > 0) else {
            return Err(self.error("attention over nothing"));
        };
        if q.len() != n_heads * head_dim || out.len() != q.len() {
            return Err(self.error(format!("{} queries for {n_heads} heads of {head_dim}", q.len())));
        }
        let scale = 1.0 / (head_dim as f32).sqrt();
        let recent_pos = layer.sinks.len() + layer.store.len();
        let group_len = n_heads / n_kv_heads * head_dim;
        out.par_chunks_mut(group_len).zip(q.par_chunks(group_len)).enumerate().try_for_each(
            |(head, (out, q))| {
                let q: Vec<f32> = q.iter().map(|x| x * scale).collect();
                let mut stats = vec![SoftmaxStats::EMPTY; group_len / head_dim];
                out.fill(0.0);
                layer.sinks.attend(head, &q, Some((&self.rope, 0)), out, &mut stats)?;
                layer.store.attend(head, &q, out, &mut stats)?;
                layer.recent.attend(head, &q, Some((&self.rope, recent_pos)), out, &mut stats)?;
                if stats.iter().any(|stats| stats.max == f32::NEG_INFINITY) {
                    return Err(self.error("attention over nothing: all tokens have been dropped"));
                }
                for (stats, out) in stats.iter().zip(out.chunks_exact_mut(head_dim)) {
                    stats.normalize(out);
                }
                Ok(())
            },
        )
    }

    fn seq_len(&self) -> usize {
        // While a token passes through the layers, the first ones hold it already.
        self.layers.last().map_or(0, Layer::len)
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.seq_len() {
            return Err(self.error(format!("truncation to {len} of {} tokens", self.seq_len())));
        }
        for layer in &mut self.layers {
            let (sinks, stored) = (layer.sinks.len(), layer.store.len());
            layer.store.truncate(len.saturating_sub(sinks).min(stored))?;
            layer.sinks.truncate(len);
            layer.recent.truncate(len.saturating_sub(sinks + stored));
        }
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        let mut total = Footprint::default();
        for layer in &self.layers {
            total += Footprint { kept: layer.sinks.bytes() + layer.recent.bytes(), ..Footprint::default() };
            total += layer.store.footprint();
        }
        total
    }

    fn clone_box(&self) -> Box<dyn KvCache> {
        Box::new(self.clone())
    }
}
