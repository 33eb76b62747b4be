//! Dense rows in pages, which sequences take as they grow.

use std::ops::Range;

use kv_attend::owner::Footprint;
use kv_gpu::pq::Pages as PageTable;
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel, Program};

use super::full_rank::FullRank;
use super::pages::Pages;
use super::prompt_rows::PromptRows;
use super::{ChunkCache, StepCache};
use crate::Result;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_ROWS, fill_rows};
use crate::memory::Buffer;
use crate::plan::PagedMemory;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;

/// `copy` of the rows of pages.
pub(crate) fn program() -> Program {
    Program::own("pages.cu", include_str!("../kernels/pages.cu"), &[], &[])
}

/// Blocks that copy the rows of a head.
const COPY_BLOCKS: usize = 64;

/// Every token exact, as in [`DenseCache`](super::dense::DenseCache), in pages granted as sequences grow:
/// memory follows the number of tokens, not the capacity of the sequences.
///
/// Steps write and read pages through the page table on the device. The chunks of a prompt attend to rows of
/// all tokens of one sequence and layer (`PromptRows`): pages are copied to these rows once per segment, and
/// each chunk is copied from them to its pages.
pub(crate) struct PagedCache {
    attend: FullRank,
    copy: Kernel,
    element: Element,
    rows: Buffer<u16>, // (layer, keys and values, pages, heads, page, head_dim)
    pages: Pages,
    prompt: PromptRows,
    batch: usize,
    heads: usize,
    head_dim: usize,
    n_layers: usize,
    capacity: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct CopyArguments {
    paged: DevicePtr<AnyElement>,
    rows: DevicePtr<AnyElement>,
    pages: DevicePtr<u32>,
    paged_side: u64,
    rows_side: u64,
    first: u32,
    count: u32,
    page_tokens: u32,
    capacity: u32,
    chunks: u32,
    restore: u32,
}

const _: () = assert!(size_of::<CopyArguments>() == 64);

/// The direction of a copy.
#[derive(Clone, Copy, PartialEq, Eq)]
enum To {
    Rows,
    Pages,
}

impl PagedCache {
    /// An empty cache.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for too many pages;
    /// [`Error::DeviceMemory`](crate::Error::DeviceMemory); [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(gpu: &Gpu, shape: &CacheShape, memory: PagedMemory) -> Result<Self> {
        let &CacheShape { layers: n_layers, heads, head_dim, element, batch, capacity, .. } = shape;
        let pages = Pages::new(gpu, memory, (batch, capacity), 0)?;
        Ok(Self {
            attend: FullRank::new(gpu, shape, true)?,
            copy: gpu.device.kernel(&program(), "copy", 0)?,
            element,
            rows: Buffer::zeros(gpu, 2 * n_layers * pages.count() * heads * pages.page() * head_dim)?,
            pages,
            prompt: PromptRows::new(heads, head_dim),
            batch,
            heads,
            head_dim,
            n_layers,
            capacity,
        })
    }

    /// Elements of a layer's keys.
    const fn side_len(&self) -> usize {
        self.pages.count() * self.heads * self.pages.page() * self.head_dim
    }

    /// Copies tokens of a sequence and layer between its pages and the rows of a prompt.
    fn copy(&self, gpu: &Gpu, layer: usize, sequence: usize, tokens: Range<usize>, to: To) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        let (Rows { keys: paged, capacity: page, .. }, rows) = (self.rows(layer), self.prompt.rows()?);
        let arguments = CopyArguments {
            paged,
            rows: rows.keys,
            pages: self.pages.table(sequence).table,
            paged_side: (self.side_len() / 8) as u64,
            rows_side: (self.heads * rows.capacity * self.head_dim / 8) as u64,
            first: tokens.start as u32,
            count: tokens.len() as u32,
            page_tokens: page as u32,
            capacity: rows.capacity as u32,
            chunks: (self.head_dim / 8) as u32,
            restore: u32::from(to == To::Rows),
        };
        let grid = Grid::new([COPY_BLOCKS, self.heads, 2])?;
        // SAFETY: the structure is the kernel's argument; the sequence has pages for the tokens, and the rows
        // have room for them.
        Ok(unsafe { self.copy.launch(gpu.stream(), grid, 256, false, &arguments) }?)
    }
}

impl StepCache for PagedCache {
    fn rows(&self, layer: usize) -> Rows {
        let side = |side: usize| self.rows.pointer().offset((2 * layer + side) * self.side_len()).cast();
        Rows { keys: side(0), values: side(1), capacity: self.pages.page() }
    }

    fn slot_mapping(&self) -> SlotMapping {
        SlotMapping { sinks: self.capacity, ring: 0, leaving: 1 }
    }

    fn pages(&self) -> Option<PageTable> {
        Some(self.pages.table(0))
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let (rows, lengths) = ((self.rows(layer), self.pages()), sequences.exact_lengths);
        // SAFETY: the buffers have the lengths of `new`; sequences have pages for their tokens, which
        // `before_step` has granted, or the spare page for the one token of an empty sequence. The preceding
        // kernel writes queries and rows, but not lengths: `begin` has written them.
        unsafe { self.attend.launch(gpu, rows, lengths, queries, out, None) }
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.set_lengths(gpu, &vec![0; self.batch])
    }

    fn end(&mut self, gpu: &Gpu, sequence: usize) -> Result<()> {
        self.pages.end(gpu, sequence)
    }

    unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.pages.before_step(gpu, sequences) }
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let kept = self.step_bytes(tokens.next_multiple_of(self.pages.page()));
        Footprint { kept, working: self.pages.bytes(), ..Footprint::default() }
    }

    fn bytes(&self) -> usize {
        self.rows.bytes() + self.pages.bytes() + self.prompt.bytes()
    }
}

impl Timed for PagedCache {
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.pages.set_lengths_anywhere(gpu, tokens)?;
        for (tensor, side) in (0..2 * self.n_layers).enumerate() {
            let at = self.rows.pointer().offset(side * self.side_len());
            fill_rows(gpu, self.element, at, self.side_len(), RANDOM_ROWS + tensor as u32)?;
        }
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        4 * self.n_layers * self.batch * self.heads * tokens * self.head_dim
    }
}

impl ChunkCache for PagedCache {
    fn reserve(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.pages.reserve(gpu, lengths)
    }

    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        // Powers of two, so that a prompt that grows chunk by chunk seldom reallocates.
        let room = chunk.end().next_power_of_two().min(self.capacity);
        let rows = self.prompt.open(gpu, room)?;
        if !self.prompt.hold_those_before(layer, chunk) {
            self.copy(gpu, layer, chunk.sequence, 0..chunk.position, To::Rows)?;
        }
        Ok(rows)
    }

    fn is_exact(&self) -> bool {
        true
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.pages.check_reserved(chunk.sequence, chunk.end())?;
        self.prompt.close(layer, chunk);
        self.copy(gpu, layer, chunk.sequence, chunk.position..chunk.end(), To::Pages)
    }

    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.prompt.invalidate();
        self.pages.set_lengths(gpu, lengths)
    }

    fn set_length(&mut self, _gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.prompt.invalidate();
        self.pages.set_length(sequence, length);
        Ok(())
    }
}
