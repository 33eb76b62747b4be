//! Counts of the rows that attention fetches from slower memory.

use std::ops::AddAssign;

/// Exact rows fetched by attention since the cache was created or cloned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fetched {
    /// Attention calls, one per layer and KV head.
    pub attentions: u64,
    /// Requested rows: a key and a value each.
    pub rows: u64,
    /// Block-cache hits.
    pub hits: u64,
    /// Bytes of the misses.
    pub bytes: u64,
    /// Bytes of the blocks loaded into block caches.
    pub loaded_bytes: u64,
    /// Bytes read to score the tokens of which rows are requested: codes, components or bounds of keys.
    pub scored_bytes: u64,
}

/// [`Fetched`] per decode step.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct FetchedPerStep {
    /// Mean number of exact rows (a key and a value) requested per layer and KV head.
    #[serde(rename = "fetched_rows_per_step")]
    pub rows: f64,
    /// Hit rate of the block cache; 0 without one.
    #[serde(rename = "block_hit_rate")]
    pub hit_rate: f64,
    /// Bytes of the misses, over all layers and heads.
    #[serde(rename = "fetched_bytes_per_step")]
    pub bytes: f64,
    /// Bytes of the blocks loaded into the block caches.
    #[serde(rename = "loaded_bytes_per_step")]
    pub loaded_bytes: f64,
    /// Bytes read to score tokens, over all layers and heads.
    #[serde(rename = "scored_bytes_per_step")]
    pub scored_bytes: f64,
}

impl Fetched {
    /// The averages over the steps of a model with `heads` KV heads over all layers.
    #[must_use]
    pub fn per_step(&self, heads: usize) -> FetchedPerStep {
        let attentions = self.attentions.max(1) as f64;
        let steps = attentions / heads as f64;
        FetchedPerStep {
            rows: self.rows as f64 / attentions,
            hit_rate: self.hits as f64 / self.rows.max(1) as f64,
            bytes: self.bytes as f64 / steps,
            loaded_bytes: self.loaded_bytes as f64 / steps,
            scored_bytes: self.scored_bytes as f64 / steps,
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
        self.scored_bytes += other.scored_bytes;
    }
}
