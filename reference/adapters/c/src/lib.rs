//! The family's interface for C and C++. `include/kvc.h` is its documentation; every function passes the
//! caller's pointers to [`args`], which checks what can be checked, and runs in [`error::call`].

#![allow(non_camel_case_types, reason = "they have their names in C")]
#![allow(
    unsafe_op_in_unsafe_fn,
    clippy::missing_safety_doc,
    reason = "the rules for callers are those at the top of the header; they hold for every function alike"
)]

mod args;
mod cache;
mod codebook;
mod codec;
mod error;
mod pq;
mod rotation;
mod rows;
mod save;
mod sq;
mod store;

pub use cache::*;
pub use codebook::*;
pub use codec::*;
pub use error::*;
pub use pq::*;
pub use rotation::*;
pub use rows::*;
pub use save::kvc_bytes;
pub use sq::*;
pub use store::*;

/// The version of the library, such as "0.2.0". The string lives as long as the program.
#[unsafe(no_mangle)]
pub extern "C" fn kvc_version() -> *const std::ffi::c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}
