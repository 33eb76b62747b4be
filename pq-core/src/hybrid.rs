//! Hybrid attention: one softmax over all tokens, with exact rows for the few tokens of largest weight and
//! codes for the rest.
//!
//! Top-k attention drops the tokens that it does not fetch; attention on codes has no exact token. Here the
//! tokens with the largest coded weights leave the coded softmax, and their exact keys and values are added
//! instead. A token that the selection misses keeps its coded weight, so codes of about one bit per component
//! suffice: the error of the output is of second order in that of the selection.
//!
//! A decode step has three parts, so that fetching rows overlaps with attention on codes:
//!
//! 1. [`hybrid_select_into`] scores all tokens by their codes and chooses the rows to fetch.
//! 2. [`hybrid_attend_into`] attends to the codes of all other tokens.
//! 3. [`attend_exact_into`](crate::attend_exact_into) adds the fetched rows to the same softmax, like sinks
//!    and window.

mod budget;
mod scores;
mod values;

use crate::blocks::CHUNK;
use crate::centroid_sums::flush_interval;
use crate::error::{check_at_least, check_finite, check_len};
use crate::simd::{Kernel, Run};
use crate::softmax::{exponentiate, max};
use crate::{
    Backend, CodedTokens, Error, GroupRule, Luts, PqShape, SearchScratch, SoftmaxStats,
    combine_group_into_with, top_k_into_with,
};

pub use budget::RowBudget;
use scores::score_group;
use values::{Lanes, MOST, weighted_values_len};

/// Parameters of [`hybrid_select_into`].
///
/// # Examples
/// ```
/// use pq_core::{GroupRule, Hybrid, RowBudget};
/// let hybrid = Hybrid { rows: RowBudget::Share(0.01), ..Hybrid::default() };
/// assert_eq!((hybrid.rows.most(1000), hybrid.rule), (10, GroupRule::SumOfSoftmax));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hybrid<'a> {
    /// How many tokens are read exactly.
    pub rows: RowBudget,
    /// How the scores of a group of query heads are combined.
    pub rule: GroupRule,
    /// Variances of the differences between exact and coded scores, one per query, or empty for zeros.
    ///
    /// A centroid is the mean of its cluster. Exact scores `s` therefore scatter around the coded score `c`
    /// with this variance `v`, and the expected weight is `E[exp(s)] = exp(c + v / 2)` for normal
    /// differences: attention on codes alone underestimates a token's weight relative to an exact token. Half
    /// of the variance is added to the coded scores. With `e` the mean squared error of each component of the
    /// coded keys, `v = sum_d query_d^2 e_d`.
    pub score_variances: &'a [f32],
    /// Softmax statistics of the tokens that are always exact (sinks, window), one per query, or empty. From
    /// them [`RowBudget::Error`] derives the codes' share of the attention.
    pub others: &'a [SoftmaxStats],
}

/// Working memory of [`hybrid_select_into`] and [`hybrid_attend_into`], borrowed from the caller. It holds
/// the coded scores between the two calls.
///
/// # Examples
/// ```
/// use pq_core::{HybridScratch, PqShape, SoftmaxStats};
/// let (values, group, n) = (PqShape::new(128, 16, 8)?, 4, 1000);
/// let mut floats = vec![0.0; HybridScratch::len(values, group, n)];
/// let mut stats = vec![SoftmaxStats::EMPTY; group];
/// let scratch = HybridScratch::new(values, n, &mut floats, &mut stats)?;
/// assert_eq!(scratch.search().scores().len(), group * n);
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Debug)]
pub struct HybridScratch<'a> {
    search: SearchScratch<'a>,
    floats: &'a mut [f32], // scratch of `hybrid_attend_into`
}

impl<'a> HybridScratch<'a> {
    /// Floats that attention of `group` query heads on `n` tokens needs, given the shape of the values'
    /// quantizer.
    #[must_use]
    pub const fn len(values: PqShape, group: usize, n: usize) -> usize {
        SearchScratch::len(group, n).saturating_add(attend_len(values, group))
    }

    /// Partitions the caller's memory for `n` tokens and `stats.len()` query heads.
    ///
    /// # Shapes
    /// `floats` at least [`len`](Self::len) elements; `stats` (group,).
    /// # Errors
    /// [`Error::TooShort`].
    pub fn new(
        values: PqShape,
        n: usize,
        floats: &'a mut [f32],
        stats: &'a mut [SoftmaxStats],
    ) -> Result<Self, Error> {
        let group = stats.len();
        check_at_least("hybrid scratch", floats.len(), Self::len(values, group, n))?;
        let (search, floats) = floats.split_at_mut(SearchScratch::len(group, n));
        let floats = &mut floats[..attend_len(values, group)];
        Ok(Self { search: SearchScratch::new(n, search, stats)?, floats })
    }

