#![doc = include_str!("../README.md")]

mod error;
mod gemm;
mod gemv;
mod products;
mod programs;
pub mod ranks;
mod serve;
mod step;
mod weights;

pub use error::{Error, Result};
pub use gemm::check_cublas;
pub use programs::programs;
pub use serve::Batch;
pub use step::{CHUNK, Decoder, Part};
pub use weights::{RANDOM_MODELS, WeightLayout, Weights, random_config};
