#![doc = include_str!("../README.md")]

pub mod cache;
pub mod calibrate;
pub mod compare;
#[cfg(feature = "cuda")]
pub mod device;
mod error;
pub mod eval;
pub mod method;
mod pack;
mod profile;
pub mod report;
pub mod stream;

pub use error::{Error, Result};
pub use kv_attend::owner::Side;
pub use profile::{KindOfText, Profile, ProfileFile};
