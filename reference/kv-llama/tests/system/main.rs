//! The loop: against `transformers`, and over a cache.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

mod exact_cache;
mod parity;
