//! The cache of a layer: all key/value heads of one sequence.

use alloc::sync::Arc;
use alloc::vec::Vec;

use kv_attend::owner::{Heads, Reader, Writer, attend_heads};

use crate::error::{check_len, count_rows};
use crate::{Attention, Backend, Element, Error, HeadCache, HeadMaps, Rows, Window, Workspace};

const MAGIC: [u8; 4] = *b"SVLC";
const VERSION: u32 = 1;

/// The keys and values of all heads of a layer of one sequence: a [`HeadCache`] per head, each at its own
/// ranks.
///
/// Keys and queries come after the rotary embedding. With feature `rayon`, appends and attention divide the
/// heads among the threads; results do not depend on their number.
///
/// # Source
/// ZACK, 5.1: attention on rows of lower rank.
/// # Examples
/// ```
/// use svd_core::{Attention, Budget, LayerCache, LayerCalibration, Rows, Window, Workspace};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
/// let (heads, group, dim, prompt) = (2, 2, 16, 300);
/// // (tokens, heads, head_dim), with components of decaying scale.
/// let row = |seed: usize, n: usize| {
///     (0..n * dim).map(move |i| noise(seed + i) * 0.7_f32.powi((i % dim) as i32)).collect::<Vec<f32>>()
/// };
/// let rows = |seed: usize, n| (0..prompt).flat_map(move |t| row(seed + t * 97, n)).collect::<Vec<f32>>();
/// let (q, k, v) = (rows(1, heads * group), rows(2, heads), rows(3, heads));
/// let (keys, values) = (Rows::contiguous(&k, heads * dim)?, Rows::contiguous(&v, heads * dim)?);
///
/// let mut calibration = LayerCalibration::new(heads, group, [dim, dim])?;
/// calibration.add(Rows::contiguous(&q, heads * group * dim)?, keys, values)?;
/// let rotations = calibration.rotations()?;
/// let ranks = rotations.ranks(0.25, Budget::Fraction(0.5), 1)?;
///
/// let window = Window { sinks: 4, recent: 32, batch: 1 };
/// let mut cache = LayerCache::new(&rotations.maps(&ranks)?, window)?;
/// cache.append(keys, values)?; // the prompt
/// let mut workspace = Workspace::default();
/// let (query, mut out) = (row(7, heads * group), vec![0.0; heads * group * dim]);
/// cache.append(Rows::from(&row(5, heads)[..]), Rows::from(&row(6, heads)[..]))?; // a step
/// cache.attend_into(&Attention::scaled(0.25), &query, &mut workspace, &mut out)?;
/// assert_eq!((cache.len(), cache.heads()[0].reduced()), (301, 265));
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerCache<E> {
    heads: Vec<HeadCache<E>>, // at least one; all have the same window, dimensions and number of tokens
    window: Window,
}

impl<E: Element> LayerCache<E> {
    /// No tokens, with a head for each element of `maps`.
    ///
    /// # Errors
    /// [`Error::Zero`] for no head, [`Error::Length`] when the heads differ in their dimensions.
    pub fn new(maps: &[Arc<HeadMaps>], window: Window) -> Result<Self, Error> {
        Self::from_heads(maps.iter().map(|maps| HeadCache::new(maps.clone(), window)).collect(), window)
    }

