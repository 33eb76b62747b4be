#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod adc;
mod attend;
mod codebook;
mod codes;
mod encode;
mod error;
mod exp;
#[cfg(feature = "alloc")]
mod kmeans;
mod lut;
mod pack;
#[cfg(feature = "alloc")]
mod rng;
mod shape;
mod topk;
#[cfg(feature = "alloc")]
mod train;
mod window;

pub use adc::scan_into;
pub use attend::{SoftmaxStats, attend_into};
pub use codebook::Codebook;
pub use codes::Codes;
pub use encode::{decode_into, encode_into};
pub use error::Error;
pub use lut::{Lut, lut_into};
pub use pack::{pack_bits, unpack_bits};
pub use shape::PqShape;
pub use topk::top_k_into;
#[cfg(feature = "alloc")]
pub use train::{TrainOptions, Trained, train};
pub use window::Window;
