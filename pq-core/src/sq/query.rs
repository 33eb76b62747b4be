//! Scores of queries with the coded keys of a block.

use super::dot::{Dots, QUERY_LIMIT, Scalar, Vector, pairs};
use super::keys::Keys;
use super::shape::{QUAD, Shape, TILE};
use crate::error::{check_at_least, check_len};
use crate::simd::{Kernel, Run, Simd};
use crate::{Backend, Error};

/// Elements of the scratch of [`scores_into`] for blocks of at most `n` tokens.
#[must_use]
pub const fn scores_scratch_len(keys: &Shape, n: usize, group: usize) -> usize {
    group.saturating_mul(keys.dim() / 2 + n.next_multiple_of(TILE))
}

/// The scores of a group of queries with the tokens of a block.
///
/// With `x_i` the product of component i of the query and its step in the block, the score of token t is
/// `unit * sum_i (z_i c[t, i]) + unit / 2 * sum_i z_i (1 - 2^(b_i))`, where `unit = max_i |x_i| / 16256` and
/// `z_i` is `x_i / unit`, rounded half away from zero: the dot product of the levels, up to the 15 bits of the
/// query. Sums of integers are exact.
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
        let group = queries.len() / keys.shape().dim();
        if group == 0 {
            return;
        }
        let (integers, padded) = scratch.split_at_mut(queries.len() / 2);
        score_padded(dots, queries, keys, integers, padded);
        for (scores, padded) in
            scores.chunks_exact_mut(keys.n()).zip(padded.chunks_exact(padded.len() / group))
        {
            scores.copy_from_slice(&padded[..keys.n()]);
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

/// Writes the scores (group, tokens of whole tiles); those after the block's tokens are meaningless. `integers`
/// is scratch of half the length of `queries`.
#[inline(always)]
pub(super) fn score_padded(
    dots: impl Dots,
    queries: &[f32],
    keys: &Keys<'_>,
    integers: &mut [f32],
    scores: &mut [f32],
) {
    let shape = keys.shape();
    let dim = shape.dim();
    let padded = keys.n().next_multiple_of(TILE);
    let integers: &mut [u32] = bytemuck::cast_slice_mut(integers);
    let sums: &mut [u32] = bytemuck::cast_slice_mut(scores);
    for (query, integers) in queries.chunks_exact(dim).zip(integers.chunks_exact_mut(dim / 2)) {
        round_query(keys, query, integers);
    }
    dots.keys(keys.tiles(), integers, sums);
    for (g, query) in queries.chunks_exact(dim).enumerate() {
        let (unit, _) = units(keys, query);
        let integers = &integers[g * dim / 2..][..dim / 2];
        let offset = unit * (0.5 * offset(shape, integers) as f32);
        for sum in &mut sums[g * padded..][..padded] {
            *sum = (*sum as i32 as f32 * unit + offset).to_bits();
        }
    }
}

/// The value of 1 of a query's integers, and its reciprocal. NaN if a component is not finite, so that all
/// scores are.
#[inline(always)]
fn units(keys: &Keys<'_>, query: &[f32]) -> (f32, f32) {
    let (mut largest, mut sum) = (0.0_f32, 0.0);
    for (i, &q) in query.iter().enumerate() {
        let x = q * keys.step(i);
        largest = largest.max(x.abs());
        sum += x * 0.0; // NaN for NaN and infinities
    }
    let unit = largest / QUERY_LIMIT + sum;
    (unit, if largest > 0.0 { QUERY_LIMIT / largest } else { 0.0 })
}

/// Rounds a query to integers.
#[inline(always)]
fn round_query(keys: &Keys<'_>, query: &[f32], integers: &mut [u32]) {
    let (_, per_unit) = units(keys, query);
    for (q, (query, integers)) in query.chunks_exact(QUAD).zip(integers.chunks_exact_mut(2)).enumerate() {
        let rounded = core::array::from_fn(|j| {
            let x = query[j] * keys.step(QUAD * q + j) * per_unit;
            (x + if x < 0.0 { -0.5 } else { 0.5 }) as i32
        });
        integers.copy_from_slice(&pairs(rounded));
    }
}

/// `sum_i z_i (1 - 2^(b_i))`.
#[inline(always)]
fn offset(shape: &Shape, integers: &[u32]) -> i64 {
    let quads = integers.chunks_exact(2).zip(shape.widths());
    let sum_of = |x: u32| i64::from(x as i16) + i64::from((x >> 16) as i16);
    quads.map(|(z, &width)| (sum_of(z[0]) + sum_of(z[1])) * (1 - (1_i64 << width))).sum()
}
