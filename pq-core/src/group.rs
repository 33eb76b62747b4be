use crate::error::check_len;
use crate::simd::Kernel;
use crate::softmax::{SoftmaxStats, exp_sum, max};
use crate::{Backend, Error};

/// How the query heads that share a key/value head agree on one set of tokens.
///
/// Each head's scores go through a softmax over all tokens first, so that a head with large scores does not outvote the
/// others; then a token gets the heads' sum or maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GroupRule {
    /// The rule of PQCache's released code.
    #[default]
    SumOfSoftmax,
    /// A token that one head needs badly is kept even if the others ignore it.
    MaxOfSoftmax,
}

/// One score per token from those of a group of query heads, and the softmax numbers of each head.
///
/// A single head keeps its order under either rule.
///
/// # Shapes
/// `scores` (group, n); `stats` (group,); `out` (n,); both fully written.
/// # Errors
/// [`Error::Length`]; nothing is then written.
/// # Cost
/// Two exponentials a score; no allocation.
pub fn combine_group_into(
    scores: &[f32],
    rule: GroupRule,
    stats: &mut [SoftmaxStats],
    out: &mut [f32],
) -> Result<(), Error> {
    check_len("scores", scores.len(), stats.len().saturating_mul(out.len()))?;
    Backend::detect().run(Combine { scores, rule, stats, out });
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

    /// Plain code, compiled to each set's registers.
    #[inline(always)]
    fn scalar(self) {
        self.out.fill(0.0);
        if self.out.is_empty() {
            return self.stats.fill(SoftmaxStats::EMPTY);
        }
        for (stats, scores) in self.stats.iter_mut().zip(self.scores.chunks_exact(self.out.len())) {
            *stats = SoftmaxStats { max: max(scores), sum: 0.0 };
            stats.sum = exp_sum(scores, stats.finite_max());
            let (max, scale) = (stats.finite_max(), 1.0 / stats.sum);
            for (out, &score) in self.out.iter_mut().zip(scores) {
                let weight = crate::exp::exp(score - max) * scale;
                *out = match self.rule {
                    GroupRule::SumOfSoftmax => *out + weight,
                    GroupRule::MaxOfSoftmax => {
                        if weight > *out {
                            weight
                        } else {
                            *out
                        }
                    }
                };
            }
        }
    }
}