    fn from_heads(heads: Vec<HeadCache<E>>, window: Window) -> Result<Self, Error> {
        let first = heads.first().ok_or(Error::Zero { what: "number of heads" })?;
        for head in &heads {
            let ([dim, dim_v], [first_dim, first_dim_v]) = (head.maps().dims(), first.maps().dims());
            check_len("keys of a head", dim, first_dim)?;
            check_len("values of a head", dim_v, first_dim_v)?;
            check_len("tokens of a head", head.len(), first.len())?;
        }
        Ok(Self { heads, window })
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

    /// Bytes of all tokens' rows, as [`HeadCache::size`].
    #[must_use]
    pub fn size(&self) -> usize {
        self.heads.iter().map(HeadCache::size).sum()
    }

    /// Appends tokens to all heads.
    ///
    /// # Shapes
    /// `keys` (n, heads * dim), `values` (n, heads * dim of the values): tokens first (NHD). For heads first
    /// (HND), [`append_heads`](Self::append_heads).
    /// # Errors
    /// [`Error::Length`]; the cache is then unchanged.
    /// # Cost
    /// That of [`HeadCache::append`] for each head.
    pub fn append(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<(), Error> {
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
    ) -> Result<(), Error> {
        let [dim, dim_v] = self.heads[0].maps().dims();
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
    pub fn append_heads(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<(), Error> {
        let [dim, dim_v] = self.heads[0].maps().dims();
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
    ) -> Result<(), Error> {
        backend.check()?;
        let append = |(h, head): (usize, &mut HeadCache<E>)| {
            let (keys, values) = rows(h)?;
            head.append_with(backend, keys, values)
        };
        #[cfg(feature = "rayon")]
        {
            use rayon::prelude::*;
            self.heads.par_iter_mut().enumerate().try_for_each(append)
        }
        #[cfg(not(feature = "rayon"))]
        self.heads.iter_mut().enumerate().try_for_each(append)
    }

    /// Keeps the first `len` tokens of every head, as [`HeadCache::truncate`].
    pub fn truncate(&mut self, len: usize) {
        self.heads.iter_mut().for_each(|head| head.truncate(len));
    }

    /// Attention of all query heads on all tokens, the query's own among them: append it first.
    ///
    /// # Shapes
    /// `queries` (heads, group, dim): a decode step's query heads in order; `out` (heads, group, dim of the
    /// values), fully written, rotated if the values' rotation is folded into the weights.
    /// # Errors
    /// [`Error::PartialRow`], [`Error::Length`], [`Error::Attend`] for a bad scale or cap. `out` may then
    /// hold anything.
    /// # Cost
    /// That of [`HeadCache::attend_into`] for each head. The workspace allocates when it has to grow.
    pub fn attend_into<Q: Element>(
        &self,
        attention: &Attention,
        queries: &[Q],
        workspace: &mut Workspace,
        out: &mut [f32],
    ) -> Result<(), Error> {
        attend_batch_into(&[self], attention, queries, workspace, out)
    }

    /// The cache as bytes, without its maps.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.tag::<E>();
        writer.window(self.window);
        writer.usize(self.heads.len());
        self.heads.iter().for_each(|head| head.write(&mut writer));
        writer.finish()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote; `maps` are those that the cache had.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::TrailingBytes`];
    /// [`Error::BadField`] for another element type, other maps, or numbers of tokens that a window cannot
    /// hold; [`Error::Length`] for another number of heads, or heads of unlike lengths.
    pub fn from_bytes(bytes: &[u8], maps: &[Arc<HeadMaps>]) -> Result<Self, Error> {
        let mut reader = Reader::new("a low-rank layer cache", MAGIC, VERSION, bytes)?;
        reader.tag::<E>()?;
        let window = reader.window()?;
        check_len("heads", reader.usize()?, maps.len())?;
        let heads = maps.iter().map(|maps| HeadCache::read(&mut reader, maps, window));
        let heads = heads.collect::<Result<_, _>>()?;
        reader.finish()?;
        Self::from_heads(heads, window)
    }
}

/// [`LayerCache::attend_into`] for a batch of sequences in one call, whose lengths and ranks may differ.
///
/// # Shapes
/// `queries` (sequences, heads, group, dim); `out` (sequences, heads, group, dim of the values), fully
/// written.
/// # Errors
/// As [`LayerCache::attend_into`]; [`Error::Length`] also when the caches differ in heads or dimensions.
pub fn attend_batch_into<E: Element, Q: Element>(
    caches: &[&LayerCache<E>],
    attention: &Attention,
    queries: &[Q],
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
    queries: &[Q],
    workspace: &mut Workspace,
    out: &mut [f32],
) -> Result<(), Error> {
    backend.check()?;
    let Some(first) = caches.first() else { return check_len("queries", queries.len(), 0) };
    let (dims, heads) = (first.heads[0].maps().dims(), first.heads.len());
    for cache in caches {
        check_len("heads of a cache", cache.heads.len(), heads)?;
        let [dim, dim_v] = cache.heads[0].maps().dims();
        check_len("keys of a cache", dim, dims[0])?;
        check_len("values of a cache", dim_v, dims[1])?;
    }
    let tasks = caches.len() * heads;
    let group = count_rows("queries", queries.len(), tasks.saturating_mul(dims[0]))?;
    check_len("out", out.len(), (tasks * group).saturating_mul(dims[1]))?;
    if group == 0 {
        return Ok(());
    }
    let scratch_len = caches.iter().flat_map(|cache| &cache.heads).map(|head| head.scratch_len(group)).max();
    let sizes = Heads { heads: tasks, group, dims, scratch_len: scratch_len.unwrap_or(0) };
    attend_heads(sizes, queries, workspace, out, |task, queries, scratch, out, stats| {
        let head = &caches[task / heads].heads[task % heads];
        head.attend_into_with(backend, attention, queries, scratch, out, stats)
    })
}
