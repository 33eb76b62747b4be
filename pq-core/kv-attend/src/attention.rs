//! Exact attention: its options, its tokens, and the function.

use core::ops::Range;

use crate::error::{check_at_least, check_len};
use crate::kernel::Attend;
use crate::{Backend, Element, Error, Rows, SoftmaxStats};

/// How inner products become scores, and which tokens a query attends to.
///
/// # Examples
/// ```
/// use kv_attend::Attention;
/// let gemma2 = Attention { softcap: Some(50.0), window: Some(4096), ..Attention::scaled(1.0 / 16.0) };
/// assert_eq!(gemma2.scale, 0.0625);
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Factor of the inner products, usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Sliding window: the number of tokens that a query attends to, its own included, at positions up to
    /// `window - 1` before its own. `None` for all.
    pub window: Option<usize>,
}

impl Attention {
    /// All tokens, without a cap.
    #[must_use]
    pub const fn scaled(scale: f32) -> Self {
        Self { scale, softcap: None, window: None }
    }

    /// Checks the fields, as every function that takes the options does.
    ///
    /// # Errors
    /// [`Error::Attention`] for a scale that is not finite or a cap that is not positive and finite,
    /// [`Error::Zero`] for a window of no tokens.
    pub fn check(&self) -> Result<(), Error> {
        if !self.scale.is_finite() {
            return Err(Error::Attention { what: "scale" });
        }
        match (self.softcap, self.window) {
            (Some(cap), _) if !(cap.is_finite() && cap > 0.0) => Err(Error::Attention { what: "softcap" }),
            (_, Some(0)) => Err(Error::Zero { what: "window" }),
            _ => Ok(()),
        }
    }
}

/// A scale of 1, all tokens, no cap.
impl Default for Attention {
    fn default() -> Self {
        Self::scaled(1.0)
    }
}

/// The tokens of one KV head as exact rows, or of several KV heads ([`heads`](Self::heads)): all tokens, or a
/// list of them.
///
/// # Examples
/// ```
/// use kv_attend::{ExactTokens, Rows};
/// let (keys, values) = ([0.0_f32; 8], [1.0_f32; 4]); // 4 tokens: keys of rank 2, values of rank 1
/// let tokens = ExactTokens::new(Rows::contiguous(&keys, 2)?, Rows::contiguous(&values, 1)?)?;
/// let retrieved = tokens.chosen(&[3, 0])?;
/// assert_eq!((tokens.n(), retrieved.n()), (4, 2));
/// # Ok::<(), kv_attend::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ExactTokens<'a, E> {
    pub(crate) keys: Rows<'a, E>,
    pub(crate) values: Rows<'a, E>,       // as many as keys
    pub(crate) heads: usize,              // divides the components of keys and of values
    pub(crate) chosen: Option<&'a [u32]>, // each the index of a row
    start: usize,                         // position of row 0
    first_query: Option<usize>,           // position of the first query token
}

impl<'a, E> ExactTokens<'a, E> {
    /// All rows; row t of `keys` and `values` is the token at position t, unless
    /// [`starting_at`](Self::starting_at) moves them.
    ///
    /// # Errors
    /// [`Error::Length`] if there are more or fewer values than keys.
    pub const fn new(keys: Rows<'a, E>, values: Rows<'a, E>) -> Result<Self, Error> {
        if keys.rows() != values.rows() {
            return Err(Error::Length { what: "values", expected: keys.rows(), actual: values.rows() });
        }
        Ok(Self { keys, values, heads: 1, chosen: None, start: 0, first_query: None })
    }

    /// All rows of slices without gaps: `keys` (n, dim_k) and `values` (n, dim_v).
    ///
    /// # Errors
    /// [`Error::Zero`] for no components, [`Error::PartialRow`], [`Error::Length`].
    pub fn contiguous(keys: &'a [E], dim_k: usize, values: &'a [E], dim_v: usize) -> Result<Self, Error> {
        Self::new(Rows::contiguous(keys, dim_k)?, Rows::contiguous(values, dim_v)?)
    }

