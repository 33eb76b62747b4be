//! Maximum inner product search: selects the tokens that a decode step attends to.

use kv_attend::simd::dot;
use kv_attend::{AnyRows, for_any_rows};

use crate::error::{check_at_least, check_len, count_rows};
use crate::simd::{Kernel, Run};
use crate::{
    Backend, Codes, Element, Error, GroupRule, Luts, Rows, SoftmaxStats, combine_group_into_with,
    scan_into_with, top_k_into_with,
};

/// Parameters of [`search_into`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// Tokens to select by score, in addition to the sinks and the recent tokens.
    pub k: usize,
    /// First tokens of the sequence, which are always selected.
    pub sinks: usize,
    /// Last tokens of the sequence, which are always selected.
    pub recent: usize,
    /// How the scores of a group of query heads are combined.
    pub rule: GroupRule,
}

impl Search {
    /// Number of tokens that a search among `n` returns.
    #[must_use]
    pub const fn found(&self, n: usize) -> usize {
        let wanted = self.k.saturating_add(self.sinks).saturating_add(self.recent);
        if wanted < n { wanted } else { n }
    }
}

/// Parameters of [`rerank_into`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rerank {
    /// Candidates to keep.
    pub k: usize,
    /// How the scores of a group of query heads are combined.
    pub rule: GroupRule,
}

/// Scratch of [`search_into`] and [`rerank_into`], borrowed from the caller. It holds the scores afterwards.
///
/// # Examples
/// ```
/// use pq_core::{SearchScratch, SoftmaxStats};
/// let (group, n) = (2, 100);
/// let mut floats = vec![0.0; SearchScratch::len(group, n)];
/// let mut stats = [SoftmaxStats::EMPTY; 2];
/// let scratch = SearchScratch::new(n, &mut floats, &mut stats)?;
/// assert_eq!((scratch.scores().len(), scratch.combined().len()), (200, 100));
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Debug)]
pub struct SearchScratch<'a> {
    scores: &'a mut [f32],         // (group, n)
    combined: &'a mut [f32],       // (n,)
    stats: &'a mut [SoftmaxStats], // (group,)
}

impl<'a> SearchScratch<'a> {
    /// Floats that a search over `n` tokens by `group` query heads needs: `(group + 1) * n`.
    #[must_use]
    pub const fn len(group: usize, n: usize) -> usize {
        group.saturating_mul(n).saturating_add(n)
    }

    /// Partitions the caller's memory for `n` tokens and `stats.len()` query heads.
    ///
    /// # Shapes
    /// `floats` at least [`len`](Self::len) elements; `stats` (group,).
    /// # Errors
    /// [`Error::TooShort`].
    pub fn new(n: usize, floats: &'a mut [f32], stats: &'a mut [SoftmaxStats]) -> Result<Self, Error> {
        let len = Self::len(stats.len(), n);
        check_at_least("search scratch", floats.len(), len)?;
        let (scores, combined) = floats[..len].split_at_mut(len - n);
        Ok(Self { scores, combined, stats })
    }

    /// The scores of all tokens for each query head: (group, n).
    #[must_use]
    pub const fn scores(&self) -> &[f32] {
        self.scores
    }

    /// The combined scores, as [`combine_group_into`](crate::combine_group_into) defines them: (n,).
    #[must_use]
    pub const fn combined(&self) -> &[f32] {
        self.combined
    }

    /// The softmax statistics of each query head over all tokens: (group,).
    #[must_use]
    pub const fn stats(&self) -> &[SoftmaxStats] {
        self.stats
    }

    /// Mutable scores, combined scores and statistics.
    pub(crate) fn parts(&mut self) -> (&mut [f32], &mut [f32], &mut [SoftmaxStats]) {
        (self.scores, self.combined, self.stats)
    }

    pub(crate) fn check(&self, group: usize, n: usize) -> Result<(), Error> {
        check_len("heads of the search scratch", self.stats.len(), group)?;
        check_len("tokens of the search scratch", self.combined.len(), n)
    }
}

