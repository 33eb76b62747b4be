//! One score per token from the scores of a group of query heads, each through its own softmax.

use kv_attend::simd::exp;

use crate::error::check_len;
use crate::ln::ln;
use crate::simd::{Kernel, Run};
use crate::softmax::{exp_sum, max};
use crate::{Backend, Error, SoftmaxStats};

/// How the scores of a GQA group's query heads are combined into one score per token.
///
/// Each head's scores pass through a softmax over all tokens first, so that a head with large scores does not
/// outvote the others. A token's score is then the sum or the maximum over the heads. [`combine_group_into`]
/// defines the result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupRule {
    /// Sum over the heads, as in PQCache's released code.
    #[default]
    SumOfSoftmax,
    /// Maximum over the heads: one head's large weight suffices to select a token.
    MaxOfSoftmax,
}

/// Combined weights of at least this size are kept as weights. Smaller ones are replaced by their logarithms,
/// since exponentials in `f32` lose their digits there.
const LEAST_WEIGHT: f32 = 1.0 / (1_u128 << 100) as f32;

/// Tokens whose logarithms are computed together, few enough for L1.
const CHUNK: usize = 256;

/// Combines the scores of a group of query heads into one score per token, and computes each head's softmax
/// statistics. The group attends to the tokens with the highest combined scores.
///
/// * One head: its scores, in their exact order.
/// * Several heads: a token's weight of one head is `exp(l)` with `l = score - max - ln(sum)`, and the
///   combined weight is the heads' sum or maximum. Where it is 2^-100 or more, it is the token's score. Where
///   it is less, the score is its logarithm, `ln(sum of exp(l))` or the maximum of `l`. It is negative, so
///   these tokens rank below all others and keep their order, however wide the range of the scores is. A
///   logarithm below `f32::MIN` is minus infinity.
///
/// A score of NaN counts as minus infinity, which has weight 0 and ranks last. Plus infinity counts as
/// `f32::MAX` in a head's softmax. A head whose scores are all minus infinity has no weights. Therefore no
/// head can invalidate the others.
///
/// # Shapes
/// `scores` (group, n); `stats` (group,); `out` (n,); both fully written.
/// # Errors
/// [`Error::Length`]; `stats` and `out` are then untouched.
/// # Cost
/// One exponential per score for a single head, two for several. Each chunk of 256 tokens that contains a
/// weight below 2^-100 takes one more per score, and one logarithm per token. No allocation.
/// # Examples
/// ```
/// use pq_core::{GroupRule, SoftmaxStats, combine_group_into};
/// // Head 0 attends to token 2 alone; head 1 divides its attention between tokens 0 and 1.
/// let scores = [0.0, 0.0, 50.0, 7.0, 7.0, -50.0];
/// let (mut stats, mut combined) = ([SoftmaxStats::EMPTY; 2], [0.0; 3]);
/// combine_group_into(&scores, GroupRule::SumOfSoftmax, &mut stats, &mut combined)?;
/// assert!((combined[0] - 0.5).abs() < 1e-6 && (combined[2] - 1.0).abs() < 1e-6);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn combine_group_into(
    scores: &[f32],
    rule: GroupRule,
    stats: &mut [SoftmaxStats],
    out: &mut [f32],
) -> Result<(), Error> {
    combine_group_into_with(Backend::detect(), scores, rule, stats, out)
}

/// [`combine_group_into`] on a given backend.
///
/// # Errors
/// As [`combine_group_into`], and [`Error::BackendUnavailable`].
pub fn combine_group_into_with(
    backend: Backend,
    scores: &[f32],
    rule: GroupRule,
    stats: &mut [SoftmaxStats],
    out: &mut [f32],
) -> Result<(), Error> {
    backend.check()?;
    check_len("scores", scores.len(), stats.len().saturating_mul(out.len()))?;
    backend.run(Combine { scores, rule, stats, out });
    Ok(())
}

