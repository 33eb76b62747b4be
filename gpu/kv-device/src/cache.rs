//! KV caches on a device: the traits that an engine calls.

pub(crate) mod cachegen;
pub(crate) mod codes;
pub(crate) mod dense;
pub(crate) mod eviction;
mod full_rank;
pub(crate) mod hybrid;
pub(crate) mod int4;
mod key_means;
pub(crate) mod merge;
pub(crate) mod million;
pub(crate) mod paged;
mod pages;
pub(crate) mod pqcache;
mod prompt_rows;
pub(crate) mod row_store;
mod span;
pub(crate) mod sq;
mod step_budget;
pub(crate) mod transformed;
mod window;
pub(crate) mod zack;

use kv_attend::owner::Footprint;
use kv_gpu::pq::{Pages, Prefetch};
use kv_gpu::{AnyElement, DevicePtr};

use crate::Result;
use crate::bases::{Bases, Place, TurnedRows};
use crate::gpu::Gpu;
use crate::rows::{Chunk, Room, Rows, Sequences};
use key_means::KeyMeans;

/// The bases in which a cache takes rotated queries and keys: what an engine applies to them after RoPE.
#[derive(Clone, Copy)]
pub struct RowTransform<'a> {
    pub(crate) bases: &'a Bases,
    /// Means less which keys are coded. A step computes their part of the scores before queries leave the
    /// model's basis.
    pub(crate) means: Option<&'a KeyMeans>,
}

impl RowTransform<'_> {
    /// Launches the transform of a step's rotated queries (batch, n_heads, head_dim), and of the keys in the
    /// rows of a layer, the `slots`, `u32` (batch,), of all rows of its first head.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    /// # Safety
    /// As [`DeviceCache::attend`]; the rows at the slots are written.
    pub unsafe fn step(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<u16>,
        rows: &Rows,
        (slots, batch): (DevicePtr<u32>, usize),
    ) -> Result<()> {
        if let Some(means) = self.means {
            // SAFETY: the caller's contract.
            unsafe { means.launch(gpu, layer, sequences, queries.cast()) }?;
        }
        let (keys, capacity) = (rows.keys, rows.capacity);
        let rows = TurnedRows { queries, keys, capacity, tokens: batch, place: Place::Slots(slots) };
        // SAFETY: the caller's contract.
        unsafe { self.bases.turn(gpu, layer, &rows) }
    }

    /// Launches the transform of a chunk's rotated queries (count, n_heads, head_dim), and of its keys in the
    /// rows of [`ChunkCache::chunk_rows`].
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds; the chunk's keys are written.
    pub unsafe fn chunk(
        &self,
        gpu: &Gpu,
        layer: usize,
        chunk: &Chunk,
        queries: DevicePtr<u16>,
        rows: &Rows,
    ) -> Result<()> {
        let (keys, capacity) = (rows.keys, rows.capacity);
        let place = Place::From(chunk.position);
        let rows = TurnedRows { queries, keys, capacity, tokens: chunk.count, place };
        // SAFETY: the caller's contract.
        unsafe { self.bases.turn(gpu, layer, &rows) }
    }
}

/// The keys and values of a batch of sequences, in a method's form on the device.
///
/// A step writes each token's rotated keys and its values to [`Self::rows`] of every layer, at the slot from
/// [`Self::room`], and calls [`Self::attend`] for the layer. Both are part of a captured graph: all that
/// changes from step to step is in device memory.
pub trait DeviceCache: ChunkCache + Timed {
    /// Exact rows of a layer.
    fn rows(&self, layer: usize) -> Rows;

    /// Room for the tokens of a sequence.
    fn room(&self) -> Room;

    /// The page table of [`Self::rows`]; none if a sequence is one page.
    fn pages(&self) -> Option<Pages> {
        None
    }

