//! KV caches on the device: [`DeviceCache`] mirrors [`KvCache`](crate::cache::KvCache), for a batch.

#[path = "cache/cachegen.rs"]
mod cachegen;
#[path = "cache/codes.rs"]
mod codes;
#[path = "cache/dense.rs"]
mod dense;
#[path = "cache/eviction.rs"]
mod eviction;
#[path = "cache/full_rank.rs"]
mod full_rank;
#[path = "cache/hybrid.rs"]
mod hybrid;
#[path = "cache/int4.rs"]
mod int4;
#[path = "cache/key_means.rs"]
mod key_means;
#[path = "cache/million.rs"]
mod million;
#[path = "build.rs"]
mod of_method;
#[path = "cache/paged.rs"]
mod paged;
#[path = "cache/pages.rs"]
mod pages;
#[path = "cache/pqcache.rs"]
mod pqcache;
#[path = "cache/prompt_rows.rs"]
mod prompt_rows;
#[path = "cache/row_store.rs"]
mod row_store;
#[path = "cache/span.rs"]
mod span;
#[path = "cache/step_budget.rs"]
mod step_budget;
#[path = "cache/window.rs"]
mod window;
#[path = "cache/zack.rs"]
mod zack;

use kv_gpu::pq::{Pages, Prefetch};
use kv_gpu::{AnyElement, DevicePtr};

pub use cachegen::CacheGenCache;
pub use dense::DenseCache;
pub use hybrid::HybridCache;
pub use int4::Int4Cache;
use key_means::KeyMeans;
pub use million::MillionCache;
use of_method::TransformedCodes;
pub use of_method::{fitted, method_cache};
pub use paged::PagedCache;
pub use pqcache::PqCache;
pub use zack::ZackCache;

use super::Gpu;
use super::bases::Bases;
use super::memory::Buffer;
use crate::cache::Footprint;
use crate::side::Side;
use crate::{Error, Result};

/// The sequences of a batch, on the device. (batch,) each.
pub struct Sequences {
    pub(crate) tokens: Buffer<u32>,        // to be fed next
    pub(crate) positions: Buffer<u32>,     // of these tokens
    pub(crate) running: Buffer<u32>,       // 0 once a sequence has ended
    pub(crate) slots: Buffer<u32>,         // their rows among all exact rows, for the first head
    pub(crate) exact_lengths: Buffer<u32>, // exact tokens, these included
    pub(crate) coded_lengths: Buffer<u32>, // tokens that are not exact
}

/// Consecutive tokens of one sequence of a batch that run at once: a prompt, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The sequence.
    pub sequence: usize,
    /// Position of the first token: the number of tokens before the chunk.
    pub position: usize,
    /// Tokens.
    pub count: usize,
}

impl Chunk {
    /// Length of the sequence, the chunk included.
    #[must_use]
    pub const fn end(&self) -> usize {
        self.position + self.count
    }
}

/// Rows of a layer's exact tokens: elements (pages or batch, heads, capacity, head_dim).
#[derive(Clone, Copy)]
pub struct Rows {
    /// Keys, rotated.
    pub keys: DevicePtr<AnyElement>,
    /// Values.
    pub values: DevicePtr<AnyElement>,
    /// Rows per head, in a sequence or a page.
    pub capacity: usize,
}

impl Rows {
    /// The rows of one side.
    pub(crate) const fn side(&self, side: Side) -> DevicePtr<AnyElement> {
        match side {
            Side::Keys => self.keys,
            Side::Values => self.values,
        }
    }
}

/// The bases in which a cache takes rotated queries and keys.
#[derive(Clone, Copy)]
pub struct RowTransform<'a> {
    pub(super) bases: &'a Bases,
    /// Means less which keys are coded. A step computes their part of the scores before queries leave the
    /// model's basis.
    pub(super) means: Option<&'a KeyMeans>,
}

/// Tokens of a sequence that a cache has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// First tokens, whose rows stay exact.
    pub sinks: usize,
    /// Exact rows that later tokens share as a ring; 0 if all tokens are sinks.
    pub ring: usize,
    /// Maximum tokens.
    pub capacity: usize,
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

    /// Launches attention of (batch, n_heads, head_dim) rotated queries over the tokens of a layer.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn attend(
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
    /// [`Error::Device`].
    fn clear(&mut self, gpu: &Gpu) -> Result<()>;

    /// Empties one sequence, so that others can use its pages. It is idle at its first token until the next
    /// chunks.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn end(&mut self, _gpu: &Gpu, _sequence: usize) -> Result<()> {
        Ok(())
    }

    /// Work before a step, outside of its graph, such as encoding tokens that leave the window.
    ///
    /// # Errors
    /// [`Error::Pages`] if there is no page for a sequence's next token; nothing has changed then.
    /// [`Error::Device`].
    fn before_step(&mut self, _gpu: &Gpu, _sequences: &Sequences) -> Result<()> {
        Ok(())
    }

    /// Bytes of shared memory of a block of the background work. If a step's kernels leave them free, both
    /// share multiprocessors; else a step waits for that block to end.
    fn background_shared_memory(&self) -> usize {
        0
    }

    /// Bytes by purpose with `tokens` in every sequence, counted as in
    /// [`KvCache::footprint`](crate::cache::KvCache): only what these tokens take of the capacity.
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
    /// [`Error::Device`].
    fn fetched_rows(&self, _gpu: &Gpu) -> Result<u64> {
        Ok(0)
    }

    /// Exact rows read by steps so far, over all layers and heads, if steps decide how many. Waits for the
    /// last step.
    ///
    /// # Errors
    /// [`Error::Device`].
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
    /// [`Error::Device`].
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()>;

    /// Bytes that a step reads with `tokens` in every sequence.
    fn step_bytes(&self, tokens: usize) -> usize;

    /// Makes steps wait for the encoding of tokens that leave the window, for timing. Call it before a
    /// [`Decoder`] is made.
    ///
    /// [`Decoder`]: super::Decoder
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
    /// [`Error::Pages`] if there is not enough; nothing has changed then. [`Error::Device`].
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
    /// [`Error::Device`].
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
    /// [`Error::Device`].
    fn append(&mut self, gpu: &Gpu, layer: usize, chunk: &Chunk) -> Result<()>;

    /// Sets the lengths of the sequences, at which the last chunks ended. The next step may follow.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn set_lengths(&mut self, gpu: &Gpu, lengths: &[usize]) -> Result<()>;

    /// As [`Self::set_lengths`] for one sequence. The others continue where they are.
    ///
    /// # Errors
    /// [`Error::Device`].
    fn set_length(&mut self, gpu: &Gpu, sequence: usize, length: usize) -> Result<()>;
}

/// Refuses more tokens than kernels count.
fn check_tokens(capacity: usize) -> Result<()> {
    match u32::try_from(capacity) {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::Argument(format!("a sequence of {capacity} tokens: 32 bits count them"))),
    }
}
