//! The cache of a layer: all key/value heads of one sequence.

use alloc::sync::Arc;
use alloc::vec::Vec;

use kv_attend::owner::{Reader, Writer};

use crate::error::{check_len, count_rows};
use crate::{
    Attention, Backend, Element, Error, Evicted, HeadBooks, HeadCache, Rows, SoftmaxStats, Window,
    normalize_all,
};

const MAGIC: [u8; 4] = *b"PQLC";
const VERSION: u32 = 1;

/// The keys and values of all heads of a layer of one sequence: a [`HeadCache`] per head.
///
/// With feature `rayon`, appends and attention divide the heads among the threads; results do not depend on
/// their number.
///
/// # Examples
/// ```
/// use pq_core::{Attention, HeadBooks, LayerCache, PqShape, Rows, TrainOptions, Window, Workspace};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let (heads, group, dim, prompt) = (2, 2, 16, 300);
/// // (tokens, heads, head_dim); a channel of keys usually has an offset.
/// let row = |t: usize| (0..heads * dim).map(move |i| noise(t * 31 + i) + if i % dim == 5 { 8.0 } else { 0.0 });
/// let keys: Vec<f32> = (0..prompt).flat_map(row).collect();
/// let (keys, shape) = (Rows::contiguous(&keys, heads * dim)?, PqShape::new(dim, 8, 6)?);
///
/// let books = HeadBooks::train_layer(keys, keys, heads, [shape; 2], &TrainOptions::default())?;
/// let mut cache = LayerCache::new(&books, Window { sinks: 4, recent: 32, batch: 16 })?;
/// cache.append(keys, keys)?; // the prompt
/// let mut workspace = Workspace::default();
/// for t in prompt..prompt + 20 {
///     let new: Vec<f32> = row(t).collect();
///     cache.append(Rows::from(&new[..]), Rows::from(&new[..]))?;
///     let queries: Vec<f32> = (0..heads * group * dim).map(|i| noise(t + i)).collect();
///     let mut out = vec![0.0; heads * group * dim];
///     cache.attend_into(&Attention::scaled(0.25), Rows::from(&queries[..]), &mut workspace, &mut out)?;
/// }
/// assert_eq!((cache.len(), cache.heads()[0].recent()), (320, 44));
/// let restored = LayerCache::<f32>::from_bytes(&cache.to_bytes(), &books)?;
/// assert_eq!(restored.size(), cache.size());
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerCache<E> {
    heads: Vec<HeadCache<E>>, // at least one; all have the same window, dimensions and number of tokens
    window: Window,
}

/// Working memory of attention, which grows to what a call needs and keeps it for the next.
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    scratch: Vec<f32>,
    stats: Vec<SoftmaxStats>,
    rows: Vec<f32>, // outputs of several query tokens, by heads
}

impl<E: Element> LayerCache<E> {
    /// No tokens, with a head for each element of `books`.
    ///
    /// # Errors
    /// [`Error::Zero`] for no head, [`Error::ShapeMismatch`] when the heads differ in their dimensions.
    pub fn new(books: &[Arc<HeadBooks>], window: Window) -> Result<Self, Error> {
        Self::from_heads(books.iter().map(|books| HeadCache::new(books.clone(), window)).collect(), window)
    }

    fn from_heads(heads: Vec<HeadCache<E>>, window: Window) -> Result<Self, Error> {
        let first = heads.first().ok_or(Error::Zero { what: "number of heads" })?;
        let same = |head: &HeadCache<E>| head.dims() == first.dims() && head.len() == first.len();
        if heads.iter().all(same) { Ok(Self { heads, window }) } else { Err(Error::ShapeMismatch) }
    }