    /// The coded scores of all tokens, the combined ones, and their softmax statistics, as
    /// [`hybrid_select_into`] leaves them. After [`hybrid_attend_into`] the coded scores of the selected tokens
    /// are minus infinity.
    #[must_use]
    pub const fn search(&self) -> &SearchScratch<'a> {
        &self.search
    }
}

/// Floats of one pass over the values: the sums of the weights and the weights of a chunk.
const fn attend_len(values: PqShape, group: usize) -> usize {
    weighted_values_len(values, group).saturating_add(CHUNK)
}

/// Scores all tokens by their codes and selects the tokens to read exactly.
///
/// A token's coded score for query g is that of [`attend_into`](crate::attend_into), plus half of
/// [`Hybrid::score_variances`]. The tokens with the highest combined scores are selected
/// ([`combine_group_into`](crate::combine_group_into)), as many as [`Hybrid::rows`] allows. Writes their
/// indices in ascending order and returns their number; elements of `selected` beyond them are undefined. A
/// token whose coded score is minus infinity (a masked one) or NaN for every query is never selected.
///
/// # Shapes
/// `luts` (group, m, ksub) in the keys' shape, for n below 2^32 tokens; `scratch` for the same group and n;
/// `selected` at least [`RowBudget::most`] of n elements.
/// # Errors
/// [`Error::ShapeMismatch`]; [`Error::Length`] for a bias, variances, statistics or a scratch of another
/// group or n; [`Error::NotFinite`] for an infinite or NaN variance and for statistics whose log-sum-exp is
/// NaN; [`Error::Budget`] for a negative variance and for a share or bounds out of range; [`Error::TooLarge`]
/// for 2^32 tokens or more; [`Error::TooShort`] for `selected`. Then `selected` is untouched.
/// # Cost
/// group * n * m lookups, the exponentials of [`combine_group_into`](crate::combine_group_into), one
/// selection, and for [`RowBudget::Error`] one more pass over n; no allocation.
/// # Source
/// The group's rule is that of PQCache (arXiv 2407.12820), 3.4.
/// # Examples
/// One decode step: rows are chosen by codes; the chosen rows and the codes of all other tokens share a
/// softmax.
///
/// ```
/// use pq_core::*;
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let (shape, group, n) = (PqShape::new(16, 4, 4)?, 2, 500); // 1 bit per component
/// # let keys: Vec<f32> = (0..n * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// # let values: Vec<f32> = (0..n * 16).map(|i| noise(3 * i + 1)).collect();
/// # let options = TrainOptions { encode: true, ..Default::default() };
/// # let [k, v] = [train(shape, &keys, &options)?, train(shape, &values, &options)?];
/// # let [key_book, value_book] =
/// #     [CodebookBuf::new(shape, &k.centroids)?, CodebookBuf::new(shape, &v.centroids)?];
/// # let [key_codes, value_codes] = [Codes::new(shape, n, &k.codes)?, Codes::new(shape, n, &v.codes)?];
/// # let queries: Vec<f32> = (0..group * 16).map(noise).collect();
/// let tokens = CodedTokens::new(key_codes, value_codes, value_book.view())?;
/// let (mut table, mut floats) =
///     (vec![0.0; group * shape.lut_len()], vec![0.0; HybridScratch::len(shape, group, n)]);
/// let luts = lut_into(&key_book.view(), &queries, &mut table)?;
/// let mut coded = [SoftmaxStats::EMPTY; 2];
/// let mut scratch = HybridScratch::new(shape, n, &mut floats, &mut coded)?;
/// let hybrid = Hybrid { rows: RowBudget::Count(20), ..Hybrid::default() };
/// let mut selected = [0; 20];
/// let found = hybrid_select_into(&luts, &tokens, &hybrid, &mut scratch, &mut selected)?;
///
/// // An engine with offloaded rows fetches them while this runs.
/// let (mut out, mut stats) = (vec![0.0; group * 16], [SoftmaxStats::EMPTY; 2]);
/// hybrid_attend_into(&tokens, &selected[..found], &mut scratch, &mut out, &mut stats)?;
///
/// let rows = ExactTokens::contiguous(&keys, 16, &values, 16)?.chosen(&selected[..found])?;
/// let queries = Rows::from(&queries[..]);
/// attend_exact_into(&Attention::default(), queries, &rows, &mut floats, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// # Ok::<(), Error>(())
/// ```
pub fn hybrid_select_into(
    luts: &Luts<'_>,
    tokens: &CodedTokens<'_>,
    hybrid: &Hybrid<'_>,
    scratch: &mut HybridScratch<'_>,
    selected: &mut [u32],
) -> Result<usize, Error> {
    hybrid_select_into_with(Backend::detect(), luts, tokens, hybrid, scratch, selected)
}

