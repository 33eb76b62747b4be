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
    fold(lanes, |a, b| if b > a { b } else { a })
}

/// Combines partial results pairwise, so that few wait for others.
#[inline(always)]
pub(crate) fn fold<T: Copy>(lanes: [T; LANES], combine: impl Fn(T, T) -> T) -> T {
    let eight: [T; 8] = halve(lanes, &combine);
    let four: [T; 4] = halve(eight, &combine);
    let [a, b] = halve(four, &combine);
    combine(a, b)
}

/// Combines every element of the first half, `HALF` elements, with one of the second.
#[inline(always)]
fn halve<T: Copy, const N: usize, const HALF: usize>(x: [T; N], combine: &impl Fn(T, T) -> T) -> [T; HALF] {
    let mut half = [x[0]; HALF];
    for (i, half) in half.iter_mut().enumerate() {
        *half = combine(x[i], x[i + HALF]);
    }
    half
}

/// Replaces each score by `exp(score - max)` and returns their sum: sixteen partial sums, added pairwise. A NaN
/// stays.
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
    fold(lanes, |a, b| a + b)
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
    fold(lanes, |a, b| a + b)
}
