//! The loop: against `transformers`, over a cache, with quantized weights, and for many requests.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

mod exact_cache;
mod long_prompts;
mod parity;
mod quantized;
mod scheduler;
