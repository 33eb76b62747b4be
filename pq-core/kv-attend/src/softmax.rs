//! Softmax statistics that can be merged, so that the parts of a sequence may be attended to apart.

use crate::Error;
use crate::error::check_len;
use crate::exp::exp;

/// The maximum and sum of a softmax over some tokens, which suffice to merge it with a softmax over others.
///
/// Attention over a subset of the tokens gives the unnormalized `out = sum_t exp(score_t - max) * value_t`
/// and these two values. Every attention function of the family adds its tokens to such a pair, so exact
/// rows, codes and rows of lower rank may follow each other in any order. [`normalize`](Self::normalize)
/// divides at the end.
///
/// # Examples
/// ```
/// use kv_attend::SoftmaxStats;
/// // One token of score 0 and value 1, and one of score 0 and value 4, computed apart.
/// let (mut stats, other) = (SoftmaxStats { max: 0.0, sum: 1.0 }, SoftmaxStats { max: 0.0, sum: 1.0 });
/// let mut out = [1.0];
/// stats.merge(&mut out, other, &[4.0])?;
/// stats.normalize(&mut out);
/// assert_eq!(out, [2.5]);
/// # Ok::<(), kv_attend::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SoftmaxStats {
    /// The highest score; minus infinity for no tokens.
    pub max: f32,
    /// Sum over the tokens of `exp(score - max)`.
    pub sum: f32,
}

impl SoftmaxStats {
    /// No tokens.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// The logarithm of the sum of `exp(score)`; minus infinity for no tokens, NaN where a score was NaN.
    #[must_use]
    pub fn log_sum_exp(self) -> f32 {
        if self.sum == 0.0 { f32::NEG_INFINITY } else { self.max + libm::logf(self.sum) }
    }

    /// Adds attention over other tokens, `other_out` with `other`, to `out`.
    ///
    /// # Errors
    /// [`Error::Length`] when the slices differ in length; nothing is then changed.
    pub fn merge(&mut self, out: &mut [f32], other: Self, other_out: &[f32]) -> Result<(), Error> {
        check_len("other out", other_out.len(), out.len())?;
        let scale = self.absorb(other, out);
        for (out, &x) in out.iter_mut().zip(other_out) {
            *out += scale * x;
        }
        Ok(())
    }

    /// Divides `out` by the sum: the attention over all tokens. Zeros for no tokens.
    pub fn normalize(self, out: &mut [f32]) {
        let scale = if self.max == f32::NEG_INFINITY { 0.0 } else { 1.0 / self.sum };
        out.iter_mut().for_each(|x| *x *= scale);
    }

    /// Adds the statistics of other tokens and rescales `out` to the new maximum. Returns the factor by which
    /// their output has to be added to `out`.
    pub fn absorb(&mut self, other: Self, out: &mut [f32]) -> f32 {
        self.raise_max(other.max, out);
        let scale = if other.max == f32::NEG_INFINITY { 0.0 } else { exp(other.max - self.max) };
        self.sum += scale * other.sum;
        scale
    }

    /// The value to subtract from scores: the maximum, or 0 if it is minus infinity, since the difference of
    /// two infinities is NaN.
    #[must_use]
    pub fn finite_max(self) -> f32 {
        if self.max == f32::NEG_INFINITY { 0.0 } else { self.max }
    }

    /// Raises the maximum to `max` and rescales the sum and `out`. A lower maximum, or NaN, changes nothing.
    #[inline(always)]
    pub fn raise_max(&mut self, max: f32, out: &mut [f32]) {
        if max > self.max {
            let scale = if self.max == f32::NEG_INFINITY { 0.0 } else { exp(self.max - max) };
            self.max = max;
            self.sum *= scale;
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// [`SoftmaxStats::EMPTY`].
impl Default for SoftmaxStats {
    fn default() -> Self {
        Self::EMPTY
    }
}

/// [`SoftmaxStats::normalize`] for every query of a group.
///
/// # Shapes
/// `stats` (group,); `out` (group, dim of the values).
/// # Errors
/// [`Error::Zero`] for no query, [`Error::PartialRow`] if `stats` does not divide `out`; nothing is then
/// changed.
/// # Examples
/// ```
/// use kv_attend::{SoftmaxStats, normalize_all};
/// let stats = [SoftmaxStats { max: 3.0, sum: 2.0 }, SoftmaxStats::EMPTY]; // the second query saw no token
/// let mut out = [4.0, 6.0, 0.0, 0.0];
/// normalize_all(&stats, &mut out)?;
/// assert_eq!(out, [2.0, 3.0, 0.0, 0.0]);
/// # Ok::<(), kv_attend::Error>(())
/// ```
pub fn normalize_all(stats: &[SoftmaxStats], out: &mut [f32]) -> Result<(), Error> {
    if stats.is_empty() {
        return Err(Error::Zero { what: "number of queries" });
    }
    if !out.len().is_multiple_of(stats.len()) {
        return Err(Error::PartialRow { what: "out", row: stats.len(), actual: out.len() });
    }
    let dim = (out.len() / stats.len()).max(1);
    stats.iter().zip(out.chunks_exact_mut(dim)).for_each(|(stats, out)| stats.normalize(out));
    Ok(())
}

/// Number of partial sums, so that reductions vectorize. The definition of the result includes it.
pub(crate) const LANES: usize = 16;

/// Adds the tokens of `scores` (n, P), a multiple of 16 elements, to the softmax of each query, and replaces
/// scores by weights. Minus infinity means no token. A NaN does not change the maximum, and makes the sum
/// NaN. Columns beyond the queries of `stats` are ignored.
#[inline(always)]
pub(crate) fn add_scores<const P: usize>(scores: &mut [f32], stats: &mut [SoftmaxStats], out: &mut [f32]) {
    let rank = out.len() / stats.len();
    let scores = scores.as_chunks_mut::<LANES>().0;
    let mut largest = [f32::NEG_INFINITY; LANES];
    for chunk in scores.iter() {
        for (lane, &x) in largest.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    let mut base = [0.0; LANES];
    for (g, (stats, out)) in stats.iter_mut().zip(out.chunks_exact_mut(rank)).enumerate() {
        let lanes = largest.iter().skip(g).step_by(P);
        stats.raise_max(lanes.fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a }), out);
        base.iter_mut().skip(g).step_by(P).for_each(|base| *base = stats.finite_max());
    }
    let mut sums = [0.0; LANES];
    for chunk in scores.iter_mut() {
        for ((x, &base), sum) in chunk.iter_mut().zip(&base).zip(&mut sums) {
            *x = exp(*x - base);
            *sum += *x;
        }
    }
    for (g, stats) in stats.iter_mut().enumerate() {
        stats.sum += sums.iter().skip(g).step_by(P).sum::<f32>();
    }
}
