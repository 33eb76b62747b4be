#![doc = include_str!("../README.md")]
#![no_std]
#![forbid(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

#[cfg(feature = "alloc")]
mod allocate;
mod attend;
#[cfg(feature = "alloc")]
mod eigen;
mod error;
mod exp;
#[cfg(feature = "alloc")]
mod fold;
#[cfg(feature = "alloc")]
mod gram;
mod project;
#[cfg(feature = "alloc")]
mod rank;
#[cfg(feature = "alloc")]
mod rotation;

#[cfg(feature = "alloc")]
pub use allocate::balanced_order;
pub use attend::{SoftmaxStats, attend_into};
pub use error::Error;
#[cfg(feature = "alloc")]
pub use fold::{fold_input, fold_output};
#[cfg(feature = "alloc")]
pub use gram::Gram;
pub use project::project_into;
#[cfg(feature = "alloc")]
pub use rank::{rank_for_removal, removal_for_keep};
#[cfg(feature = "alloc")]
pub use rotation::Rotation;
