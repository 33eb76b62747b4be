//! Operations of `svd-core` against naive forms in `f64`, at the edges of their sizes and values.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

mod calibration;
mod extremes;
mod kernels;
mod owners;
mod properties;
mod reduced_rows;
mod schedules;
mod support;
mod with_pq_core;
