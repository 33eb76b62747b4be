//! How many tokens a step selects.

use kv_gpu::{DevicePtr, Grid, Kernel};
use pq_core::TokenBudget;

use super::row_store;
use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::rows::Sequences;

/// The number of tokens that the heads of a step choose, on the device.
pub(super) struct StepBudget {
    kernel: Kernel,
    budget: TokenBudget,
    reserved: usize,
    ks: Buffer<u32>,     // (batch,)
    counts: Buffer<u32>, // (batch, heads): as `ks`
}

#[derive(Clone, Copy)]
#[repr(C)]
struct BudgetArguments {
    coded_lengths: DevicePtr<u32>,
    ks: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    ratio: f64,
    tokens: u32,
    reserved: u32,
    least: u32,
    sequences: u32,
    heads: u32,
}

const _: () = assert!(size_of::<BudgetArguments>() == 56);

impl StepBudget {
    /// For `batch` sequences of `heads` heads; `reserved` tokens of the sinks and the window count towards a
    /// ratio.
    pub fn new(gpu: &Gpu, budget: TokenBudget, reserved: usize, batch: usize, heads: usize) -> Result<Self> {
        let words = |n| Buffer::<u32>::zeros(gpu, n);
        Ok(Self {
            kernel: gpu.device.kernel(&row_store::program(), "budget", 0)?,
            budget,
            reserved,
            ks: words(batch)?,
            counts: words(batch * heads)?,
        })
    }

    /// Launches the count for a step of these sequences.
    pub fn launch(&self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        let (ratio, tokens, least) = match self.budget {
            TokenBudget::Ratio(ratio) => (TokenBudget::factor(ratio), 0, 1),
            TokenBudget::Share(share) => (TokenBudget::factor(share), 0, 0),
            TokenBudget::Tokens(tokens) => (0.0, tokens as u32, 0),
        };
        let batch = self.ks.len();
        let arguments = BudgetArguments {
            coded_lengths: sequences.coded_lengths,
            ks: self.ks.pointer(),
            counts: self.counts.pointer(),
            ratio,
            tokens,
            reserved: if matches!(self.budget, TokenBudget::Ratio(_)) { self.reserved as u32 } else { 0 },
            least,
            sequences: batch as u32,
            heads: (self.counts.len() / batch.max(1)) as u32,
        };
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`.
        Ok(unsafe { self.kernel.launch(gpu.stream(), Grid::new([1, 1, 1])?, 32, false, &arguments) }?)
    }

    /// Tokens to choose, (batch,).
    pub fn ks(&self) -> DevicePtr<u32> {
        self.ks.pointer()
    }

    /// The same for every head, (batch, heads).
    pub fn counts(&self) -> DevicePtr<u32> {
        self.counts.pointer()
    }
}
