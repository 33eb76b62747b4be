//! The cache of a plan as an engine calls it: arguments are checked here, once for all caches.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use kv_attend::owner::Footprint;
use kv_gpu::pq::{Pages, Prefetch};
use kv_gpu::{AnyElement, DevicePtr};

use crate::cache::Cache;
use crate::cache::row_transform::RowTransform;
use crate::gpu::Gpu;
use crate::rows::{Chunk, Rows, Sequences, SlotMapping};
use crate::shape::CacheShape;
use crate::timed::Timed;
use crate::{Error, Result};

/// The keys and values of a batch of sequences on a device, in the form of a [`Plan`](crate::Plan).
///
/// A step writes each token's rotated keys and its values to [`Self::rows`] of every layer, at the slot
/// from [`Self::slot_mapping`], and calls [`Self::attend`] for the layer. Both may be part of a captured
/// graph: all that changes from step to step is in device memory.
///
/// Prompts are appended by chunks, many tokens of one sequence at a time: for every layer an engine writes
/// rows to [`Self::chunk_rows`], attends and calls [`Self::append`].
///
/// # Errors
/// Every call that takes a layer, a sequence, a chunk or lengths returns [`Error::Argument`] for those that
/// the cache does not have, and for another [`Gpu`] than that of [`Plan::build`](crate::Plan::build); nothing
/// has changed then. Every call with a `Gpu` returns [`Error::Gpu`] for an error of the driver.
pub struct DeviceCache {
    cache: Box<dyn Cache>,
    stream: Arc<CudaStream>, // of the GPU
    layers: usize,
    batch: usize,
    capacity: usize,
    open: Option<(usize, Chunk)>, // the layer and the chunk whose rows the engine writes
}

/// Steps.
impl DeviceCache {
    /// Exact rows of a layer.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    pub fn rows(&self, layer: usize) -> Result<Rows> {
        self.check_layer(layer)?;
        Ok(self.cache.rows(layer))
    }

    /// Which tokens have exact rows, and their slots.
    #[must_use]
    pub fn slot_mapping(&self) -> SlotMapping {
        self.cache.slot_mapping()
    }

    /// The page table of [`Self::rows`]; none if a sequence is one page.
    #[must_use]
    pub fn pages(&self) -> Option<Pages> {
        self.cache.pages()
    }

    /// The rotation that this cache applies to queries and keys after RoPE; none for the model's basis.
    #[must_use]
    pub fn transform(&self) -> Option<RowTransform<'_>> {
        self.cache.transform()
    }

    /// Work before a step, outside of its graph, such as encoding tokens that leave the window.
    ///
    /// # Errors
    /// [`Error::Pages`] if there is no page for a sequence's next token; nothing has changed then. Those of
    /// [`DeviceCache`].
    /// # Safety
    /// As [`Self::attend`].
    pub unsafe fn before_step(&mut self, gpu: &Gpu, sequences: &Sequences) -> Result<()> {
        self.check_gpu(gpu)?;
        // SAFETY: the caller's contract.
        unsafe { self.cache.before_step(gpu, sequences) }
    }

    /// Launches attention of (batch, n_heads, head_dim) rotated queries over the tokens of a layer.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds. Lengths and positions are of sequences within
    /// the capacity and as long as [`Self::set_lengths`] and the steps since then have made them; the kernel
    /// before does not write them. The rows of these tokens are written.
    pub unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()> {
        self.check_gpu(gpu)?;
        self.check_layer(layer)?;
        // SAFETY: the caller's contract.
        unsafe { self.cache.attend(gpu, layer, sequences, queries, out) }
    }

    /// Sets the weights that are read after the attention of each layer, those of its output product. A cache
    /// whose attention waits for PCIe prefetches them into L2 meanwhile.
    pub fn prefetch_next(&mut self, gpu: &Gpu, reads: &[Prefetch]) {
        self.cache.prefetch_next(gpu, reads);
    }

    /// Bytes of shared memory of a block of the background work. If a step's kernels leave them free, both
    /// share multiprocessors; else a step waits for that block to end.
    #[must_use]
    pub fn background_shared_memory(&self) -> usize {
        self.cache.background_shared_memory()
    }
}

