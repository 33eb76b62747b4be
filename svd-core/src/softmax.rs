use crate::Error;
use crate::error::check_len;
use crate::exp::exp;

/// Maximum and sum of a softmax over some of the tokens, by which it merges with the softmax over others.
///
/// Partial attention is `out = sum_t exp(score_t - max) * value_t`, not yet divided by the sum.
/// [`attend_into`](crate::attend_into) adds tokens to `out` and the statistics, so the parts of a sequence
/// can be added in any order; [`normalize`](Self::normalize) divides at the end.
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

    /// Adds attention over other tokens, `other_out` with `other`, to `out`.
    ///
    /// # Errors
    /// [`Error::Length`] if the slices differ in length; nothing is then changed.
    pub fn merge(&mut self, out: &mut [f32], other: Self, other_out: &[f32]) -> Result<(), Error> {
        check_len("other out", other_out.len(), out.len())?;
        self.raise_max(other.max, out);
        let scale = if other.max == f32::NEG_INFINITY { 0.0 } else { exp(other.max - self.max) };
        self.sum += scale * other.sum;
        for (out, &x) in out.iter_mut().zip(other_out) {
            *out += scale * x;
        }
        Ok(())
    }

    /// Divides `out` by the sum, which gives the attention over all tokens: zeros for no tokens.
    pub fn normalize(self, out: &mut [f32]) {
        let scale = if self.max == f32::NEG_INFINITY { 0.0 } else { 1.0 / self.sum };
        out.iter_mut().for_each(|x| *x *= scale);
    }

    /// Raises the maximum to `max` and scales the sums down accordingly.
    #[inline(always)]
    fn raise_max(&mut self, max: f32, out: &mut [f32]) {
        if max > self.max {
            let scale = if self.max == f32::NEG_INFINITY { 0.0 } else { exp(self.max - max) };
            self.max = max;
            self.sum *= scale;
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }
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
        let max = if stats.max == f32::NEG_INFINITY { 0.0 } else { stats.max };
        base.iter_mut().skip(g).step_by(P).for_each(|base| *base = max);
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
