//! What a crate implements for its compressed tokens, so that caches of heads, layers and batches are made of
//! them.

use core::ops::Range;

use alloc::sync::Arc;

use super::{EvictedRows, Fit, Pair, Reader, Writer};
use crate::error::check_len;
use crate::{Attention, Backend, Element, Error, Rows, SoftmaxStats};

/// The compressed tokens of one KV head of one sequence, which follow its sinks.
/// [`Windowed`](super::Windowed) makes the cache of a head of it: it adds sinks and window, whose exact rows
/// have elements of type `E`.
///
/// Tokens are appended in order. What the store holds does not depend on how they were divided among appends.
pub trait Store<E: Element>: Sized + Send + Sync {
    /// State that all sequences share: codebooks, maps.
    type Shared: Send + Sync;
    /// An append's report on the tokens that it compressed. A layer collects those of its heads.
    type Report: FromIterator<Self::Report> + Send;
    /// The error of the crate.
    type Error: From<Error> + Send;
    /// The name of the serialized type in errors.
    const NAME: &'static str;
    /// Magic bytes of a serialized layer.
    const MAGIC: [u8; 4];
    /// Version of the serialized format.
    const VERSION: u32;
    /// The most queries (query tokens times query heads) of a call of [`attend_into`](Self::attend_into). Of
    /// larger groups a call has one query token.
    const QUERIES: usize;

    /// Creates an empty store.
    fn new(shared: Arc<Self::Shared>) -> Self;

    /// Components of a key and of a value, at least 1.
    fn dims(&self) -> [usize; 2];

    /// Tokens of a block: tokens leave the window in multiples of it.
    fn block(&self) -> usize {
        1
    }

    /// Number of tokens.
    fn len(&self) -> usize;

    /// Whether there are no tokens.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all tokens, without the shared state.
    fn size(&self) -> usize;

    /// Compresses tokens that have left the window.
    ///
    /// # Errors
    /// [`Error::BackendUnavailable`]; the store is then unchanged.
    fn append(&mut self, backend: Backend, evicted: &EvictedRows<'_, E>)
    -> Result<Self::Report, Self::Error>;

    /// Keeps the first `len` tokens.
    fn truncate(&mut self, len: usize);

    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    fn scratch_len(&self, query_tokens: usize, group: usize) -> usize;

    /// Adds the store's tokens to the `out` and `stats` of a group of query heads, for one or several query
    /// tokens.
    ///
    /// # Shapes
    /// `scratch` at least [`scratch_len`](Self::scratch_len), at a cache line; `out` (T, group, dim of the
    /// values); `stats` (T, group).
    /// # Errors
    /// [`Error::BackendUnavailable`].
    fn attend_into(
        &self,
        backend: Backend,
        queries: &Queries<'_>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Self::Error>;

    /// How well the shared state fits the tokens, if it knows what to expect.
    fn fits(&self) -> Option<Pair<Fit>> {
        None
    }

    /// Writes everything but the shared state.
    fn write(&self, writer: &mut Writer);

    /// Reads what [`write`](Self::write) wrote.
    ///
    /// # Errors
    /// Those of the [`Reader`]; [`Error::BadField`] for other codebooks or maps.
    fn read(reader: &mut Reader<'_>, shared: &Arc<Self::Shared>) -> Result<Self, Self::Error>;
}

/// The queries of a group of heads, of consecutive tokens, for a [`Store`] that follows a head's sinks.
#[derive(Clone, Copy, Debug)]
pub struct Queries<'a> {
    pub(super) scaled: &'a [f32],
    pub(super) tokens: usize, // at least 1
    pub(super) group: usize,  // at least 1
    pub(super) first: usize,
    pub(super) start: usize,
    pub(super) attention: Attention, // of scale 1
}

impl<'a> Queries<'a> {
    /// The queries of a group of heads of one token, after RoPE and scaled: (group, dim). Of a store of `len`
    /// tokens they see those from index `first` on.
    ///
    /// # Examples
    /// ```
    /// use kv_attend::owner::Queries;
    /// let queries = Queries::of_token(&[0.5, 1.0], 2, 10, 4); // two heads of one component
    /// assert_eq!((queries.visible(0, 10), queries.group()), (4..10, 2));
    /// ```
    #[must_use]
    pub const fn of_token(scaled: &'a [f32], group: usize, len: usize, first: usize) -> Self {
        let window = Some(len.saturating_sub(first) + 1); // with the token itself
        let attention = Attention { window, ..Attention::scaled(1.0) };
        Self { scaled, tokens: 1, group, first: len, start: 0, attention }
    }

    /// The queries after RoPE, already scaled: (T, group, dim).
    #[must_use]
    pub const fn scaled(&self) -> &'a [f32] {
        self.scaled
    }

    /// Number of query tokens, T.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Query heads of the group.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.group
    }

    /// The position of the first query token.
    #[must_use]
    pub const fn first(&self) -> usize {
        self.first
    }

    /// The position of the store's first token.
    #[must_use]
    pub const fn start(&self) -> usize {
        self.start
    }

    /// Softcap and sliding window, with a scale of 1.
    #[must_use]
    pub const fn attention(&self) -> &Attention {
        &self.attention
    }

    /// The tokens, of a store of `len`, that query token `i` sees: up to its own position, at most the last
    /// [`Attention::window`] of them.
    #[must_use]
    pub fn visible(&self, i: usize, len: usize) -> Range<usize> {
        let end = self.first + i + 1;
        let start = self.attention.window.map_or(0, |window| end.saturating_sub(window));
        start.saturating_sub(self.start).min(len)..end.saturating_sub(self.start).min(len)
    }
}

/// Checks the arguments of attention on a head of `tokens` tokens, and returns the size of the GQA group.
///
/// # Shapes
/// `queries` (T, group * dim); `out` (T, group, dim of the values); `stats` (T, group).
/// # Errors
/// Those of [`Attention::check`]; [`Error::PartialRow`] if queries do not consist of keys; [`Error::Length`];
/// [`Error::Causal`] for more query tokens than tokens; a single query token is always allowed.
pub(super) fn check_queries<Q>(
    attention: &Attention,
    queries: Rows<'_, Q>,
    tokens: usize,
    [dim, dim_v]: [usize; 2],
    out: &[f32],
    stats: &[SoftmaxStats],
) -> Result<usize, Error> {
    attention.check()?;
    let group = count("queries", queries.components(), dim)?;
    check_len("stats", stats.len(), queries.rows().saturating_mul(group))?;
    check_len("out", out.len(), stats.len().saturating_mul(dim_v))?;
    if group > 0 {
        check_causal(queries.rows(), tokens)?;
    }
    Ok(group)
}

/// Checks that two heads have the same dimensions.
pub(super) fn check_dims([dim, dim_v]: [usize; 2], [first, first_v]: [usize; 2]) -> Result<(), Error> {
    check_len("keys of a head", dim, first)?;
    check_len("values of a head", dim_v, first_v)
}

/// Checks that each query token has a position among `tokens`, or that it is the only one.
pub(super) fn check_causal(queries: usize, tokens: usize) -> Result<(), Error> {
    if queries > tokens.max(1) { Err(Error::Causal { queries, tokens }) } else { Ok(()) }
}

/// Number of parts of `part` elements, at least 1 each, in `actual` elements.
pub(super) fn count(what: &'static str, actual: usize, part: usize) -> Result<usize, Error> {
    if actual.is_multiple_of(part) {
        Ok(actual / part)
    } else {
        Err(Error::PartialRow { what, row: part, actual })
    }
}
