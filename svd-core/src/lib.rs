#![doc = include_str!("../README.md")]
#![no_std]
// Only the vector forms of the kernels use pointers.
#![deny(unsafe_code)]

#[cfg(feature = "alloc")]
extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

#[cfg(feature = "alloc")]
mod balanced_order;
#[cfg(feature = "alloc")]
mod calibration;
#[cfg(feature = "alloc")]
mod eigen;
mod error;
#[cfg(feature = "alloc")]
mod fold;
#[cfg(feature = "alloc")]
#[allow(unsafe_code)]
mod gram;
mod hadamard;
#[cfg(feature = "alloc")]
mod head_maps;
#[cfg(feature = "alloc")]
mod layer_cache;
#[cfg(feature = "alloc")]
mod layer_rotations;
#[allow(unsafe_code)]
mod map;
#[cfg(feature = "alloc")]
mod rank;
#[cfg(feature = "alloc")]
mod reduced_rows;
#[cfg(feature = "alloc")]
mod rotation;
#[cfg(feature = "alloc")]
mod schedule;

#[cfg(feature = "alloc")]
pub use balanced_order::balanced_order;
#[cfg(feature = "alloc")]
pub use calibration::{HeadGrams, LayerCalibration};
pub use error::Error;
#[cfg(feature = "alloc")]
pub use gram::{Gram, NoRope, PostRope, PreRope, RopeSide};
pub use hadamard::Hadamard;
#[cfg(feature = "alloc")]
pub use head_maps::{HeadMaps, Reduction};
pub use kv_attend::{
    Attention, Backend, Element, Error as AttendError, ExactTokens, Rows, RowsMut, SoftmaxStats, Window,
    attend_exact_into, attend_exact_into_with, attend_exact_scratch_len, normalize_all,
};
#[cfg(feature = "alloc")]
pub use kv_attend::{
    Workspace,
    owner::{attend_batch_into, attend_batch_into_with},
};
#[cfg(feature = "alloc")]
pub use layer_cache::{LowRankHeadCache, LowRankLayerCache};
#[cfg(feature = "alloc")]
pub use layer_rotations::LayerRotations;
pub use map::Map;
#[cfg(feature = "alloc")]
pub use map::MapBuf;
#[cfg(feature = "alloc")]
pub use rank::{Budget, rank_for_removal, ranks_by_loss, ranks_by_removal};
#[cfg(feature = "alloc")]
pub use reduced_rows::ReducedRows;
#[cfg(feature = "alloc")]
pub use rotation::Rotation;
#[cfg(feature = "alloc")]
pub use schedule::{
    DecodeHead, PrefillHead, PrefillRules, Schedule, Task, TaskCost, schedule_decode, schedule_prefill,
};
