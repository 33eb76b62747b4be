mod launch;
mod train;

use kv_gpu::pq::{EncodeGeneric, EncodeGenericShape, Lut, LutShape, Search, SearchShape, TrainShape};
use kv_gpu::svd::{Attend, AttendShape};
use kv_gpu::{AnyElement, DevicePtr, Element};
use pq_core::{CodebookBuf, GroupRule, PqShape};

use super::codes::{RANDOM_BOOKS, RANDOM_CODES, fill_codes, random_codebook};
use super::row_store::{RowStore, StoreShape};
use super::span::Span;
use super::step_budget::StepBudget;
use super::turns::Turns;
use super::window::{Window, WindowShape};
use super::{Chunk, ChunkCache, DeviceCache, Room, Rows, Sequences, check_tokens};
use crate::Result;
use crate::cache::Footprint;
use crate::device::Gpu;
use crate::device::memory::Buffer;
use crate::method::Retrieval;
use crate::model::Config;
use train::Training;

/// Bytes by which layers of codes are aligned.
const ALIGNMENT: usize = 256;

/// Bytes of shared memory that the driver reserves for two blocks.
const RESERVED_SHARED_MEMORY: usize = 2 << 10;

/// PQCache: codes of keys on the device, exact rows of all tokens in page-locked host memory.
///
/// For each layer a step makes the lookup tables of its queries (`pq::Lut`), finds the best tokens
/// (`pq::Search`), reads the rows that the last step has not chosen over PCIe (`RowStore`) and attends to
/// all together with sinks and window (`svd::Attend` at full rank). Codebooks are the profile's, or those that a
/// sequence's prompt trains (`Training`). Chosen rows have slots behind the exact
/// ones, so that one launch attends to both. All lengths are on the device.
pub struct PqCache {
    kernels: Kernels,
    element: Element,
    window: Window, // chosen rows are in its slots
    store: RowStore,
    codes: Buffer<u8>,      // (layer, (batch, heads, codes of `stored` keys), padded)
    centroids: Buffer<f32>, // (layer, books, heads, m, ksub, dsub)
    training: Option<Training>,
    turns: Turns,
    budget: StepBudget,
    ranks: Buffer<u32>,
    offsets: Buffer<u64>,
    scratch: Scratch,
    span: Span, // that a chunk encodes
    retrieval: Retrieval,
    shape: Shape,
}

struct Kernels {
    lut: Lut,
    search: Search,
    attend: Attend,
    encode: EncodeGeneric,
}

/// What one layer after the other uses within a step.
struct Scratch {
    luts: Buffer<f32>,   // (batch, heads, group, m, ksub)
    tokens: Buffer<u32>, // (batch, heads, most)
    found: Buffer<u32>,  // (batch,)
    search: Buffer<u8>,
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
    codes: usize,  // bytes of a layer's codes, padded
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
    /// [`Error::Argument`](crate::Error::Argument) for a window of an odd number of tokens, or none, and for
    /// more tokens than 32 bits count; [`Error::Device`](crate::Error::Device).
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn new(
        gpu: &Gpu,
        config: &Config,
        element: Element,
        retrieval: Retrieval,
        codebooks: Option<Vec<Vec<CodebookBuf>>>,
        window: pq_core::Window,
        batch: usize,
        capacity: usize,
    ) -> Result<Self> {
        let (n_layers, quantizer) = (config.n_layers, retrieval.quantizer);
        let (heads, group, head_dim) = (config.n_kv_heads, config.gqa_group(), config.head_dim);
        let stored = capacity.saturating_sub(window.sinks).max(1);
        let (sinks, ring) = (window.sinks, window.recent);
        let turns = Turns::new(gpu, n_layers, batch, window)?;
        let most = retrieval.budget.k(stored, sinks + ring);
        let store =
            StoreShape { n_layers, batch, heads, head_dim, sinks, ring, stored, most, staged_sides: 1 };
        let store = RowStore::new(gpu, element, store, retrieval.home)?;
        check_tokens(capacity)?;
        let codes = (batch * heads * quantizer.codes_len(stored)).next_multiple_of(ALIGNMENT);
        let books = if retrieval.training.is_some() { batch } else { 1 };
        let shape =
            Shape { n_layers, batch, books, heads, group, head_dim, sinks, ring, stored, most, codes };
        let window = WindowShape { slots: most, ..WindowShape::new(config, window, batch, capacity) };
        let kernels = Kernels::new(gpu, element, retrieval, &shape)?;
        let trained = TrainShape { quantizer, element: element.into() };
        let training = Training::new(gpu, &retrieval, trained, batch)?;
        let codebooks = match codebooks {
            Some(codebooks) => codebooks,
            None => random_codebooks(n_layers, heads, quantizer)?,
        };
        let of_books = |layer: &Vec<CodebookBuf>| -> Vec<f32> {
            layer.iter().flat_map(CodebookBuf::centroids).collect::<Vec<f32>>().repeat(books)
        };
        let centroids: Vec<f32> = codebooks.iter().flat_map(of_books).collect();
        let offsets: Vec<u64> = (0..heads).map(|head| (head * head_dim) as u64).collect();
        let cache = Self {
            window: Window::new(gpu, window)?,
            store,
            codes: Buffer::zeros(gpu, n_layers * codes)?,
            centroids: Buffer::of(gpu, &centroids)?,
            training,
            turns,
            budget: StepBudget::new(gpu, retrieval.budget, sinks + ring, batch, heads)?,
            ranks: Buffer::of(gpu, &vec![head_dim as u32; heads])?,
            offsets: Buffer::of(gpu, &offsets)?,
            scratch: Scratch::new(gpu, &kernels, retrieval, &shape)?,
            span: Span::new(gpu)?,
            kernels,
            element,
            retrieval,
            shape,
        };
        gpu.synchronize()?; // the codebooks are copied
        Ok(cache)
    }

