//! Attention to the scalar codes of a block.

use kv_attend::simd::tanh;

use super::dot::{Dots, QUERIES, Scalar, Vector};
use super::keys::Keys;
use super::query::{Scorer, integers_len, scores_scratch_len};
use super::shape::{Shape, TILE};
use super::values::{Adder, Values, weight_words};
use crate::error::{check_at_least, check_len, count_rows};
use crate::simd::{Kernel, Run, Simd};
use crate::softmax::{exponentiate, max};
use crate::{Attention, Backend, Error, SoftmaxStats};

/// The coded tokens of a block, with an optional bias and softcap.
#[derive(Clone, Copy, Debug)]
pub struct Block<'a> {
    keys: Keys<'a>,
    values: Values<'a>, // as many
    bias: Option<&'a [f32]>,
    softcap: Option<f32>, // positive and finite
}

impl<'a> Block<'a> {
    /// Combines keys and values.
    ///
    /// # Errors
    /// [`Error::Length`] when there are more or fewer values than keys.
    pub fn new(keys: Keys<'a>, values: Values<'a>) -> Result<Self, Error> {
        check_len("values", values.n(), keys.n())?;
        Ok(Self { keys, values, bias: None, softcap: None })
    }

    /// Sets the terms (group, n) that are added to the scores: those of the keys' mean
    /// ([`RopeMean::scores_into`](crate::RopeMean::scores_into)), or a mask. A token whose bias is minus
    /// infinity contributes nothing. Takes a slice or an `Option` of one; [`attend_into`] checks the length.
    #[must_use]
    pub fn with_bias(self, bias: impl Into<Option<&'a [f32]>>) -> Self {
        Self { bias: bias.into(), ..self }
    }

    /// Caps the scores after the bias, as [`CodedTokens::with_softcap`](crate::CodedTokens::with_softcap).
    ///
    /// # Errors
    /// The error of [`Attention::check`] for a cap that is not positive and finite.
    pub fn with_softcap(self, softcap: impl Into<Option<f32>>) -> Result<Self, Error> {
        let softcap = softcap.into();
        Attention { softcap, ..Attention::default() }.check()?;
        Ok(Self { softcap, ..self })
    }

    /// Number of tokens.
    #[must_use]
    pub const fn n(&self) -> usize {
        self.keys.n()
    }

    const fn tokens(&self) -> Tokens<'_> {
        Tokens { keys: &self.keys, values: &self.values, bias: self.bias, softcap: self.softcap }
    }
}

/// A [`Block`] by reference: moving its shapes would take as long as the products with a few tokens.
pub(super) struct Tokens<'a> {
    pub keys: &'a Keys<'a>,
    pub values: &'a Values<'a>, // as many
    pub bias: Option<&'a [f32]>,
    pub softcap: Option<f32>,
}

impl Tokens<'_> {
    /// Turns the scores of query `g` with the keys into those of the softmax.
    #[inline(always)]
    fn finish_scores(&self, g: usize, scores: &mut [f32]) {
        if let Some(bias) = self.bias {
            for (score, &bias) in scores.iter_mut().zip(&bias[g * self.keys.n()..]) {
                *score += bias;
            }
        }
        if let Some(cap) = self.softcap {
            for score in scores {
                // A masked token stays masked.
                *score = if *score == f32::NEG_INFINITY { *score } else { cap * tanh(*score / cap) };
            }
        }
    }
}

/// Elements of the scratch of [`attend_into`] for blocks of at most `n` tokens.
#[must_use]
pub const fn attend_scratch_len(keys: &Shape, values: &Shape, n: usize, group: usize) -> usize {
    let together = if group < QUERIES { group } else { QUERIES };
    scores_scratch_len(keys, n, group) + together * (weight_words(n) + values.padded_dim())
}

