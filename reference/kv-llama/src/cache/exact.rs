//! The cache without a method: exact rows.

use std::sync::Arc;

use kv_attend::owner::{Footprint, Pair};
use kv_attend::{Attention, ExactTokens, Rows, SoftmaxStats, attend_exact_into, normalize_all};
use kv_model::{Config, Rope};

use super::KvCache;
use crate::{Error, Result};

/// Exact keys and values in `f32`, and the pattern of a cache of one's own.
#[derive(Clone)]
pub struct ExactCache {
    config: Config,
    rope: Arc<Rope>,
    layers: Vec<Pair<Vec<f32>>>, // keys after RoPE and values, (n, n_kv_heads * head_dim) each
}

impl ExactCache {
    /// An empty cache of a model of this shape, with room for the positions of `rope`.
    #[must_use]
    pub fn new(config: &Config, rope: &Arc<Rope>) -> Self {
        let layers = (0..config.n_layers).map(|_| Pair::of(|_| vec![])).collect();
        Self { config: config.clone(), rope: rope.clone(), layers }
    }

    fn layer(&self, l: usize) -> Result<&Pair<Vec<f32>>> {
        self.layers.get(l).ok_or_else(|| refused(format!("layer {l} of {}", self.layers.len())))
    }

    /// Tokens in a layer.
    fn tokens(&self, rows: &Pair<Vec<f32>>) -> usize {
        rows.values.len() / self.config.kv_dim()
    }
}

fn refused(what: String) -> Error {
    Error::Cache { method: "exact", what }
}

impl KvCache for ExactCache {
    fn prefill(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (kv_dim, held) = (self.config.kv_dim(), self.tokens(self.layer(layer)?));
        if k.len() != v.len() || !k.len().is_multiple_of(kv_dim) {
            return Err(refused(format!("{} keys and {} values for rows of {kv_dim}", k.len(), v.len())));
        }
        if pos != held {
            return Err(refused(format!("tokens at position {pos} after {held} tokens")));
        }
        if held + k.len() / kv_dim > self.rope.len() {
            let n = held + k.len() / kv_dim;
            return Err(refused(format!("{n} tokens for {} positions", self.rope.len())));
        }
        let rows = &mut self.layers[layer];
        rows.keys.extend(self.rope.layer(layer).rotated(k, kv_dim, pos));
        rows.values.extend_from_slice(v);
        Ok(())
    }

    fn attend(&self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<()> {
        let last = self.tokens(self.layer(layer)?).checked_sub(1);
        let last = last.ok_or_else(|| refused("attention over nothing".into()))?;
        let mut stats = vec![SoftmaxStats::EMPTY; self.config.n_heads];
        out.fill(0.0);
        self.attend_into(layer, last, q, out, &mut stats)?;
        Ok(normalize_all(&stats, out)?)
    }

    fn attend_into(
        &self,
        layer: usize,
        pos: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let (config, Pair { keys, values }) = (&self.config, self.layer(layer)?);
        let tokens = ExactTokens::contiguous(keys, config.kv_dim(), values, config.kv_dim())?;
        let tokens = tokens.heads(config.n_kv_heads)?.first_query(pos);
        let attention = Attention {
            window: config.attention[layer].window,
            ..Attention::scaled(1.0 / (config.head_dim as f32).sqrt())
        };
        let queries = Rows::contiguous(q, config.q_dim())?;
        Ok(attend_exact_into(&attention, queries, &tokens, &mut vec![0.0; q.len()], out, stats)?)
    }

    fn seq_len(&self) -> usize {
        self.layers.last().map_or(0, |rows| self.tokens(rows))
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.seq_len() {
            return Err(refused(format!("truncation to {len} of {} tokens", self.seq_len())));
        }
        let kv_dim = self.config.kv_dim();
        self.layers.iter_mut().flat_map(Pair::iter_mut).for_each(|rows| rows.truncate(len * kv_dim));
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        let floats: usize = self.layers.iter().map(|rows| rows.keys.len() + rows.values.len()).sum();
        Footprint { kept: size_of::<f32>() * floats, ..Footprint::default() }
    }

    fn clone_box(&self) -> Box<dyn KvCache> {
        Box::new(self.clone())
    }
}
