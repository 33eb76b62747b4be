#![doc = include_str!("../README.md")]

mod bases;
mod build;
mod cache;
mod device_cache;
mod error;
mod gpu;
mod hashed;
mod host_memory;
mod ledger;
#[cfg(feature = "load")]
mod load;
mod memory;
pub mod plan;
mod programs;
mod rotate;
mod rows;
mod shape;
mod timed;

pub use cache::row_transform::RowTransform;
pub use device_cache::DeviceCache;
pub use error::{Error, Result};
pub use gpu::{Gpu, without_captures};
pub use hashed::{fill_hashed, hashed};
pub use host_memory::PageLocked;
pub use ledger::Allocating;
#[cfg(feature = "load")]
pub use load::{Destination, Ended, FRAMES, Loader, Stages, Staging};
pub use memory::Buffer;
pub use plan::Plan;
pub use programs::programs;
pub use rows::{Chunk, Rows, Sequences, SlotMapping};
pub use shape::CacheShape;
pub use timed::Timed;
