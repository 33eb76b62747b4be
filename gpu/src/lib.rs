#![doc = include_str!("../README.md")]

pub mod codec;
mod compile;
mod device;
mod disk_cache;
mod error;
mod library;
mod module;
pub mod pq;
mod self_test;
pub mod svd;
mod tensor_map;

pub use compile::{Image, Program, compile};
pub use device::Device;
pub use error::Error;
pub use self_test::{self_test, self_test_program};

/// Element type of queries, rows and outputs, as the kernels number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE half precision.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
}

/// Element type of rows that may be in single precision, too, as the kernels number them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VectorElement {
    /// Single precision.
    F32 = 0,
    /// IEEE half precision.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
}