/// Selects the tokens that a group of query heads attends to: scan, combination of the group's scores, top-k,
/// sinks and recent tokens.
///
/// Writes their indices in ascending order and returns their number ([`Search::found`]). Afterwards `scratch`
/// holds the scores of all tokens and their statistics: [`SoftmaxStats::log_sum_exp`] gives the fraction of a
/// query's attention that the selected tokens hold. The scale of a query does not change the selection for a
/// single head. For a group, scale queries as for attention, since every head's scores pass through a
/// softmax.
///
/// # Shapes
/// `luts` (group, m, ksub); `codes` (n, m) packed; `scratch` for the same group and n; `tokens` at least
/// [`Search::found`] elements.
/// # Errors
/// [`Error::ShapeMismatch`], [`Error::Length`] for a scratch of other sizes, [`Error::TooShort`] for
/// `tokens`, which is then untouched.
/// # Cost
/// group * n * m lookups, the exponentials of [`combine_group_into`](crate::combine_group_into), one
/// selection; no allocation.
/// # Source
/// PQCache (arXiv 2407.12820), 3.1 and 3.4.
/// # Examples
/// ```
/// use pq_core::*;
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let (shape, n) = (PqShape::new(16, 8, 6)?, 500);
/// let mut keys: Vec<f32> = (0..n * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// let query: Vec<f32> = (0..16).map(|i| noise(7 * i)).collect();
/// keys[123 * 16..124 * 16].iter_mut().zip(&query).for_each(|(key, q)| *key += 2.0 * q); // a matching key
/// let trained = train(shape, &keys, &TrainOptions { encode: true, ..Default::default() })?;
/// let codebook = CodebookBuf::new(shape, &trained.centroids)?;
///
/// let mut table = vec![0.0; shape.lut_len()];
/// let luts = lut_into(&codebook.view(), &query, &mut table)?;
/// let search = Search { k: 10, sinks: 4, recent: 16, ..Default::default() };
/// let (mut floats, mut stats) = (vec![0.0; SearchScratch::len(1, n)], [SoftmaxStats::EMPTY]);
/// let mut scratch = SearchScratch::new(n, &mut floats, &mut stats)?;
/// let mut tokens = vec![0; search.found(n)];
/// let found = search_into(&luts, &Codes::new(shape, n, &trained.codes)?, &search, &mut scratch, &mut tokens)?;
/// assert_eq!(found, 30);
/// assert!(tokens.contains(&123));
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn search_into(
    luts: &Luts<'_>,
    codes: &Codes<'_>,
    search: &Search,
    scratch: &mut SearchScratch<'_>,
    tokens: &mut [u32],
) -> Result<usize, Error> {
    search_into_with(Backend::detect(), luts, codes, search, scratch, tokens)
}

/// [`search_into`] on a given backend.
///
/// # Errors
/// As [`search_into`], and [`Error::BackendUnavailable`].
pub fn search_into_with(
    backend: Backend,
    luts: &Luts<'_>,
    codes: &Codes<'_>,
    search: &Search,
    scratch: &mut SearchScratch<'_>,
    tokens: &mut [u32],
) -> Result<usize, Error> {
    backend.check()?;
    let n = codes.n();
    if luts.shape() != codes.shape() {
        return Err(Error::ShapeMismatch);
    }
    scratch.check(luts.group(), n)?;
    let found = search.found(n);
    check_at_least("tokens", tokens.len(), found)?;
    for (g, scores) in scratch.scores.chunks_exact_mut(n.max(1)).enumerate() {
        scan_into_with(backend, &luts.lut(g), codes, scores)?;
    }
    combine_group_into_with(backend, scratch.scores, search.rule, scratch.stats, scratch.combined)?;
    // Sinks and recent tokens do not count toward k.
    let sinks = search.sinks.min(n);
    let recent = search.recent.min(n - sinks);
    let middle = &scratch.combined[sinks..n - recent];
    let k = search.k.min(middle.len());
    for (i, token) in tokens[..sinks].iter_mut().enumerate() {
        *token = i as u32;
    }
    let chosen = &mut tokens[sinks..sinks + k];
    top_k_into_with(backend, middle, k, chosen)?;
    chosen.iter_mut().for_each(|token| *token += sinks as u32);
    for (i, token) in tokens[sinks + k..found].iter_mut().enumerate() {
        *token = (n - recent + i) as u32;
    }
    Ok(found)
}

