//! For crates that own caches: a layer, generic over the cache of a head; the exact rows of a head; scratch
//! memory; and serialization.
//!
//! A crate implements [`Head`] for its cache of one KV head. [`Layer`] holds the heads of a layer for one
//! sequence, and [`attend_batch_into`] runs attention for a batch of sequences.

mod batch;
mod bytes;
mod exact_rows;
mod head;
mod layer;
#[cfg(feature = "serde")]
pub mod serde;
mod workspace;

pub use batch::{attend_batch_into, attend_batch_into_with};
pub use bytes::{Reader, Writer};
pub use exact_rows::ExactRows;
pub use head::{Head, check_queries};
pub use layer::Layer;
pub use workspace::Workspace;
