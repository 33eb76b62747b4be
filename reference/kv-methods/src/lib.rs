#![doc = include_str!("../README.md")]

mod cache;
mod calibrate;
mod error;
#[cfg(test)]
mod fixture;
mod method;
mod pack;
mod profile;

pub use calibrate::{Calibration, CalibrationText, calibrated, calibrated_on};
pub use error::{Error, Result};
#[cfg(feature = "cuda")]
pub use method::device_help;
pub use method::{DEFAULT_METHODS, Method, Place, Prepared, method_examples, methods_help};
pub use profile::{KindOfText, Profile, ProfileFile};
