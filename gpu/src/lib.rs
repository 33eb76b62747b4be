#![doc = include_str!("../README.md")]

mod device;
mod error;
mod self_test;

pub use device::{Device, compile};
pub use error::Error;
pub use self_test::self_test;

/// Source of every kernel, by name.
pub const KERNELS: [(&str, &str); 1] = [("self_test", include_str!("kernels/self_test.cu"))];
