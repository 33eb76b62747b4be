//! Attention over two parts of the tokens, merged: `kernels/merge.cu`.

use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use crate::Result;
use crate::gpu::Gpu;

/// `merge`.
pub(crate) fn program(element: Element, head_dim: usize, group: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim), ("GROUP", group)];
    Program::own("merge.cu", include_str!("../kernels/merge.cu"), &[], &defines)
}

/// Merges attention over the exact tokens with attention over the stored ones.
pub(super) struct Merge {
    kernel: Kernel,
    head_dim: usize,
}

/// Both parts. (batch, n_heads, head_dim) elements, and (batch, n_heads) numbers each.
pub(super) struct Parts {
    /// Attention over the exact tokens, replaced by that over all.
    pub out: DevicePtr<AnyElement>,
    /// Attention over the stored tokens.
    pub stored: DevicePtr<u16>,
    /// The log-sum-exp of the scores, exact tokens first.
    pub log_sum_exps: [DevicePtr<f32>; 2],
    /// `u32` (heads,): components of the stored values; none for all.
    pub ranks: Option<DevicePtr<u32>>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Arguments {
    out: DevicePtr<AnyElement>,
    stored: DevicePtr<u16>,
    log_sum_exps: [DevicePtr<f32>; 2],
    ranks: Option<DevicePtr<u32>>,
}

const _: () = assert!(size_of::<Arguments>() == 40);

impl Merge {
    /// Compiles the kernel.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, element: Element, head_dim: usize, group: usize) -> Result<Self> {
        let program = program(element, head_dim, group);
        Ok(Self { kernel: gpu.device.kernel(&program, "merge", 0)?, head_dim })
    }

    /// Launches the merge for `batch` sequences, with PDL.
    ///
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds.
    pub unsafe fn launch(&self, gpu: &Gpu, n_heads: usize, batch: usize, parts: &Parts) -> Result<()> {
        let &Parts { out, stored, log_sum_exps, ranks } = parts;
        let arguments = Arguments { out, stored, log_sum_exps, ranks };
        let grid = Grid::new([n_heads, batch, 1])?;
        // SAFETY: the structure is the kernel's argument; the caller's contract.
        Ok(unsafe { self.kernel.launch(gpu.stream(), grid, self.head_dim as u32, true, &arguments) }?)
    }
}