/// Ranks candidates by exact scores and keeps the best `k`: the second stage of a search that selected more
/// tokens than attention needs.
///
/// Writes indices into the list of candidates, in ascending order, and returns their number,
/// `min(k, candidates)`.
///
/// # Shapes
/// `queries` (group, dim); `keys` (candidates, dim), the exact keys; `scratch` for the same group and
/// candidates; `kept` at least `min(k, candidates)` elements.
/// # Errors
/// [`Error::Zero`] for no query or a dimension of zero, [`Error::PartialRow`], [`Error::Length`], or
/// [`Error::TooShort`] for `kept`.
/// # Cost
/// group * candidates * dim multiply-adds and a selection; no allocation.
/// # Examples
/// ```
/// use pq_core::{Rerank, SearchScratch, SoftmaxStats, rerank_into};
/// let candidates = [17, 40, 99]; // tokens, as a search found them
/// let keys = [0.0_f32, 1.0, 2.0, 0.5, 3.0, 0.0]; // their exact keys, fetched
/// let mut floats = vec![0.0; SearchScratch::len(1, 3)];
/// let mut stats = [SoftmaxStats::EMPTY];
/// let mut scratch = SearchScratch::new(3, &mut floats, &mut stats)?;
/// let mut kept = [0; 2];
/// rerank_into(&[1.0, 0.0], &keys, &Rerank { k: 2, ..Rerank::default() }, &mut scratch, &mut kept)?;
/// assert_eq!(kept.map(|i| candidates[i as usize]), [40, 99]);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn rerank_into<E: Element>(
    queries: &[f32],
    keys: &[E],
    rerank: &Rerank,
    scratch: &mut SearchScratch<'_>,
    kept: &mut [u32],
) -> Result<usize, Error> {
    rerank_into_with(Backend::detect(), queries, keys, rerank, scratch, kept)
}

/// [`rerank_into`] on a given backend.
///
/// # Errors
/// As [`rerank_into`], and [`Error::BackendUnavailable`].
pub fn rerank_into_with<E: Element>(
    backend: Backend,
    queries: &[f32],
    keys: &[E],
    rerank: &Rerank,
    scratch: &mut SearchScratch<'_>,
    kept: &mut [u32],
) -> Result<usize, Error> {
    backend.check()?;
    let (group, n) = (scratch.stats.len(), scratch.combined.len());
    if group == 0 || queries.is_empty() {
        return Err(Error::Zero { what: "the number of query components" });
    }
    let dim = count_rows("queries", queries.len(), group)?;
    check_len("keys", keys.len(), n.saturating_mul(dim))?;
    check_at_least("kept", kept.len(), rerank.k.min(n))?;
    score_exactly(backend, queries, Rows::from(keys).into(), dim, scratch.scores);
    combine_group_into_with(backend, scratch.scores, rerank.rule, scratch.stats, scratch.combined)?;
    top_k_into_with(backend, scratch.combined, rerank.k, kept)
}

/// Computes the scores (group, n) of exact keys (n, dim), a single row.
fn score_exactly(backend: Backend, queries: &[f32], keys: AnyRows<'_>, dim: usize, scores: &mut [f32]) {
    for_any_rows!(keys, keys => backend.run(ExactScores { queries, keys: keys.row(0), dim, scores }));
}

struct ExactScores<'a, 'b, E> {
    queries: &'a [f32], // (group, dim)
    keys: &'a [E],      // (n, dim)
    dim: usize,         // at least 1
    scores: &'b mut [f32],
}

impl<E: Element> Kernel for ExactScores<'_, '_, E> {
    type Output = ();

    /// Portable code that the compiler vectorizes for each instruction set.
    #[inline(always)]
    fn scalar(self) {
        let n = self.keys.len() / self.dim;
        for (query, scores) in self.queries.chunks_exact(self.dim).zip(self.scores.chunks_exact_mut(n.max(1)))
        {
            for (key, score) in self.keys.chunks_exact(self.dim).zip(scores) {
                *score = dot(query, key);
            }
        }
    }
}