    /// Codes of a layer from a sequence on.
    fn codes(&self, layer: usize, sequence: usize) -> DevicePtr<u8> {
        let of_sequence = self.shape.heads * self.retrieval.quantizer.codes_len(self.shape.stored);
        self.codes.pointer().offset(layer * self.shape.codes + sequence * of_sequence)
    }

    /// Codebooks of a layer's heads for a sequence.
    fn centroids(&self, layer: usize, sequence: usize) -> DevicePtr<f32> {
        let Shape { books, heads, .. } = self.shape;
        let book = layer * books + if books == 1 { 0 } else { sequence };
        self.centroids.pointer().offset(book * heads * self.retrieval.quantizer.codebook_len())
    }
}

impl Kernels {
    fn new(gpu: &Gpu, element: Element, retrieval: Retrieval, shape: &Shape) -> Result<Self> {
        let device = &gpu.device;
        let (quantizer, group) = (retrieval.quantizer, shape.group);
        let vectors = element.into();
        Ok(Self {
            lut: Lut::new(device, LutShape { quantizer, group, element: vectors })?,
            search: Search::new(device, SearchShape { quantizer, group, rule: GroupRule::SumOfSoftmax })?,
            attend: Attend::new(device, AttendShape { dim: shape.head_dim, element })?,
            encode: EncodeGeneric::new(device, EncodeGenericShape { quantizer, element: vectors })?,
        })
    }
}

impl Scratch {
    fn new(gpu: &Gpu, kernels: &Kernels, retrieval: Retrieval, shape: &Shape) -> Result<Self> {
        let Shape { batch, heads, group, stored, most, .. } = *shape;
        let words = |n| Buffer::<u32>::zeros(gpu, n);
        Ok(Self {
            luts: Buffer::zeros(gpu, batch * heads * group * retrieval.quantizer.lut_len())?,
            tokens: words(batch * heads * most)?,
            found: words(batch)?,
            search: Buffer::zeros(gpu, kernels.search.workspace_len(batch, heads, stored))?,
            attend: Buffer::zeros(gpu, kernels.attend.workspace_len(batch, heads, group))?,
        })
    }
}

impl DeviceCache for PqCache {
    fn rows(&self, layer: usize) -> Rows {
        self.window.rows(layer)
    }

    fn room(&self) -> Room {
        self.window.shape.room()
    }

    fn attend(
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
        self.launch_search(gpu, layer, sequences, queries)?;
        let chosen = (self.scratch.tokens.pointer(), self.budget.counts());
        self.store.fetch(gpu, layer, chosen, self.window.slots(layer))?;
        self.launch_attend(gpu, layer, queries, out)
    }

    fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.training.iter_mut().for_each(Training::clear);
        self.window.forget_past();
        self.store.forget(gpu)?;
        self.turns.restart_at(gpu, 0)
    }

    fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        self.train_on_ring(gpu)?;
        let Some(turn) = self.turns.begin(gpu, sequences)? else { return Ok(()) };
        turn.layers()
            .try_for_each(|layer| self.store.take_turn(gpu, layer, self.rows(layer), &self.turns))?;
        let background = self.turns.background(gpu)?;
        turn.layers().try_for_each(|layer| self.launch_encode(background, layer))?;
        self.turns.end(&turn)
    }

    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.window.fill_random(gpu, self.element)?;
        self.store.fill_random(gpu, self.element, |layer| self.rows(layer))?;
        fill_codes(gpu, &self.codes, RANDOM_CODES)?;
        self.training.iter_mut().for_each(Training::use_hashed);
        self.store.forget(gpu)?;
        self.turns.restart_at(gpu, tokens)?;
        gpu.synchronize()
    }

    fn encode_synchronously(&mut self) {
        self.turns.asynchronous = false;
    }

    fn background_shared_memory(&self) -> usize {
        self.kernels.encode.shared_memory() + RESERVED_SHARED_MEMORY
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        let Shape { n_layers, batch, heads, sinks, ring, .. } = self.shape;
        let exact = tokens.min(sinks + ring);
        let coded = tokens - exact;
        let k = self.retrieval.budget.k(coded, sinks + ring);
        let codes = batch * heads * self.retrieval.quantizer.codes_len(coded);
        n_layers * (codes + 4 * self.shape.side_len(exact + k))
    }

    fn footprint(&self, tokens: usize) -> Footprint {
        let Shape { n_layers, batch, heads, sinks, ring, most, .. } = self.shape;
        let exact = tokens.min(sinks + ring);
        let codes = batch * heads * self.retrieval.quantizer.codes_len(tokens - exact);
        let rows = |rows| 4 * n_layers * self.shape.side_len(rows); // keys and values of 16 bits
        let (own, shared) = match self.training {
            Some(_) => (self.centroids.bytes(), 0),
            None => (0, self.centroids.bytes()),
        };
        Footprint {
            kept: n_layers * codes + rows(exact) + own,
            offloaded: n_layers * batch * heads * (tokens - exact) * self.store.pair_bytes(),
            working: self.store.staged_bytes() + rows(most),
            shared,
        }
    }

    fn bytes(&self) -> usize {
        self.window.bytes() + self.codes.bytes() + self.centroids.bytes() + self.store.bytes()
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

    fn force_hits(&mut self, share: f32) {
        self.store.force_hits(share);
    }
}

impl ChunkCache for PqCache {
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        self.turns.wait(gpu)?; // of the layer before, from the same rows
        let (first, count) = self.window.shape.stored_by(chunk);
        self.span.write(gpu, first, count)?;
        if layer == 0 {
            self.begin_training(gpu, chunk)?;
        }
        if self.window.holds_past(layer, chunk) {
            return self.window.past();
        }
        let rows = self.window.open(gpu, layer, chunk)?;
        let stored = self.window.shape.stored(chunk.position);
        self.store.restore(gpu, layer, chunk.sequence, stored, rows)?;
        Ok(rows)
    }

    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.window.close(gpu, layer, chunk)?;
        let tokens = self.window.shape.stored_by(chunk);
        let stream = self.turns.background(gpu)?;
        self.store.take_chunk(gpu, stream, layer, chunk, tokens, self.window.past()?)?;
        self.train(stream, layer, chunk)?;
        self.launch_encode_chunk(stream, layer, chunk)?;
        if layer + 1 == self.shape.n_layers && self.trains_on(chunk) {
            self.training.iter_mut().for_each(|training| training.end(chunk.sequence));
        }
        Ok(())
    }

    fn settle(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        let encoded = lengths.iter().map(|length| length.saturating_sub(self.shape.sinks));
        let encoded: Vec<usize> = encoded.collect();
        self.training.iter_mut().for_each(|training| training.settle(lengths));
        self.window.forget_past();
        self.store.forget(gpu)?;
        self.turns.restart(gpu, &encoded)
    }
}

/// Codebooks for timing, hashed: the same for all heads of a layer.
fn random_codebooks(n_layers: usize, heads: usize, quantizer: PqShape) -> Result<Vec<Vec<CodebookBuf>>> {
    let layer = |layer| Ok(vec![random_codebook(quantizer, RANDOM_BOOKS + 2 * layer as u32)?; heads]);
    (0..n_layers).map(layer).collect()
}
