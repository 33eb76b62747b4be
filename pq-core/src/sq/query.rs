//! Scores of queries with the coded keys of a block.

use super::dot::{Dots, QUERIES, QUERY_LIMIT, Scalar, Vector};
use super::keys::Keys;
use super::level::floor;
use super::plan::KeyPlan;
use super::shape::{LANES, MAX_DIM, Shape, TILE, chunks};
use crate::error::{check_at_least, check_len};
use crate::simd::{Kernel, Run, Simd};
use crate::softmax::fold;
use crate::{Backend, Error};

/// Elements of the scratch of [`scores_into`] for blocks of at most `n` tokens.
#[must_use]
pub const fn scores_scratch_len(keys: &Shape, n: usize, group: usize) -> usize {
    let together = if group < QUERIES { group } else { QUERIES };
    together * (integers_len(keys) + n.next_multiple_of(TILE))
}

/// Elements of a query's integers.
pub(super) const fn integers_len(keys: &Shape) -> usize {
    keys.padded_dim() / 2
}

/// The scores of a group of queries with the tokens of a block.
///
/// With `x_i` the product of component i of the query and its step in the block, the score of token t is
/// `unit * sum_i (z_i c[t, i]) + unit / 2 * sum_i z_i (1 - 2^(b_i))`, where `unit = max_i |x_i| / 16256` and
/// `z_i` is `x_i / unit`, rounded half away from zero: the dot product of the levels, up to the 15 bits of
/// the query. Sums of integers are exact.
///
/// # Shapes
/// `queries` (group, dim), in the block's dual basis: scaled, rotated by minus the position of the middle of
/// the block, times the dual of the keys' basis; `scratch` at least [`scores_scratch_len`]; `scores`
/// (group, n), fully written.
/// # Errors
/// [`Error::PartialRow`], [`Error::Length`], [`Error::TooShort`]; `scores` is then untouched.
/// # Cost
/// Per query n * dim integer multiply-adds, two per 32-bit lane; per group two shifts and two masks for four
/// codes; no allocation.
pub fn scores_into(
    queries: &[f32],
    keys: &Keys<'_>,
    scratch: &mut [f32],
    scores: &mut [f32],
) -> Result<(), Error> {
    scores_into_with(Backend::detect(), queries, keys, scratch, scores)
}

/// [`scores_into`] on a given backend.
///
/// # Errors
/// As [`scores_into`], and [`Error::BackendUnavailable`].
pub fn scores_into_with(
    backend: Backend,
    queries: &[f32],
    keys: &Keys<'_>,
    scratch: &mut [f32],
    scores: &mut [f32],
) -> Result<(), Error> {
    backend.check()?;
    let group = crate::error::count_rows("queries", queries.len(), keys.shape().dim())?;
    check_len("scores", scores.len(), group.saturating_mul(keys.n()))?;
    let scratch_len = scores_scratch_len(keys.shape(), keys.n(), group);
    check_at_least("scratch", scratch.len(), scratch_len)?;
    backend.run(ScoreAll { queries, keys, scratch: &mut scratch[..scratch_len], scores });
    Ok(())
}

struct ScoreAll<'a, 'b> {
    queries: &'a [f32],
    keys: &'a Keys<'a>,
    scratch: &'b mut [f32],
    scores: &'b mut [f32],
}

impl ScoreAll<'_, '_> {
    #[inline(always)]
    fn run(self, dots: impl Dots) {
        let Self { queries, keys, scratch, scores } = self;
        let (dim, n) = (keys.shape().dim(), keys.n());
        let scorer = Scorer::new(keys);
        for (queries, scores) in queries.chunks(QUERIES * dim).zip(scores.chunks_mut(QUERIES * n)) {
            let group = queries.len() / dim;
            let (integers, padded) = scratch.split_at_mut(group * integers_len(keys.shape()));
            scorer.score(dots, queries, integers, padded);
            let padded = padded.chunks_exact(n.next_multiple_of(TILE));
            for (scores, padded) in scores.chunks_exact_mut(n).zip(padded) {
                scores.copy_from_slice(&padded[..n]);
            }
        }
    }
}

