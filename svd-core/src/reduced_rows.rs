//! The tokens of one KV head of one sequence at lower rank.

mod attend;

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Range;

use kv_attend::owner::{EvictedRows, Pair, Queries, Reader, Store, Writer};

use crate::error::{check_at_least, check_len};
use crate::{Attention, Backend, Element, Error, ExactTokens, HeadMaps, Reduction, Rows, SoftmaxStats};

/// The keys and values of one head of one sequence as rows of lower rank, with elements of type `E`: the
/// tokens between the sinks and the window of a [`LowRankHeadCache`](crate::LowRankHeadCache), or all tokens
/// that an engine reduces with exact rows of its own.
///
/// # Examples
/// ```
/// use half::f16;
/// use svd_core::{Backend, HeadMaps, ReducedRows, Reduction, Rows, SoftmaxStats, normalize_all};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
/// let maps = HeadMaps::new(Reduction::folded(16, 8)?, Reduction::folded(16, 10)?);
/// let rows: Vec<f32> = (0..200 * 16).map(noise).collect();
/// let rows = Rows::contiguous(&rows, 16)?; // 200 tokens of a head, rotated by the weights
/// let mut reduced = ReducedRows::<f16>::new(maps.into());
/// reduced.append(Backend::detect(), rows, rows)?;
/// reduced.truncate(190); // drafts are rejected
/// assert_eq!(reduced.size(), 2 * 190 * 18);
///
/// let query = [0.25; 16]; // scaled
/// let mut scratch = vec![0.0; reduced.scratch_len(1)];
/// let (mut out, mut stats) = ([0.0; 16], [SoftmaxStats::EMPTY]);
/// // A sliding window sees the tokens from 90 on.
/// reduced.attend_into(Backend::detect(), &query, 90..190, None, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert_eq!(out[10..], [0.0; 6]); // beyond the rank of the values
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ReducedRows<E> {
    maps: Arc<HeadMaps>,
    rows: Pair<Vec<E>>, // (tokens, rank) each
}

impl<E: Element> ReducedRows<E> {
    /// No tokens.
    #[must_use]
    pub const fn new(maps: Arc<HeadMaps>) -> Self {
        Self { maps, rows: Pair::new(Vec::new(), Vec::new()) }
    }

    /// The maps that reduce the tokens.
    #[must_use]
    pub const fn maps(&self) -> &Arc<HeadMaps> {
        &self.maps
    }

    /// The rows as they are stored: keys (tokens, rank) and values (tokens, rank).
    #[must_use]
    pub fn rows(&self) -> [&[E]; 2] {
        [&self.rows.keys, &self.rows.values]
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.keys.len() / self.maps.keys().rank()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.rows.keys.is_empty()
    }

    /// Bytes of the rows.
    #[must_use]
    pub fn size(&self) -> usize {
        self.rows.iter().map(|rows| size_of_val(&rows[..])).sum()
    }

    /// Reduces tokens, whose elements may be wider than those of the reduced rows: these are rounded once. An
    /// element beyond the range of `E` becomes the nearest one.
    ///
    /// # Shapes
    /// `keys` (n, dim), `values` (n, dim of the values).
    /// # Errors
    /// [`Error::BackendUnavailable`], [`Error::Length`]; nothing is then appended.
    pub fn append<R: Element>(
        &mut self,
        backend: Backend,
        keys: Rows<'_, R>,
        values: Rows<'_, R>,
    ) -> Result<(), Error> {
        self.append_by(backend, keys, values, |x| E::from_f32(x.to_f32()).saturate())
    }

    /// [`append`](Self::append), with what rounds an element that no map changes.
    fn append_by<R: Element>(
        &mut self,
        backend: Backend,
        keys: Rows<'_, R>,
        values: Rows<'_, R>,
        convert: impl Fn(&R) -> E,
    ) -> Result<(), Error> {
        backend.check()?;
        let [dim, dim_v] = self.maps.dims();
        check_len("values", values.rows(), keys.rows())?;
        check_len("row of keys", keys.components(), dim)?;
        check_len("row of values", values.components(), dim_v)?;
        self.maps.keys().store(backend, keys, &mut self.rows.keys, &convert)?;
        self.maps.values().store(backend, values, &mut self.rows.values, &convert)
    }

