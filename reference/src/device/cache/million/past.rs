//! Chunks of a prompt over MILLION's cache: what it keeps of the tokens before becomes rows, and it takes the
//! chunk from there.

use cudarc::driver::CudaStream;
use kv_gpu::pq::{EncodeArguments, TILE};
use kv_gpu::{DevicePtr, Grid, Kernel};

use super::{MillionCache, Shape};
use crate::device::cache::{Chunk, Rows};
use crate::device::memory::Buffer;
use crate::device::{Gpu, driver, programs};
use crate::side::{Pair, Side};
use crate::{Error, Result};

/// Rows of all tokens of one sequence in one layer, and the kernels between them and the cache.
pub(super) struct Past {
    decode: Pair<Kernel>,
    exact: Kernel,
    pub rows: Buffer<u16>, // (keys and values, heads, capacity, head_dim)
    span: Buffer<u32>,     // the first coded token that the chunk encodes, and at COUNT how many
}

/// Where the count is: 16 bytes on.
const COUNT: usize = 4;

#[derive(Clone, Copy)]
#[repr(C)]
struct DecodeArguments {
    codes: DevicePtr<u8>,
    table: DevicePtr<u32>,
    rows: DevicePtr<u32>,
    tokens: u32,
    tiles: u32,
    capacity: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExactArguments {
    kept: DevicePtr<u16>,
    rows: DevicePtr<u16>,
    kept_side: u64,
    rows_side: u64,
    tokens: u32,
    sinks: u32,
    ring: u32,
    capacity: u32,
    restore: u32,
}

const _: () = assert!(size_of::<DecodeArguments>() == 40 && size_of::<ExactArguments>() == 56);

impl Shape {
    /// Elements of the keys of one sequence and layer, of all its tokens.
    const fn past_side_len(&self) -> usize {
        self.heads * self.capacity * self.head_dim
    }

    /// Tokens behind the sinks that a chunk encodes, as (first, count): all up to its end, without those that
    /// the cache has attended to as codes.
    const fn encoded_by(&self, chunk: &Chunk) -> (usize, usize) {
        let first = chunk.position.saturating_sub(self.sinks + self.ring);
        (first, chunk.end().saturating_sub(self.sinks).saturating_sub(first))
    }
}

impl MillionCache {
    /// The kernels and rows of chunks, made for the first one.
    fn new_past(&self, gpu: &Gpu) -> Result<Past> {
        let element = self.element;
        let kernel = |side: Side, name| {
            gpu.device.kernel(&programs::past(element, &self.layouts[side], side), name, 0)
        };
        Ok(Past {
            decode: Pair::try_of(|side| kernel(side, "decode").map_err(Error::from))?,
            exact: kernel(Side::Keys, "exact")?,
            rows: Buffer::zeros(gpu, 2 * self.shape.past_side_len())?,
            span: Buffer::zeros(gpu, 2 * COUNT)?,
        })
    }

    /// [`DeviceCache::chunk_rows`](crate::device::DeviceCache::chunk_rows).
    pub(super) fn rows_before(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        if self.past.is_none() {
            self.past = Some(self.new_past(gpu)?);
        }
        self.wait_for_codes(gpu)?; // of the layer before, from the same rows
        let Some(past) = &self.past else { return Err(Error::argument("no rows for a chunk")) };
        if layer == 0 {
            let (first, count) = self.shape.encoded_by(chunk);
            past.span.write(gpu, &[first as u32, 0, 0, 0, count as u32, 0, 0, 0])?;
        }
        if chunk.position > 0 {
            self.copy_exact(gpu, past, layer, chunk.sequence, chunk.position, true)?;
            Side::ALL.into_iter().try_for_each(|side| self.decode(gpu, past, side, layer, chunk))?;
        }
        let side = |side: usize| past.rows.pointer().offset(side * self.shape.past_side_len()).cast();
        Ok(Rows { keys: side(0), values: side(1), capacity: self.shape.capacity })
    }

    /// [`DeviceCache::append`](crate::device::DeviceCache::append).
    pub(super) fn take(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        let Some(past) = &self.past else { return Err(Error::argument("a chunk without rows")) };
        self.copy_exact(gpu, past, layer, chunk.sequence, chunk.end(), false)?;
        if !self.asynchronous {
            return self.encode_chunk(&gpu.stream, past, layer, chunk);
        }
        let written = gpu.stream.record_event(None).map_err(|e| driver("record rows", e))?;
        self.background.wait(&written).map_err(|e| driver("wait for rows", e))?;
        self.encode_chunk(&self.background, past, layer, chunk)
    }

