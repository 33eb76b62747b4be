//! Streams and stores of contexts, over this crate's models and caches: `kv-stream` and `kv-store` know
//! neither.

pub mod encoded;
#[cfg(feature = "store")]
pub mod prompt;
pub mod target;
