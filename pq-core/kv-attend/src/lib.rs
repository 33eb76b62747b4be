#![doc = include_str!("../README.md")]
#![no_std]
// Only the vector forms of the kernels use pointers; see `simd`.
#![deny(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod attention;
mod backend;
mod cpu_features;
mod dispatch;
mod dot;
#[allow(unsafe_code)]
mod element;
mod error;
mod exp;
mod instructions;
#[allow(unsafe_code)]
mod kernel;
#[cfg(feature = "alloc")]
pub mod owner;
mod rows;
#[allow(unsafe_code)]
pub mod simd;
mod softmax;
mod window;

pub use attention::{
    Attention, ExactTokens, attend_exact_into, attend_exact_into_with, attend_exact_scratch_len,
};
pub use backend::Backend;
pub use element::{Element, ElementType, ParseElementTypeError};
pub use error::Error;
#[cfg(feature = "alloc")]
pub use owner::Workspace;
pub use rows::{AnyRows, Rows, RowsMut};
pub use softmax::{SoftmaxStats, normalize_all};
pub use window::Window;
