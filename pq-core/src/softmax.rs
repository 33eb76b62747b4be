use crate::Error;
use crate::error::check_len;
use crate::exp::exp;

/// The maximum and sum of a softmax over some tokens, which suffice to merge it with a softmax over others.
///
/// Attention over a subset of the tokens gives the unnormalized `out = sum_t exp(score_t - max) * value_t`
/// and these two values. Every attention function here adds its tokens to such a pair, so codes, an exact
/// window and retrieved tokens may follow each other in any order. [`normalize`](Self::normalize) divides at
/// the end.
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

    /// The logarithm of the sum of `exp(score)`; minus infinity for no tokens.
    #[must_use]
    pub fn log_sum_exp(self) -> f32 {
        if self.sum > 0.0 { self.max + libm::logf(self.sum) } else { f32::NEG_INFINITY }
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

    /// Adds the statistics of other tokens; returns the factor for their output.
    pub(crate) fn absorb(&mut self, other: Self, out: &mut [f32]) -> f32 {
        self.raise_max(other.max, out);
        let scale = if other.max == f32::NEG_INFINITY { 0.0 } else { exp(other.max - self.max) };
        self.sum += scale * other.sum;
        scale
    }

    /// The value to subtract from scores: 0 while all of them are minus infinity, whose differences would be
    /// NaN.
    pub(crate) fn finite_max(self) -> f32 {
        if self.max == f32::NEG_INFINITY { 0.0 } else { self.max }
    }

    /// Raises the maximum to `max` and rescales the sums.
    pub(crate) fn raise_max(&mut self, max: f32, out: &mut [f32]) {
        if max > self.max {
            let scale = if self.max == f32::NEG_INFINITY { 0.0 } else { exp(self.max - max) };
            self.max = max;
            self.sum *= scale;
            out.iter_mut().for_each(|x| *x *= scale);
        }
    }
}

/// Number of partial results, which lets reductions vectorize; part of their definition.
const LANES: usize = 16;

/// The maximum, ignoring NaN; minus infinity for no scores.
#[inline(always)]
pub(crate) fn max(scores: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (chunks, tail) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = if x > *lane { x } else { *lane };
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = if x > *lane { x } else { *lane };
    }
    lanes.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
}

/// Replaces each score by `exp(score - max)` and returns their sum: sixteen partial sums, added in order. A
/// NaN stays.
#[inline(always)]
pub(crate) fn exponentiate(scores: &mut [f32], max: f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, tail) = scores.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            *x = exp(*x - max);
            *lane += *x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(tail) {
        *x = exp(*x - max);
        *lane += *x;
    }
    lanes.into_iter().sum()
}

/// The sum of `exp(clean(score) - max)`, as [`exponentiate`] adds it.
#[inline(always)]
pub(crate) fn exp_sum(scores: &[f32], max: f32, clean: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0; LANES];
    let (chunks, tail) = scores.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += exp(clean(x) - max);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane += exp(clean(x) - max);
    }
    lanes.into_iter().sum()
}
