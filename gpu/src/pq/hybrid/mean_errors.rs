//! The third launch of hybrid attention, which adds the mean errors of the coded values to the outputs.

use cudarc::driver::sys::CUstream;
use half::f16;

use super::{HybridArguments, HybridShape, OPERATION};
use crate::compile::source;
use crate::device::Kernel;
use crate::pointer::{AnyElement, DevicePtr};
use crate::pq::mean_errors::BlockMeans;
use crate::pq::select::CommonArguments;
use crate::{Device, Error, Program};

/// The most blocks of a row: the last one adds up what all have found.
const MOST_SLICES: usize = 32;

/// `MeanArguments` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct KernelArguments {
    common: CommonArguments,
    selected: DevicePtr<u32>,
    means: DevicePtr<f16>,
    recent: DevicePtr<f32>,
    log_sum_exp: DevicePtr<f32>,
    partials: DevicePtr<u8>,
    counts: DevicePtr<u8>,
    out: DevicePtr<AnyElement>,
    blocks: u32,
    recent_parts: u32,
}

const _: () = assert!(size_of::<KernelArguments>() == 160);

/// Offsets in its part of the workspace. The counters of finished blocks come first.
struct Parts {
    log_sum_exp: usize,
    partials: usize,
    end: usize,
}

/// Adds mean errors to the outputs of attention.
pub(super) struct AddMeanErrors {
    kernel: Kernel,
    shape: HybridShape,
    sm_count: usize,
}

impl AddMeanErrors {
    /// The kernel for a shape.
    pub fn program(shape: &HybridShape) -> Program {
        let defines = [("MEAN_WARPS", Self::warps(shape))];
        shape.selection().program(source!("pq_hybrid/mean_errors.cu"), &defines)
    }

    /// Warps of a block, of which a multiprocessor runs one: a thread has 128 registers in a block of 16 warps,
    /// 255 in one of 8.
    const fn warps(shape: &HybridShape) -> usize {
        if shape.selection().entry() == 8 { 8 } else { 16 }
    }

    /// Compiles the kernel for a shape.
    ///
    /// # Errors
    /// [`Error::NoNvrtc`], [`Error::Compile`] or [`Error::Driver`].
    pub fn new(device: &Device, shape: HybridShape) -> Result<Self, Error> {
        let kernel = device.kernel(&Self::program(&shape), "pq_hybrid_mean_errors", 0)?;
        Ok(Self { kernel, shape, sm_count: device.sm_count() })
    }

    /// Blocks of a row.
    fn slices(&self, batch: usize, heads: usize) -> usize {
        (self.sm_count / batch.saturating_mul(heads).max(1)).clamp(1, MOST_SLICES)
    }

    fn parts(&self, batch: usize, heads: usize) -> Parts {
        let rows = batch.saturating_mul(heads);
        let words = |count: usize| rows.saturating_mul(count).saturating_mul(4).saturating_add(15) / 16 * 16;
        let (group, dim) = (self.shape.group, self.shape.keys.dim());
        let log_sum_exp = words(1);
        let partials = log_sum_exp.saturating_add(words(group));
        let of_slices = self.slices(batch, heads).saturating_mul(group * dim);
        Parts { log_sum_exp, partials, end: partials.saturating_add(words(of_slices)) }
    }

    /// Bytes of its part of the workspace, zeroed before the first step.
    pub fn workspace_len(&self, batch: usize, heads: usize) -> usize {
        self.parts(batch, heads).end
    }

    /// Where attention writes the log-sum-exps if the caller wants none.
    pub fn log_sum_exp(&self, a: &HybridArguments, workspace: DevicePtr<u8>) -> DevicePtr<f32> {
        workspace.offset(self.parts(a.batch, a.heads).log_sum_exp).cast()
    }

    /// Adds the mean errors. `workspace`: its own part.
    ///
    /// # Errors
    /// [`Error::Argument`] for sizes that do not fit, [`Error::Driver`].
    /// # Safety
    /// As for [`Hybrid::attend`](super::Hybrid::attend), whose kernel precedes it on the stream and has written
    /// the log-sum-exps.
    pub unsafe fn launch(
        &self,
        stream: CUstream,
        common: CommonArguments,
        a: &HybridArguments,
        means: BlockMeans,
        log_sum_exp: DevicePtr<f32>,
        workspace: DevicePtr<u8>,
    ) -> Result<(), Error> {
        let prepared = KernelArguments {
            common,
            selected: a.selected,
            means: means.means,
            recent: means.recent,
            log_sum_exp,
            partials: workspace.offset(self.parts(a.batch, a.heads).partials),
            counts: workspace,
            out: a.out,
            blocks: OPERATION.in_32_bits("blocks of tokens", means.blocks)?,
            recent_parts: OPERATION.in_32_bits("parts of blocks", means.recent_parts)?,
        };
        let slices = self.slices(a.batch, a.heads);
        let grid = OPERATION.grid(&[("slices", slices), ("heads", a.heads), ("sequences", a.batch)])?;
        // SAFETY: the structure is the kernel's argument; the caller upholds the contract of its pointers.
        unsafe { self.kernel.launch(stream, grid, 32 * Self::warps(&self.shape) as u32, true, &prepared) }
    }
}
