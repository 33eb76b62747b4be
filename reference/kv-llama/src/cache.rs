//! What the loop asks of a cache: one trait, which knows no method.

mod exact;
mod fetched;
mod fit;

use kv_attend::SoftmaxStats;
use kv_attend::owner::Footprint;

use crate::Result;
pub use exact::ExactCache;
pub use fetched::{Fetched, FetchedPerStep};
pub use fit::HeadFit;

/// Rotated keys and values of a prompt, (n, n_kv_heads * head_dim) each.
pub type PromptRows = (Vec<f32>, Vec<f32>);

/// The keys and values of one sequence, in the representation of a method.
///
/// Keys arrive before RoPE with the position of their first token; the cache decides what it stores.
/// Positions must continue the sequence of each layer.
pub trait KvCache: Send + Sync {
    /// Passes the rotated last queries, (n, n_heads * head_dim), of the prompt whose keys and values follow
    /// next. Caches that select tokens by attention need them.
    fn watch(&mut self, _layer: usize, _queries: &[f32]) {}

    /// Whether [`Self::watch`] gets every query: all of a prompt, and that of each step before its key and
    /// value. Otherwise it gets the last [`WATCHED`](crate::WATCHED) of a prompt.
    fn watches_all(&self) -> bool {
        false
    }

    /// The rows that tokens of a prompt attend to among themselves, given rotated keys and values (n,
    /// n_kv_heads * head_dim); `None` for the exact rows.
    ///
    /// # Errors
    /// Errors of the method's core.
    fn prompt_rows(&self, _layer: usize, _keys: &[f32], _values: &[f32]) -> Result<Option<PromptRows>> {
        Ok(None)
    }

    /// Appends the keys and values of a prompt or a prefill chunk: (n, n_kv_heads * head_dim) each, the first
    /// at position `pos`.
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) for a position that does not continue the sequence; errors of
    /// the method's core.
    fn prefill(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> Result<()>;

    /// Appends one token's keys and values: (n_kv_heads * head_dim) each.
    ///
    /// # Errors
    /// As [`Self::prefill`].
    fn append(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.prefill(layer, pos, k, v)
    }

    /// Attention of the queries of the layer's last token, rotated to its position, over the layer's tokens
    /// in its window.
    ///
    /// `q` and `out` (n_heads, head_dim); `out` is fully written.
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) for an empty layer; errors of the method's core.
    fn attend(&self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<()>;

    /// Adds the attention of the queries of `n` tokens, rotated to positions `pos..pos + n`, over the layer's
    /// tokens in their windows, to earlier partial results.
    ///
    /// `q` (n, n_heads, head_dim); `out` like it and `stats` (n, n_heads) hold the partial softmax, as for
    /// [`kv_attend::attend_exact_into`]. Queries that see no token of the layer are unchanged.
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) for slices of other lengths; errors of the method's core.
    fn attend_into(
        &self,
        layer: usize,
        pos: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()>;

    /// Tokens in every layer.
    fn seq_len(&self) -> usize;

    /// Drops all tokens from position `len` on. Compressed tokens stay compressed, also those that a cache
    /// which never held more than `len` tokens keeps exact: the window refills from the next token on.
    ///
    /// # Errors
    /// [`Error::Cache`](crate::Error::Cache) when `len` is beyond the end, or the method has dropped tokens
    /// that a cache of `len` tokens attends to. The cache is then unchanged.
    fn truncate(&mut self, len: usize) -> Result<()>;

    /// Exact byte counts by purpose.
    fn footprint(&self) -> Footprint;

    /// Counts of the rows that attention has fetched, for methods that offload rows or score them cheaply.
    fn fetched(&self) -> Fetched {
        Fetched::default()
    }

    /// How well codes that were fitted to a calibration text fit the tokens of this cache, for every layer,
    /// head and side of a method that has such codes. An engine may then take another profile or method.
    fn fits(&self) -> Vec<HeadFit> {
        vec![]
    }

    /// An independent copy.
    fn clone_box(&self) -> Box<dyn KvCache>;
}
