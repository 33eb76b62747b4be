//! GEMMs of any number of tokens with rows of weights, and the kernels between them: `kernels/rows.cu`.

use kv_device::Buffer;
use kv_gpu::{DevicePtr, Element, Grid, Kernel, Program};

use super::Context;
use super::append::Qkv;
use crate::Result;
use crate::gemm::{Gemm, GemmShape, Output};
use crate::weights::{DeviceMatrix, LayerWeights};

/// Threads of a block.
pub(super) const THREADS: u32 = 256;

/// Maximum blocks of the kernels that take any number.
const MOST_BLOCKS: usize = 4096;

/// `embed`, `normalize`, `append` and `swiglu`.
pub(crate) fn program(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("rows.cu", include_str!("../kernels/rows.cu"), &[], &defines)
}

/// Blocks for as many threads, of a kernel that takes any number.
pub(super) fn blocks(threads: usize) -> usize {
    threads.div_ceil(THREADS as usize).clamp(1, MOST_BLOCKS)
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NormArguments {
    residual: DevicePtr<f32>,
    bias: Option<DevicePtr<f32>>,
    norm: DevicePtr<f32>,
    out: DevicePtr<u16>,
    hidden: u32,
    eps: f32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SwigluArguments {
    gate_up: DevicePtr<u16>,
    bias: Option<DevicePtr<f32>>,
    out: DevicePtr<u16>,
    rows: u64,
    inner: u32,
}

const _: () = assert!(size_of::<NormArguments>() == 40 && size_of::<SwigluArguments>() == 40);

/// The matrices of a layer, as rows.
#[derive(Clone, Copy)]
pub(crate) struct LayerRows {
    pub qkv: DevicePtr<u16>,
    pub o: DevicePtr<u16>,
    pub gate_up: DevicePtr<u16>,
    pub down: DevicePtr<u16>,
}

impl LayerRows {
    /// Those of weights that are stored so.
    pub fn of(layer: &LayerWeights) -> Self {
        let LayerWeights { qkv, o, gate_up, down, .. } = layer;
        let [qkv, o, gate_up, down] = [qkv, o, gate_up, down].map(|matrix| matrix.weight.pointer());
        Self { qkv, o, gate_up, down }
    }
}

/// Kernels and buffers.
pub(crate) struct RowLayers {
    gemm: Gemm,
    norm: Kernel,
    swiglu: Kernel,
    normed: Buffer<u16>,  // (tokens, hidden)
    qkv: Buffer<u16>,     // (tokens, rows of q, k and v)
    gate_up: Buffer<u16>, // (tokens, 2 intermediate)
    inner: Buffer<u16>,   // (tokens, intermediate)
}

impl RowLayers {
    /// For up to `tokens` tokens.
    pub fn new(context: &Context<'_>, tokens: usize) -> Result<Self> {
        let Context { gpu, weights, .. } = context;
        let config = &weights.config;
        let rows = program(weights.element, config.head_dim);
        let kernel = |name| gpu.device().kernel(&rows, name, 0);
        let halves = |row: usize| Buffer::<u16>::zeros(gpu, tokens.saturating_mul(row));
        Ok(Self {
            gemm: Gemm::new(gpu, weights.element)?,
            norm: kernel("normalize")?,
            swiglu: kernel("swiglu")?,
            normed: halves(config.hidden_size)?,
            qkv: halves(config.q_dim() + 2 * config.kv_dim())?,
            gate_up: halves(2 * config.intermediate_size)?,
            inner: halves(config.intermediate_size)?,
        })
    }

    /// Launches every product of a step once, on buffers of zeros, of which the residual stream stays one.
    pub fn warm_up(
        &self,
        context: &Context<'_>,
        residual: DevicePtr<f32>,
        attended: DevicePtr<u16>,
        logits: DevicePtr<f32>,
        count: usize,
    ) -> Result<()> {
        if let Some(layer) = context.weights.layers.first() {
            let rows = LayerRows::of(layer);
            self.product(context, (&layer.qkv, rows.qkv), &self.normed, &self.qkv, count)?;
            self.add(context, (&layer.o, rows.o), attended, residual, count)?;
            self.product(context, (&layer.gate_up, rows.gate_up), &self.normed, &self.gate_up, count)?;
            self.add(context, (&layer.down, rows.down), self.inner.pointer(), residual, count)?;
        }
        self.output(context, logits, count)
    }

    /// Queries, keys and values of layer `l`.
    pub fn qkv(
        &self,
        context: &Context<'_>,
        l: usize,
        rows: &LayerRows,
        residual: DevicePtr<f32>,
        count: usize,
    ) -> Result<Qkv> {
        let layer = &context.weights.layers[l];
        let before = l.checked_sub(1).and_then(|before| context.weights.layers[before].down.bias());
        self.normalize(context, (residual, before), &layer.attention_norm, count)?;
        self.product(context, (&layer.qkv, rows.qkv), &self.normed, &self.qkv, count)?;
        Ok(Qkv { elements: self.qkv.pointer(), bias: layer.qkv.bias() })
    }

    /// The part of layer `l` after attention. The bias of the last product is added by the norm that follows.
    pub fn after_attention(
        &self,
        context: &Context<'_>,
        l: usize,
        rows: &LayerRows,
        (residual, attended): (DevicePtr<f32>, DevicePtr<u16>),
        count: usize,
    ) -> Result<()> {
        let layer = &context.weights.layers[l];
        self.add(context, (&layer.o, rows.o), attended, residual, count)?;
        context.sum(residual, count)?;
        self.normalize(context, (residual, layer.o.bias()), &layer.feed_forward_norm, count)?;
        self.product(context, (&layer.gate_up, rows.gate_up), &self.normed, &self.gate_up, count)?;
        self.activate(context, layer, count)?;
        self.add(context, (&layer.down, rows.down), self.inner.pointer(), residual, count)?;
        context.sum(residual, count)
    }

    /// The rank's part of the logits (count, vocab_size).
    pub fn logits(
        &self,
        context: &Context<'_>,
        residual: DevicePtr<f32>,
        logits: DevicePtr<f32>,
        count: usize,
    ) -> Result<()> {
        let weights = context.weights;
        let bias = weights.layers.last().and_then(|layer| layer.down.bias());
        self.normalize(context, (residual, bias), &weights.norm, count)?;
        self.output(context, logits, count)
    }

    /// RMSNorm of the residual stream, after the bias of the last product has been added to it.
    fn normalize(
        &self,
        context: &Context<'_>,
        (residual, bias): (DevicePtr<f32>, Option<DevicePtr<f32>>),
        norm: &Buffer<f32>,
        count: usize,
    ) -> Result<()> {
        let config = &context.weights.config;
        let arguments = NormArguments {
            residual,
            bias,
            norm: norm.pointer(),
            out: self.normed.pointer(),
            hidden: config.hidden_size as u32,
            eps: config.rms_norm_eps,
        };
        let grid = Grid::new([count, 1, 1])?;
        // SAFETY: the structure is the kernel's argument; buffers have the lengths of `new` or are the
        // caller's for as many tokens; norm and bias have a number for each component.
        Ok(unsafe { self.norm.launch(context.gpu.stream(), grid, THREADS, true, &arguments) }?)
    }

    fn activate(&self, context: &Context<'_>, layer: &LayerWeights, count: usize) -> Result<()> {
        let inner = context.weights.config.intermediate_size;
        let arguments = SwigluArguments {
            gate_up: self.gate_up.pointer(),
            bias: layer.gate_up.bias(),
            out: self.inner.pointer(),
            rows: count as u64,
            inner: inner as u32,
        };
        let grid = Grid::new([blocks(count * inner / 8), 1, 1])?;
        // SAFETY: as in `normalize`.
        Ok(unsafe { self.swiglu.launch(context.gpu.stream(), grid, THREADS, true, &arguments) }?)
    }

    /// A product that is stored as elements, without the bias.
    fn product(
        &self,
        context: &Context<'_>,
        (matrix, rows): (&DeviceMatrix, DevicePtr<u16>),
        input: &Buffer<u16>,
        out: &Buffer<u16>,
        count: usize,
    ) -> Result<()> {
        let shape = shape(matrix, count, Output::Store);
        // SAFETY: inputs and outputs are rows of the buffers of `new`.
        unsafe { self.gemm.launch(context.gpu, shape, rows, input.pointer(), out.pointer()) }
    }

    /// A product that is added to the residual stream, or replaces it, without the bias.
    fn add(
        &self,
        context: &Context<'_>,
        (matrix, rows): (&DeviceMatrix, DevicePtr<u16>),
        input: DevicePtr<u16>,
        residual: DevicePtr<f32>,
        count: usize,
    ) -> Result<()> {
        let shape = shape(matrix, count, if context.adds() { Output::Add } else { Output::Replace });
        // SAFETY: as in `product`, or the caller's buffers for as many tokens.
        unsafe { self.gemm.launch(context.gpu, shape, rows, input, residual) }
    }

    fn output(&self, context: &Context<'_>, logits: DevicePtr<f32>, count: usize) -> Result<()> {
        let (weights, vocab) = (context.weights, context.weights.config.vocab_size);
        let shape = GemmShape { stride: vocab, ..shape(&weights.output, count, Output::Replace) };
        let (rows, logits) = (weights.output.weight.pointer(), logits.offset(weights.shard.of(vocab).start));
        // SAFETY: as in `add`; a rank writes its part of every row.
        unsafe { self.gemm.launch(context.gpu, shape, rows, self.normed.pointer(), logits) }
    }
}

/// The product of `tokens` tokens with a matrix, one token's outputs after the other's.
const fn shape(matrix: &DeviceMatrix, tokens: usize, output: Output) -> GemmShape {
    GemmShape { tokens, n_in: matrix.n_in, n_out: matrix.rows, stride: matrix.rows, output }
}
