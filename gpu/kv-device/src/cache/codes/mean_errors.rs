//! The mean errors of coded values.

use cudarc::driver::CudaStream;
use half::f16;
use kv_attend::owner::Side;
use kv_gpu::Element;
use kv_gpu::pq::{
    BlockMeans, EncodeArguments, MEAN_TOKENS, MeanErrors, MeanErrorsArguments, MeanErrorsShape,
};

use super::{TokenCodes, WindowShape};
use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;

/// What the codes of values lose on average, by blocks of tokens, for a cache without pages.
pub(super) struct ValueErrors {
    sums: MeanErrors,
    blocks: usize,       // of a sequence
    recent_parts: usize, // of blocks
    means: Buffer<f16>,  // (layer, batch, heads, blocks, head_dim)
    recent: Buffer<f32>, // (layer, batch, heads, recent_parts, head_dim)
    summed: Buffer<u32>, // (layer, batch, heads)
}

impl TokenCodes {
    /// The same codes, with the mean errors of the values. No token is encoded yet.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn with_mean_errors(self, gpu: &Gpu, element: Element) -> Result<Self> {
        let WindowShape { n_layers, batch, heads, head_dim, ring, capacity, .. } = self.shape;
        let (blocks, all) = (capacity.div_ceil(MEAN_TOKENS).max(1), n_layers * batch * heads);
        let recent_parts = BlockMeans::recent_parts(ring); // tokens of the window are encoded ahead of a step
        let shape = MeanErrorsShape { quantizer: self.layouts.values.shape(), element };
        let errors = ValueErrors {
            sums: MeanErrors::new(&gpu.device, shape)?,
            blocks,
            recent_parts,
            means: Buffer::zeros(gpu, all * blocks * head_dim)?,
            recent: Buffer::zeros(gpu, all * recent_parts * head_dim)?,
            summed: Buffer::zeros(gpu, all)?,
        };
        Ok(Self { value_errors: Some(errors), ..self })
    }

    /// Adds the errors of values of a layer that have just been encoded.
    pub(super) fn sum_errors(
        &self,
        stream: &CudaStream,
        layer: usize,
        sequence: usize,
        encoded: EncodeArguments,
    ) -> Result<()> {
        let Some(errors) = &self.value_errors else { return Ok(()) };
        let arguments = MeanErrorsArguments {
            encoded,
            table: self.table(Side::Values, layer),
            norms: self.norms_of(Side::Values, layer, sequence),
            gain: self.gain(Side::Values),
            means: errors.of(&self.shape, layer, sequence),
        };
        // SAFETY: as for the encoder, which has just run on the stream; a sequence has blocks for all its
        // tokens, and no more than the window are encoded before a step attends to their codes.
        Ok(unsafe { errors.sums.launch(stream.cu_stream(), &arguments) }?)
    }

    /// The mean errors of a layer's values, if they are kept.
    pub fn mean_errors(&self, layer: usize) -> Option<BlockMeans> {
        self.value_errors.as_ref().map(|errors| errors.of(&self.shape, layer, 0))
    }
}

impl ValueErrors {
    /// Those of a layer from a sequence on.
    fn of(&self, shape: &WindowShape, layer: usize, sequence: usize) -> BlockMeans {
        let WindowShape { batch, heads, head_dim, .. } = *shape;
        let rows = (layer * batch + sequence) * heads;
        BlockMeans {
            means: self.means.pointer().offset(rows * self.blocks * head_dim),
            blocks: self.blocks,
            recent: self.recent.pointer().offset(rows * self.recent_parts * head_dim),
            recent_parts: self.recent_parts,
            summed: self.summed.pointer().offset(rows),
        }
    }

    /// Bytes of the means of `tokens` tokens in every sequence, whole blocks or not.
    pub(super) fn bytes_of(&self, shape: &WindowShape, tokens: usize) -> usize {
        let WindowShape { n_layers, batch, heads, head_dim, .. } = *shape;
        n_layers * batch * heads * tokens.div_ceil(MEAN_TOKENS) * head_dim * size_of::<f16>()
    }

    /// Bytes of all means.
    pub(super) const fn bytes(&self) -> usize {
        self.means.bytes()
    }

    /// Bytes of the sums of the last blocks.
    pub(super) const fn working_bytes(&self) -> usize {
        self.recent.bytes() + self.summed.bytes()
    }
}
