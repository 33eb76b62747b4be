//! Products of tokens' activations with the weights of a layer, and the operations between them: everything
//! of a layer but attention. Tokens are those of a step, one of each sequence, or of prompts.
//!
//! [`fused`] has products of up to 32 tokens with packed weights, [`rows`] GEMMs of any number with rows,
//! which are the weights themselves or [`unpacked`].

mod append;
mod fused;
mod prompt;
mod rows;
mod step;
mod unpacked;

use kv_device::{Buffer, Gpu};
use kv_gpu::DevicePtr;

use crate::Result;
use crate::ranks::Communicator;
use crate::weights::Weights;
pub(crate) use append::{Append, Qkv};
pub(crate) use prompt::PromptProducts;
pub(crate) use rows::program;
pub(crate) use step::{StepProducts, StepRows};

/// What products compute with.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub gpu: &'a Gpu,
    pub weights: &'a Weights,
    pub communicator: Option<&'a dyn Communicator>,
}

impl<'a> Context<'a> {
    /// Sums the residual streams of `count` tokens over the ranks.
    fn sum(&self, residual: DevicePtr<f32>, count: usize) -> Result<()> {
        let Some(communicator) = self.communicator else { return Ok(()) };
        // SAFETY: there is a residual stream for each of the tokens; all ranks run the same ones.
        unsafe { communicator.sum(self.gpu.stream(), residual, count * self.weights.config.hidden_size) }
    }

    /// Completes the logits of `count` tokens, of which every rank has its part.
    fn gather(&self, logits: DevicePtr<f32>, count: usize) -> Result<()> {
        let Some(communicator) = self.communicator else { return Ok(()) };
        // SAFETY: there is a row for every token, of which the product writes the rank's part; all ranks run
        // the same steps.
        unsafe { communicator.gather(self.gpu.stream(), logits, count, self.weights.config.vocab_size) }
    }

    /// Whether this rank adds its products to the residual stream. The others replace theirs by them, before
    /// all are summed.
    fn adds(&self) -> bool {
        self.weights.shard.rank() == 0
    }

    /// The weights of the norm after layer `l`.
    fn norm_after(&self, l: usize) -> &'a Buffer<f32> {
        let weights = self.weights;
        weights.layers.get(l + 1).map_or(&weights.norm, |next| &next.attention_norm)
    }
}
