//! MILLION on a device: attention on codes of keys and values.

pub(crate) mod prefix;

use kv_attend::owner::{Footprint, Pair, Side};
use kv_gpu::pq::{Attend, AttendArguments, AttendShape, ExactTokens, Paging};
use kv_gpu::{AnyElement, DevicePtr, Element, Grid, Kernel};
use pq_core::{CodebookBuf, PqShape};

use super::codes::{TokenCodes, Transform, paging};
use super::eviction::{self, Evictions};
use super::key_means::KeyMeans;
use super::pages::Pages;
use super::row_transform::RowTransform;
use super::transformed::TransformedCodes;
use super::window::{Window, WindowShape};
use super::{ChunkCache, StepCache};
use crate::Result;
use crate::gpu::Gpu;
use crate::memory::Buffer;
use crate::plan::{Heads, PagedMemory, RowForm};
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;
use prefix::PrefixRows;

/// Bytes of shared memory that a block of `pq::Encode` takes at 64 subspaces, and what the driver reserves
/// for two blocks.
const ENCODE_SHARED_MEMORY: usize = (40 + 2) << 10;

/// MILLION: sinks and a ring of recent tokens exact, all tokens behind them as codes: `pq::Attend`.
///
/// Tokens are encoded before the ring overwrites their rows (`Evictions`): an eviction copies them
/// (`kernels/evict.cu`), so that the ring goes on meanwhile. At every step exactly the last tokens of a
/// ring's length are exact, as on the CPU with a window of that length.
///
/// With a transform it is `pqklt`: queries and keys arrive in the basis of the codes, and values are folded
/// into the model. Codes may be of keys less their rotated mean, whose part of the scores precedes attention
/// (`KeyMeans`), and of rows divided by their norms.
///
/// Codes may be in pages that sequences take as they grow (`Pages`). An eviction encodes up to the last token
/// that the ring will have let go, so the pages of a step hold what is encoded before it.
pub(crate) struct MillionCache {
    attend: Attend,
    stage: Kernel,
    element: Element,
    window: Window,
    evictions: Evictions,
    codes: TokenCodes,
    staged: Buffer<u16>, // (layer, keys and values, batch, heads, ring, head_dim)
    workspace: Buffer<u8>,
    prefix: Option<PrefixRows>, // from the first chunk of a prompt on
}

#[derive(Clone, Copy)]
#[repr(C)]
struct StageArguments {
    rows: DevicePtr<u16>,
    staged: DevicePtr<u16>,
    firsts: DevicePtr<u32>,
    counts: DevicePtr<u32>,
    sequences: u32,
    heads: u32,
    sinks: u32,
    ring: u32,
    most: u32,
    chunks: u32,
}

impl MillionCache {
    /// An empty cache; `codebooks` per layer and head, or hashed ones, of transformed rows if there is a
    /// transform.
    ///
    /// # Errors
    /// [`Error::Argument`] for too many pages; [`Error::Gpu`].
    pub fn new(
        gpu: &Gpu,
        shape: &CacheShape,
        quantizers: Pair<PqShape>,
        codebooks: Option<Heads<Pair<CodebookBuf>>>,
        transformed: Option<TransformedCodes>,
        memory: Option<PagedMemory>,
    ) -> Result<Self> {
        let &CacheShape { layers, heads, window, batch, capacity, .. } = shape;
        let evictions = Evictions::new(gpu, layers, batch, window)?;
        let pages =
            memory.map(|memory| Pages::new(gpu, memory, (batch, capacity), window.sinks)).transpose()?;
        let form = transformed.as_ref().map(|codes| codes.form);
        let transform = transformed.map(|codes| Transform::new(gpu, shape, &codes)).transpose()?;
        let attend = Attend::new(&gpu.device, kernel(shape, quantizers, form, paging(pages.is_some())))?;
        let exact = WindowShape::new(shape);
        let cache = Self {
            stage: gpu.device.kernel(&eviction::program(), "stage", 0)?,
            window: Window::new(gpu, exact)?,
            evictions,
            codes: TokenCodes::new(gpu, shape, quantizers, codebooks, transform, pages)?,
            staged: Buffer::zeros(gpu, 2 * layers * exact.side_len(exact.ring))?,
            workspace: Buffer::zeros(gpu, attend.workspace_len(batch, heads))?,
            prefix: None,
            attend,
            element: shape.element,
        };
        gpu.synchronize()?; // the tables are copied
        Ok(cache)
    }

    /// The evicted tokens of a layer: elements (batch, heads, ring, head_dim).
    fn staged(&self, layer: usize) -> Pair<DevicePtr<u16>> {
        let len = self.window.shape.side_len(self.window.shape.ring);
        Pair::of(|side| self.staged.pointer().offset((2 * layer + side as usize) * len))
    }

    /// Copies the evicted tokens of a layer.
    fn stage(&self, gpu: &Gpu, layer: usize) -> Result<()> {
        let WindowShape { batch, heads, head_dim, sinks, ring, .. } = self.window.shape;
        let stage = StageArguments {
            rows: self.window.rows(layer).keys.cast(),
            staged: self.staged(layer).keys,
            firsts: self.evictions.firsts(layer),
            counts: self.evictions.counts(layer),
            sequences: batch as u32,
            heads: heads as u32,
            sinks: sinks as u32,
            ring: ring as u32,
            most: ring as u32,
            chunks: (head_dim / 8) as u32,
        };
        let grid = Grid::new([heads, batch, 2])?;
        // SAFETY: the structure is the kernel's argument, and the buffers have the lengths of `new`. The
        // background stream no longer reads what this writes: the layer's last eviction has been waited for.
        Ok(unsafe { self.stage.launch(gpu.stream(), grid, 256, false, &stage) }?)
    }
}

