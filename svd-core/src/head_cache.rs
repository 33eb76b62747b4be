//! The cache of one key/value head of one sequence.

use alloc::sync::Arc;
use alloc::vec::Vec;

use kv_attend::owner::{Moves, Reader, WindowRows, Writer};

use crate::error::{check_at_least, check_len, count_rows};
use crate::{
    Attention, Backend, Element, Error, ExactTokens, HeadMaps, Rows, SoftmaxStats, Window,
    attend_exact_into_with,
};

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones exact,
/// all others as rows of lower rank, all in elements of type `E`.
///
/// Tokens are appended in order and leave the window in batches, as [`Window`] says; stored rows do not
/// depend on how the tokens were divided among appends. Attention runs over all three parts in one softmax.
/// [`LayerCache`](crate::LayerCache) has all heads of a layer.
///
/// # Examples
/// ```
/// use svd_core::{
///     Attention, HeadCache, HeadMaps, Reduction, Rows, SoftmaxStats, Window, normalize_all,
/// };
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
/// // Rotated keys and values of a model whose weights are folded: components of decaying scale.
/// let rows: Vec<f32> = (0..200 * 16).map(|i| noise(i) * 0.7_f32.powi((i % 16) as i32)).collect();
/// let rows = Rows::contiguous(&rows, 16)?;
/// let maps = HeadMaps::new(Reduction::folded(16, 8)?, Reduction::folded(16, 10)?);
/// let mut head = HeadCache::new(maps.into(), Window { sinks: 4, recent: 32, batch: 1 });
/// head.append(rows, rows)?;
/// assert_eq!((head.reduced(), head.size()), (164, 4 * (36 * 32 + 164 * 18)));
///
/// let mut scratch = vec![0.0; head.scratch_len(1)];
/// let (mut out, mut stats) = ([0.0; 16], [SoftmaxStats::EMPTY]);
/// head.attend_into(&Attention::scaled(0.25), rows.row(7), &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HeadCache<E> {
    maps: Arc<HeadMaps>,
    window: Window,
    exact: [WindowRows<E>; 2], // keys, values
    reduced: [Vec<E>; 2],      // (tokens, rank) each
}

/// Query heads that attend together. A larger group reads the rows again for each of its parts.
const QUERIES: usize = 64;

impl<E: Element> HeadCache<E> {
    /// No tokens.
    #[must_use]
    pub fn new(maps: Arc<HeadMaps>, window: Window) -> Self {
        let exact = maps.dims().map(WindowRows::new);
        Self { maps, window, exact, reduced: [Vec::new(), Vec::new()] }
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sinks() + self.reduced() + self.recent()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of sinks, exact tokens at the beginning.
    #[must_use]
    pub fn sinks(&self) -> usize {
        self.exact[0].sinks().len() / self.exact[0].dim()
    }

    /// Number of tokens at lower rank, which follow the sinks.
    #[must_use]
    pub fn reduced(&self) -> usize {
        self.reduced[0].len() / self.maps.keys().rank()
    }

    /// Number of exact tokens at the end.
    #[must_use]
    pub fn recent(&self) -> usize {
        self.exact[0].recent().len() / self.exact[0].dim()
    }

    /// The maps.
    #[must_use]
    pub const fn maps(&self) -> &Arc<HeadMaps> {
        &self.maps
    }

    /// Bytes of all tokens' rows. The maps, which sequences share, are not among them.
    #[must_use]
    pub fn size(&self) -> usize {
        let reduced = self.reduced.iter().map(|rows| size_of_val(&rows[..]));
        self.exact.iter().map(WindowRows::size).chain(reduced).sum()
    }

    /// The tokens at lower rank as they are stored: keys (tokens, rank) and values (tokens, rank).
    #[must_use]
    pub fn reduced_rows(&self) -> [&[E]; 2] {
        let [keys, values] = &self.reduced;
        [keys, values]
    }

    /// Appends tokens, and shortens those that leave the window.
    ///
    /// # Shapes
    /// `keys` (n, dim), `values` (n, dim of the values).
    /// # Errors
    /// [`Error::Length`]; the cache is then unchanged.
    /// # Cost
    /// dim * rank multiply-adds for each key or value that leaves the window, none where the rotation is
    /// folded.
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
        backend.check()?;
        check_len("values", values.rows(), keys.rows())?;
        let [dim, dim_v] = self.maps.dims();
        check_len("row of keys", keys.components(), dim)?;
        check_len("row of values", values.components(), dim_v)?;
        let moves = Moves::new(&self.window, self.len(), self.recent(), keys.rows());
        let sides = [(keys, self.maps.keys()), (values, self.maps.values())];
        for ((new, map), (exact, reduced)) in
            sides.into_iter().zip(self.exact.iter_mut().zip(&mut self.reduced))
        {
            exact.push(new, &moves, |rows| map.store(backend, rows, reduced))?;
        }
        Ok(())
    }

