//! Products of up to 32 tokens with packed weights, fused with the operations between them.

use kv_device::Buffer;
use kv_gpu::{DevicePtr, Grid, Kernel};

use super::Context;
use crate::Result;
use crate::gemv::{Gemv, GemvArguments, GemvShape, Input, Output};
use crate::step::picks::step_program;
use crate::weights::DeviceMatrix;

#[derive(Clone, Copy)]
#[repr(C)]
struct ScaleArguments {
    residual: DevicePtr<f32>,
    norm: DevicePtr<f32>,
    scaled: DevicePtr<u16>,
    squares: DevicePtr<f32>,
    hidden: u32,
}

const _: () = assert!(size_of::<ScaleArguments>() == 40);

/// Components of a block of `scale`, a multiple of 32.
const SCALE_THREADS: u32 = 128;

/// The products after attention, and the input of those before.
pub(crate) struct FusedLayers {
    o: Gemv,
    gate_up: Gemv,
    down: Gemv,
    scale: Kernel,
    pub scaled: Buffer<u16>, // (columns, hidden): residual times the weights of the next norm
    pub squares: Buffer<f32>, // (columns, hidden / 16): sums of squares of the residual
    inner: Buffer<u16>,      // (columns, intermediate)
}

/// The kernel of a product of up to `columns` tokens. `reserved` bytes of a multiprocessor's shared memory
/// stay free for other kernels.
pub(super) fn gemv(
    context: &Context<'_>,
    n_in: usize,
    (columns, reserved): (usize, usize),
    (input, output): (Input, Output),
) -> Result<Gemv> {
    let (element, head_dim) = (context.weights.element, context.weights.config.head_dim);
    Gemv::new(context.gpu, GemvShape { n_in, columns, element, head_dim, input, output }, reserved)
}

impl FusedLayers {
    /// Kernels and buffers of up to `columns` tokens, as [`gemv`].
    pub fn new(context: &Context<'_>, columns: usize, reserved: usize) -> Result<Self> {
        let Context { gpu, weights, .. } = context;
        let config = &weights.config;
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let gemv = |n_in, input, output| self::gemv(context, n_in, (columns, reserved), (input, output));
        let added = if context.adds() { Output::Add } else { Output::Store };
        Ok(Self {
            o: gemv(config.q_dim(), Input::Elements, added)?,
            gate_up: gemv(hidden, Input::Residual, Output::SwiGlu)?,
            down: gemv(inner, Input::Elements, added)?,
            scale: gpu.device().kernel(&step_program(weights.element), "scale", 0)?,
            scaled: Buffer::zeros(gpu, columns * hidden)?,
            squares: Buffer::zeros(gpu, columns * hidden.div_ceil(16))?,
            inner: Buffer::zeros(gpu, columns * inner)?,
        })
    }

    /// Prepares a norm of the residual stream.
    pub fn prepare(
        &self,
        context: &Context<'_>,
        norm: &Buffer<f32>,
        residual: DevicePtr<f32>,
        count: usize,
    ) -> Result<()> {
        let hidden = context.weights.config.hidden_size;
        let arguments = ScaleArguments {
            residual,
            norm: norm.pointer(),
            scaled: self.scaled.pointer(),
            squares: self.squares.pointer(),
            hidden: hidden as u32,
        };
        let grid = Grid::new([hidden.div_ceil(SCALE_THREADS as usize), count, 1])?;
        // SAFETY: the structure is the kernel's argument; buffers have the lengths of `new`.
        Ok(unsafe { self.scale.launch(context.gpu.stream(), grid, SCALE_THREADS, false, &arguments) }?)
    }

    /// A product of the normalized residual stream.
    pub fn normed(
        &self,
        context: &Context<'_>,
        gemv: &Gemv,
        matrix: &DeviceMatrix,
        count: usize,
        complete: impl FnOnce(&mut GemvArguments),
    ) -> Result<()> {
        let mut arguments = GemvArguments::of(matrix, self.scaled.pointer(), count);
        arguments.squares = Some(self.squares.pointer());
        arguments.eps = context.weights.config.rms_norm_eps;
        complete(&mut arguments);
        // SAFETY: `complete` adds what the output uses; all buffers have the lengths of `new` or are the
        // caller's for as many tokens, and positions and slots are below the capacities of tables and rows.
        unsafe { gemv.launch(context.gpu, &arguments) }
    }

    /// The part of layer `l` after attention, and the norm that follows it.
    pub fn after_attention(
        &self,
        context: &Context<'_>,
        l: usize,
        residual: DevicePtr<f32>,
        attended: DevicePtr<u16>,
        count: usize,
    ) -> Result<()> {
        let (layer, inner) = (&context.weights.layers[l], self.inner.pointer());
        let o = (&self.o, &layer.o, attended);
        self.add(context, o, &layer.feed_forward_norm, residual, count)?;
        self.normed(context, &self.gate_up, &layer.gate_up, count, |a| a.out = Some(inner))?;
        let down = (&self.down, &layer.down, inner);
        self.add(context, down, context.norm_after(l), residual, count)
    }

    /// Adds a product, of ranks the sum of their products, to the residual stream, and prepares norm `next`.
    fn add(
        &self,
        context: &Context<'_>,
        (gemv, matrix, input): (&Gemv, &DeviceMatrix, DevicePtr<u16>),
        next: &Buffer<f32>,
        residual: DevicePtr<f32>,
        count: usize,
    ) -> Result<()> {
        let mut arguments = GemvArguments::of(matrix, input, count);
        arguments.residual = Some(residual);
        arguments.norm = Some(next.pointer());
        arguments.out = Some(self.scaled.pointer());
        arguments.squares_out = Some(self.squares.pointer());
        if !context.adds() {
            (arguments.bias, arguments.stride) = (None, context.weights.config.hidden_size as u32);
        }
        // SAFETY: all buffers have the lengths of `new`, or are the caller's for as many tokens.
        unsafe { gemv.launch(context.gpu, &arguments) }?;
        if context.communicator.is_none() {
            return Ok(());
        }
        context.sum(residual, count)?;
        self.prepare(context, next, residual, count)
    }
}
