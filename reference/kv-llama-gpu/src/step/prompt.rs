//! Prefill: many tokens of one sequence at a time, layer by layer.
//!
//! A prompt runs in segments. A segment passes through one layer after the other, and through a layer in
//! chunks. A layer's weights are thus unpacked once per segment, and a cache that keeps rows elsewhere
//! restores those before a segment once per layer, not once per chunk.

mod launch;

use kv_device::{Allocating, Buffer, Chunk, Gpu};
use kv_gpu::svd::{AttendShape, Prefill};
use kv_gpu::{DevicePtr, Element, Grid, Kernel, Program};

use super::super::gemm::{Gemm, GemmShape, Output};
use super::super::weights::{self, LayerWeights, Packed};
use super::{Activations, Decoder};
use crate::Result;

/// Threads of the kernels of `kernels/prompt.cu`.
const THREADS: u32 = 256;

/// `embed`, `normalize`, `append` and `swiglu`.
pub(crate) fn program(element: Element, head_dim: usize) -> Program {
    let defines = [("ELEMENT", element as usize), ("HEAD_DIM", head_dim)];
    Program::own("prompt.cu", include_str!("../kernels/prompt.cu"), &[], &defines)
}

/// Chunks of the weights that a block of `unpack` takes: `UNPACKED` of the kernel.
const UNPACKED: usize = 8;

/// Maximum chunks of a segment, whose residual streams are all held.
const SEGMENT: usize = 8;

/// Kernels and buffers for segments of chunks of up to `tokens` tokens, made by the first prompt.
pub(super) struct Prompts {
    tokens: usize,
    segment: usize, // tokens, at most
    gemm: Gemm,
    attend: Prefill,
    workspace: Buffer<u8>, // of `attend`
    unpack: Kernel,
    embed: Kernel,
    norm: Kernel,
    append: Kernel,
    swiglu: Kernel,
    ids: Buffer<u32>,      // (segment,)
    residual: Buffer<f32>, // (segment, hidden)
    normed: Buffer<u16>,   // (tokens, hidden)
    qkv: Buffer<u16>,      // (tokens, rows of q, k and v)
    queries: Buffer<u16>,  // (tokens, n_heads, head_dim)
    attended: Buffer<u16>, // (tokens, n_heads, head_dim)
    gate_up: Buffer<u16>,  // (tokens, 2 intermediate)
    inner: Buffer<u16>,    // (tokens, intermediate)
    matrices: LayerMatrices,
    lengths: Buffer<u32>, // (SEGMENT, LENGTHS): tokens with a chunk, at COUNT those of the chunk, at ONE 1
    ranks: Buffer<u32>,   // (n_kv_heads,)
    offsets: Buffer<u64>, // (n_kv_heads,)
}

/// Words of a chunk's `lengths`.
const LENGTHS: usize = 12;

/// The matrices of one layer, as rows.
struct LayerMatrices {
    qkv: Buffer<u16>,
    o: Buffer<u16>,
    gate_up: Buffer<u16>,
    down: Buffer<u16>,
}

/// Tokens to append to a sequence of `start` tokens.
pub(super) struct Prompt<'a> {
    pub sequence: usize,
    pub start: usize,
    pub tokens: &'a [u32],
}

impl Prompt<'_> {
    /// Length of the sequence, the prompt included.
    pub const fn end(&self) -> usize {
        self.start + self.tokens.len()
    }
}

/// A chunk of a segment.
struct SegmentChunk {
    chunk: Chunk,
    index: usize,                 // in the segment
    residual: DevicePtr<f32>,     // (count, hidden)
    bias: Option<DevicePtr<f32>>, // of the last product added to it
    is_last: bool,                // of the prompt
}

#[derive(Clone, Copy)]
#[repr(C)]
struct UnpackArguments {
    packed: DevicePtr<u16>,
    rows: DevicePtr<u16>,
    n_rows: u32,
    n_in: u32,
    order: u32,
    head_dim: u32,
}

const _: () = assert!(size_of::<UnpackArguments>() == 32);

impl LayerMatrices {
    /// Room for the largest matrices of all layers.
    fn new(gpu: &Gpu, layers: &[LayerWeights]) -> Result<Self> {
        let room = |of: fn(&LayerWeights) -> &Packed| {
            let len = |layer| of(layer).rows * of(layer).n_in;
            Buffer::zeros(gpu, layers.iter().map(len).max().unwrap_or(0))
        };
        Ok(Self {
            qkv: room(|layer| &layer.qkv)?,
            o: room(|layer| &layer.o)?,
            gate_up: room(|layer| &layer.gate_up)?,
            down: room(|layer| &layer.down)?,
        })
    }
}

