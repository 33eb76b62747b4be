#![doc = include_str!("../README.md")]

pub mod compare;
#[cfg(feature = "cuda")]
pub mod device;
mod error;
pub mod eval;
pub mod report;
pub mod stream;

pub use error::{Error, Result};
