//! Scalar codes with their bases: keys in their query-weighted KLT, rotated relative to blocks of positions,
//! values in a Hadamard basis and without their mean.
//!
//! [`Basis::fit_layer`] fits the bases of a layer, [`Basis::head`] makes the shared state of a head of one of
//! them at some number of bits, and a [`LayerCache`] holds a layer of a sequence. The codes are those of
//! [`pq_core::sq`].

mod basis;
mod codes;
mod head;
mod values;

use kv_attend::owner::{AnyLayer, Layer};

pub use basis::{Basis, Bits, CodedKeys, Samples};
pub use codes::Codes;
pub use head::Head;

/// The keys and values of all heads of a layer of one sequence, with the methods of [`Layer`]: the first
/// tokens (sinks) and the most recent ones as exact rows of `E`, all others as scalar codes in blocks. Keys
/// and queries are those after RoPE, values and outputs are plain.
///
/// The position of a token is its index in the cache. [`Window::batch`](kv_attend::Window::batch) is rounded
/// up to a multiple of the block.
pub type LayerCache<E> = Layer<Codes, E>;

/// A [`LayerCache`] whose element type is chosen at run time.
pub type AnyLayerCache = AnyLayer<Codes>;
