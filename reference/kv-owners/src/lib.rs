#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;
pub mod sq;

pub use error::Error;
