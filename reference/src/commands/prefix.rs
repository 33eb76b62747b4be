//! A prompt that is in the cache, and the prefix of it that a store held.

#[cfg(feature = "store")]
mod loader;

#[cfg(feature = "store")]
pub use loader::{KvArgs, PromptLoader};
use serde::Serialize;

/// The prefix of a prompt that was in a store.
#[derive(Serialize)]
pub struct Prefix {
    /// Tokens loaded at each level.
    pub loaded: Vec<usize>,
    /// Tokens recomputed.
    pub recomputed: usize,
}

/// A prompt that is in the cache.
pub struct Prefilled {
    pub seconds: f64,
    /// None without a store.
    pub prefix: Option<Prefix>,
}
