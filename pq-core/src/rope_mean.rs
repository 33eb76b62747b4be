//! The mean of keys before RoPE, taken out after it.
//!
//! A key at position j is `R(j) k`; the keys' mean `mu`, taken before RoPE, rotates with the position, so in rotated keys it is a
//! large part that no codebook shared by all positions can follow. Codes of `R(j) k - R(j) mu` are better at equal bits, and
//! the part that was taken out adds to every score a number that depends on the query and the position alone:
//! `<q, R(j) mu> = sum over pairs of a cos(j f) + b sin(j f)`.

use crate::error::check_len;
use crate::pack::BLOCK;
use crate::simd::Kernel;
use crate::{Backend, Error};

/// The mean key of a head before RoPE, with the cosines and sines of a block of positions; borrowed from the caller's
/// storage.
///
/// Pairs are Llama's: component `i` with `i + dim / 2`, rotated by `position * frequencies[i]`.
///
/// # Source
/// Su et al., RoFormer (arXiv 2104.09864), 3.2.
#[derive(Clone, Copy, Debug)]
pub struct RopeMean<'a> {
    mean: &'a [f32],        // (dim,)
    frequencies: &'a [f32], // (dim / 2,)
    waves: &'a [f32],       // (dim / 2, 2, 64): cosines and sines of positions 0..64
}

impl<'a> RopeMean<'a> {
    /// Elements of the storage for `dim` components.
    #[must_use]
    pub const fn storage_len(dim: usize) -> usize {
        dim.saturating_mul(BLOCK)
    }

    /// From the mean (dim,), the pairs' frequencies (dim / 2,) in radians per position, and storage.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::NotFinite`].
    pub fn new(mean: &'a [f32], frequencies: &'a [f32], storage: &'a mut [f32]) -> Result<Self, Error> {
        check_len("mean", mean.len(), 2 * frequencies.len())?;
        check_len("storage", storage.len(), Self::storage_len(mean.len()))?;
        crate::error::check_finite("mean", mean)?;
        crate::error::check_finite("frequencies", frequencies)?;
        for (waves, &frequency) in storage.chunks_exact_mut(2 * BLOCK).zip(frequencies) {
            let (cosines, sines) = waves.split_at_mut(BLOCK);
            for (r, (cosine, sine)) in cosines.iter_mut().zip(sines).enumerate() {
                let (s, c) = libm::sincos(r as f64 * f64::from(frequency));
                (*cosine, *sine) = (c as f32, s as f32);
            }
        }
        Ok(Self { mean, frequencies, waves: storage })
    }

    /// Takes `R(j) mu` out of rotated keys (n, dim) at positions `first` and on.
    ///
    /// # Errors
    /// [`Error::Length`]; `keys` is then untouched.
    pub fn subtract(&self, first: usize, keys: &mut [f32]) -> Result<(), Error> {
        let dim = self.mean.len();
        let n = keys.len() / dim.max(1);
        check_len("keys", keys.len(), n * dim)?;
        for (i, key) in keys.chunks_exact_mut(dim.max(1)).enumerate() {
            let (x, y) = key.split_at_mut(dim / 2);
            let (mean_x, mean_y) = self.mean.split_at(dim / 2);
            for (d, (x, y)) in x.iter_mut().zip(y).enumerate() {
                let (s, c) = libm::sincos((first as f64 + i as f64) * f64::from(self.frequencies[d]));
                *x -= (c * f64::from(mean_x[d]) - s * f64::from(mean_y[d])) as f32;
                *y -= (s * f64::from(mean_x[d]) + c * f64::from(mean_y[d])) as f32;
            }
        }
        Ok(())
    }

    /// What the mean adds to the scores of a rotated query: `scores[i] = <query, R(first + i) mu>`, the
    /// [`bias`](crate::CodedTokens::bias) of attention on codes.
    ///
    /// # Shapes
    /// `query` (dim,); `scores` (n,), fully written.
    /// # Errors
    /// [`Error::Length`]; `scores` is then untouched.
    /// # Cost
    /// n * dim multiply-adds and, per 64 positions, dim / 2 sines; no allocation.
    pub fn scores_into(&self, query: &[f32], first: usize, scores: &mut [f32]) -> Result<(), Error> {
        check_len("query", query.len(), self.mean.len())?;
        Backend::detect().run(Scores { mean: self, query, first, scores });
        Ok(())
    }
}

struct Scores<'a, 'b> {
    mean: &'a RopeMean<'a>,
    query: &'a [f32],
    first: usize,
    scores: &'b mut [f32],
}

impl Kernel for Scores<'_, '_> {
    type Output = ();

    /// Plain code, compiled to each set's registers: the waves are rotated to the block's first position once, then every
    /// pair is two multiply-adds a position.
    #[inline(always)]
    fn scalar(self) {
        let half = self.query.len() / 2;
        let (query_x, query_y) = self.query.split_at(half);
        let (mean_x, mean_y) = self.mean.mean.split_at(half);
        for (b, scores) in self.scores.chunks_mut(BLOCK).enumerate() {
            let start = self.first as f64 + (b * BLOCK) as f64;
            let mut sums = [0.0_f32; BLOCK];
            for (d, waves) in self.mean.waves.chunks_exact(2 * BLOCK).enumerate() {
                let a = query_x[d] * mean_x[d] + query_y[d] * mean_y[d];
                let b = query_y[d] * mean_x[d] - query_x[d] * mean_y[d];
                let (s, c) = libm::sincos(start * f64::from(self.mean.frequencies[d]));
                let (s, c) = (s as f32, c as f32);
                let (cosine, sine) = (a * c + b * s, b * c - a * s);
                let (cosines, sines) = waves.split_at(BLOCK);
                for ((sum, x), y) in sums.iter_mut().zip(cosines).zip(sines) {
                    *sum += cosine * x + sine * y;
                }
            }
            scores.copy_from_slice(&sums[..scores.len()]);
        }
    }
}
