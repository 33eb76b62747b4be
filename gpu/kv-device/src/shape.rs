//! The sizes of a cache.

use kv_gpu::Element;
use pq_core::Window;

use crate::{Error, Result};

/// The sizes of the cache of a batch, and what else it knows of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct CacheShape {
    /// Layers.
    pub layers: usize,
    /// KV heads of a layer.
    pub heads: usize,
    /// Query heads of a KV head, 1 to 16.
    pub group: usize,
    /// Components of a head, 64 or 128.
    pub head_dim: usize,
    /// RoPE's radians per position, (head_dim / 2,), of the pairs of components `i` and `i + head_dim / 2`.
    pub frequencies: Vec<f64>,
    /// Element type of queries, rows and outputs.
    pub element: Element,
    /// The tokens that stay exact.
    pub window: Window,
    /// Sequences.
    pub batch: usize,
    /// Maximum tokens of a sequence.
    pub capacity: usize,
}

impl CacheShape {
    /// Elements of a token's keys in a layer.
    pub(crate) const fn kv_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Rejects sizes that kernels do not support or do not count.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub(crate) fn check(&self) -> Result<()> {
        let &Self { layers, heads, group, head_dim, ref frequencies, batch, capacity, .. } = self;
        if !matches!(head_dim, 64 | 128) || !(1..=16).contains(&group) {
            let what = format!("heads of {head_dim} components in groups of {group}: 64 or 128, and 1 to 16");
            return Err(Error::Argument(what));
        }
        if frequencies.len() != head_dim / 2 {
            let what = format!("{} frequencies of heads of {head_dim} components", frequencies.len());
            return Err(Error::Argument(what));
        }
        if layers == 0 || heads == 0 || batch == 0 {
            return Err(Error::argument("a cache without layers, heads or sequences"));
        }
        if u32::try_from(capacity).is_err() {
            return Err(Error::Argument(format!("a sequence of {capacity} tokens: 32 bits count them")));
        }
        // Keys and values in single precision, of one more token than any buffer has.
        let sizes = [layers, batch, heads, capacity + 1, head_dim, 2 * size_of::<f32>()];
        let bytes = sizes.into_iter().try_fold(1, usize::checked_mul).filter(|&n| n <= isize::MAX as usize);
        bytes.map(drop).ok_or_else(|| Error::argument("more rows than addresses"))
    }
}