    /// Makes the stream of the steps wait for all codes that are being written.
    pub(super) fn wait_for_codes(&self, gpu: &Gpu) -> Result<()> {
        let encoded = self.background.record_event(None).map_err(|e| driver("record codes", e))?;
        gpu.stream.wait(&encoded).map_err(|e| driver("wait for codes", e))
    }

    /// Copies the exact ones of a sequence's first `tokens` tokens: to rows, or from them.
    fn copy_exact(
        &self,
        gpu: &Gpu,
        past: &Past,
        layer: usize,
        sequence: usize,
        tokens: usize,
        restore: bool,
    ) -> Result<()> {
        let Shape { batch, heads, head_dim, sinks, ring, capacity, .. } = self.shape;
        let kept = heads * (sinks + ring) * head_dim; // of one sequence
        let arguments = ExactArguments {
            kept: self.rows.pointer().offset((2 * layer * batch + sequence) * kept),
            rows: past.rows.pointer(),
            kept_side: (batch * kept / 8) as u64,
            rows_side: (self.shape.past_side_len() / 8) as u64,
            tokens: tokens as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            capacity: capacity as u32,
            restore: restore.into(),
        };
        // SAFETY: the structure is the kernel's argument; the buffers have the lengths of `new` and `new_past`,
        // and the decoder keeps tokens within the capacity.
        Ok(unsafe { past.exact.launch(gpu.stream(), Grid::new([heads, 2, 1])?, 256, false, &arguments) }?)
    }

    /// Decodes the tokens before a chunk that are not exact.
    fn decode(&self, gpu: &Gpu, past: &Past, side: Side, layer: usize, chunk: &Chunk) -> Result<()> {
        let Shape { heads, head_dim, sinks, ring, capacity, tiles, .. } = self.shape;
        let tokens = chunk.position.saturating_sub(sinks + ring);
        if tokens == 0 {
            return Ok(());
        }
        let rows = side as usize * self.shape.past_side_len() + sinks * head_dim;
        let arguments = DecodeArguments {
            codes: self.codes_of(side, layer, chunk.sequence),
            table: self.table(side, layer).cast(),
            rows: past.rows.pointer().offset(rows).cast(),
            tokens: tokens as u32,
            tiles: tiles as u32,
            capacity: capacity as u32,
        };
        let grid = Grid::new([tokens.div_ceil(TILE), heads, 1])?;
        // SAFETY: as above; the codes of these tokens have been waited for.
        Ok(unsafe { past.decode[side].launch(gpu.stream(), grid, 256, false, &arguments) }?)
    }

    fn encode_chunk(&self, stream: &CudaStream, past: &Past, layer: usize, chunk: &Chunk) -> Result<()> {
        let Shape { heads, head_dim, sinks, capacity, tiles, .. } = self.shape;
        let (first, count) = self.shape.encoded_by(chunk);
        for side in Side::ALL {
            let vectors = side as usize * self.shape.past_side_len() + (sinks + first) * head_dim;
            let arguments = EncodeArguments {
                batch: 1,
                heads,
                max_count: count,
                vectors: past.rows.pointer().offset(vectors).cast(),
                strides: [0, capacity * head_dim, head_dim],
                centroids: self.centroids_of(side, layer),
                firsts: past.span.pointer(),
                counts: past.span.pointer().offset(COUNT),
                codes: self.codes_of(side, layer, chunk.sequence),
                tiles,
                pages: None,
            };
            // SAFETY: the rows have all tokens from the first on, whose codes fit since the tokens do; attention
            // and the next chunk wait for this.
            unsafe { self.encoders[side].launch(stream.cu_stream(), &arguments) }?;
        }
        Ok(())
    }

    /// Codes of a layer and sequence.
    fn codes_of(&self, side: Side, layer: usize, sequence: usize) -> DevicePtr<u8> {
        let Shape { heads, tiles, .. } = self.shape;
        self.codes(side, layer).offset(sequence * heads * tiles * self.layouts[side].tile_len())
    }
}
