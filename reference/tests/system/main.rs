//! The library: caches, methods, streams and stores.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

#[path = "../support"]
mod support {
    #[path = "../../kv-model/tests/support/gguf.rs"]
    pub mod gguf;
    pub mod kv;
    #[cfg(feature = "s3")]
    pub mod s3;
    pub mod shipped;
    #[cfg(feature = "s3")]
    #[allow(dead_code)] // what only the tests of the store need
    #[path = "../../../codec-core/kv-store/tests/support/weed.rs"]
    pub mod weed;
}

mod caches;
mod configurations;
mod determinism;
mod evaluation;
mod headers;
mod histories;
mod hybrid_bound;
mod offload;
mod profiles;
mod pruned;
mod quality;
#[cfg(feature = "store")]
mod store;
#[cfg(feature = "s3")]
mod store_s3;
mod stream;
mod tokenizers;
