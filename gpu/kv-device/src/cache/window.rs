//! Exact rows of sinks and of the most recent tokens.

use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel};

use super::eviction;
use super::prompt_rows::PromptRows;
use crate::Result;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_ROWS, fill_rows};
use crate::memory::Buffer;
use crate::rows::{Chunk, Rows, SlotMapping};
use crate::shape::CacheShape;

/// Sizes of a batch whose sinks and ring of recent tokens are exact.
#[derive(Clone, Copy)]
pub(super) struct WindowShape {
    pub n_layers: usize,
    pub batch: usize,
    pub heads: usize,
    pub head_dim: usize,
    pub sinks: usize,
    pub ring: usize,
    pub leaving: usize,  // tokens that leave these rows at once: `SlotMapping`
    pub slots: usize,    // rows per head after the exact ones, for fetched rows
    pub capacity: usize, // tokens of a sequence
}

impl WindowShape {
    pub const fn new(shape: &CacheShape) -> Self {
        let &CacheShape { layers: n_layers, heads, head_dim, window, batch, capacity, .. } = shape;
        Self {
            n_layers,
            batch,
            heads,
            head_dim,
            sinks: window.sinks,
            ring: window.recent,
            leaving: 1,
            slots: 0,
            capacity,
        }
    }

    pub const fn slot_mapping(&self) -> SlotMapping {
        let Self { sinks, ring, leaving, .. } = *self;
        SlotMapping { sinks, ring, leaving }
    }

    /// Rows per head.
    const fn rows(&self) -> usize {
        self.sinks + self.ring + self.slots
    }

    /// Elements of a layer's keys with `rows` rows per head.
    pub const fn side_len(&self, rows: usize) -> usize {
        self.batch * self.heads * rows * self.head_dim
    }

    /// Elements of the keys of all tokens of one sequence and layer.
    pub const fn past_side_len(&self) -> usize {
        self.heads * self.capacity * self.head_dim
    }

    /// The number of tokens in a sequence of `tokens` that are not exact.
    pub const fn stored(&self, tokens: usize) -> usize {
        self.slot_mapping().coded(tokens)
    }

    /// Bytes of the exact rows with `tokens` in every sequence.
    pub fn exact_bytes(&self, tokens: usize) -> usize {
        2 * self.n_layers * self.side_len(tokens - self.stored(tokens)) * size_of::<u16>()
    }

    /// Tokens after the sinks that are stored at a chunk's end, as (first, count): all up to its end, except
    /// those before the chunk that are no longer exact.
    pub const fn stored_by(&self, chunk: &Chunk) -> (usize, usize) {
        let first = self.stored(chunk.position);
        (first, chunk.end().saturating_sub(self.sinks).saturating_sub(first))
    }
}

/// The exact rows of a batch, and rows of all tokens of one sequence and layer, to which the chunks of a
/// prompt attend.
pub(super) struct Window {
    pub shape: WindowShape,
    copy: Kernel,
    rows: Buffer<u16>, // (layer, keys and values, batch, heads, sinks + ring + slots, head_dim)
    prefix: PromptRows,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExactArguments {
    kept: DevicePtr<u16>,
    rows: DevicePtr<u16>,
    kept_side: u64,
    rows_side: u64,
    tokens: u32,
    stored: u32,
    moved: u32,
    sinks: u32,
    ring: u32,
    kept_capacity: u32,
    capacity: u32,
    chunks: u32,
    restore: u32,
}

const _: () = assert!(size_of::<ExactArguments>() == 72);

impl Window {
    /// Empty rows.
    pub fn new(gpu: &Gpu, shape: WindowShape) -> Result<Self> {
        Ok(Self {
            copy: gpu.device.kernel(&eviction::program(), "exact", 0)?,
            rows: Buffer::zeros(gpu, 2 * shape.n_layers * shape.side_len(shape.rows()))?,
            prefix: PromptRows::new(shape.heads, shape.head_dim),
            shape,
        })
    }

