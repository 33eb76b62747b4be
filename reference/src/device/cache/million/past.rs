//! Chunks of a prompt over MILLION's cache: its codes become rows, and it takes the chunk from there.

use cudarc::driver::CudaStream;
use kv_gpu::pq::{EncodeArguments, TILE};
use kv_gpu::{AnyElement, DevicePtr, Grid, Kernel};

use super::{MillionCache, WindowShape};
use crate::device::cache::{Chunk, Rows};
use crate::device::memory::Buffer;
use crate::device::{Gpu, programs};
use crate::side::{Pair, Side};
use crate::{Error, Result};

/// What chunks need besides the rows of all tokens.
pub(super) struct Past {
    decode: Pair<Kernel>,
    span: Buffer<u32>, // the first coded token that the chunk encodes, and at COUNT how many
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

const _: () = assert!(size_of::<DecodeArguments>() == 40);

impl MillionCache {
    /// The kernels of chunks, made for the first one.
    fn new_past(&self, gpu: &Gpu) -> Result<Past> {
        let kernel = |side: Side| {
            gpu.device.kernel(&programs::past(self.element, &self.layouts[side], side), "decode", 0)
        };
        Ok(Past {
            decode: Pair::try_of(|side| kernel(side).map_err(Error::from))?,
            span: Buffer::zeros(gpu, 2 * COUNT)?,
        })
    }

    /// [`ChunkCache::chunk_rows`](crate::device::cache::ChunkCache::chunk_rows).
    pub(super) fn rows_before(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        if self.past.is_none() {
            self.past = Some(self.new_past(gpu)?);
        }
        self.turns.wait(gpu)?; // of the layer before, from the same rows
        let rows = self.window.open(gpu, layer, chunk)?;
        let Some(past) = &self.past else { return Err(Error::argument("no kernels for a chunk")) };
        if layer == 0 {
            let (first, count) = self.window.shape.stored_by(chunk);
            past.span.write(gpu, &[first as u32, 0, 0, 0, count as u32, 0, 0, 0])?;
        }
        for (side, rows) in Side::ALL.into_iter().zip([rows.keys, rows.values]) {
            self.decode(gpu, &past.decode[side], side, layer, (chunk, rows))?;
        }
        Ok(rows)
    }

    /// [`ChunkCache::append`](crate::device::cache::ChunkCache::append).
    pub(super) fn take(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        let stream = self.turns.background(gpu)?;
        self.encode_chunk(stream, layer, chunk)
    }

    /// Decodes the tokens before a chunk that are not exact.
    fn decode(
        &self,
        gpu: &Gpu,
        decode: &Kernel,
        side: Side,
        layer: usize,
        (chunk, rows): (&Chunk, DevicePtr<AnyElement>),
    ) -> Result<()> {
        let WindowShape { heads, head_dim, sinks, capacity, .. } = self.window.shape;
        let tokens = self.window.shape.stored(chunk.position);
        if tokens == 0 {
            return Ok(());
        }
        let arguments = DecodeArguments {
            codes: self.codes_of(side, layer, chunk.sequence),
            table: self.table(side, layer).cast(),
            rows: rows.cast::<u16>().offset(sinks * head_dim).cast(),
            tokens: tokens as u32,
            tiles: self.tiles as u32,
            capacity: capacity as u32,
        };
        let grid = Grid::new([tokens.div_ceil(TILE), heads, 1])?;
        // SAFETY: the structure is the kernel's argument; the buffers have the lengths of `new`, and the
        // codes of these tokens have been waited for.
        Ok(unsafe { decode.launch(gpu.stream(), grid, 256, false, &arguments) }?)
    }

    fn encode_chunk(&self, stream: &CudaStream, layer: usize, chunk: &Chunk) -> Result<()> {
        let WindowShape { heads, head_dim, sinks, capacity, .. } = self.window.shape;
        let (first, count) = self.window.shape.stored_by(chunk);
        let Some(past) = &self.past else { return Err(Error::argument("a chunk without rows")) };
        let rows = self.window.past()?;
        for (side, rows) in Side::ALL.into_iter().zip([rows.keys, rows.values]) {
            let arguments = EncodeArguments {
                batch: 1,
                heads,
                max_count: count,
                vectors: rows.cast::<u16>().offset((sinks + first) * head_dim).cast(),
                strides: [0, capacity * head_dim, head_dim],
                centroids: self.centroids_of(side, layer),
                firsts: past.span.pointer(),
                counts: past.span.pointer().offset(COUNT),
                codes: self.codes_of(side, layer, chunk.sequence),
                tiles: self.tiles,
                pages: None,
            };
            // SAFETY: the rows have all tokens from the first on, whose codes fit since the tokens do;
            // attention and the next chunk wait for this.
            unsafe { self.encoders[side].launch(stream.cu_stream(), &arguments) }?;
        }
        Ok(())
    }

    /// Codes of a layer and sequence.
    fn codes_of(&self, side: Side, layer: usize, sequence: usize) -> DevicePtr<u8> {
        let tiles = self.window.shape.heads * self.tiles; // of a sequence
        self.codes(side, layer).offset(sequence * tiles * self.layouts[side].tile_len())
    }
}