/// [`hybrid_select_into`] on a given backend.
///
/// # Errors
/// As [`hybrid_select_into`], and [`Error::BackendUnavailable`].
pub fn hybrid_select_into_with(
    backend: Backend,
    luts: &Luts<'_>,
    tokens: &CodedTokens<'_>,
    hybrid: &Hybrid<'_>,
    scratch: &mut HybridScratch<'_>,
    selected: &mut [u32],
) -> Result<usize, Error> {
    backend.check()?;
    let (group, n) = (luts.group(), tokens.n());
    tokens.check_queries(luts)?;
    scratch.search.check(group, n)?;
    for (what, len) in [("score_variances", hybrid.score_variances.len()), ("others", hybrid.others.len())] {
        check_len(what, len, if len == 0 { 0 } else { group })?;
    }
    check_finite("score_variances", hybrid.score_variances)?;
    hybrid.score_variances.iter().try_for_each(|&x| check_budget("score_variances", x, f32::MAX))?;
    if let Some(index) = hybrid.others.iter().position(|others| others.log_sum_exp().is_nan()) {
        return Err(Error::NotFinite { what: "others", index });
    }
    match hybrid.rows {
        RowBudget::Count(_) => {}
        RowBudget::Share(share) => check_budget("share", share, 1.0)?,
        RowBudget::Error { bound, value_error, .. } => {
            check_budget("bound", bound, f32::MAX)?;
            check_budget("value_error", value_error, f32::MAX)?;
        }
    }
    if u32::try_from(n).is_err() {
        return Err(Error::TooLarge);
    }
    check_at_least("selected", selected.len(), hybrid.rows.most(n))?;
    let (all_scores, combined, stats) = scratch.search.parts();
    score_group(backend, luts, &tokens.keys(), scratch.floats, all_scores)?;
    for (g, scores) in all_scores.chunks_exact_mut(n.max(1)).enumerate() {
        let rise = hybrid.score_variances.get(g).map_or(0.0, |variance| 0.5 * variance);
        backend.run(FinishScores { tokens, g, rise, scores });
    }
    combine_group_into_with(backend, all_scores, hybrid.rule, stats, combined)?;
    let k = hybrid.rows.to_read(hybrid.score_variances, hybrid.others, combined, stats);
    let found = top_k_into_with(backend, combined, k, selected)?;
    let mut kept = 0;
    for i in 0..found {
        // Top-k includes masked tokens if there are not enough others.
        selected[kept] = selected[i];
        kept += usize::from(combined[selected[i] as usize] > f32::NEG_INFINITY);
    }
    Ok(kept)
}

fn check_budget(what: &'static str, value: f32, most: f32) -> Result<(), Error> {
    if (0.0..=most).contains(&value) { Ok(()) } else { Err(Error::Budget { what }) }
}

/// Turns table scores into coded scores.
struct FinishScores<'a, 'b> {
    tokens: &'a CodedTokens<'a>,
    g: usize,
    rise: f32,
    scores: &'b mut [f32],
}

impl Kernel for FinishScores<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        self.tokens.finish_scores(self.g, 0, self.scores);
        if self.rise != 0.0 {
            self.scores.iter_mut().for_each(|score| *score += self.rise);
        }
    }
}

