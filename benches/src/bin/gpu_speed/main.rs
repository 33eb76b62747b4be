//! Times `kv-gpu` against the floor of every kernel; `benches/peers/gpu.py` runs it and PyTorch and writes
//! the tables.
//!
//! Prints a JSON line per measurement. Arguments run only the measurements whose "kernel, shape" contains one
//! of them. `GPU_LIMIT=8.0:163` times the kernels of an A100. `GPU_CACHE=FOLDER` keeps compiled kernels for
//! the next run.

#![allow(clippy::unwrap_used, unsafe_code)] // a measurement that cannot run should say so by panicking

mod attend;
mod codec;
mod encode;
mod gather;
mod gram;
mod hybrid;
mod prefill;
mod project;
mod ragged;
mod rope_mean_scores;
mod scalar;
mod search;
#[path = "../../../../gpu/tests/common/selection.rs"]
mod selection;
mod stopwatch;
mod train;

use stopwatch::Stopwatch;

fn main() {
    let watch = Stopwatch::new(std::env::args().skip(1).collect());
    attend::run(&watch);
    scalar::run(&watch);
    rope_mean_scores::run(&watch);
    hybrid::run(&watch);
    encode::run(&watch);
    train::run(&watch);
    search::run(&watch);
    gather::run(&watch);
    project::run(&watch);
    gram::run(&watch);
    ragged::run(&watch);
    prefill::run(&watch);
    codec::run(&watch);
}
