//! The interface as C calls it.

#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::undocumented_unsafe_blocks,
    clippy::unwrap_used,
    reason = "the tests are callers from C, whose every line is unsafe"
)]

mod across_languages;
mod header;
mod hostile;
mod same_bytes;
mod support;
