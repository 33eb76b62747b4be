//! For crates that own caches: sinks, window, eviction, truncation, batches and serialization, generic over
//! how the other tokens are compressed; pairs of keys and values; the bytes of a cache by purpose; and how
//! well codes fit.
//!
//! A crate implements [`Store`] for its compressed tokens of one KV head. [`Windowed`] adds sinks and window,
//! [`Layer`] holds the heads of a layer for one sequence ([`AnyLayer`] if the element type is chosen at run
//! time), and [`attend_batch_into`] runs attention for a batch of sequences.

mod any_layer;
mod batch;
mod bytes;
mod exact_rows;
mod fit;
mod footprint;
mod layer;
#[cfg(feature = "serde")]
pub mod serde;
mod side;
mod store;
mod windowed;
mod workspace;

pub use any_layer::{AnyLayer, AnyStore};
pub use batch::{attend_batch_into, attend_batch_into_with};
pub use bytes::{Reader, Writer};
pub use exact_rows::{EvictedRows, ExactRows};
pub use fit::Fit;
pub use footprint::Footprint;
pub use layer::Layer;
pub use side::{Pair, Side};
pub use store::{Queries, Store};
pub use windowed::Windowed;
pub use workspace::Workspace;