/// Attention over the codes of all tokens except the selected ones.
///
/// Adds these tokens to `out` and `stats`, as [`attend_into`](crate::attend_into) does, with the scores that
/// [`hybrid_select_into`] left in `scratch`. The selected tokens are excluded from the sums, not subtracted,
/// and from the maximum, so the result stays accurate even if they hold nearly all the weight. Add the exact
/// rows of the selected tokens before or after.
///
/// The scores of the selected tokens become minus infinity in `scratch`: a second call on the same scores
/// excludes them, too.
///
/// # Shapes
/// `selected` as [`hybrid_select_into`] wrote it, or any other tokens; `scratch` from that call for the same
/// tokens (its scores are not checked); `out` (group, dim of the values); `stats` (group,).
/// # Errors
/// [`Error::TokenOutOfRange`]; [`Error::Length`]; [`Error::TooShort`] for a scratch of another shape of values.
/// `out` and `stats` are then untouched.
/// # Cost
/// Per query n exponentials; n * m additions of a group's weights, and group * ksub * dim multiply-adds; no
/// allocation.
/// # Source
/// MILLION (DAC 2025), III-B, equation 7, for the sums per centroid.
/// # Examples
/// See [`hybrid_select_into`] for the whole step.
pub fn hybrid_attend_into(
    tokens: &CodedTokens<'_>,
    selected: &[u32],
    scratch: &mut HybridScratch<'_>,
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    hybrid_attend_into_with(Backend::detect(), tokens, selected, scratch, out, stats)
}

/// [`hybrid_attend_into`] on a given backend.
///
/// # Errors
/// As [`hybrid_attend_into`], and [`Error::BackendUnavailable`].
pub fn hybrid_attend_into_with(
    backend: Backend,
    tokens: &CodedTokens<'_>,
    selected: &[u32],
    scratch: &mut HybridScratch<'_>,
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    backend.check()?;
    let (group, n, shape) = (stats.len(), tokens.n(), tokens.value_shape());
    scratch.search.check(group, n)?;
    check_at_least("hybrid scratch", scratch.floats.len(), attend_len(shape, group))?;
    check_len("out", out.len(), group.saturating_mul(shape.dim()))?;
    if let Some((index, &token)) = selected.iter().enumerate().find(|(_, token)| **token as usize >= n) {
        return Err(Error::TokenOutOfRange { index, token, n });
    }
    let (scores, ..) = scratch.search.parts();
    for scores in scores.chunks_exact_mut(n.max(1)) {
        selected.iter().for_each(|&token| scores[token as usize] = f32::NEG_INFINITY);
    }
    let parts = scores.chunks(MOST * n.max(1)).zip(out.chunks_mut(MOST * shape.dim()));
    for ((scores, out), stats) in parts.zip(stats.chunks_mut(MOST)) {
        backend.run(AttendRest { tokens, scores, floats: scratch.floats, out, stats });
    }
    Ok(())
}

/// Attention of up to [`MOST`] query heads over the codes, given their scores.
struct AttendRest<'a, 'b> {
    tokens: &'a CodedTokens<'a>,
    scores: &'a [f32], // (heads, n); minus infinity for excluded tokens
    floats: &'b mut [f32],
    out: &'b mut [f32],
    stats: &'b mut [SoftmaxStats],
}

impl Kernel for AttendRest<'_, '_> {
    type Output = ();

    /// Portable code that the compiler vectorizes for each instruction set.
    #[inline(always)]
    fn scalar(self) {
        let Self { tokens, scores, floats, out, stats } = self;
        let (n, codebook) = (tokens.n(), tokens.codebook());
        let (row, floats) = floats.split_at_mut(CHUNK);
        let mut lanes = Lanes::new(codebook.shape(), stats.len(), floats);
        let mut rest = [SoftmaxStats::EMPTY; MOST];
        for (rest, scores) in rest.iter_mut().zip(scores.chunks_exact(n.max(1))) {
            rest.max = max(scores);
        }
        for start in (0..n).step_by(CHUNK) {
            let end = n.min(start + CHUNK);
            let row = &mut row[..end - start];
            for (g, scores) in scores.chunks_exact(n).enumerate() {
                row.copy_from_slice(&scores[start..end]);
                rest[g].sum += exponentiate(row, rest[g].finite_max());
                tokens.scale_weights(start, row);
                lanes.set_weights(g, row);
            }
            lanes.add(&tokens.values().part(start, end));
            if end == n || end % flush_interval(codebook.shape().ksub()) == 0 {
                lanes.flush();
            }
        }
        let mut scales = [0.0; MOST];
        let totals = stats.iter_mut().zip(out.chunks_exact_mut(codebook.shape().dim()));
        for ((scale, rest), (total, out)) in scales.iter_mut().zip(rest).zip(totals) {
            *scale = total.absorb(rest, out);
        }
        lanes.add_values(&codebook, &scales, out);
    }
}