impl Kernel for ScoreAll<'_, '_> {
    type Output = ();

    fn scalar(self) {
        self.run(Scalar);
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        self.run(Vector(s));
    }
}

/// What the queries of a block share.
pub(super) struct Scorer<'a> {
    keys: &'a Keys<'a>,
    steps: [f32; MAX_DIM],
}

impl<'a> Scorer<'a> {
    #[inline(always)]
    pub fn new(keys: &'a Keys<'a>) -> Self {
        Self { keys, steps: keys.steps() }
    }

    /// Writes the scores of at most [`QUERIES`] queries, (group, tokens of whole tiles); those after the
    /// block's tokens are meaningless. `integers` is scratch of (group, [`integers_len`]).
    #[inline(always)]
    pub fn score(&self, dots: impl Dots, queries: &[f32], integers: &mut [f32], scores: &mut [f32]) {
        let shape = self.keys.shape();
        let (dim, n) = (shape.dim(), self.keys.n().next_multiple_of(TILE));
        let integers: &mut [u32] = bytemuck::cast_slice_mut(integers);
        let sums: &mut [u32] = &mut bytemuck::cast_slice_mut(scores)[..queries.len() / dim * n];
        let made;
        let plan = match self.keys.plan() {
            Some(plan) => plan,
            None => {
                made = KeyPlan::new(shape);
                &made
            }
        };
        let mut scales = [(0.0, 0.0); QUERIES];
        let of_queries = queries.chunks_exact(dim).zip(integers.chunks_exact_mut(integers_len(shape)));
        for ((query, integers), scale) in of_queries.zip(&mut scales) {
            *scale = self.round(dots, plan, query, integers);
        }
        dots.keys(self.keys.tiles(), plan, integers, sums);
        for (sums, (unit, lowest)) in sums.chunks_exact_mut(n).zip(scales) {
            for sum in sums {
                *sum = (*sum as i32 as f32 * unit + lowest).to_bits();
            }
        }
    }

    /// Rounds a query to integers. Returns the value of 1 of them, and the score of codes 0. Both are NaN if
    /// a component of the query is not finite, so that all scores are.
    #[inline(always)]
    fn round(&self, dots: impl Dots, plan: &KeyPlan, query: &[f32], integers: &mut [u32]) -> (f32, f32) {
        let mut factors = [0.0; MAX_DIM];
        let factors = &mut factors[..self.keys.shape().padded_dim()];
        for ((factor, q), step) in factors.iter_mut().zip(query).zip(&self.steps) {
            *factor = q * step;
        }
        let (mut largest, mut nan) = ([0.0; LANES], [0.0; LANES]);
        for factors in chunks(factors) {
            for ((largest, nan), x) in largest.iter_mut().zip(&mut nan).zip(factors) {
                *largest = if x.abs() > *largest { x.abs() } else { *largest };
                *nan += x * 0.0; // NaN for NaN and infinities
            }
        }
        let largest = fold(largest, |a, b| if b > a { b } else { a });
        let unit = largest / QUERY_LIMIT + fold(nan, |a, b| a + b);
        let per_unit = if largest > 0.0 { (QUERY_LIMIT / largest).min(f32::MAX) } else { 0.0 };
        let mut rounded = [0; MAX_DIM];
        let rounded = &mut rounded[..factors.len()];
        rounded.iter_mut().zip(factors).for_each(|(z, x)| *z = round(*x * per_unit));
        dots.factors_of(rounded, integers);
        let terms = rounded.iter().zip(&plan.twice_lowest).map(|(z, lowest)| z.wrapping_mul(*lowest));
        (unit, unit * (0.5 * terms.fold(0, i32::wrapping_add) as f32))
    }
}

/// Rounds half away from zero. Any integer for NaN.
#[inline(always)]
fn round(x: f32) -> i32 {
    let magnitude = floor(x.abs() + 0.5).1 as i32;
    if x < 0.0 { -magnitude } else { magnitude }
}
