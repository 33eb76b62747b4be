//! The cache of one KV head of one sequence: sinks and window as exact rows, all other tokens in a store.

use alloc::sync::Arc;

use super::store::check_queries;
use super::{ExactRows, Queries, Reader, Store, Writer};
use crate::error::check_at_least;
use crate::{
    Attention, Backend, Element, Rows, SoftmaxStats, Window, attend_exact_into_with, attend_exact_scratch_len,
};

/// Floats per cache line: a store's loads that straddle two lines cost up to a tenth of its time.
const ALIGNMENT: usize = 16;

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones as
/// exact rows of `E`, all others compressed in a [`Store`].
///
/// Tokens are appended in order and leave the window in batches, as [`Window`] specifies; a batch is rounded
/// up to whole blocks of the store. Attention runs over all three parts in one softmax.
/// [`Layer`](super::Layer) holds all heads of a layer.
///
/// # Examples
/// See `HeadCache` in pq-core.
#[derive(Clone, Debug)]
pub struct Windowed<S, E> {
    store: S,
    exact: ExactRows<E>,
}

impl<S: Store<E>, E: Element> Windowed<S, E> {
    /// Creates an empty cache.
    #[must_use]
    pub fn new(shared: Arc<S::Shared>, window: Window) -> Self {
        let store = S::new(shared);
        let exact = ExactRows::new(store.dims(), whole_blocks(window, &store));
        Self { store, exact }
    }

