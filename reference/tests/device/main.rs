//! The model and its caches on a GPU. Without a GPU these tests are skipped, which `GPU_TESTS=require` turns
//! into a failure. Some occupy the device, its link or the host's memory: `.ci/gpu` runs the modules one
//! after another.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

#[path = "../../../gpu/tests/common/kernels.rs"]
mod kernels;
#[path = "../support/device.rs"]
mod support;

mod compare;
mod faults;
mod hybrid;
mod load;
mod model;
mod pages;
mod pqcache;
mod ranks;
mod refill;
mod small;
mod wide;
