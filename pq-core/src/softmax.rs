//! Maximum and sum of exponentials over scores, in sixteen partial results, so that every backend has the
//! same bits.

use kv_attend::simd::exp;

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