    /// Components of a key and of a value.
    #[must_use]
    pub const fn dims(&self) -> [usize; 2] {
        self.exact.dims()
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sinks() + self.compressed() + self.recent()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of sinks, exact tokens at the beginning.
    #[must_use]
    pub const fn sinks(&self) -> usize {
        self.exact.sinks()
    }

    /// Number of compressed tokens, which follow the sinks.
    #[must_use]
    pub fn compressed(&self) -> usize {
        self.store.len()
    }

    /// Number of exact tokens at the end.
    #[must_use]
    pub fn recent(&self) -> usize {
        self.exact.recent()
    }

    /// The compressed tokens, for a search or another operation on them.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Bytes of all tokens, without the shared state.
    #[must_use]
    pub fn size(&self) -> usize {
        self.exact.size() + self.store.size()
    }

    /// Appends tokens, and compresses those that leave the window.
    ///
    /// # Shapes
    /// `keys` (n, dim), `values` (n, dim of the values).
    /// # Errors
    /// [`Error::Length`](crate::Error::Length); the cache is then unchanged.
    /// # Cost
    /// A copy of each row; for each token that leaves the window that of the store.
    pub fn append(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<S::Report, S::Error> {
        self.append_with(Backend::detect(), keys, values)
    }

    /// [`append`](Self::append) on a given backend.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`Error::BackendUnavailable`](crate::Error::BackendUnavailable).
    pub fn append_with(
        &mut self,
        backend: Backend,
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) -> Result<S::Report, S::Error> {
        backend.check()?;
        let (between, store) = (self.store.len(), &mut self.store);
        self.exact.append(between, [keys, values], |evicted| store.append(backend, &evicted))
    }

    /// Keeps the first `len` tokens, to drop rejected drafts or to share a prefix with another sequence.
    /// Compressed tokens stay so: the window refills from the next token on.
    pub fn truncate(&mut self, len: usize) {
        let between = self.exact.truncate(len, self.store.len());
        self.store.truncate(between);
    }

    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    #[must_use]
    pub fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        let (dim, step) = (self.dims()[0], self.step(query_tokens, group));
        let queries = step.saturating_mul(group);
        let of_parts = self.store.scratch_len(step, group).max(attend_exact_scratch_len(queries, dim));
        queries.saturating_mul(dim).saturating_add(of_parts).saturating_add(ALIGNMENT)
    }

    /// Query tokens that are processed together, so that the scratch does not grow with their number.
    fn step(&self, query_tokens: usize, group: usize) -> usize {
        (S::QUERIES / group.max(1)).clamp(1, query_tokens.max(1))
    }

    /// Attention of a group of query heads over all tokens, for one or several query tokens.
    ///
    /// Query token i of T is at the position of the cache's token `len - T + i`, since a step appends its
    /// tokens first. It sees the tokens up to its own position, at most the last [`Attention::window`] of
    /// them, be they sinks, compressed or recent.
    ///
    /// Adds the tokens to `out` and `stats`, as [`attend_exact_into`](crate::attend_exact_into) does: start
    /// from zeros and [`SoftmaxStats::EMPTY`], and finish with [`normalize_all`](crate::normalize_all).
    ///
    /// # Shapes
    /// `queries` (T, group * dim): a decode step passes `Rows::from(slice)`; `scratch` at least
    /// [`scratch_len`](Self::scratch_len); `out` (T, group, dim of the values), in the basis in which the
    /// store has its values; `stats` (T, group).
    /// # Errors
    /// [`Error::PartialRow`](crate::Error::PartialRow), [`Error::Length`](crate::Error::Length),
    /// [`Error::TooShort`](crate::Error::TooShort); [`Error::Causal`](crate::Error::Causal) for more query
    /// tokens than there are tokens, and the error of [`Attention::check`]. `out` and `stats` are then
    /// untouched.
    /// # Cost
    /// Exact attention on sinks and recent rows and that of the store, once per [`Store::QUERIES`] queries;
    /// no allocation.
    pub fn attend_into<Q: Element>(
        &self,
        attention: &Attention,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), S::Error> {
        self.attend_into_with(Backend::detect(), attention, queries, scratch, out, stats)
    }

    /// [`attend_into`](Self::attend_into) on a given backend.
    ///
    /// # Errors
    /// As [`attend_into`](Self::attend_into), and
    /// [`Error::BackendUnavailable`](crate::Error::BackendUnavailable).
    pub fn attend_into_with<Q: Element>(
        &self,
        backend: Backend,
        attention: &Attention,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), S::Error> {
        backend.check()?;
        let ([dim, dim_v], query_tokens) = (self.dims(), queries.rows());
        let group = check_queries(attention, queries, self.len(), [dim, dim_v], out, stats)?;
        if stats.is_empty() {
            return Ok(());
        }
        check_at_least("scratch", scratch.len(), self.scratch_len(query_tokens, group))?;
        if self.is_empty() {
            return Ok(());
        }
        let unaligned = scratch.as_ptr().align_offset(ALIGNMENT * size_of::<f32>());
        let scratch = &mut scratch[unaligned.min(ALIGNMENT)..];
        let (step, row) = (self.step(query_tokens, group), group * dim);
        let (scratch, scaled) = scratch.split_at_mut(scratch.len() - step * row);
        let outs = out.chunks_mut(step * group * dim_v).zip(stats.chunks_mut(step * group));
        for (first, (out, stats)) in (0..query_tokens).step_by(step).zip(outs) {
            let queries = queries.slice(first..query_tokens.min(first + step))?;
            let scaled = &mut scaled[..queries.rows() * row];
            for (scaled, query) in scaled.chunks_exact_mut(row).zip(queries.iter()) {
                scaled.iter_mut().zip(query).for_each(|(scaled, q)| *scaled = attention.scale * q.to_f32());
            }
            let queries = Queries {
                scaled,
                tokens: queries.rows(),
                group,
                first: self.len() - query_tokens + first,
                start: self.sinks(),
                attention: Attention { scale: 1.0, ..*attention },
            };
            self.store.attend_into(backend, &queries, scratch, out, stats)?;
            let (rows, attention) = (Rows::contiguous(scaled, row)?, &queries.attention);
            for tokens in self.exact.tokens(self.store.len(), queries.first)? {
                attend_exact_into_with(backend, attention, rows, &tokens, scratch, out, stats)?;
            }
        }
        Ok(())
    }

    /// Writes everything but the window and the shared state.
    pub(super) fn write(&self, writer: &mut Writer) {
        self.store.write(writer);
        self.exact.write(writer, self.store.len());
    }

    /// Reads what [`write`](Self::write) wrote.
    ///
    /// # Errors
    /// Those of the [`Reader`]; [`Error::BadField`](crate::Error::BadField) for a cache of other codebooks or
    /// maps, and for numbers of tokens that the window cannot hold.
    pub(super) fn read(
        reader: &mut Reader<'_>,
        shared: &Arc<S::Shared>,
        window: Window,
    ) -> Result<Self, S::Error> {
        let store = S::read(reader, shared)?;
        let exact = ExactRows::read(reader, store.dims(), whole_blocks(window, &store), store.len())?;
        Ok(Self { store, exact })
    }
}

/// The window with a batch of whole blocks.
fn whole_blocks<S: Store<E>, E: Element>(window: Window, store: &S) -> Window {
    Window { batch: window.batch.max(1).next_multiple_of(store.block()), ..window }
}
