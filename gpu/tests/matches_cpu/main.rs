//! The CPU crates are the definitions: every kernel agrees with them on random shapes. Without a GPU these tests are
//! skipped, which `GPU_TESTS=require` turns into a failure.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

#[path = "../common/mod.rs"]
mod common;

mod codec;
mod codec_check;
mod codec_index;
mod pq_append;
mod pq_attend;
mod pq_attend_generic;
mod pq_encode;
mod pq_gather;
mod pq_gather_attend;
mod pq_hybrid;
mod pq_mean_errors;
mod pq_rope_mean_scores;
mod pq_search;
mod pq_train;
mod sq_attend;
mod sq_decode;
mod sq_encode;
mod sq_queries;
mod svd_attend;
mod svd_gram;
mod svd_prefill;
mod svd_project;
