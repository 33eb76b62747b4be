//! Memory that attention reuses from call to call.

use alloc::vec::Vec;

use crate::SoftmaxStats;

/// Scratch memory of attention. It grows to what a call needs and is reused by the next.
///
/// An engine has one for all layers and steps; the caches of `pq-core` and `svd-core` share it.
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    pub(super) scratch: Vec<f32>,
    pub(super) stats: Vec<SoftmaxStats>,
    pub(super) rows: Vec<f32>, // outputs of several query tokens, by heads
}
