//! Prompt chunks over MILLION's cache: its codes are decoded to rows, and the chunk is appended from them.

use kv_attend::owner::{Pair, Side};
use kv_gpu::pq::{CodeLayout, TILE};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use super::{MillionCache, WindowShape};
use crate::gpu::Gpu;
use crate::rows::{Chunk, Rows};
use crate::{Error, Result};

/// `decode` of codes in a layout.
pub(crate) fn program(element: Element, layout: &CodeLayout, side: Side) -> Program {
    let dim = layout.shape().dim();
    let bits = (layout.table_len() / dim).ilog2() as usize;
    let defines = [
        ("ELEMENT", element as usize),
        ("HEAD_DIM", dim),
        ("KEPT_M", 8 * layout.tile_len() / TILE / bits),
        ("KEPT_BITS", bits),
    ];
    Program::own("decode_prefix.cu", include_str!("../../kernels/decode_prefix.cu"), &[], &defines)
        .define_if(side == Side::Keys, "KEYS")
}

/// What chunks need besides the rows of all tokens.
pub(super) struct PrefixRows {
    decode: Pair<Kernel>,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DecodeArguments {
    codes: DevicePtr<u8>,
    table: DevicePtr<u32>,
    rows: DevicePtr<u32>,
    pages: Option<DevicePtr<u32>>,
    tokens: u32,
    tiles: u32,
    capacity: u32,
}

const _: () = assert!(size_of::<DecodeArguments>() == 48);

impl MillionCache {
    /// The kernels of chunks, made for the first chunk.
    fn new_prefix(&self, gpu: &Gpu) -> Result<PrefixRows> {
        let kernel = |side: Side| {
            gpu.device.kernel(&program(self.element, &self.codes.layouts[side], side), "decode", 0)
        };
        Ok(PrefixRows { decode: Pair::try_of(|side| kernel(side).map_err(Error::from))? })
    }

    /// [`ChunkCache::chunk_rows`](crate::cache::ChunkCache::chunk_rows).
    pub(super) fn rows_before(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        if self.prefix.is_none() {
            self.prefix = Some(self.new_prefix(gpu)?);
        }
        self.evictions.wait(gpu)?; // of the previous layer, from the same rows
        let rows = self.window.open(gpu, layer, chunk)?;
        let Some(prefix) = &self.prefix else { return Err(Error::argument("no kernels for a chunk")) };
        self.codes.begin_chunk(gpu, chunk)?;
        for (side, rows) in Side::ALL.into_iter().zip([rows.keys, rows.values]) {
            self.decode(gpu, &prefix.decode[side], side, layer, (chunk, rows))?;
        }
        Ok(rows)
    }

    /// [`ChunkCache::append`](crate::cache::ChunkCache::append).
    pub(super) fn take(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        let stream = self.evictions.background(gpu)?;
        self.codes.encode_chunk(stream, layer, chunk, self.window.prefix()?)
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
        let rows = rows.cast::<u16>().offset(sinks * head_dim);
        let arguments = DecodeArguments {
            codes: self.codes.of(side, layer, chunk.sequence),
            table: self.codes.table(side, layer).cast(),
            rows: rows.cast(),
            pages: self.codes.page_table(chunk.sequence).map(|pages| pages.table),
            tokens: tokens as u32,
            tiles: self.codes.tiles as u32,
            capacity: capacity as u32,
        };
        let grid = Grid::new([tokens.div_ceil(TILE), heads, 1])?;
        // SAFETY: the structure is the kernel's argument; the buffers have the lengths of `new`, and the
        // codes of these tokens have been waited for.
        unsafe { decode.launch(gpu.stream(), grid, 256, false, &arguments) }?;
        self.codes.restore(gpu, (side, layer), chunk.sequence, tokens, (rows, capacity))
    }
}