    /// Exact rows of a layer.
    pub fn rows(&self, layer: usize) -> Rows {
        let capacity = self.shape.rows();
        let len = self.shape.side_len(capacity);
        let side = |side: usize| self.rows.pointer().offset((2 * layer + side) * len).cast();
        Rows { keys: side(0), values: side(1), capacity }
    }

    /// The slots of a layer.
    pub fn slots(&self, layer: usize) -> Rows {
        let Rows { keys, values, capacity } = self.rows(layer);
        let exact = (self.shape.sinks + self.shape.ring) * self.shape.head_dim;
        let behind = |rows: DevicePtr<AnyElement>| rows.cast::<u16>().offset(exact).cast();
        Rows { keys: behind(keys), values: behind(values), capacity }
    }

    /// Fills the rows with hashed elements.
    pub fn fill_random(&self, gpu: &Gpu, element: Element) -> Result<()> {
        let len = self.shape.side_len(self.shape.rows());
        (0..2 * self.shape.n_layers).try_for_each(|side| {
            let rows = self.rows.pointer().offset(side * len);
            fill_rows(gpu, element, rows, len, RANDOM_ROWS + side as u32)
        })
    }

    /// Rows for all tokens of a chunk's sequence. They hold the exact tokens before the chunk; the caller
    /// adds the others.
    pub fn open(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        let rows = self.prefix.open(gpu, self.shape.capacity)?;
        if chunk.position > 0 {
            self.copy(gpu, layer, chunk.sequence, chunk.position, true)?;
        }
        Ok(rows)
    }

    /// Copies the tokens that are exact after the chunk from the rows of all tokens.
    pub fn close(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.prefix.close(layer, chunk);
        self.copy(gpu, layer, chunk.sequence, chunk.end(), false)
    }

    /// Rows of all tokens, with those before the chunk: `restore` adds the first ones after the sinks, as
    /// many as it is told, unless the rows still hold them from the chunk before.
    pub fn rows_before(
        &mut self,
        gpu: &Gpu,
        layer: usize,
        chunk: &Chunk,
        restore: impl FnOnce(usize, Rows) -> Result<()>,
    ) -> Result<Rows> {
        if self.prefix.hold_those_before(layer, chunk) {
            return self.prefix();
        }
        let rows = self.open(gpu, layer, chunk)?;
        restore(self.shape.stored(chunk.position), rows)?;
        Ok(rows)
    }

    /// Invalidates the rows of all tokens, which are about to be overwritten.
    pub const fn invalidate_prefix(&mut self) {
        self.prefix.invalidate();
    }

    /// The rows of all tokens of the last [`Self::open`].
    pub fn prefix(&self) -> Result<Rows> {
        self.prefix.rows()
    }

    /// Copies the exact tokens among a sequence's first `tokens`: to the rows of all tokens, or from them.
    fn copy(&self, gpu: &Gpu, layer: usize, sequence: usize, tokens: usize, restore: bool) -> Result<()> {
        let WindowShape { batch, heads, head_dim, sinks, ring, leaving, capacity, .. } = self.shape;
        let stored = self.shape.stored(tokens);
        let kept = heads * self.shape.rows() * head_dim; // of one sequence
        let arguments = ExactArguments {
            kept: self.rows.pointer().offset((2 * layer * batch + sequence) * kept),
            rows: self.prefix()?.keys.cast(),
            kept_side: (batch * kept / 8) as u64,
            rows_side: (self.shape.past_side_len() / 8) as u64,
            tokens: tokens as u32,
            stored: stored as u32,
            moved: if leaving > 1 { stored as u32 } else { 0 },
            sinks: sinks as u32,
            ring: ring as u32,
            kept_capacity: self.shape.rows() as u32,
            capacity: capacity as u32,
            chunks: (head_dim / 8) as u32,
            restore: restore.into(),
        };
        // SAFETY: the structure is the kernel's argument; the buffers have the lengths of `new` and `open`,
        // and the decoder keeps tokens within the capacity.
        Ok(unsafe { self.copy.launch(gpu.stream(), Grid::new([heads, 2, 1])?, 256, false, &arguments) }?)
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> usize {
        self.rows.bytes() + self.prefix.bytes()
    }
}
