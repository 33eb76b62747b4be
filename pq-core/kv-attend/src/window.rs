//! Which tokens stay exact, as arithmetic on counts.

/// The window of exact tokens: the first `sinks` and at least the last `recent`. All others are compressed in
/// batches.
///
/// This is arithmetic on token counts; the cache moves the data. With `batch > 1` it is MILLION's residual
/// block: up to `recent + batch - 1` recent tokens stay exact, so that a compressor that works on groups of
/// tokens always gets whole groups.
///
/// # Examples
/// ```
/// let window = kv_attend::Window { sinks: 4, recent: 64, batch: 32 };
/// assert_eq!(window.to_sinks(0, 10), 4); // four of the first ten tokens become sinks
/// assert_eq!(window.to_evict(95), 0); // 31 more than `recent`: no whole batch
/// assert_eq!(window.to_evict(96), 32);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// First tokens of the sequence that are never compressed.
    pub sinks: usize,
    /// Minimum number of most recent tokens that stay exact.
    pub recent: usize,
    /// Tokens are evicted in multiples of this; 0 counts as 1.
    pub batch: usize,
}

impl Window {
    /// How many of `n` arriving tokens become sinks when `held` tokens are cached already.
    #[must_use]
    pub const fn to_sinks(&self, held: usize, n: usize) -> usize {
        let free = self.sinks.saturating_sub(held);
        if n < free { n } else { free }
    }

    /// How many of the oldest of `held` recent tokens to compress now.
    #[must_use]
    pub const fn to_evict(&self, held: usize) -> usize {
        let surplus = held.saturating_sub(self.recent);
        if self.batch <= 1 { surplus } else { surplus / self.batch * self.batch }
    }
}
