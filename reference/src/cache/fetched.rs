//! What attention reads of rows that are not all in fast memory.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// Exact rows that attention has fetched since the cache was made or copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Attentions of one layer and key/value head.
    pub attentions: u64,
    /// Pairs of a key and a value that were asked for.
    pub rows: u64,
    /// Those that a block cache had.
    pub hits: u64,
    /// Bytes of the others.
    pub bytes: u64,
    /// Bytes of the blocks that were brought into a block cache.
    pub loaded_bytes: u64,
}

/// [`Fetched`] of a decode step.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct FetchedPerStep {
    /// Exact rows (a key and a value) that one layer and key/value head asks for, on average.
    #[serde(rename = "fetched_rows_per_step")]
    pub rows: f64,
    /// The fraction of them that a block cache has; 0 where there is none.
    #[serde(rename = "block_hit_rate")]
    pub hit_rate: f64,
    /// Bytes of the others, over all layers and heads.
    #[serde(rename = "fetched_bytes_per_step")]
    pub bytes: f64,
    /// Bytes of the blocks that are brought into the block caches.
    #[serde(rename = "loaded_bytes_per_step")]
    pub loaded_bytes: f64,
}

impl Fetched {
    /// The averages over the steps of a model with `heads` pairs of a layer and a key/value head.
    #[must_use]
    pub fn per_step(&self, heads: usize) -> FetchedPerStep {
        let attentions = self.attentions.max(1) as f64;
        let steps = attentions / heads as f64;
        FetchedPerStep {
            rows: self.rows as f64 / attentions,
            hit_rate: self.hits as f64 / self.rows.max(1) as f64,
            bytes: self.bytes as f64 / steps,
            loaded_bytes: self.loaded_bytes as f64 / steps,
        }
    }
}

impl AddAssign for Fetched {
    fn add_assign(&mut self, other: Self) {
        self.attentions += other.attentions;
        self.rows += other.rows;
        self.hits += other.hits;
        self.bytes += other.bytes;
        self.loaded_bytes += other.loaded_bytes;
    }
}

/// Counts [`Fetched`] where attention borrows the store.
#[derive(Debug, Default)]
pub(crate) struct FetchCounter([AtomicU64; 5]);

impl FetchCounter {
    pub fn add(&self, fetched: Fetched) {
        let Fetched { attentions, rows, hits, bytes, loaded_bytes } = fetched;
        for (counter, n) in self.0.iter().zip([attentions, rows, hits, bytes, loaded_bytes]) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    pub fn get(&self) -> Fetched {
        let count = |i: usize| self.0[i].load(Ordering::Relaxed);
        let [attentions, rows, hits, bytes, loaded_bytes] = [0, 1, 2, 3, 4].map(count);
        Fetched { attentions, rows, hits, bytes, loaded_bytes }
    }
}

/// A copy of a cache starts its own counts.
impl Clone for FetchCounter {
    fn clone(&self) -> Self {
        Self::default()
    }
}
