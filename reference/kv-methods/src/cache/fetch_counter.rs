//! Counts the rows that attention fetches.

use std::sync::atomic::{AtomicU64, Ordering};

use kv_llama::Fetched;

/// Interior-mutable counter of [`Fetched`], since attention borrows the store immutably.
#[derive(Debug, Default)]
pub(crate) struct FetchCounter([AtomicU64; 6]);

impl FetchCounter {
    pub fn add(&self, fetched: Fetched) {
        let Fetched { attentions, rows, hits, bytes, loaded_bytes, scored_bytes } = fetched;
        for (counter, n) in self.0.iter().zip([attentions, rows, hits, bytes, loaded_bytes, scored_bytes]) {
            counter.fetch_add(n, Ordering::Relaxed);
        }
    }

    pub fn get(&self) -> Fetched {
        let count = |i: usize| self.0[i].load(Ordering::Relaxed);
        let [attentions, rows, hits, bytes, loaded_bytes, scored_bytes] = [0, 1, 2, 3, 4, 5].map(count);
        Fetched { attentions, rows, hits, bytes, loaded_bytes, scored_bytes }
    }
}

/// A clone starts counting from zero.
impl Clone for FetchCounter {
    fn clone(&self) -> Self {
        Self::default()
    }
}
