//! Where a model calls its cache.

use candle_core::{Result, Tensor};

/// The KV cache of a layer, as a model of candle calls it.
pub trait Kv {
    /// Appends the keys and values (batch, KV heads, tokens, dim) of new tokens, after RoPE, and returns the
    /// attention (batch, heads, tokens, dim) of their queries `q` to all tokens up to their own.
    ///
    /// # Errors
    /// Those of the cache.
    fn attend_new(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor>;
}