    /// How it takes rotated queries and keys, of steps and of chunks; none for the model's own.
    fn transform(&self) -> Option<RowTransform<'_>> {
        None
    }

    /// Launches the transform of a chunk's keys and values in the rows of [`ChunkCache::chunk_rows`], both as
    /// a model computes them without the maps that are folded into its weights.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    /// # Safety
    /// As [`RowTransform::chunk`].
    unsafe fn turn_stored(&self, gpu: &Gpu, layer: usize, chunk: &Chunk, rows: &Rows) -> Result<()> {
        match self.transform() {
            // SAFETY: the caller's contract.
            Some(RowTransform { bases, .. }) => unsafe { bases.turn_stored(gpu, layer, chunk, rows) },
            None => Ok(()),
        }
    }

    /// Launches attention of (batch, n_heads, head_dim) rotated queries over the tokens of a layer.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds. Lengths and positions are of sequences within
    /// the capacity and as long as [`ChunkCache::set_lengths`] and the steps since then have made them; the
    /// kernel before does not write them. The rows of these tokens are written.
    unsafe fn attend(
        &self,
        gpu: &Gpu,
        layer: usize,
        sequences: &Sequences,
        queries: DevicePtr<AnyElement>,
        out: DevicePtr<AnyElement>,
    ) -> Result<()>;

    /// Sets the weights that are read after the attention of each layer, those of its output product. A cache
    /// whose attention waits for PCIe prefetches them into L2 meanwhile.
    fn prefetch_next(&mut self, _gpu: &Gpu, _reads: &[Prefetch]) {}

    /// Empties all sequences.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn clear(&mut self, gpu: &Gpu) -> Result<()>;

    /// Empties one sequence, so that others can use its pages. It is idle at its first token until the next
    /// chunks.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn end(&mut self, _gpu: &Gpu, _sequence: usize) -> Result<()> {
        Ok(())
    }

    /// Work before a step, outside of its graph, such as encoding tokens that leave the window.
    ///
    /// # Errors
    /// [`Error::Pages`](crate::Error::Pages) if there is no page for a sequence's next token; nothing has
    /// changed then.
    /// [`Error::Gpu`](crate::Error::Gpu).
    /// # Safety
    /// As [`Self::attend`].
    unsafe fn before_step(&mut self, _gpu: &Gpu, _sequences: &Sequences) -> Result<()> {
        Ok(())
    }

    /// Bytes of shared memory of a block of the background work. If a step's kernels leave them free, both
    /// share multiprocessors; else a step waits for that block to end.
    fn background_shared_memory(&self) -> usize {
        0
    }

    /// Bytes by purpose with `tokens` in every sequence: only what these tokens take of the capacity.
    fn footprint(&self, tokens: usize) -> Footprint;

    /// Bytes of device memory.
    fn bytes(&self) -> usize;

    /// Bytes of host memory that the device reads.
    fn host_bytes(&self) -> usize {
        0
    }

    /// Rows (a token's key and value of one head) read from the host so far. Waits for the last step.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn fetched_rows(&self, _gpu: &Gpu) -> Result<u64> {
        Ok(0)
    }

    /// Exact rows read by steps so far, over all layers and heads, if steps decide how many. Waits for the
    /// last step.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn chosen_rows(&self, _gpu: &Gpu) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Bytes of a row that [`Self::fetched_rows`] counts.
    fn fetched_row_bytes(&self) -> usize {
        0
    }
}

/// What the timing of steps needs of a cache: any length without a prefill, and control over what overlaps.
pub trait Timed {
    /// Fills the first `tokens` of every sequence with hashed rows or codes, to time steps at that length
    /// without a prefill.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()>;

    /// Bytes that a step reads with `tokens` in every sequence.
    fn step_bytes(&self, tokens: usize) -> usize;

    /// Makes steps wait for the encoding of tokens that leave the window, for timing. Call it before the
    /// first step.
    fn encode_synchronously(&mut self) {}

    /// Counts this share of the rows that a step would read from the host as cache hits, for timing: random
    /// queries have no locality. With a share above 0, results are wrong. It applies to graphs that are
    /// captured later.
    fn force_hits(&mut self, _share: f32) {}
}

/// The part of a cache that appends prompts, many tokens at a time.
pub trait ChunkCache {
    /// Reserves memory for sequences that have these lengths after the next prompts.
    ///
    /// # Errors
    /// [`Error::Pages`](crate::Error::Pages) if there is not enough; nothing has changed then.
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn reserve(&mut self, _gpu: &Gpu, _lengths: &[usize]) -> Result<()> {
        Ok(())
    }

    /// Rows (heads, capacity, head_dim) of all tokens of a chunk's sequence up to the chunk's end; those
    /// before the chunk are as the method stores them, or as they were computed. The decoder then writes the
    /// chunk's rotated keys and its values, runs attention over the rows, and calls [`Self::append`]. The
    /// tokens of a chunk thus attend to each other exactly, as on the CPU, except for [`Self::chunk_ranks`].
    /// Several chunks may pass through a layer before the first of them enters the next one.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn chunk_rows(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<Rows>;

    /// `u32` (heads,) each: the number of components of a layer's keys, and of its values, that the queries
    /// of a chunk read; none for all of them.
    fn chunk_ranks(&self, _layer: usize) -> Option<[DevicePtr<u32>; 2]> {
        None
    }

    /// Whether [`Self::chunk_rows`] are the cache itself, for all layers at once: rows written there need no
    /// [`Self::append`].
    fn has_rows_of_all(&self) -> bool {
        false
    }

    /// Whether [`DeviceCache::rows`] hold every token, so that [`Self::set_lengths`] may follow steps, too:
    /// none of the rows that they have written is still to be stored.
    fn is_exact(&self) -> bool {
        self.has_rows_of_all()
    }

    /// Appends the chunk's tokens from the rows of [`Self::chunk_rows`], after attention.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()>;

    /// Sets the lengths of the sequences, at which the last chunks ended. The next step may follow.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()>;

    /// As [`Self::set_lengths`] for one sequence. The others continue where they are.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu).
    fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()>;
}