    /// Declares that each row holds `heads` KV heads, one after the other: (tokens, heads, head_dim), NHD.
    ///
    /// # Errors
    /// [`Error::Zero`] for no heads, [`Error::PartialRow`] if `heads` does not divide a row.
    /// # Examples
    /// ```
    /// use kv_attend::{Attention, ExactTokens, Rows, SoftmaxStats, attend_exact_into, normalize_all};
    /// // 3 tokens of 2 heads of 2 components, and a query for each head.
    /// let cache = [0.0_f32, 0.0, 5.0, 5.0, 0.0, 0.0, 5.0, 5.0, 0.0, 0.0, 5.0, 5.0];
    /// let queries = [1.0_f32; 4];
    /// let rows = Rows::contiguous(&cache, 4)?;
    /// let tokens = ExactTokens::new(rows, rows)?.heads(2)?;
    /// let (mut scratch, mut out, mut stats) = ([0.0; 4], [0.0; 4], [SoftmaxStats::EMPTY; 2]);
    /// let attention = Attention::default();
    /// attend_exact_into(&attention, Rows::from(&queries[..]), &tokens, &mut scratch, &mut out, &mut stats)?;
    /// normalize_all(&stats, &mut out)?;
    /// assert_eq!(out, [0.0, 0.0, 5.0, 5.0]);
    /// # Ok::<(), kv_attend::Error>(())
    /// ```
    pub const fn heads(self, heads: usize) -> Result<Self, Error> {
        if heads == 0 {
            return Err(Error::Zero { what: "heads" });
        }
        if !self.keys.components().is_multiple_of(heads) {
            return Err(Error::PartialRow {
                what: "a row of keys",
                row: heads,
                actual: self.keys.components(),
            });
        }
        if !self.values.components().is_multiple_of(heads) {
            return Err(Error::PartialRow {
                what: "a row of values",
                row: heads,
                actual: self.values.components(),
            });
        }
        Ok(Self { heads, ..self })
    }

    /// Restricts attention to the rows listed in `tokens`, in any order: a search's result. A row listed
    /// twice counts twice. All [`heads`](Self::heads) of the rows share the list; for one list per head, take
    /// the [`columns`](Rows::columns) of one head at a time.
    ///
    /// # Errors
    /// [`Error::Token`] for an index that is out of range.
    pub fn chosen(self, tokens: &'a [u32]) -> Result<Self, Error> {
        let rows = self.keys.rows();
        match tokens.iter().position(|&token| usize::try_from(token).map_or(true, |token| token >= rows)) {
            Some(index) => Err(Error::Token { index, token: tokens[index], rows }),
            None => Ok(Self { chosen: Some(tokens), ..self }),
        }
    }

    /// Sets the position of row 0, for rows that are a part of a sequence. The default is 0.
    #[must_use]
    pub const fn starting_at(self, position: usize) -> Self {
        Self { start: position, ..self }
    }

    /// Sets the position of the first query token, from which the causal mask and the window are counted. It
    /// may lie before the rows, among them or after them. By default the query tokens are the last rows.
    #[must_use]
    pub const fn first_query(self, position: usize) -> Self {
        Self { first_query: Some(position), ..self }
    }

    /// Number of tokens: of the list, or of all rows.
    #[must_use]
    pub const fn n(&self) -> usize {
        match self.chosen {
            Some(tokens) => tokens.len(),
            None => self.keys.rows(),
        }
    }

    /// The rows that query token `i` of `queries` sees. The range may end beyond the last row.
    pub(crate) fn visible(&self, window: Option<usize>, i: usize, queries: usize) -> Range<usize> {
        let first = |end: usize| window.map_or(0, |window| end.saturating_sub(window));
        match self.first_query {
            Some(position) => {
                let end = position.saturating_add(i).saturating_add(1);
                first(end).saturating_sub(self.start)..end.saturating_sub(self.start)
            }
            None => {
                let end = (self.keys.rows() + 1 + i).saturating_sub(queries);
                first(end)..end
            }
        }
    }
}

/// Elements of the scratch of [`attend_exact_into`]: all queries in `f32`, of `dim_k` components each.
#[must_use]
pub const fn attend_exact_scratch_len(queries: usize, dim_k: usize) -> usize {
    queries.saturating_mul(dim_k)
}

