//! PQCache on a device: attention to exact rows of the host, selected by codes of their keys.

mod index;
mod launch;
mod train;

use kv_attend::owner::Footprint;
use kv_gpu::pq::{GatherAttend, GatherAttendShape, Prefetch, TrainShape};
use kv_gpu::{AnyElement, DevicePtr, Element};
use pq_core::{CodebookBuf, PqShape};

use super::eviction::Evictions;
use super::row_store::{RowStore, StoreShape};
use super::span::Span;
use super::step_budget::StepBudget;
use super::window::{Window, WindowShape};
use super::{ChunkCache, StepCache};
use crate::Result;
use crate::gpu::Gpu;
use crate::hashed::{RANDOM_BOOKS, RANDOM_CODES, random_codebook};
use crate::memory::Buffer;
use crate::plan::Retrieval;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;
use index::{Kernels, KeyIndex, Wanted};
use train::Training;

/// PQCache: codes of keys on the device, exact rows of all tokens in memory of the host.
///
/// For each layer a step finds the best tokens by their codes (`KeyIndex`), looks up which of their rows are
/// here since recent steps (`RowStore`) and attends to all together with sinks and window
/// (`pq::GatherAttend`), to the others as they arrive over PCIe. Codebooks are the profile's, or those that a
/// sequence's prompt trains (`Training`). Rows stay in slots behind the exact ones. All lengths are on the
/// device.
pub(crate) struct PqCache {
    index: KeyIndex,
    attend: GatherAttend,
    element: Element,
    window: Window, // rows of the host stay in its slots
    store: RowStore,
    training: Option<Training>,
    evictions: Evictions,
    budget: StepBudget,
    scratch: Scratch,
    span: Span, // that a chunk encodes
    retrieval: Retrieval,
    shape: Shape,
}

/// What one layer after the other uses within a step.
struct Scratch {
    tokens: Buffer<u32>, // (batch, heads, most)
    attend: Buffer<u8>,
}

/// Sizes of the cache.
#[derive(Clone, Copy)]
struct Shape {
    n_layers: usize,
    batch: usize,
    books: usize, // sets of codebooks: one, or one a sequence where its prompt trains them
    heads: usize,
    group: usize,
    head_dim: usize,
    sinks: usize,
    ring: usize,
    stored: usize, // tokens of a sequence that the host has room for
    most: usize,   // tokens of a sequence that a step chooses at most
    held: usize,   // rows of a head that stay on the device, at least `most`
}

impl Shape {
    /// Elements of a layer's keys of `rows` rows a head.
    const fn side_len(&self, rows: usize) -> usize {
        self.batch * self.heads * rows * self.head_dim
    }
}

impl PqCache {
    /// An empty cache; `codebooks` per layer and head, or hashed ones.
    ///
    /// # Errors
    /// [`Error::HostMemory`](crate::Error::HostMemory) when the host has no room for the rows;
    /// [`Error::Gpu`](crate::Error::Gpu).
    pub fn new(
        gpu: &Gpu,
        sizes: &CacheShape,
        retrieval: Retrieval,
        codebooks: Option<Vec<Vec<CodebookBuf>>>,
    ) -> Result<Self> {
        let &CacheShape {
            layers: n_layers, heads, group, head_dim, element, window, batch, capacity, ..
        } = sizes;
        let quantizer = retrieval.quantizer;
        let stored = capacity.saturating_sub(window.sinks).max(1);
        let (sinks, ring) = (window.sinks, window.recent);
        let evictions = Evictions::new(gpu, n_layers, batch, window)?;
        let most = retrieval.budget.k(stored, sinks + ring);
        let store =
            StoreShape { n_layers, batch, heads, head_dim, sinks, ring, stored, most, staged_sides: 1 };
        let held = retrieval.resident.min(stored).max(most);
        let store = RowStore::new(gpu, element, store, retrieval.home, held)?;
        let books = if retrieval.training.is_some() { batch } else { 1 };
        let shape = Shape { n_layers, batch, books, heads, group, head_dim, sinks, ring, stored, most, held };
        let window = WindowShape { slots: held, ..WindowShape::new(sizes) };
        let attend = GatherAttend::new(&gpu.device, GatherAttendShape { dim: head_dim, element })?;
        let trained = TrainShape { quantizer, element: element.into() };
        let training = Training::new(gpu, retrieval.training, trained, batch)?;
        let codebooks = match codebooks {
            Some(codebooks) => codebooks,
            None => random_codebooks(n_layers, heads, quantizer)?,
        };
        let cache = Self {
            window: Window::new(gpu, window)?,
            store,
            index: KeyIndex::new(gpu, element, quantizer, &codebooks, shape)?,
            training,
            evictions,
            budget: StepBudget::new(gpu, retrieval.budget, sinks + ring, batch, heads)?,
            scratch: Scratch {
                tokens: Buffer::zeros(gpu, batch * heads * most)?,
                attend: Buffer::zeros(gpu, attend.workspace_len(batch, heads, group))?,
            },
            span: Span::new(gpu)?,
            attend,
            element,
            retrieval,
            shape,
        };
        gpu.synchronize()?; // the codebooks are copied
        Ok(cache)
    }
}

/// Rejects codes that the kernels of the index, or of the training, do not support.
pub(crate) fn check_kernels(shape: &CacheShape, retrieval: &Retrieval) -> Result<()> {
    let (quantizer, element) = (retrieval.quantizer, shape.element);
    Kernels { quantizer, group: shape.group, element }.check()?;
    let trained = TrainShape { quantizer, element: element.into() };
    let checked = retrieval.training.map(|_| trained.program());
    Ok(checked.transpose().map(drop)?)
}

