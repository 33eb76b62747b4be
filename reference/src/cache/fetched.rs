//! What decode steps read of rows that are kept elsewhere.

use std::ops::AddAssign;
use std::sync::atomic::{AtomicU64, Ordering};

/// Exact rows that attention has fetched since the cache was made or copied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Attentions of one layer and key/value head.
    pub attentions: u64,
    /// Pairs of a key and a value.
    pub rows: u64,
    /// Their bytes.
    pub bytes: u64,
}

impl AddAssign for Fetched {
    fn add_assign(&mut self, other: Self) {
        self.attentions += other.attentions;
        self.rows += other.rows;
        self.bytes += other.bytes;
    }
}

/// Counts [`Fetched`] where attention borrows the store.
#[derive(Debug, Default)]
pub(crate) struct FetchCounter([AtomicU64; 3]);

impl FetchCounter {
    /// Adds one attention that has read `rows` of `row_bytes` each.
    pub fn add(&self, rows: usize, row_bytes: usize) {
        for (counter, n) in self.0.iter().zip([1, rows, rows * row_bytes]) {
            counter.fetch_add(n as u64, Ordering::Relaxed);
        }
    }

    pub fn get(&self) -> Fetched {
        let [attentions, rows, bytes] = [0, 1, 2].map(|i: usize| self.0[i].load(Ordering::Relaxed));
        Fetched { attentions, rows, bytes }
    }
}

/// A copy of a cache starts its own counts.
impl Clone for FetchCounter {
    fn clone(&self) -> Self {
        Self::default()
    }
}