impl Prompts {
    fn new(decoder: &Decoder, tokens: usize, segment: usize) -> Result<Self> {
        let _purpose = Allocating::new("prompts");
        let (gpu, model) = (&*decoder.gpu, &*decoder.weights);
        let (config, element) = (&model.config, model.element);
        let (heads, head_dim, q_dim) = (config.n_kv_heads, config.head_dim, config.q_dim());
        let prompt = program(element, head_dim);
        let kernel = |name| gpu.device().kernel(&prompt, name, 0);
        let halves = |row: usize| Buffer::<u16>::zeros(gpu, tokens.saturating_mul(row));
        let attend = Prefill::new(gpu.device(), AttendShape { dim: head_dim, element })?;
        let offsets: Vec<u64> = (0..heads).map(|head| (head * head_dim) as u64).collect();
        Ok(Self {
            tokens,
            segment,
            gemm: Gemm::new(gpu, element)?,
            workspace: Buffer::zeros(gpu, attend.workspace_len())?,
            attend,
            unpack: gpu.device().kernel(&weights::program(element), "unpack", 0)?,
            embed: kernel("embed")?,
            norm: kernel("normalize")?,
            append: kernel("append")?,
            swiglu: kernel("swiglu")?,
            ids: Buffer::zeros(gpu, segment)?,
            residual: Buffer::zeros(gpu, segment.saturating_mul(config.hidden_size))?,
            normed: halves(config.hidden_size)?,
            qkv: halves(q_dim + 2 * config.kv_dim())?,
            queries: halves(q_dim)?,
            attended: halves(q_dim)?,
            gate_up: halves(2 * config.intermediate_size)?,
            inner: halves(config.intermediate_size)?,
            matrices: LayerMatrices::new(gpu, &model.layers)?,
            lengths: Buffer::zeros(gpu, SEGMENT * LENGTHS)?,
            ranks: Buffer::of(gpu, &vec![head_dim as u32; heads])?,
            offsets: Buffer::of(gpu, &offsets)?,
        })
    }

    /// Whether chunks and segments of these sizes fit.
    const fn fits(&self, tokens: usize, segment: usize) -> bool {
        self.tokens >= tokens && self.segment >= segment
    }

    /// Unpacks the matrices of a layer.
    fn unpack(&self, gpu: &Gpu, head_dim: usize, layer: &LayerWeights) -> Result<()> {
        let LayerMatrices { qkv, o, gate_up, down } = &self.matrices;
        let matrices = [(&layer.qkv, qkv), (&layer.o, o), (&layer.gate_up, gate_up), (&layer.down, down)];
        for (&Packed { rows: n_out, n_in, order, ref weight, .. }, rows) in matrices {
            let arguments = UnpackArguments {
                packed: weight.pointer(),
                rows: rows.pointer(),
                n_rows: n_out as u32,
                n_in: n_in as u32,
                order: order as u32,
                head_dim: head_dim as u32,
            };
            let (chunks, tiles) = (n_in.div_ceil(64), n_out.div_ceil(16));
            let grid = Grid::new([chunks.div_ceil(UNPACKED), tiles, 1])?;
            // SAFETY: the structure is the kernel's argument, and the rows have as many elements as the
            // largest of these matrices.
            unsafe { self.unpack.launch(gpu.stream(), grid, THREADS, false, &arguments) }?;
        }
        Ok(())
    }

    /// A product of the rows of a chunk with an unpacked matrix, without the bias.
    fn product<T>(
        &mut self,
        gpu: &Gpu,
        matrix: &Packed,
        rows: DevicePtr<u16>,
        (input, count): (DevicePtr<u16>, usize),
        (out, output): (DevicePtr<T>, Output),
    ) -> Result<()> {
        let shape = GemmShape { tokens: count, n_in: matrix.n_in, n_out: matrix.rows, output };
        // SAFETY: `unpack` has written the matrix; inputs and outputs are rows of the buffers of `new`.
        unsafe { self.gemm.launch(gpu, shape, rows, input, out) }
    }
}

impl Decoder {
    /// Runs the prompts of sequences, at most `chunk` tokens of a sequence at a time. Attention's output for
    /// each prompt's last token, and its residual stream, are left in the activations of a step.
    pub(super) fn run_prompts(&mut self, prompts: &[Prompt], chunk: usize) -> Result<()> {
        let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
        let segment = chunk.saturating_mul(SEGMENT);
        let sizes = (longest.min(chunk), longest.min(segment));
        let mut state = match self.prompts.take().filter(|state| state.fits(sizes.0, sizes.1)) {
            Some(state) => state,
            None => Prompts::new(self, sizes.0, sizes.1)?,
        };
        let run = prompts.iter().try_for_each(|&Prompt { sequence, start, tokens }| {
            let last = tokens.len().div_ceil(segment) - 1;
            tokens.chunks(segment).enumerate().try_for_each(|(i, tokens)| {
                let all = Chunk { sequence, position: start + i * segment, count: tokens.len() };
                self.run_segment(&mut state, tokens, all, chunk, i == last)
            })
        });
        self.prompts = Some(state);
        run
    }