struct Combine<'a, 'b> {
    scores: &'a [f32],
    rule: GroupRule,
    stats: &'b mut [SoftmaxStats],
    out: &'b mut [f32],
}

impl Kernel for Combine<'_, '_> {
    type Output = ();

    /// Portable code that the compiler vectorizes for each instruction set.
    #[inline(always)]
    fn scalar(self) {
        let Self { scores, rule, stats, out } = self;
        if out.is_empty() {
            return stats.fill(SoftmaxStats::EMPTY);
        }
        match stats {
            [] => return out.fill(f32::NEG_INFINITY), // no weights
            [stats] => {
                *stats = softmax(scores).0;
                for (out, &score) in out.iter_mut().zip(scores) {
                    *out = if score.is_nan() { f32::NEG_INFINITY } else { score };
                }
                return;
            }
            _ => {}
        }
        for (g, (stats, scores)) in stats.iter_mut().zip(scores.chunks_exact(out.len())).enumerate() {
            let sound;
            (*stats, sound) = softmax(scores);
            let rule = (g > 0).then_some(rule);
            if sound {
                add_weights(out, scores, *stats, rule, |score| score);
            } else {
                add_cleaned_weights(out, scores, *stats, rule);
            }
        }
        let n = out.len();
        for (i, out) in out.chunks_mut(CHUNK).enumerate() {
            if out.iter().fold(false, |any, &weight| any | (weight < LEAST_WEIGHT)) {
                let chunk = i * CHUNK..i * CHUNK + out.len();
                let scores = scores.chunks_exact(n).map(|scores| &scores[chunk.clone()]);
                take_logarithms(out, stats.iter().zip(scores), rule);
            }
        }
    }
}

/// The softmax statistics of a head, and whether its scores need no [`clean`].
#[inline(always)]
fn softmax(scores: &[f32]) -> (SoftmaxStats, bool) {
    let mut stats = SoftmaxStats { max: max(scores), sum: 0.0 };
    stats.sum = exp_sum(scores, stats.finite_max(), |score| score);
    // NaN for a score of NaN and for an infinite maximum; 0 where every score is minus infinity.
    let sound = stats.sum > 0.0;
    if !sound {
        stats.max = stats.max.min(f32::MAX);
        stats.sum = cleaned_exp_sum(scores, stats.finite_max());
    }
    (stats, sound)
}

/// [`exp_sum`] of scores that are not sound, which are rare: one instantiation for all instruction sets.
#[cold]
fn cleaned_exp_sum(scores: &[f32], max: f32) -> f32 {
    exp_sum(scores, max, clean)
}

/// Replaces NaN by minus infinity and plus infinity by `f32::MAX`.
#[inline(always)]
fn clean(score: f32) -> f32 {
    let score = if score > f32::NEG_INFINITY { score } else { f32::NEG_INFINITY };
    if score < f32::MAX { score } else { f32::MAX }
}

/// Combines a head's weights with those in `out`. Without a rule, as for the first head, they overwrite
/// `out`.
#[inline(always)]
fn add_weights(
    out: &mut [f32],
    scores: &[f32],
    stats: SoftmaxStats,
    rule: Option<GroupRule>,
    clean: impl Fn(f32) -> f32,
) {
    let scale = if stats.sum > 0.0 { 1.0 / stats.sum } else { 0.0 };
    let weights = scores.iter().map(|&score| exp(clean(score) - stats.finite_max()) * scale);
    let both = out.iter_mut().zip(weights);
    match rule {
        None => both.for_each(|(out, weight)| *out = weight),
        Some(GroupRule::SumOfSoftmax) => both.for_each(|(out, weight)| *out += weight),
        Some(GroupRule::MaxOfSoftmax) => {
            both.for_each(|(out, weight)| *out = if weight > *out { weight } else { *out });
        }
    }
}

/// [`add_weights`] of scores that are not sound.
#[cold]
fn add_cleaned_weights(out: &mut [f32], scores: &[f32], stats: SoftmaxStats, rule: Option<GroupRule>) {
    add_weights(out, scores, stats, rule, clean);
}