    /// Keeps the first `len` tokens: rejected drafts, or a prefix that another sequence shares. Tokens at
    /// lower rank stay so: the window fills again from the next token on.
    pub fn truncate(&mut self, len: usize) {
        let sinks = self.sinks().min(len);
        let reduced = self.reduced().min(len - sinks);
        let recent = self.recent().min(len - sinks - reduced);
        self.exact.iter_mut().for_each(|rows| rows.truncate(sinks, recent));
        let ranks = [self.maps.keys().rank(), self.maps.values().rank()];
        self.reduced.iter_mut().zip(ranks).for_each(|(rows, rank)| rows.truncate(reduced * rank));
    }

    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    #[must_use]
    pub fn scratch_len(&self, group: usize) -> usize {
        let [dim, dim_v] = self.maps.dims();
        group.min(QUERIES) * (dim + self.maps.keys().rank() + self.maps.values().rank() + dim_v)
    }

    /// Attention of a group of query heads on all tokens.
    ///
    /// Adds the tokens to `out` and `stats`, as [`attend_exact_into`](crate::attend_exact_into) does: start
    /// from zeros and [`SoftmaxStats::EMPTY`], and finish with [`normalize_all`](crate::normalize_all). The
    /// query's token is the last of the cache, from which [`Attention::window`] counts.
    ///
    /// # Shapes
    /// `queries` (group, dim); `scratch` at least [`scratch_len`](Self::scratch_len); `out` (group, dim of
    /// the values), rotated if the values' rotation is folded; `stats` (group,).
    /// # Errors
    /// [`Error::Zero`] for no query, [`Error::PartialRow`], [`Error::Length`], [`Error::TooShort`],
    /// [`Error::Attend`] for a bad scale or cap; `out` and `stats` are then untouched.
    /// # Cost
    /// group * (rank of the keys + rank of the values) multiply-adds a token at lower rank; for the query,
    /// group * dim * rank for each side that is not folded. No allocation.
    pub fn attend_into<Q: Element>(
        &self,
        attention: &Attention,
        queries: &[Q],
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        self.attend_into_with(Backend::detect(), attention, queries, scratch, out, stats)
    }

    /// [`attend_into`](Self::attend_into) on a given backend.
    ///
    /// # Errors
    /// As [`attend_into`](Self::attend_into), and [`Error::BackendUnavailable`].
    pub fn attend_into_with<Q: Element>(
        &self,
        backend: Backend,
        attention: &Attention,
        queries: &[Q],
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        backend.check()?;
        let [dim, dim_v] = self.maps.dims();
        let group = count_rows("queries", queries.len(), dim)?;
        check_len("stats", stats.len(), group)?;
        check_len("out", out.len(), group.saturating_mul(dim_v))?;
        check_at_least("scratch", scratch.len(), self.scratch_len(group))?;
        if group == 0 {
            return Err(Error::Zero { what: "number of queries" });
        }
        let rows = queries.chunks(QUERIES * dim).zip(out.chunks_mut(QUERIES * dim_v));
        for ((queries, out), stats) in rows.zip(stats.chunks_mut(QUERIES)) {
            let [keys, values] = &self.exact;
            let recent_at = self.len() - self.recent();
            for (first, keys, values) in
                [(0, keys.sinks(), values.sinks()), (recent_at, keys.recent(), values.recent())]
            {
                let tokens = ExactTokens::contiguous(keys, dim, values, dim_v)?;
                let tokens = tokens.first_query(self.len().saturating_sub(first + 1));
                let queries = Rows::from(queries);
                attend_exact_into_with(backend, attention, queries, &tokens, scratch, out, stats)?;
            }
            self.attend_reduced(backend, attention, queries, scratch, out, stats)?;
        }
        Ok(())
    }