    /// Runs a segment through all layers, `chunk` tokens at a time. At a prompt's end, the residual stream
    /// and attention's output of the last token are left in the activations of a step.
    fn run_segment(
        &mut self,
        state: &mut Prompts,
        tokens: &[u32],
        segment: Chunk,
        chunk: usize,
        is_last: bool,
    ) -> Result<()> {
        let (gpu, weights) = (self.gpu.clone(), self.weights.clone());
        let config = &weights.config;
        let (hidden, q_dim) = (config.hidden_size, config.q_dim());
        let starts = (0..segment.count).step_by(chunk);
        let mut chunks: Vec<SegmentChunk> = starts
            .enumerate()
            .map(|(index, start)| SegmentChunk {
                chunk: Chunk {
                    position: segment.position + start,
                    count: chunk.min(segment.count - start),
                    ..segment
                },
                index,
                residual: state.residual.pointer().offset(start * hidden),
                bias: None,
                is_last: false,
            })
            .collect();
        if let Some(chunk) = chunks.last_mut() {
            chunk.is_last = is_last;
        }
        self.start_segment(state, tokens, &chunks)?;
        for (l, layer) in weights.layers.iter().enumerate() {
            state.unpack(&gpu, config.head_dim, layer)?;
            chunks.iter_mut().try_for_each(|chunk| self.run_layer(state, chunk, l, layer))?;
        }
        if let Some(SegmentChunk { chunk, is_last: true, .. }) = chunks.last() {
            let (i, from) = (chunk.sequence, chunk.count - 1);
            let Activations { residual, attended, .. } = &self.activations;
            residual.copy(&gpu, i * hidden, &state.residual, (segment.count - 1) * hidden, hidden)?;
            attended.copy(&gpu, i * q_dim, &state.attended, from * q_dim, q_dim)?;
        }
        Ok(())
    }

    /// Runs a chunk through a layer, the last one up to attention.
    fn run_layer(
        &mut self,
        state: &mut Prompts,
        of_segment: &mut SegmentChunk,
        l: usize,
        layer: &LayerWeights,
    ) -> Result<()> {
        let gpu = self.gpu.clone();
        let &mut SegmentChunk { chunk, residual, is_last, .. } = of_segment;
        let count = chunk.count;
        let LayerMatrices { qkv, o, gate_up, down } = &state.matrices;
        let [qkv_rows, o_rows, gate_up_rows, down_rows] = [qkv, o, gate_up, down].map(Buffer::pointer);
        self.normalize(state, of_segment, &layer.attention_norm)?;
        let (normed, qkv) = (state.normed.pointer(), state.qkv.pointer());
        state.product(&gpu, &layer.qkv, qkv_rows, (normed, count), (qkv, Output::Store))?;
        let rows = self.cache.chunk_rows(&gpu, l, &chunk)?;
        self.append_rows(state, &chunk, l, &rows)?;
        // The last layer's output is used for the last token only.
        let is_end = l + 1 == self.weights.layers.len();
        let skipped = match is_end {
            true if is_last => count - 1,
            true => count,
            false => 0,
        };
        self.attend_rows(state, of_segment, l, &rows, skipped)?;
        self.cache.append(&gpu, l, &chunk)?;
        if is_end {
            return Ok(());
        }
        // As in a step: one rank adds, the others replace.
        let added = if self.weights.shard.rank() == 0 { Output::Add } else { Output::Replace };
        let attended = state.attended.pointer();
        state.product(&gpu, &layer.o, o_rows, (attended, count), (residual, added))?;
        self.sum_rows(residual, count)?;
        of_segment.bias = layer.o.bias.as_ref().map(Buffer::pointer);
        self.normalize(state, of_segment, &layer.feed_forward_norm)?;
        let (gate_up, inner) = (state.gate_up.pointer(), state.inner.pointer());
        state.product(&gpu, &layer.gate_up, gate_up_rows, (normed, count), (gate_up, Output::Store))?;
        self.activate(state, count, layer)?;
        state.product(&gpu, &layer.down, down_rows, (inner, count), (residual, added))?;
        self.sum_rows(residual, count)?;
        of_segment.bias = layer.down.bias.as_ref().map(Buffer::pointer);
        Ok(())
    }
    /// Sums the residual streams of `count` tokens over the ranks.
    fn sum_rows(&self, residual: DevicePtr<f32>, count: usize) -> Result<()> {
        let Some(communicator) = &self.communicator else { return Ok(()) };
        // SAFETY: a chunk has a residual stream for each of its tokens; all ranks run the same prompts.
        unsafe { communicator.sum(self.gpu.stream(), residual, count * self.weights.config.hidden_size) }
    }
}
