//! Kernel launches of a prompt chunk, except the GEMMs.

use kv_device::{Buffer, Chunk, Rows};
use kv_gpu::svd::PrefillArguments;
use kv_gpu::{DevicePtr, Grid};

use super::{Decoder, LENGTHS, Prompts, SegmentChunk, THREADS};
use crate::weights::LayerWeights;
use crate::{Error, Result};

/// Blocks of those that take any number.
const BLOCKS: usize = 4096;

/// Places of a chunk's `lengths`, 16 bytes apart.
const COUNT: usize = 4;
const ONE: usize = 8;

#[derive(Clone, Copy)]
#[repr(C)]
struct EmbedArguments {
    embedding: DevicePtr<u16>,
    ids: DevicePtr<u32>,
    residual: DevicePtr<f32>,
    hidden: u32,
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
struct AppendArguments {
    qkv: DevicePtr<u16>,
    bias: Option<DevicePtr<f32>>,
    cos: DevicePtr<f32>,
    sin: DevicePtr<f32>,
    queries: DevicePtr<u16>,
    keys: DevicePtr<u16>,
    values: DevicePtr<u16>,
    rows: u32,
    position: u32,
    query_heads: u32,
    heads: u32,
    capacity: u32,
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

const _: () = assert!(size_of::<EmbedArguments>() == 32 && size_of::<NormArguments>() == 40);
const _: () = assert!(size_of::<AppendArguments>() == 80 && size_of::<SwigluArguments>() == 40);

impl Decoder {
    /// Embeds the tokens of a segment.
    pub(super) fn start_segment(
        &self,
        state: &Prompts,
        tokens: &[u32],
        chunks: &[SegmentChunk],
    ) -> Result<()> {
        let gpu = &*self.gpu;
        state.ids.write_first(gpu, tokens)?;
        let mut lengths = vec![0; chunks.len() * LENGTHS];
        for (lengths, SegmentChunk { chunk, .. }) in lengths.chunks_exact_mut(LENGTHS).zip(chunks) {
            (lengths[0], lengths[COUNT], lengths[ONE]) = (chunk.end() as u32, chunk.count as u32, 1);
        }
        state.lengths.write_first(gpu, &lengths)?;
        let arguments = EmbedArguments {
            embedding: self.weights.embedding.pointer(),
            ids: state.ids.pointer(),
            residual: state.residual.pointer(),
            hidden: self.weights.config.hidden_size as u32,
        };
        let grid = Grid::new([tokens.len(), 1, 1])?;
        // SAFETY: the structure is the kernel's argument, the tokens are in the vocabulary, and the buffers
        // have rows for as many tokens.
        Ok(unsafe { state.embed.launch(gpu.stream(), grid, THREADS, false, &arguments) }?)
    }

    pub(super) fn normalize(
        &self,
        state: &Prompts,
        of_segment: &SegmentChunk,
        norm: &Buffer<f32>,
    ) -> Result<()> {
        let config = &self.weights.config;
        let arguments = NormArguments {
            residual: of_segment.residual,
            bias: of_segment.bias,
            norm: norm.pointer(),
            out: state.normed.pointer(),
            hidden: config.hidden_size as u32,
            eps: config.rms_norm_eps,
        };
        let grid = Grid::new([of_segment.chunk.count, 1, 1])?;
        // SAFETY: as above; norm and bias have a number for each component.
        Ok(unsafe { state.norm.launch(self.gpu.stream(), grid, THREADS, false, &arguments) }?)
    }

    /// Rotates queries and keys, and writes keys and values behind those of the tokens before.
    pub(super) fn append_rows(&self, state: &Prompts, chunk: &Chunk, l: usize, rows: &Rows) -> Result<()> {
        let (config, layer) = (&self.weights.config, &self.weights.layers[l]);
        let arguments = AppendArguments {
            qkv: state.qkv.pointer(),
            bias: layer.qkv.bias.as_ref().map(Buffer::pointer),
            cos: self.cos.pointer(),
            sin: self.sin.pointer(),
            queries: state.queries.pointer(),
            keys: rows.keys.cast(),
            values: rows.values.cast(),
            rows: chunk.count as u32,
            position: chunk.position as u32,
            query_heads: config.n_heads as u32,
            heads: config.n_kv_heads as u32,
            capacity: rows.capacity as u32,
        };
        // SAFETY: as above; the chunk ends within the capacity of rows and of the tables of angles.
        unsafe {
            state.append.launch(self.gpu.stream(), Grid::new([BLOCKS, 1, 1])?, THREADS, false, &arguments)
        }?;
        let Some(transform) = self.cache.transform() else { return Ok(()) };
        // SAFETY: these rows have just been written, and nothing else uses them before attention.
        Ok(unsafe { transform.chunk(&self.gpu, l, chunk, state.queries.pointer(), rows) }?)
    }

    /// Attention of the chunk's queries from `skipped` on.
    pub(super) fn attend_rows(
        &self,
        state: &Prompts,
        of_segment: &SegmentChunk,
        l: usize,
        rows: &Rows,
        skipped: usize,
    ) -> Result<()> {
        let config = &self.weights.config;
        let (heads, head_dim, q_dim) = (config.n_kv_heads, config.head_dim, config.q_dim());
        let max_count = of_segment.chunk.count - skipped;
        let counts = if max_count == 1 { ONE } else { COUNT };
        let lengths = state.lengths.pointer().offset(of_segment.index * LENGTHS);
        let [key_ranks, value_ranks] = self.cache.chunk_ranks(l)?.unwrap_or([state.ranks.pointer(); 2]);
        let arguments = PrefillArguments {
            batch: 1,
            heads,
            group: config.gqa_group(),
            capacity: rows.capacity,
            max_count,
            keys: rows.keys,
            values: rows.values,
            pages: None,
            queries: state.queries.pointer().offset(skipped * q_dim).cast(),
            strides: [0, q_dim, head_dim],
            lengths,
            counts: lengths.offset(counts),
            window: None,
            key_ranks,
            value_ranks,
            key_offsets: state.offsets.pointer(),
            value_offsets: state.offsets.pointer(),
            key_rank_sum: heads * head_dim,
            value_rank_sum: heads * head_dim,
            padded: true,
            scale: 1.0 / (head_dim as f32).sqrt(),
            out: state.attended.pointer().offset(skipped * q_dim).cast(),
            workspace: state.workspace.pointer(),
        };
        // SAFETY: the rows have keys and values up to the chunk's end, which is within their capacity, and
        // ranks are at most `head_dim`. Either all queries are attended to, or the last one, or none, which
        // launches nothing.
        Ok(unsafe { state.attend.launch(self.gpu.stream(), &arguments) }?)
    }

    pub(super) fn activate(&self, state: &Prompts, count: usize, layer: &LayerWeights) -> Result<()> {
        let arguments = SwigluArguments {
            gate_up: state.gate_up.pointer(),
            bias: layer.gate_up.bias.as_ref().map(Buffer::pointer),
            out: state.inner.pointer(),
            rows: count as u64,
            inner: self.weights.config.intermediate_size as u32,
        };
        // SAFETY: as above.
        unsafe {
            state.swiglu.launch(self.gpu.stream(), Grid::new([BLOCKS, 1, 1])?, THREADS, false, &arguments)
        }
        .map_err(Error::from)
    }
}
