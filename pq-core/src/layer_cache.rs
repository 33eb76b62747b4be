//! The cache of a layer: all key/value heads of one sequence.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::bytes::{Reader, Writer};
use crate::error::{check_len, count_rows};
use crate::{
    Backend, Element, Error, Evicted, HeadBooks, HeadCache, Rows, SoftmaxStats, Window, normalize_all,
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
/// use pq_core::{HeadBooks, LayerCache, PqShape, Rows, TrainOptions, Window, Workspace};
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
///     cache.attend_into(&queries, 0.25, &mut workspace, &mut out)?;
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
    floats: Vec<f32>,
    stats: Vec<SoftmaxStats>,
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

    /// Attention of all query heads, with scores `scale * <query, key>`.
    ///
    /// # Shapes
    /// `queries` (heads, group, dim): a decode step's query heads in order; `out` (heads, group, dim of the
    /// values), fully written.
    /// # Errors
    /// [`Error::PartialRow`], [`Error::Length`].
    /// # Cost
    /// That of [`HeadCache::attend_into`] for each head. The workspace allocates when it has to grow.
    pub fn attend_into<Q: Element>(
        &self,
        queries: &[Q],
        scale: f32,
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        attend_batch_into(&[self], queries, scale, workspace, out)
    }

    /// The cache as bytes, without its codebooks.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.tag::<E>();
        let Window { sinks, recent, batch } = self.window;
        [sinks, recent, batch, self.heads.len()].into_iter().for_each(|x| writer.len(x));
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
        let window = Window { sinks: reader.len()?, recent: reader.len()?, batch: reader.len()? };
        check_len("heads", reader.len()?, books.len())?;
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
/// `queries` (sequences, heads, group, dim); `out` (sequences, heads, group, dim of the values), fully
/// written.
/// # Errors
/// [`Error::ShapeMismatch`] when the caches differ in heads or dimensions, [`Error::PartialRow`],
/// [`Error::Length`].
pub fn attend_batch_into<E: Element, Q: Element>(
    caches: &[&LayerCache<E>],
    queries: &[Q],
    scale: f32,
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<(), Error> {
    attend_batch_into_with(Backend::detect(), caches, queries, scale, workspace, out)
}

/// [`attend_batch_into`] on a given backend.
///
/// # Errors
/// As [`attend_batch_into`], and [`Error::BackendUnavailable`].
pub fn attend_batch_into_with<E: Element, Q: Element>(
    backend: Backend,
    caches: &[&LayerCache<E>],
    queries: &[Q],
    scale: f32,
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<(), Error> {
    backend.check()?;
    let Some(first) = caches.first() else { return check_len("queries", queries.len(), 0) };
    let ([dim, dim_v], heads) = (first.heads[0].dims(), first.heads.len());
    if caches.iter().any(|cache| cache.heads.len() != heads || cache.heads[0].dims() != [dim, dim_v]) {
        return Err(Error::ShapeMismatch);
    }
    let tasks = caches.len() * heads;
    let group = count_rows("queries", queries.len(), tasks.saturating_mul(dim))?;
    check_len("out", out.len(), (tasks * group).saturating_mul(dim_v))?;
    if group == 0 {
        return Ok(());
    }
    let scratch_len =
        caches.iter().flat_map(|cache| &cache.heads).map(|head| head.scratch_len(group)).max().unwrap_or(0);
    // Each thread takes consecutive heads with one scratch.
    #[cfg(feature = "rayon")]
    let parts = rayon::current_num_threads().min(tasks);
    #[cfg(not(feature = "rayon"))]
    let parts = 1;
    let each = tasks.div_ceil(parts);
    let scratch = at_least(&mut workspace.floats, parts * scratch_len, 0.0);
    let stats = at_least(&mut workspace.stats, tasks * group, SoftmaxStats::EMPTY);
    stats.fill(SoftmaxStats::EMPTY);
    out.fill(0.0);
    let part = |i: usize, queries: &[Q], scratch: &mut [f32], out: &mut [f32], stats: &mut [SoftmaxStats]| {
        let rows =
            queries.chunks(group * dim).zip(out.chunks_mut(group * dim_v)).zip(stats.chunks_mut(group));
        for (task, ((queries, out), stats)) in (i * each..).zip(rows) {
            let head = &caches[task / heads].heads[task % heads];
            head.attend_into_with(backend, queries, scale, scratch, out, stats)?;
            normalize_all(stats, out)?;
        }
        Ok(())
    };
    let (queries_len, out_len, stats_len) = (each * group * dim, each * group * dim_v, each * group);
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        let parts = queries.par_chunks(queries_len).zip(scratch.par_chunks_mut(scratch_len));
        let parts = parts.zip(out.par_chunks_mut(out_len)).zip(stats.par_chunks_mut(stats_len)).enumerate();
        parts.try_for_each(|(i, (((queries, scratch), out), stats))| part(i, queries, scratch, out, stats))
    }
    #[cfg(not(feature = "rayon"))]
    part(0, &queries[..queries_len], scratch, &mut out[..out_len], &mut stats[..stats_len])
}

/// The first `len` elements, after growing to them.
fn at_least<T: Clone>(memory: &mut Vec<T>, len: usize, fill: T) -> &mut [T] {
    if memory.len() < len {
        memory.resize(len, fill);
    }
    &mut memory[..len]
}
