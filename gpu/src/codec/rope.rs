//! The cosines and sines with which a decoder rotates keys that were stored before RoPE.

use crate::pointer::DevicePtr;

/// RoPE of keys that are stored before it, as [`codec_core::RopeTable::halves`]: cosines and sines of the
/// positions of all tokens of a frame, for the pairs of components `i` and `i + head_dim / 2`.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    /// `f32` (tokens, head_dim / 2).
    pub cos: DevicePtr<f32>,
    /// `f32` (tokens, head_dim / 2).
    pub sin: DevicePtr<f32>,
}

/// `Rope` of the kernels, which only those compiled with `ROPE` read.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct KernelRope {
    cos: Option<DevicePtr<f32>>,
    sin: Option<DevicePtr<f32>>,
}

impl From<Option<Rope>> for KernelRope {
    fn from(rope: Option<Rope>) -> Self {
        Self { cos: rope.map(|rope| rope.cos), sin: rope.map(|rope| rope.sin) }
    }
}
