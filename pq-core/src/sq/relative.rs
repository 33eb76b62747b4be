//! Keys and queries relative to blocks of positions: the steps of a [`HeadTransform`].

use super::head_transform::HeadTransform;
use super::product::Product;
use super::rotate::rotate_by;
use crate::simd::{Kernel, Run, Simd};
use crate::{Backend, Error};

/// Writes the components of the keys of a block, whose first token is at position `first`: without their
/// mean, in the basis.
///
/// `keys` (n, dim), after RoPE, are changed; `out` (n, dim).
pub(super) fn transform_keys(
    backend: Backend,
    transform: &HeadTransform,
    first: usize,
    keys: &mut [f32],
    out: &mut [f32],
) -> Result<(), Error> {
    let (dim, run) = (transform.keys().dim(), transform.run());
    let (half, waves) = (dim / 2, transform.waves());
    rotate_by(transform.frequencies(), -(first as i64), keys)?;
    for (r, keys) in keys.chunks_mut(run * dim).enumerate() {
        let mut mean = transform.mean().to_vec();
        rotate_by(transform.frequencies(), (r * run) as i64, &mut mean)?;
        let (mean_x, mean_y) = mean.split_at(half);
        for (t, key) in keys.chunks_exact_mut(dim).enumerate() {
            let (x, y) = key.split_at_mut(half);
            for (i, (x, y)) in x.iter_mut().zip(y).enumerate() {
                let (cos, sin) = (waves[i * run + t], waves[(half + i) * run + t]);
                *x -= cos * mean_x[i] - sin * mean_y[i];
                *y -= sin * mean_x[i] + cos * mean_y[i];
            }
        }
    }
    backend.run(Product { rows: keys, matrix: transform.basis(), columns: dim, out, stride: dim });
    Ok(())
}

/// The queries of consecutive blocks in their dual bases, and what their scores have from the mean of the
/// keys.
pub(super) struct Queries<'a, 'b> {
    transform: &'a HeadTransform,
    group: usize,
    rotated: &'b mut [f32],  // (group, dim), relative to a token: see `new`
    relative: &'b mut [f32], // (blocks, group, dim)
    factors: &'b mut [f32],  // (blocks, group, runs of a block, dim)
    probes: &'b mut [f32],   // (blocks, group, dim)
    bias: &'b mut [f32],     // (blocks, group, tokens of a block)
}

impl<'a, 'b> Queries<'a, 'b> {
    /// Elements of the scratch for each block.
    pub const fn scratch_len(transform: &HeadTransform, group: usize) -> usize {
        let runs = transform.block() / transform.run();
        group.saturating_mul((2 + runs) * transform.keys().dim() + transform.block())
    }

    /// Takes the queries (group, dim) relative to the first token of the first block. Running the kernel
    /// makes them relative to that after the last block.
    pub fn new(
        transform: &'a HeadTransform,
        blocks: usize,
        rotated: &'b mut [f32],
        scratch: &'b mut [f32],
    ) -> Self {
        let (dim, block) = (transform.keys().dim(), transform.block());
        let of_block = rotated.len();
        let (relative, scratch) = scratch.split_at_mut(blocks * of_block);
        let (probes, scratch) = scratch.split_at_mut(blocks * of_block);
        let (factors, scratch) = scratch.split_at_mut(blocks * block / transform.run() * of_block);
        let bias = &mut scratch[..blocks * of_block / dim * block];
        probes.fill(0.0); // components without bits
        Self { transform, group: of_block / dim, rotated, relative, factors, probes, bias }
    }

    /// The probes (group, dim) of block `b`, and the scores (group, n) of the mean with its first `n` tokens.
    pub fn of_block(&mut self, b: usize, n: usize) -> (&[f32], &mut [f32]) {
        let (len, block) = (self.rotated.len(), self.transform.block());
        let bias = &mut self.bias[b * self.group * block..][..self.group * block];
        if n < block {
            for g in 1..self.group {
                bias.copy_within(g * block..g * block + n, g * n);
            }
        }
        (&self.probes[b * len..][..len], &mut bias[..self.group * n])
    }

    /// Fills `relative` and `factors`. The compiler vectorizes the loops over pairs of components.
    #[inline(always)]
    fn turn(&mut self) {
        let Self { transform, rotated, relative, factors, .. } = self;
        let (dim, runs) = (transform.keys().dim(), transform.block() / transform.run());
        let len = rotated.len();
        for (relative, factors) in relative.chunks_exact_mut(len).zip(factors.chunks_exact_mut(runs * len)) {
            relative.copy_from_slice(rotated);
            for run in 0..runs {
                let per_query = rotated.chunks_exact_mut(dim).zip(factors.chunks_exact_mut(runs * dim));
                for (query, factors) in per_query {
                    mean_factors(query, transform.mean(), &mut factors[run * dim..][..dim]);
                    turn_back(query, transform.turn());
                }
            }
        }
    }

    #[inline(always)]
    fn products(&mut self) -> [Product<'_, '_>; 2] {
        let Self { transform, relative, factors, probes, bias, .. } = self;
        let (dim, run) = (transform.keys().dim(), transform.run());
        [
            Product {
                rows: relative,
                matrix: transform.dual(),
                columns: transform.keys().coded(),
                out: probes,
                stride: dim,
            },
            Product { rows: factors, matrix: transform.waves(), columns: run, out: bias, stride: run },
        ]
    }
}

impl Kernel for &mut Queries<'_, '_> {
    type Output = ();

    fn scalar(self) {
        self.turn();
        self.products().into_iter().for_each(Kernel::scalar);
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        self.turn();
        let [probes, bias] = self.products();
        s.run(probes);
        s.run(bias);
    }
}

/// The factors of the cosines and sines of a position in the score of the mean there: with `(x, y)` a pair of
/// the query and `(u, v)` of the mean, `x u + y v` and `y u - x v`.
#[inline(always)]
fn mean_factors(query: &[f32], mean: &[f32], factors: &mut [f32]) {
    let half = query.len() / 2;
    let ((x, y), (u, v)) = (query.split_at(half), mean.split_at(half));
    let (cosines, sines) = factors.split_at_mut(half);
    let pairs = x.iter().zip(y).zip(u.iter().zip(v));
    for (((x, y), (u, v)), (cosine, sine)) in pairs.zip(cosines.iter_mut().zip(sines)) {
        (*cosine, *sine) = (x * u + y * v, y * u - x * v);
    }
}

/// Rotates a query by minus a turn, whose cosines and sines (2, dim / 2) are given.
#[inline(always)]
fn turn_back(query: &mut [f32], turn: &[f32]) {
    let half = query.len() / 2;
    let (x, y) = query.split_at_mut(half);
    let (cosines, sines) = turn.split_at(half);
    for ((x, y), (cos, sin)) in x.iter_mut().zip(y).zip(cosines.iter().zip(sines)) {
        (*x, *y) = (cos * *x + sin * *y, cos * *y - sin * *x);
    }
}