/// Attention of a GQA group of query heads over the coded tokens of a block, added to that over other tokens.
///
/// With the scores `s[g, t]` of [`scores_into`](super::scores_into), bias and softcap included, the tokens are
/// added to `out[g] = sum_t exp(s[g, t] - max) value_t` and to `stats[g]`, as
/// [`pq_core::attend_into`](crate::attend_into) does: start from zeros and [`SoftmaxStats::EMPTY`], and finish
/// with [`SoftmaxStats::normalize`]. Weights, times the norms of the values, are rounded to integers of 15 bits
/// of the largest in the block. `out` is in the basis of the values: transform it back once, after the last
/// block.
///
/// # Shapes
/// `queries` (group, dim), in the dual basis of the block; `scratch` at least [`attend_scratch_len`]; `out`
/// (group, dim of the values); `stats` (group,).
/// # Errors
/// [`Error::PartialRow`], [`Error::Length`], [`Error::TooShort`]; `out` and `stats` are then untouched.
/// # Cost
/// That of [`scores_into`](super::scores_into), n exponentials a query, and as many integer multiply-adds for
/// the values; no allocation.
/// # Examples
/// ```
/// use pq_core::sq::{self, Shape};
/// use pq_core::{SoftmaxStats, normalize_all};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let (n, dim) = (64, 16);
/// let rows: Vec<f32> = (0..n * dim).map(|i| 1.0 + noise(i) / 2.0).collect();
/// let shape = Shape::uniform(dim, 4)?;
/// let (mut steps, mut norms) = (vec![0; dim], vec![0; n]);
/// let (mut keys, mut values) = (vec![0; shape.words_len(n)], vec![0; shape.words_len(n)]);
/// sq::encode_keys_into(&shape, &rows, &mut steps, &mut keys)?;
/// sq::encode_values_into(&shape, &rows, &mut norms, &mut values)?; // the values are the keys
/// let keys = sq::Keys::new(shape, n, &steps, &keys)?;
/// let block = sq::Block::new(keys, sq::Values::new(shape, &norms, &values)?)?;
///
/// let queries: Vec<f32> = (0..2 * dim).map(|i| noise(7 * i) / 4.0).collect();
/// let mut scratch = vec![0.0; sq::attend_scratch_len(&shape, &shape, n, 2)];
/// let (mut out, mut stats) = (vec![0.0; 2 * dim], vec![SoftmaxStats::EMPTY; 2]);
/// sq::attend_into(&queries, &block, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert!(out.iter().all(|x| (x - 1.0).abs() < 0.5)); // a mean of the values
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn attend_into(
    queries: &[f32],
    block: &Block<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    attend_into_with(Backend::detect(), queries, block, scratch, out, stats)
}

/// [`attend_into`] on a given backend.
///
/// # Errors
/// As [`attend_into`], and [`Error::BackendUnavailable`].
pub fn attend_into_with(
    backend: Backend,
    queries: &[f32],
    block: &Block<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    attend_tokens(backend, queries, &block.tokens(), scratch, out, stats)
}

/// [`attend_into_with`] by reference.
pub(super) fn attend_tokens(
    backend: Backend,
    queries: &[f32],
    tokens: &Tokens<'_>,
    scratch: &mut [f32],
    out: &mut [f32],
    stats: &mut [SoftmaxStats],
) -> Result<(), Error> {
    backend.check()?;
    let (keys, values, n) = (tokens.keys.shape(), tokens.values.shape(), tokens.keys.n());
    let group = count_rows("queries", queries.len(), keys.dim())?;
    check_len("stats", stats.len(), group)?;
    check_len("out", out.len(), group.saturating_mul(values.dim()))?;
    if let Some(bias) = tokens.bias {
        check_len("bias", bias.len(), group.saturating_mul(n))?;
    }
    let scratch_len = attend_scratch_len(keys, values, n, group);
    check_at_least("scratch", scratch.len(), scratch_len)?;
    backend.run(Attend { queries, tokens, scratch: &mut scratch[..scratch_len], out, stats });
    Ok(())
}

struct Attend<'a, 'b> {
    queries: &'a [f32],
    tokens: &'a Tokens<'a>,
    scratch: &'b mut [f32],
    out: &'b mut [f32],
    stats: &'b mut [SoftmaxStats],
}

impl Attend<'_, '_> {
    #[inline(always)]
    fn run(self, dots: impl Dots) {
        let Self { queries, tokens, scratch, out, stats } = self;
        let (keys, values, n) = (tokens.keys, tokens.values, tokens.keys.n());
        let (dim, dim_v, padded) = (keys.shape().dim(), values.shape().dim(), n.next_multiple_of(TILE));
        let (scorer, adder) = (Scorer::new(keys), Adder::new(values));
        let chunks = queries.chunks(QUERIES * dim).zip(out.chunks_mut(QUERIES * dim_v));
        for (c, ((queries, out), stats)) in chunks.zip(stats.chunks_mut(QUERIES)).enumerate() {
            let group = stats.len();
            let (integers, scratch) = scratch.split_at_mut(group * integers_len(keys.shape()));
            let (scores, scratch) = scratch.split_at_mut(group * padded);
            let (weights, sums) = scratch.split_at_mut(group * weight_words(n));
            scorer.score(dots, queries, integers, scores);
            let mut masses = [0.0; QUERIES];
            let of_queries = scores.chunks_exact_mut(padded).zip(out.chunks_exact_mut(dim_v));
            for (g, ((scores, out), stats)) in of_queries.zip(stats).enumerate() {
                let (scores, padding) = scores.split_at_mut(n);
                tokens.finish_scores(c * QUERIES + g, scores);
                stats.raise_max(max(scores), out);
                masses[g] = exponentiate(scores, stats.finite_max());
                stats.sum += masses[g];
                padding.fill(0.0);
            }
            adder.add(dots, scores, &masses[..group], [weights, sums], out);
        }
    }
}

impl Kernel for Attend<'_, '_> {
    type Output = ();

    fn scalar(self) {
        self.run(Scalar);
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        self.run(Vector(s));
    }
}
