#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

mod decode;
#[cfg(feature = "alloc")]
mod encode;
mod error;
mod frame;
mod model;
mod plane;
#[cfg(feature = "alloc")]
mod profile;
mod quant;
mod range;

pub use decode::decode_into;
#[cfg(feature = "alloc")]
pub use encode::encode;
pub use error::Error;
pub use frame::{FRAME_OVERHEAD, FrameInfo};
pub use model::{MAX_ALPHABET, Models, PRECISION};
pub use plane::{Plane, Predictor};
#[cfg(feature = "alloc")]
pub use profile::PlaneProfile;