/// Prompts, and the lengths of sequences.
impl DeviceCache {
    /// Reserves memory for sequences that have these lengths, (batch,), after the next prompts.
    ///
    /// # Errors
    /// [`Error::Pages`] if there is not enough; nothing has changed then. Those of [`DeviceCache`].
    pub fn reserve(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.check_gpu(gpu)?;
        self.check_lengths(lengths)?;
        self.cache.reserve(gpu, lengths)
    }

    /// Rows (heads, capacity, head_dim) of all tokens of a chunk's sequence up to the chunk's end; those
    /// before the chunk are as the method stores them, or as they were computed. The engine then writes the
    /// chunk's rotated keys and its values, runs attention over the rows, and calls [`Self::append`]. The
    /// tokens of a chunk thus attend to each other exactly, except for [`Self::chunk_ranks`]. Several chunks,
    /// of one sequence or of several, may pass through a layer before the first of them enters the next one.
    ///
    /// # Errors
    /// Those of [`DeviceCache`]; [`Error::DeviceMemory`] for the first chunk.
    pub fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows> {
        self.check_gpu(gpu)?;
        self.check_layer(layer)?;
        self.check_chunk(chunk)?;
        self.open = None;
        let rows = self.cache.chunk_rows(gpu, layer, chunk)?;
        self.open = Some((layer, *chunk));
        Ok(rows)
    }

    /// Launches the transform of a chunk's keys and values in the rows of [`Self::chunk_rows`], both as a
    /// model computes them without the maps that are folded into its weights.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    /// # Safety
    /// As [`RowTransform::chunk`].
    pub unsafe fn turn_stored(&self, gpu: &Gpu, layer: usize, chunk: &Chunk, rows: &Rows) -> Result<()> {
        self.check_gpu(gpu)?;
        self.check_layer(layer)?;
        self.check_chunk(chunk)?;
        // SAFETY: the caller's contract.
        unsafe { self.cache.turn_stored(gpu, layer, chunk, rows) }
    }

    /// `u32` (heads,) each: the number of components of a layer's keys, and of its values, that the queries
    /// of a chunk read; none for all of them.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    pub fn chunk_ranks(&self, layer: usize) -> Result<Option<[DevicePtr<u32>; 2]>> {
        self.check_layer(layer)?;
        Ok(self.cache.chunk_ranks(layer))
    }

    /// Whether [`Self::chunk_rows`] are the cache itself, for all layers at once: rows written there need no
    /// [`Self::append`].
    #[must_use]
    pub fn has_rows_of_all(&self) -> bool {
        self.cache.has_rows_of_all()
    }

    /// Whether [`Self::rows`] hold every token, so that [`Self::set_lengths`] may follow steps, too: none of
    /// the rows that they have written is still to be stored.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.cache.is_exact()
    }

    /// Appends the chunk's tokens from the rows of [`Self::chunk_rows`], after attention.
    ///
    /// # Errors
    /// [`Error::Argument`] for another layer or chunk than that of the last `chunk_rows`, or if memory for it
    /// has not been [reserved](Self::reserve). Those of [`DeviceCache`].
    pub fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()> {
        self.check_gpu(gpu)?;
        if self.open.take_if(|open| *open == (layer, *chunk)).is_none() {
            return Err(Error::argument("rows of this chunk and layer have not been asked for"));
        }
        self.cache.append(gpu, layer, chunk)
    }

    /// Sets the lengths of the sequences, (batch,), at which the last chunks ended. The next step may follow.
    ///
    /// # Errors
    /// Those of [`Self::reserve`].
    pub fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()> {
        self.check_gpu(gpu)?;
        self.check_lengths(lengths)?;
        self.cache.set_lengths(gpu, lengths)
    }

    /// As [`Self::set_lengths`] for one sequence. The others continue where they are.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    pub fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()> {
        self.check_gpu(gpu)?;
        self.check_sequence(sequence)?;
        self.check_length(length)?;
        self.cache.set_length(gpu, sequence, length)
    }

    /// Empties all sequences.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    pub fn clear(&mut self, gpu: &Gpu) -> Result<()> {
        self.check_gpu(gpu)?;
        self.cache.clear(gpu)
    }

    /// Empties one sequence, so that others can use its pages. It is idle at its first token until the next
    /// chunks.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    pub fn end(&mut self, gpu: &Gpu, sequence: usize) -> Result<()> {
        self.check_gpu(gpu)?;
        self.check_sequence(sequence)?;
        self.cache.end(gpu, sequence)
    }
}

