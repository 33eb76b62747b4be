#![doc = include_str!("../README.md")]
#![no_std]
// Only the vector forms of the kernels use pointers; see `simd`.
#![deny(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

#[allow(unsafe_code)]
mod attend;
mod backend;
#[cfg(feature = "alloc")]
mod balanced_order;
mod dot;
#[cfg(feature = "alloc")]
mod eigen;
#[allow(unsafe_code)]
mod element;
mod error;
mod exp;
#[cfg(feature = "alloc")]
mod fold;
#[cfg(feature = "alloc")]
#[allow(unsafe_code)]
mod gram;
#[allow(unsafe_code)]
mod map;
#[cfg(feature = "alloc")]
mod rank;
#[cfg(feature = "alloc")]
mod rotation;
#[cfg(feature = "alloc")]
mod schedule;
#[allow(unsafe_code)]
mod simd;
mod softmax;

pub use attend::{attend_into, attend_into_with};
pub use backend::Backend;
#[cfg(feature = "alloc")]
pub use balanced_order::balanced_order;
pub use element::Element;
pub use error::Error;
#[cfg(feature = "alloc")]
pub use gram::{Gram, NoRope, PostRope, PreRope, RopeSide};
pub use map::Map;
#[cfg(feature = "alloc")]
pub use map::MapBuf;
#[cfg(feature = "alloc")]
pub use rank::{Budget, rank_for_removal, ranks_by_loss, ranks_by_removal};
#[cfg(feature = "alloc")]
pub use rotation::Rotation;
#[cfg(feature = "alloc")]
pub use schedule::{
    DecodeHead, PrefillHead, PrefillRules, Schedule, Task, TaskCost, schedule_decode, schedule_prefill,
};
pub use softmax::SoftmaxStats;