    /// The caches of the heads.
    #[must_use]
    pub fn heads(&self) -> &[HeadCache<E>] {
        &self.heads
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.heads[0].len()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all tokens' rows and codes, as [`HeadCache::size`].
    #[must_use]
    pub fn size(&self) -> usize {
        self.heads.iter().map(HeadCache::size).sum()
    }

    /// Appends tokens to all heads. Returns what left the window: a head's number of tokens, and the errors
    /// of all heads.
    ///
    /// # Shapes
    /// `keys` (n, heads * dim), `values` (n, heads * dim of the values): tokens first (NHD). For heads first
    /// (HND), [`append_heads`](Self::append_heads).
    /// # Errors
    /// [`Error::Length`]; the cache is then unchanged.
    pub fn append(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<Evicted, Error> {
        self.append_with(Backend::detect(), keys, values)
    }

    /// [`append`](Self::append) on a given backend.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`Error::BackendUnavailable`].
    pub fn append_with(
        &mut self,
        backend: Backend,
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) -> Result<Evicted, Error> {
        let [dim, dim_v] = self.heads[0].dims();
        check_len("row of keys", keys.components(), self.heads.len() * dim)?;
        check_len("row of values", values.components(), self.heads.len() * dim_v)?;
        check_len("values", values.rows(), keys.rows())?;
        self.append_each(backend, |h| Ok((keys.columns(h * dim, dim)?, values.columns(h * dim_v, dim_v)?)))
    }

    /// [`append`](Self::append) of rows in the order heads, tokens (HND).
    ///
    /// # Shapes
    /// `keys` (heads * n, dim), `values` (heads * n, dim of the values).
    /// # Errors
    /// [`Error::PartialRow`] or [`Error::Length`]; the cache is then unchanged.
    pub fn append_heads(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<Evicted, Error> {
        let [dim, dim_v] = self.heads[0].dims();
        let n = count_rows("keys", keys.rows(), self.heads.len())?;
        check_len("values", values.rows(), keys.rows())?;
        check_len("row of keys", keys.components(), dim)?;
        check_len("row of values", values.components(), dim_v)?;
        self.append_each(Backend::detect(), |h| {
            Ok((keys.slice(h * n..(h + 1) * n)?, values.slice(h * n..(h + 1) * n)?))
        })
    }

    fn append_each<'a>(
        &mut self,
        backend: Backend,
        rows: impl Fn(usize) -> Result<(Rows<'a, E>, Rows<'a, E>), Error> + Sync,
    ) -> Result<Evicted, Error> {
        let append = |(h, head): (usize, &mut HeadCache<E>)| {
            let (keys, values) = rows(h)?;
            head.append_with(backend, keys, values)
        };
        #[cfg(feature = "rayon")]
        let evicted: Vec<_> = {
            use rayon::prelude::*;
            self.heads.par_iter_mut().enumerate().map(append).collect()
        };
        #[cfg(not(feature = "rayon"))]
        let evicted: Vec<_> = self.heads.iter_mut().enumerate().map(append).collect();
        evicted.into_iter().try_fold(Evicted::default(), |sum, evicted| {
            let Evicted { tokens, key_error, value_error } = evicted?;
            Ok(Evicted {
                tokens,
                key_error: sum.key_error + key_error,
                value_error: sum.value_error + value_error,
            })
        })
    }

    /// Keeps the first `len` tokens of every head, as [`HeadCache::truncate`].
    pub fn truncate(&mut self, len: usize) {
        self.heads.iter_mut().for_each(|head| head.truncate(len));
    }

    /// Attention of all query heads on all tokens, of one or several query tokens.
    ///
    /// Query token i of T is at the position of the cache's token `len - T + i`, since a step appends its
    /// tokens first. It sees the tokens up to its own position, as
    /// [`HeadCache::attend_into`] says: drafts are verified, and the chunks of a prompt run, with one call.
    ///
    /// # Shapes
    /// `queries` (T, heads * group * dim): query heads in order; a decode step passes `Rows::from(slice)`.
    /// `out` (T, heads, group, dim of the values), fully written.
    /// # Errors
    /// [`Error::PartialRow`], [`Error::Length`]; [`Error::Attend`] for more query tokens than there are
    /// tokens, and that of [`Attention::check`]. `out` is then untouched.
    /// # Cost
    /// That of [`HeadCache::attend_into`] for each head. The workspace allocates when it has to grow.
    /// # Examples
    /// ```
    /// use pq_core::{Attention, HeadBooks, LayerCache, PqShape, Rows, TrainOptions, Window, Workspace};
    /// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
    /// # let keys: Vec<f32> = (0..200 * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
    /// # let keys = Rows::contiguous(&keys, 16)?; // 200 tokens of one head
    /// # let books =
    /// #     HeadBooks::train_layer(keys, keys, 1, [PqShape::new(16, 8, 6)?; 2], &TrainOptions::default())?;
    /// let mut cache = LayerCache::new(&books, Window { sinks: 4, recent: 32, batch: 16 })?;
    /// cache.append(keys.slice(0..196)?, keys.slice(0..196)?)?;
    /// // A token and three drafts that a smaller model proposes after it, with two query heads each.
    /// cache.append(keys.slice(196..200)?, keys.slice(196..200)?)?;
    /// let queries: Vec<f32> = (0..4 * 2 * 16).map(noise).collect();
    /// let mut out = vec![0.0; 4 * 2 * 16];
    /// let (queries, mut workspace) = (Rows::contiguous(&queries, 2 * 16)?, Workspace::default());
    /// cache.attend_into(&Attention::scaled(0.25), queries, &mut workspace, &mut out)?;
    /// cache.truncate(198); // two drafts are rejected
    /// # Ok::<(), pq_core::Error>(())
    /// ```
    pub fn attend_into<Q: Element>(
        &self,
        attention: &Attention,
        queries: Rows<'_, Q>,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        attend_batch_into(&[self], attention, queries, workspace, out)
    }

    /// The cache as bytes, without its codebooks.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.tag::<E>();
        writer.window(self.window);
        writer.usize(self.heads.len());
        self.heads.iter().for_each(|head| head.write(&mut writer));
        writer.finish()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; `books` are the codebooks that the cache had.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::TrailingBytes`];
    /// [`Error::BadField`] for another element type, other codebooks, or numbers of tokens that a window
    /// cannot hold; [`Error::Length`] for another number of heads.
    pub fn from_bytes(bytes: &[u8], books: &[Arc<HeadBooks>]) -> Result<Self, Error> {
        let mut reader = Reader::new("a layer cache", MAGIC, VERSION, bytes)?;
        reader.tag::<E>()?;
        let window = reader.window()?;
        check_len("heads", reader.usize()?, books.len())?;
        let heads = books
            .iter()
            .map(|books| HeadCache::read(&mut reader, books, window))
            .collect::<Result<_, _>>()?;
        reader.finish()?;
        Self::from_heads(heads, window)
    }
}

/// [`LayerCache::attend_into`] for a batch of sequences in one call, whose lengths may differ.
///
/// # Shapes
/// `queries` (sequences * T, heads * group * dim): the T query tokens of the first sequence, then those of
/// the next; `out` (sequences, T, heads, group, dim of the values), fully written.
/// # Errors
/// [`Error::ShapeMismatch`] when the caches differ in heads or dimensions, and as
/// [`LayerCache::attend_into`]. `out` is then untouched.
/// # Examples
/// ```
/// use pq_core::*;
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// # let keys: Vec<f32> = (0..200 * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// # let keys = Rows::contiguous(&keys, 16)?; // 200 tokens of one head
/// # let shapes = [PqShape::new(16, 8, 6)?; 2];
/// # let books = HeadBooks::train_layer(keys, keys, 1, shapes, &TrainOptions::default())?;
/// let mut long = LayerCache::new(&books, Window { sinks: 4, recent: 32, batch: 16 })?;
/// let mut short = long.clone(); // shares the codebooks
/// long.append(keys, keys)?;
/// short.append(keys.slice(0..7)?, keys.slice(0..7)?)?;
/// let queries: Vec<f32> = (0..2 * 16).map(noise).collect(); // one query head of each sequence
/// let (queries, mut out) = (Rows::contiguous(&queries, 16)?, vec![0.0; 2 * 16]);
/// let attention = Attention::scaled(0.25);
/// attend_batch_into(&[&long, &short], &attention, queries, &mut Workspace::default(), &mut out)?;
/// # Ok::<(), Error>(())
/// ```
pub fn attend_batch_into<E: Element, Q: Element>(
    caches: &[&LayerCache<E>],
    attention: &Attention,
    queries: Rows<'_, Q>,
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<(), Error> {
    attend_batch_into_with(Backend::detect(), caches, attention, queries, workspace, out)
}

/// [`attend_batch_into`] on a given backend.
///
/// # Errors
/// As [`attend_batch_into`], and [`Error::BackendUnavailable`].
pub fn attend_batch_into_with<E: Element, Q: Element>(
    backend: Backend,
    caches: &[&LayerCache<E>],
    attention: &Attention,
    queries: Rows<'_, Q>,
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<(), Error> {
    backend.check()?;
    attention.check()?;
    let Some(first) = caches.first() else {
        check_len("queries", queries.rows() * queries.components(), 0)?;
        return check_len("out", out.len(), 0);
    };
    let ([dim, dim_v], heads) = (first.heads[0].dims(), first.heads.len());
    if caches.iter().any(|cache| cache.heads.len() != heads || cache.heads[0].dims() != [dim, dim_v]) {
        return Err(Error::ShapeMismatch);
    }
    let query_tokens = count_rows("query tokens", queries.rows(), caches.len())?;
    let group = count_rows("queries", queries.components(), heads.saturating_mul(dim))?;
    let row = group.saturating_mul(dim_v); // of a head and query token
    check_len("out", out.len(), (queries.rows() * heads).saturating_mul(row))?;
    caches.iter().try_for_each(|cache| cache.heads[0].check_causal(query_tokens))?;
    if out.is_empty() {
        return Ok(());
    }
    let batch = Batch { backend, caches, attention, queries, query_tokens, group };
    let Workspace { scratch, stats, rows } = workspace;
    if query_tokens == 1 {
        return batch.attend(scratch, stats, out);
    }
    // Heads are computed apart, and `out` has all heads of a query token together.
    let by_heads = at_least(rows, out.len(), 0.0);
    batch.attend(scratch, stats, by_heads)?;
    for (i, out) in out.chunks_exact_mut(row).enumerate() {
        let (sequence, t, h) = (i / heads / query_tokens, i / heads % query_tokens, i % heads);
        out.copy_from_slice(&by_heads[((sequence * heads + h) * query_tokens + t) * row..][..row]);
    }
    Ok(())
}

/// The checked arguments of [`attend_batch_into`].
struct Batch<'a, E, Q> {
    backend: Backend,
    caches: &'a [&'a LayerCache<E>], // at least one
    attention: &'a Attention,
    queries: Rows<'a, Q>, // (sequences * query_tokens, heads * group * dim)
    query_tokens: usize,
    group: usize,
}

impl<E: Element, Q: Element> Batch<'_, E, Q> {
    /// Attends with every head of every sequence to `out` (sequences, heads, query tokens, group, dim of the
    /// values).
    fn attend(
        &self,
        scratch: &mut Vec<f32>,
        stats: &mut Vec<SoftmaxStats>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let Self { caches, query_tokens, group, .. } = *self;
        let heads = caches.iter().flat_map(|cache| &cache.heads);
        let scratch_len = heads.map(|head| head.scratch_len(query_tokens, group)).max().unwrap_or(0);
        let tasks = caches.len() * caches[0].heads.len();
        // Each thread takes consecutive heads with one scratch.
        #[cfg(feature = "rayon")]
        let parts = rayon::current_num_threads().min(tasks);
        #[cfg(not(feature = "rayon"))]
        let parts = 1;
        let each = tasks.div_ceil(parts);
        let scratch = at_least(scratch, parts * scratch_len, 0.0);
        let stats = at_least(stats, tasks * query_tokens * group, SoftmaxStats::EMPTY);
        stats.fill(SoftmaxStats::EMPTY);
        out.fill(0.0);
        let (out_len, stats_len) = (each * (out.len() / tasks), each * query_tokens * group);
        #[cfg(feature = "rayon")]
        {
            use rayon::prelude::*;
            let parts = scratch.par_chunks_mut(scratch_len).zip(out.par_chunks_mut(out_len));
            let parts = parts.zip(stats.par_chunks_mut(stats_len)).enumerate();
            parts.try_for_each(|(i, ((scratch, out), stats))| self.attend_from(i * each, scratch, out, stats))
        }
        #[cfg(not(feature = "rayon"))]
        {
            debug_assert!(out_len == out.len() && stats_len == stats.len());
            self.attend_from(0, scratch, out, stats)
        }
    }

    /// Attends with as many heads as there are outputs, from head `first` of the batch on.
    fn attend_from(
        &self,
        first: usize,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let Self { backend, caches, attention, queries, query_tokens, group } = *self;
        let (heads, [dim, dim_v]) = (caches[0].heads.len(), caches[0].heads[0].dims());
        let rows = stats
            .chunks_exact_mut(query_tokens * group)
            .zip(out.chunks_exact_mut(query_tokens * group * dim_v));
        for (task, (stats, out)) in (first..).zip(rows) {
            let (sequence, h) = (task / heads, task % heads);
            let queries = queries.slice(sequence * query_tokens..(sequence + 1) * query_tokens)?;
            let queries = queries.columns(h * group * dim, group * dim)?;
            caches[sequence].heads[h].attend_into_with(backend, attention, queries, scratch, out, stats)?;
            normalize_all(stats, out)?;
        }
        Ok(())
    }
}

/// The first `len` elements, after growing to them.
fn at_least<T: Clone>(memory: &mut Vec<T>, len: usize, fill: T) -> &mut [T] {
    if memory.len() < len {
        memory.resize(len, fill);
    }
    &mut memory[..len]
}