/// Memory and counters.
impl DeviceCache {
    /// Maximum tokens of a sequence.
    #[must_use]
    pub const fn capacity(&self) -> usize {
        self.capacity
    }

    /// Bytes by purpose with `tokens` in every sequence, at most the capacity: only what these tokens take.
    #[must_use]
    pub fn footprint(&self, tokens: usize) -> Footprint {
        self.cache.footprint(tokens.min(self.capacity))
    }

    /// Bytes of device memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.cache.bytes()
    }

    /// Bytes of host memory that the device reads.
    #[must_use]
    pub fn host_bytes(&self) -> usize {
        self.cache.host_bytes()
    }

    /// Rows (a token's key and value of one head) read from the host so far. Waits for the last step.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    pub fn fetched_rows(&self, gpu: &Gpu) -> Result<u64> {
        self.check_gpu(gpu)?;
        self.cache.fetched_rows(gpu)
    }

    /// Bytes of a row that [`Self::fetched_rows`] counts.
    #[must_use]
    pub fn fetched_row_bytes(&self) -> usize {
        self.cache.fetched_row_bytes()
    }

    /// Exact rows selected by steps so far, over all layers and heads, if steps decide how many. Waits for
    /// the last step.
    ///
    /// # Errors
    /// Those of [`DeviceCache`].
    pub fn selected_rows(&self, gpu: &Gpu) -> Result<Option<u64>> {
        self.check_gpu(gpu)?;
        self.cache.selected_rows(gpu)
    }
}

impl Timed for DeviceCache {
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()> {
        self.check_gpu(gpu)?;
        self.check_length(tokens)?;
        self.cache.fill_random(gpu, tokens)
    }

    fn step_bytes(&self, tokens: usize) -> usize {
        self.cache.step_bytes(tokens.min(self.capacity))
    }

    fn encode_synchronously(&mut self) {
        self.cache.encode_synchronously();
    }

    fn force_hits(&mut self, share: f32) {
        self.cache.force_hits(share);
    }
}

impl DeviceCache {
    /// A cache that was built for this GPU and shape.
    pub(crate) fn new(gpu: &Gpu, shape: &CacheShape, cache: Box<dyn Cache>) -> Self {
        let &CacheShape { layers, batch, capacity, .. } = shape;
        Self { cache, stream: gpu.stream.clone(), layers, batch, capacity, open: None }
    }

    fn check_gpu(&self, gpu: &Gpu) -> Result<()> {
        match Arc::ptr_eq(&self.stream, &gpu.stream) {
            true => Ok(()),
            false => Err(Error::argument("the cache was built for another GPU or stream")),
        }
    }

    fn check_layer(&self, layer: usize) -> Result<()> {
        match layer < self.layers {
            true => Ok(()),
            false => Err(Error::Argument(format!("layer {layer} of a cache of {}", self.layers))),
        }
    }

    fn check_sequence(&self, sequence: usize) -> Result<()> {
        match sequence < self.batch {
            true => Ok(()),
            false => Err(Error::Argument(format!("sequence {sequence} of a batch of {}", self.batch))),
        }
    }

    fn check_length(&self, tokens: usize) -> Result<()> {
        match tokens <= self.capacity {
            true => Ok(()),
            false => Err(Error::Argument(format!("{tokens} tokens in a cache of {}", self.capacity))),
        }
    }

    fn check_lengths(&self, lengths: &[usize]) -> Result<()> {
        if lengths.len() != self.batch {
            return Err(Error::Argument(format!("{} lengths of a batch of {}", lengths.len(), self.batch)));
        }
        lengths.iter().try_for_each(|&tokens| self.check_length(tokens))
    }

    fn check_chunk(&self, chunk: &Chunk) -> Result<()> {
        self.check_sequence(chunk.sequence)?;
        if chunk.count == 0 {
            return Err(Error::argument("a chunk of no tokens"));
        }
        self.check_length(chunk.position.saturating_add(chunk.count))
    }
}