/// The shape of attention to codes, of transformed rows if they have a form.
pub(crate) fn kernel(
    shape: &CacheShape,
    quantizers: Pair<PqShape>,
    form: Option<RowForm>,
    paging: Paging,
) -> AttendShape {
    let Pair { keys, values } = quantizers;
    AttendShape {
        keys,
        values,
        group: shape.group,
        element: shape.element,
        paging,
        addends: form.is_some_and(|form| form.rotated_mean),
        norms: form.is_some_and(|form| form.norms.keys.is_some()),
        exact_fp8: false,
    }
}

impl StepCache for MillionCache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn slot_mapping(&self) -> SlotMapping {
        self.window.shape.slot_mapping()
    }

    fn transform(&self) -> Option<RowTransform<'_>> {
        self.codes.row_transform()
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        let Rows { keys, values, capacity } = self.rows(layer);
        let lengths = sequences.exact_lengths;
        let arguments = AttendArguments {
            batch: self.window.shape.batch,
            heads: self.window.shape.heads,
            tiles: self.codes.tiles,
            key_codes: self.codes.of(Side::Keys, layer, 0),
            value_codes: self.codes.of(Side::Values, layer, 0),
            key_table: self.codes.table(Side::Keys, layer),
            value_table: self.codes.table(Side::Values, layer),
            queries,
            lengths: sequences.coded_lengths,
            pages: self.codes.page_table(0),
            addends: self.codes.means().map(KeyMeans::addends),
            norms: self.codes.norms(layer),
            exact: Some(ExactTokens { keys, values, lengths, capacity }),
            exact_factors: None,
            scale: 1.0 / (self.window.shape.head_dim as f32).sqrt(),
            out,
            log_sum_exp: None,
            pdl: true,
            workspace: self.workspace.pointer(),
        };
        // SAFETY: the buffers have the lengths of `new`; the caller keeps lengths within the capacity. The
        // kernel before this one writes queries and rows, which are read after the PDL wait, and neither
        // tables nor lengths.
        Ok(unsafe { self.attend.launch(gpu.stream(), &arguments) }?)
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.evictions.reset(gpu, 0)?;
        let none = vec![0; self.window.shape.batch];
        self.codes.pages.as_mut().map_or(Ok(()), |pages| pages.set_lengths(gpu, &none))
    }

    fn end(&mut self, gpu: &Gpu, sequence: usize) -> Result<()> {
        self.codes.pages.as_mut().map_or(Ok(()), |pages| pages.end(gpu, sequence))
    }

    unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        if let Some(pages) = &mut self.codes.pages {
            // SAFETY: the caller's contract.
            unsafe { pages.before_step(gpu, sequences) }?;
        }
        let Some(eviction) = self.evictions.begin(gpu, sequences)? else { return Ok(()) };
        eviction.layers().try_for_each(|layer| self.stage(gpu, layer))?;
        let stream = self.evictions.background(gpu)?;
        let encode = |layer| self.codes.encode_evicted(stream, layer, self.staged(layer), &self.evictions);
        eviction.layers().try_for_each(encode)?;
        self.evictions.end(&eviction)
    }

    fn background_shared_memory(&self) -> usize {
        if self.evictions.asynchronous { ENCODE_SHARED_MEMORY } else { 0 }
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let shape = self.window.shape;
        Footprint {
            kept: self.codes.bytes_of(shape.stored(tokens)) + shape.exact_bytes(tokens),
            working: self.staged.bytes() + self.codes.working_bytes(),
            shared: self.codes.shared_bytes(),
            ..Footprint::default()
        }
    }

    fn bytes(&self) -> usize {
        self.window.bytes() + self.staged.bytes() + self.codes.bytes()
    }
}

impl Timed for MillionCache {
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        if let Some(pages) = &mut self.codes.pages {
            pages.set_lengths_anywhere(gpu, tokens)?;
        }
        self.window.fill_random(gpu, self.element)?;
        self.codes.fill_random(gpu)?;
        self.evictions.reset(gpu, tokens)?;
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.footprint(tokens).kept
    }

    fn encode_synchronously(&mut self) {
        self.evictions.asynchronous = false;
    }
}

impl ChunkCache for MillionCache {
    fn reserve(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.codes.pages.as_mut().map_or(Ok(()), |pages| pages.reserve(gpu, lengths))
    }

    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        self.rows_before(gpu, layer, chunk)
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        let pages = self.codes.pages.as_ref();
        pages.map_or(Ok(()), |pages| pages.check_reserved(chunk.sequence, chunk.end()))?;
        self.take(gpu, layer, chunk)
    }

    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        if let Some(pages) = &mut self.codes.pages {
            pages.set_lengths(gpu, lengths)?;
        }
        self.evictions.set_lengths(gpu, lengths)
    }

    fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.codes.pages.iter_mut().for_each(|pages| pages.set_length(sequence, length));
        self.evictions.set_length(gpu, sequence, length)
    }
}
