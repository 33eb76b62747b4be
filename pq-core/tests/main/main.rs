//! Operations of `pq-core` against naive forms in `f64`, at the edges of their sizes and values.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

mod encoding;
mod errors;
mod extremes;
mod gaussian_codebook;
mod hybrid;
mod owners;
mod properties;
mod selection;
mod sq;
mod sq_owners;
mod storage;
mod support;
