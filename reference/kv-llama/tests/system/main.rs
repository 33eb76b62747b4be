//! The loop: against `transformers`, over a cache, and with quantized weights.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

mod exact_cache;
mod parity;
mod quantized;
