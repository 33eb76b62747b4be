#![doc = include_str!("../README.md")]

pub mod codec;
mod compile;
mod device;
mod disk_cache;
mod error;
mod launch;
mod library;
mod limit;
mod module;
mod pointer;
pub mod pq;
mod self_test;
pub mod sq;
pub mod svd;
mod tensor_map;

pub use compile::{Image, Program, compile};
pub use device::{Device, Kernel};
pub use error::Error;
pub use launch::Grid;
pub use limit::Limit;
pub use pointer::{AnyElement, DevicePtr};
pub use self_test::{self_test, self_test_program};

/// Element type of queries, keys, values and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// IEEE half precision.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
}

/// Element type of vectors that may also be in single precision. The discriminants are those of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum VectorElement {
    /// Single precision.
    F32 = 0,
    /// IEEE half precision.
    F16 = 1,
    /// bfloat16.
    Bf16 = 2,
}

impl From<Element> for VectorElement {
    fn from(element: Element) -> Self {
        match element {
            Element::F16 => Self::F16,
            Element::Bf16 => Self::Bf16,
        }
    }
}