    /// Keeps the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        let [keys, values] = self.maps.sides().map(|map| len.saturating_mul(map.rank()));
        self.rows.keys.truncate(keys);
        self.rows.values.truncate(values);
    }

    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    #[must_use]
    pub fn scratch_len(&self, queries: usize) -> usize {
        attend::scratch_len(&self.maps, queries)
    }

    /// Attention of a group of query heads, or of several query tokens that see the same tokens, over the
    /// tokens of `range`, added to `out` and `stats` as by [`attend_exact_into`](crate::attend_exact_into).
    ///
    /// # Shapes
    /// `queries` (n, dim), scaled; `range` of at most [`len`](Self::len) tokens; `scratch` at least
    /// [`scratch_len`](Self::scratch_len) of n, best at a cache line; `out` (n, dim of the values), rotated if
    /// the rotation of the values is folded; `stats` (n,).
    /// # Errors
    /// [`Error::BackendUnavailable`], [`Error::Length`], [`Error::TooShort`], and the error of a bad softcap;
    /// `out` and `stats` are then untouched.
    /// # Cost
    /// n * (rank of the keys + rank of the values) multiply-adds per token; for the queries, n * dim * rank
    /// for each side that is not folded. Rows are read from memory once per 64 queries.
    #[expect(clippy::too_many_arguments, reason = "as attend_exact_into, with a range, a cap and a backend")]
    pub fn attend_into(
        &self,
        backend: Backend,
        queries: &[f32],
        range: Range<usize>,
        softcap: Option<f32>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        backend.check()?;
        let [dim, dim_v] = self.maps.dims();
        check_len("queries", queries.len(), stats.len().saturating_mul(dim))?;
        check_len("out", out.len(), stats.len().saturating_mul(dim_v))?;
        check_at_least("scratch", scratch.len(), self.scratch_len(stats.len()))?;
        check_at_least("tokens", self.len(), range.end)?;
        let attention = &Attention { softcap, ..Attention::default() };
        attention.check()?;
        if range.is_empty() {
            return Ok(());
        }
        // As heads of one query token, they all see the last row.
        let step =
            attend::Step { maps: &self.maps, backend, attention, tokens: self.tokens(range)?, causal: 1 };
        step.add(queries, scratch, out, stats)
    }

    /// The tokens of `range`, which is not beyond the last one.
    fn tokens(&self, range: Range<usize>) -> Result<ExactTokens<'_, E>, Error> {
        let [key_rank, value_rank] = self.maps.sides().map(Reduction::rank);
        let keys = &self.rows.keys[range.start * key_rank..range.end * key_rank];
        let values = &self.rows.values[range.start * value_rank..range.end * value_rank];
        Ok(ExactTokens::contiguous(keys, key_rank, values, value_rank)?)
    }
}

/// What [`LowRankHeadCache`](crate::LowRankHeadCache) needs.
impl<E: Element> Store<E> for ReducedRows<E> {
    type Shared = HeadMaps;
    type Report = ();
    type Error = Error;
    const NAME: &'static str = "a low-rank layer cache";
    const MAGIC: [u8; 4] = *b"SVLC";
    const VERSION: u32 = 2;
    const QUERIES: usize = attend::QUERIES;

    fn new(maps: Arc<HeadMaps>) -> Self {
        Self::new(maps)
    }

    fn dims(&self) -> [usize; 2] {
        self.maps.dims()
    }

    fn len(&self) -> usize {
        Self::len(self)
    }

    fn size(&self) -> usize {
        Self::size(self)
    }

    fn append(&mut self, backend: Backend, evicted: &EvictedRows<'_, E>) -> Result<(), Error> {
        let [keys, values] = evicted.sides();
        let mut parts = keys.iter().zip(values);
        parts.try_for_each(|(&keys, &values)| self.append_by(backend, keys, values, |&x| x))
    }

    fn truncate(&mut self, len: usize) {
        Self::truncate(self, len);
    }

    fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        Self::scratch_len(self, query_tokens.saturating_mul(group))
    }

    fn attend_into(
        &self,
        backend: Backend,
        queries: &Queries<'_>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let tokens = self.tokens(0..self.len())?.starting_at(queries.start()).first_query(queries.first());
        let (attention, causal) = (queries.attention(), queries.tokens());
        let step = attend::Step { maps: &self.maps, backend, attention, tokens, causal };
        step.add(queries.scaled(), scratch, out, stats)
    }

    fn write(&self, writer: &mut Writer) {
        writer.u64(self.maps.id());
        writer.usize(self.len());
        self.rows.iter().for_each(|rows| writer.elements(rows.iter().copied()));
    }

    fn read(reader: &mut Reader<'_>, maps: &Arc<HeadMaps>) -> Result<Self, Error> {
        if reader.u64()? != maps.id() {
            return Err(Error::BadField { what: "id of the maps" });
        }
        let tokens = reader.usize()?;
        let len = |rank: usize| tokens.checked_mul(rank).ok_or(Error::TooLarge);
        let [keys, values] = [len(maps.keys().rank())?, len(maps.values().rank())?];
        let rows = Pair::new(reader.elements(keys)?, reader.elements(values)?);
        Ok(Self { maps: maps.clone(), rows })
    }
}