/// Replaces the weights below [`LEAST_WEIGHT`] in a chunk by their logarithms.
#[inline(always)]
fn take_logarithms<'a>(
    out: &mut [f32],
    heads: impl Iterator<Item = (&'a SoftmaxStats, &'a [f32])> + Clone,
    rule: GroupRule,
) {
    let mut highest = [f32::NEG_INFINITY; CHUNK];
    for (stats, scores) in heads.clone() {
        let half_logarithm = HalfLogarithm::new(stats);
        for (highest, &score) in highest.iter_mut().zip(scores) {
            let half = half_logarithm.of(score);
            *highest = if half > *highest { half } else { *highest };
        }
    }
    let mut logarithms = highest.map(|half| 2.0 * half);
    if rule == GroupRule::SumOfSoftmax {
        // A token without weight in all heads has a highest logarithm of minus infinity, and differences of
        // infinities are NaN.
        let base = highest.map(|half| if half > f32::NEG_INFINITY { half } else { 0.0 });
        let mut sums = [0.0; CHUNK];
        for (stats, scores) in heads {
            let half_logarithm = HalfLogarithm::new(stats);
            for ((sum, base), &score) in sums.iter_mut().zip(&base).zip(scores) {
                *sum += exp(2.0 * (half_logarithm.of(score) - base));
            }
        }
        for (logarithm, &sum) in logarithms.iter_mut().zip(&sums) {
            *logarithm += ln(sum);
        }
    }
    for (out, &logarithm) in out.iter_mut().zip(&logarithms) {
        *out = if *out < LEAST_WEIGHT { logarithm } else { *out };
    }
}

/// Half of the logarithms of a head's weights: the difference of two scores may overflow, that of their
/// halves cannot.
struct HalfLogarithm {
    half_max: f32,
    half_ln_sum: f32,
}

impl HalfLogarithm {
    #[inline(always)]
    fn new(stats: &SoftmaxStats) -> Self {
        Self { half_max: 0.5 * stats.finite_max(), half_ln_sum: 0.5 * ln(stats.sum) }
    }

    #[inline(always)]
    fn of(&self, score: f32) -> f32 {
        (0.5 * clean(score) - self.half_max) - self.half_ln_sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    #[test]
    fn an_empty_group_or_sequence_has_no_scores() {
        let (mut stats, mut out) = ([SoftmaxStats { max: 1.0, sum: 2.0 }], [1.0; 3]);
        combine_group_into(&[], GroupRule::SumOfSoftmax, &mut [], &mut out).unwrap();
        combine_group_into(&[], GroupRule::SumOfSoftmax, &mut stats, &mut []).unwrap();
        assert_eq!((stats, out), ([SoftmaxStats::EMPTY], [f32::NEG_INFINITY; 3]));
    }

    #[test]
    fn every_backend_combines_alike() {
        let values = |len: usize, spread: f32| -> Vec<f32> {
            (0..len).map(|i| ((i * 7919 % 4093) as f32 / 2046.5 - 1.0) * spread).collect()
        };
        for (n, group) in [(1, 1), (15, 2), (300, 1), (300, 3), (1025, 8)] {
            for spread in [1.0, 100.0, 1e5] {
                for bad in [0.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let mut scores = values(n * group, spread);
                    scores[n / 2] = bad;
                    for rule in [GroupRule::SumOfSoftmax, GroupRule::MaxOfSoftmax] {
                        let combine = |backend: Backend| {
                            let (mut stats, mut out) = (vec![SoftmaxStats::EMPTY; group], vec![0.0; n]);
                            combine_group_into_with(backend, &scores, rule, &mut stats, &mut out).unwrap();
                            out
                        };
                        let expected = combine(Backend::Scalar);
                        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                            for (a, b) in combine(backend).iter().zip(&expected) {
                                assert!(a == b || (a - b).abs() <= 1e-6 * b.abs(), "{backend:?}: {a} {b}");
                            }
                        }
                    }
                }
            }
        }
    }
}
