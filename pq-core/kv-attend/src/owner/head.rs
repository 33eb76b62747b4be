//! What the cache of a head has to offer so that a layer and a batch can be built of it.

use alloc::sync::Arc;

use super::{Reader, Writer};
use crate::error::check_len;
use crate::{Attention, Backend, Element, Error, Rows, SoftmaxStats, Window};

/// The cache of one KV head of one sequence: exact rows in a [`Window`], all other tokens compressed. A
/// [`Layer`](super::Layer) holds one per KV head.
///
/// Tokens are appended in order. What the cache holds does not depend on how they were divided among appends.
pub trait Head: Sized + Send + Sync {
    /// The type of the exact rows' components.
    type Element: Element;
    /// State that all sequences share: codebooks, maps.
    type Shared: Send + Sync;
    /// An append's report on the tokens that it evicted from the window. A layer collects those of its heads.
    type Evicted: FromIterator<Self::Evicted> + Send;
    /// The error of the crate.
    type Error: From<Error> + Send;
    /// The name of the serialized type in errors.
    const NAME: &'static str;
    /// Magic bytes of a serialized layer.
    const MAGIC: [u8; 4];
    /// Version of the serialized format.
    const VERSION: u32;

    /// Creates an empty cache.
    fn new(shared: Arc<Self::Shared>, window: Window) -> Self;

    /// Components of a key and of a value, at least 1.
    fn dims(&self) -> [usize; 2];

    /// Number of tokens.
    fn len(&self) -> usize;

    /// Whether there are no tokens.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of all tokens, without the shared state.
    fn size(&self) -> usize;

    /// Appends tokens, and compresses those that leave the window.
    ///
    /// # Shapes
    /// `keys` (n, dim), `values` (n, dim of the values).
    /// # Errors
    /// [`Error::Length`], [`Error::BackendUnavailable`]; the cache is then unchanged.
    fn append_with(
        &mut self,
        backend: Backend,
        keys: Rows<'_, Self::Element>,
        values: Rows<'_, Self::Element>,
    ) -> Result<Self::Evicted, Self::Error>;

    /// Keeps the first `len` tokens.
    fn truncate(&mut self, len: usize);

    /// Elements of the scratch of [`attend_into_with`](Self::attend_into_with).
    fn scratch_len(&self, query_tokens: usize, group: usize) -> usize;

    /// Adds all tokens to the `out` and `stats` of a group of query heads, for one or several query tokens.
    /// Query token i of T is at the position of the cache's token `len - T + i`.
    ///
    /// # Shapes
    /// `queries` (T, group * dim); `scratch` at least [`scratch_len`](Self::scratch_len); `out` (T, group,
    /// dim of the values); `stats` (T, group).
    /// # Errors
    /// Those of [`check_queries`], [`Error::TooShort`], [`Error::BackendUnavailable`].
    fn attend_into_with<Q: Element>(
        &self,
        backend: Backend,
        attention: &Attention,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Self::Error>;

    /// Writes everything but the window and the shared state.
    fn write(&self, writer: &mut Writer);

    /// Reads what [`write`](Self::write) wrote.
    ///
    /// # Errors
    /// Those of the [`Reader`]; [`Error::BadField`] for a cache of other codebooks or maps, and for numbers of
    /// tokens that the window cannot hold.
    fn read(reader: &mut Reader<'_>, shared: &Arc<Self::Shared>, window: Window)
    -> Result<Self, Self::Error>;
}

/// Checks the arguments of attention on a head of `tokens` tokens, and returns the size of the GQA group.
///
/// # Shapes
/// `queries` (T, group * dim); `out` (T, group, dim of the values); `stats` (T, group).
/// # Errors
/// Those of [`Attention::check`]; [`Error::PartialRow`] if queries do not consist of keys; [`Error::Length`];
/// [`Error::Causal`] for more query tokens than tokens; a single query token is always allowed.
pub fn check_queries<Q>(
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
pub(super) fn check_dims<H: Head>(head: &H, first: &H) -> Result<(), Error> {
    let ([dim, dim_v], [first_dim, first_dim_v]) = (head.dims(), first.dims());
    check_len("keys of a head", dim, first_dim)?;
    check_len("values of a head", dim_v, first_dim_v)
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