/// Attention of a GQA group of query heads over the exact rows of their KV head, or of several groups if the
/// rows hold several KV heads ([`ExactTokens::heads`]). Keys and values may differ in their number of
/// components.
///
/// With `s_t = scale * <q, k_t>`, capped if [`Attention::softcap`] is set, adds
/// `sum_t exp(s_t - max s) * v_t` to each query's `out`, and updates its `stats` (maximum and sum). Start
/// from zeros and [`SoftmaxStats::EMPTY`], call the function for every part of the sequence, exact or coded,
/// then [`normalize_all`](crate::normalize_all).
///
/// Several query tokens (a chunk of a prompt, speculative tokens) attend causally: query token i of T sees
/// the rows up to its own, which is row `n - T + i` unless [`ExactTokens::first_query`] sets another
/// position. A masked row is not read, so it may hold anything. A visible row is read from memory once for
/// the whole group and all query tokens.
///
/// The softmax runs over at most 64 tokens at a time. A token with a NaN score makes the result NaN.
///
/// # Shapes
/// `queries` (T, heads * group * dim_k): a row is a query token, so a decode step passes `Rows::from(slice)`;
/// `tokens` keys (n, heads * dim_k) and values (n, heads * dim_v); `scratch` at least
/// [`attend_exact_scratch_len`] for T * heads * group queries; `out` (T, heads, group, dim_v); `stats` (T,
/// heads, group).
/// # Errors
/// [`Error::Zero`] for no query, [`Error::PartialRow`] if `queries` does not consist of rows of keys,
/// [`Error::Length`], [`Error::TooShort`], [`Error::Causal`], [`Error::Attention`]. `out` and `stats` are
/// then unchanged.
/// # Cost
/// T * heads * group * n * (dim_k + dim_v) multiply-adds, T * heads * group * n exponentials, one pass over
/// the rows, no allocation. One head of an NHD cache ([`Rows::columns`]) takes longer than contiguous rows,
/// since each of its rows lies on a different page. All heads in one call read memory sequentially.
/// # Source
/// The merge of partial softmaxes: Dao et al., "FlashAttention", NeurIPS 2022; the cap: Gemma 2, arXiv
/// 2408.00118; the window: Mistral 7B, arXiv 2310.06825.
/// # Examples
/// ```
/// use kv_attend::{Attention, ExactTokens, Rows, SoftmaxStats, attend_exact_into, normalize_all};
/// let (keys, values) = ([0.0_f32, 0.0], [1.0, 3.0]); // two tokens of one component, equal scores
/// let tokens = ExactTokens::contiguous(&keys, 1, &values, 1)?;
/// let queries = [2.0_f32, 5.0]; // two heads
/// let (mut scratch, mut out, mut stats) = ([0.0; 2], [0.0; 2], [SoftmaxStats::EMPTY; 2]);
/// let attention = Attention::scaled(0.5);
/// attend_exact_into(&attention, Rows::from(&queries[..]), &tokens, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert_eq!(out, [2.0, 2.0]);
///
/// // One head, two query tokens: the first does not see the second.
/// let queries = Rows::contiguous(&queries, 1)?;
/// (out, stats) = ([0.0; 2], [SoftmaxStats::EMPTY; 2]);
/// attend_exact_into(&attention, queries, &tokens, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert_eq!(out, [1.0, 2.0]);
/// # Ok::<(), kv_attend::Error>(())
/// ```
pub fn attend_exact_into<Q: Element, E: Element>(
    attention: &Attention,
    queries: Rows<'_, Q>,
    tokens: &ExactTokens<'_, E>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    attend_exact_into_with(Backend::detect(), attention, queries, tokens, scratch, out, stats)
}

/// [`attend_exact_into`] on a given backend.
///
/// # Errors
/// As for [`attend_exact_into`], and [`Error::BackendUnavailable`].
pub fn attend_exact_into_with<Q: Element, E: Element>(
    backend: Backend,
    attention: &Attention,
    queries: Rows<'_, Q>,
    tokens: &ExactTokens<'_, E>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    backend.check()?;
    attention.check()?;
    let (dim_k, dim_v) = (tokens.keys.components(), tokens.values.components());
    let (query_tokens, row) = (queries.rows(), queries.components());
    if stats.is_empty() || row == 0 || query_tokens == 0 {
        return Err(Error::Zero { what: "number of queries" });
    }
    if dim_k == 0 || dim_v == 0 {
        return Err(Error::Zero { what: "components of a row" });
    }
    if !row.is_multiple_of(dim_k) {
        return Err(Error::PartialRow { what: "queries", row: dim_k, actual: row });
    }
    let (dim_k, dim_v) = (dim_k / tokens.heads, dim_v / tokens.heads);
    if tokens.first_query.is_none() && query_tokens > tokens.keys.rows().max(1) {
        return Err(Error::Causal { queries: query_tokens, tokens: tokens.keys.rows() });
    }
    check_len("stats", stats.len(), query_tokens.checked_mul(row / dim_k).ok_or(Error::TooLarge)?)?;
    check_len("out", out.len(), stats.len().checked_mul(dim_v).ok_or(Error::TooLarge)?)?;
    let len = attend_exact_scratch_len(stats.len(), dim_k);
    check_at_least("scratch", scratch.len(), len)?;
    let scaled = &mut scratch[..len];
    for (scaled, query) in scaled.chunks_exact_mut(row).zip(queries.iter()) {
        scaled.iter_mut().zip(query).for_each(|(scaled, x)| *scaled = attention.scale * x.to_f32());
    }
    E::attend(backend, Attend { attention, queries: scaled, query_tokens, tokens, out, stats });
    Ok(())
}