impl StepCache for PqCache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn slot_mapping(&self) -> SlotMapping {
        self.window.shape.slot_mapping()
    }

    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        if layer == 0 {
            self.budget.launch(gpu, sequences)?;
        }
        let tokens = self.scratch.tokens.pointer();
        let (lengths, ks) = (sequences.coded_lengths, self.budget.ks());
        self.index.find(gpu, layer, &Wanted { queries, lengths, ks, tokens })?;
        // SAFETY: the caller's contract.
        unsafe { self.launch_attend(gpu, layer, sequences, queries, out) }
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.training.iter_mut().for_each(Training::clear);
        self.window.invalidate_prefix();
        self.store.invalidate(gpu)?;
        self.evictions.reset(gpu, 0)
    }

    fn end(&mut self, _gpu: &Gpu, sequence: usize) -> Result<()> {
        self.training.iter_mut().for_each(|training| training.invalidate(sequence));
        Ok(())
    }

    unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        self.train_on_ring(gpu)?;
        let Some(eviction) = self.evictions.begin(gpu, sequences)? else { return Ok(()) };
        eviction
            .layers()
            .try_for_each(|layer| self.store.evict(gpu, layer, self.rows(layer), &self.evictions))?;
        let background = self.evictions.background(gpu)?;
        eviction.layers().try_for_each(|layer| self.launch_encode(background, layer))?;
        self.evictions.end(&eviction)
    }

    fn prefetch_next(&mut self, gpu: &Gpu, reads: &[Prefetch]) {
        self.store.prefetch_next(gpu, reads);
    }

    fn background_shared_memory(&self) -> usize {
        self.index.background_shared_memory()
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let Shape { n_layers, batch, heads, sinks, ring, held, .. } = self.shape;
        let exact = tokens.min(sinks + ring);
        let codes = batch * heads * self.index.head_len(tokens - exact);
        let rows = |rows| 4 * n_layers * self.shape.side_len(rows); // keys and values of 16 bits
        let (own, shared) = match self.training {
            Some(_) => (self.index.book_bytes(), 0),
            None => (0, self.index.book_bytes()),
        };
        Footprint {
            kept: n_layers * codes + rows(exact) + own,
            offloaded: n_layers * batch * heads * (tokens - exact) * self.store.pair_bytes(),
            working: self.store.staged_bytes() + rows(held),
            shared,
        }
    }

    fn bytes(&self) -> usize {
        let codes = self.index.code_bytes() + self.index.book_bytes();
        self.window.bytes() + codes + self.store.bytes()
    }

    fn host_bytes(&self) -> usize {
        self.store.host_bytes()
    }

    fn fetched_rows(&self, gpu: &Gpu) -> Result<u64> {
        self.store.fetched(gpu)
    }

    fn fetched_row_bytes(&self) -> usize {
        self.store.pair_bytes()
    }
}

impl Timed for PqCache {
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        self.store.fill_random(gpu, self.element, |layer| self.rows(layer))?;
        self.index.fill_random(gpu, RANDOM_CODES)?;
        self.training.iter_mut().for_each(Training::use_hashed);
        self.store.invalidate(gpu)?;
        self.evictions.reset(gpu, tokens)?;
        gpu.synchronize()
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        let Shape { n_layers, batch, heads, sinks, ring, .. } = self.shape;
        let exact = tokens.min(sinks + ring);
        let coded = tokens - exact;
        let k = self.retrieval.budget.k(coded, sinks + ring);
        let codes = batch * heads * self.index.head_len(coded);
        n_layers * (codes + 4 * self.shape.side_len(exact + k))
    }

    fn encode_synchronously(&mut self) {
        self.evictions.asynchronous = false;
    }

    fn force_hits(&mut self, share: f32) {
        self.store.force_hits(share);
    }
}

impl ChunkCache for PqCache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        self.evictions.wait(gpu)?; // of the layer before, from the same rows
        let (first, count) = self.window.shape.stored_by(chunk);
        self.span.write(gpu, first, count)?;
        self.begin_training(gpu, chunk)?;
        self.window.rows_before(gpu, layer, chunk, |stored, rows| {
            self.store.restore(gpu, layer, chunk.sequence, stored, rows)
        })
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        let tokens = self.window.shape.stored_by(chunk);
        let stream = self.evictions.background(gpu)?;
        self.store.take_chunk(stream, layer, chunk, tokens, self.window.prefix()?)?;
        self.train(stream, layer, chunk)?;
        self.launch_encode_chunk(stream, layer, chunk)?;
        if layer + 1 == self.shape.n_layers && self.trains_on(chunk) {
            self.training.iter_mut().for_each(|training| training.end(chunk.sequence));
        }
        Ok(())
    }

    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        let sequences = lengths.iter().copied().enumerate();
        sequences.for_each(|(sequence, length)| self.set_trained_length(sequence, length));
        self.window.invalidate_prefix();
        self.store.invalidate(gpu)?;
        self.evictions.set_lengths(gpu, lengths)
    }

    fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.set_trained_length(sequence, length);
        self.window.invalidate_prefix();
        self.store.invalidate_one(gpu, sequence)?;
        self.evictions.set_length(gpu, sequence, length)
    }
}

/// Codebooks for timing, hashed: the same for all heads of a layer.
fn random_codebooks(n_layers: usize, heads: usize, quantizer: PqShape) -> Result<Vec<Vec<CodebookBuf>>> {
    let layer = |layer| Ok(vec![random_codebook(quantizer, RANDOM_BOOKS + 2 * layer as u32, 1.0)?; heads]);
    (0..n_layers).map(layer).collect()
}
