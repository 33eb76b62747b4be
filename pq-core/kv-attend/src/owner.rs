//! For crates that own caches: a layer of heads, whatever the heads hold; the exact rows of a head; working
//! memory; and the bytes of what is saved.
//!
//! A crate implements [`Head`] for its cache of one key/value head. [`Layer`] has the heads of a layer of one
//! sequence, and [`attend_batch_into`] attends with those of many sequences.

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