    /// Adds the tokens at lower rank.
    fn attend_reduced<Q: Element>(
        &self,
        backend: Backend,
        attention: &Attention,
        queries: &[Q],
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        if self.reduced() == 0 {
            return Ok(());
        }
        let (group, maps) = (stats.len(), &*self.maps);
        let [dim, dim_v] = maps.dims();
        let (projected, scratch) = scratch.split_at_mut(group * maps.keys().rank());
        let (sums, scratch) = scratch.split_at_mut(group * maps.values().rank());
        let (full, scratch) = scratch.split_at_mut(group * dim_v);
        maps.keys().project_queries(backend, Rows::contiguous(queries, dim)?, projected)?;
        sums.fill(0.0);
        let mut sums_stats = [SoftmaxStats::EMPTY; QUERIES];
        let sums_stats = &mut sums_stats[..group];
        let ([keys, values], ranks) = (self.reduced_rows(), [maps.keys().rank(), maps.values().rank()]);
        let tokens = ExactTokens::contiguous(keys, ranks[0], values, ranks[1])?;
        let tokens = tokens.first_query(self.len() - self.sinks() - 1);
        attend_exact_into_with(
            backend,
            attention,
            Rows::from(&*projected),
            &tokens,
            scratch,
            sums,
            sums_stats,
        )?;
        let parts = maps.values().reconstruct(backend, sums, full)?;
        let rows = out.chunks_exact_mut(dim_v).zip(stats).zip(parts.iter().zip(sums_stats));
        for ((out, stats), (part, part_stats)) in rows {
            let scale = stats.absorb(*part_stats, out);
            out.iter_mut().zip(part).for_each(|(out, x)| *out += scale * x);
        }
        Ok(())
    }

    /// Writes everything but the window and the maps, which all heads of a layer share or are given again.
    pub(crate) fn write(&self, writer: &mut Writer) {
        writer.u64(self.maps.id());
        [self.sinks(), self.reduced(), self.recent()].into_iter().for_each(|n| writer.usize(n));
        for (exact, reduced) in self.exact.iter().zip(&self.reduced) {
            exact.write(writer);
            writer.elements(reduced.iter().copied());
        }
    }

    pub(crate) fn read(reader: &mut Reader<'_>, maps: &Arc<HeadMaps>, window: Window) -> Result<Self, Error> {
        if reader.u64()? != maps.id() {
            return Err(Error::BadField { what: "id of the maps" });
        }
        let [sinks, reduced, recent] = [reader.usize()?, reader.usize()?, reader.usize()?];
        if !window.can_hold(sinks, reduced, recent) {
            return Err(Error::BadField { what: "number of tokens" });
        }
        let mut side = |map: &crate::Reduction| -> Result<_, Error> {
            let exact = WindowRows::read(reader, map.dim(), [sinks, recent])?;
            Ok((exact, reader.elements(reduced.checked_mul(map.rank()).ok_or(Error::TooLarge)?)?))
        };
        let ((keys, reduced_keys), (values, reduced_values)) = (side(maps.keys())?, side(maps.values())?);
        Ok(Self {
            maps: maps.clone(),
            window,
            exact: [keys, values],
            reduced: [reduced_keys, reduced_values],
        })
    }
}
