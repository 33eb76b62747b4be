//! Subtraction of the keys' mean before RoPE from keys after RoPE.
//!
//! A key at position j is `R(j) k`. The mean `mu` of the keys before RoPE rotates with the position, and a
//! codebook shared by all positions cannot represent it. Codes of `R(j) k - R(j) mu` have a smaller error at
//! equal bits. The subtracted component contributes to every score a term that depends on the query and the
//! position alone: `<q, R(j) mu> = sum over pairs of a cos(j f) + b sin(j f)`.

use crate::error::{check_len, count_rows};
use crate::simd::{BLOCK, Kernel, Run};
use crate::{Backend, Error};

/// The mean key of a head before RoPE, with the cosines and sines of a block of positions, borrowed from the
/// caller's storage. [`RopeMeanBuf`](crate::RopeMeanBuf) owns them.
///
/// Pairs are those of Llama: component `i` with `i + dim / 2`, rotated by `position * frequencies[i]`.
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

    /// Takes the mean (dim,), the pairs' frequencies (dim / 2,) in radians per position, and storage.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::NotFinite`].
    /// # Cost
    /// 32 * dim sines and cosines in `f64`: build it once and keep it.
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

    /// Subtracts `R(j) mu` from rotated keys (n, dim) at positions from `first` on.
    ///
    /// # Errors
    /// [`Error::PartialRow`]; `keys` is then untouched.
    /// # Cost
    /// n * dim / 2 sines and cosines in `f64`; no allocation.
    pub fn subtract(&self, first: usize, keys: &mut [f32]) -> Result<(), Error> {
        let dim = self.mean.len();
        if dim == 0 {
            return check_len("keys", keys.len(), 0);
        }
        count_rows("keys", keys.len(), dim)?;
        for (i, key) in keys.chunks_exact_mut(dim).enumerate() {
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

    /// Computes the contribution of the mean to the scores of a rotated query: `scores[i] = <query, R(first +
    /// i) mu>`, the [bias](crate::CodedTokens::with_bias) of attention on codes.
    ///
    /// # Shapes
    /// `query` (dim,); `scores` (n,), fully written.
    /// # Errors
    /// [`Error::Length`]; `scores` is then untouched.
    /// # Cost
    /// n * dim multiply-adds and, per 64 positions, dim / 2 sines and cosines; no allocation.
    pub fn scores_into(&self, query: &[f32], first: usize, scores: &mut [f32]) -> Result<(), Error> {
        self.scores_into_with(Backend::detect(), query, first, scores)
    }

    /// [`scores_into`](Self::scores_into) on a given backend.
    ///
    /// # Errors
    /// As [`scores_into`](Self::scores_into), and [`Error::BackendUnavailable`].
    pub fn scores_into_with(
        &self,
        backend: Backend,
        query: &[f32],
        first: usize,
        scores: &mut [f32],
    ) -> Result<(), Error> {
        backend.check()?;
        check_len("query", query.len(), self.mean.len())?;
        backend.run(Scores { mean: self, query, first, scores });
        Ok(())
    }
}

/// A [`RopeMean`] that owns its mean, frequencies, cosines and sines, so that decode steps do not recompute
/// them.
///
/// # Examples
/// ```
/// use pq_core::RopeMeanBuf;
/// let mean = RopeMeanBuf::new(&[1.0, 0.0], &[0.5])?;
/// let mut scores = [0.0; 2];
/// mean.view().scores_into(&[1.0, 0.0], 0, &mut scores)?; // cos(0), cos(0.5)
/// assert!((scores[1] - 0.5_f32.cos()).abs() < 1e-6);
/// # Ok::<(), pq_core::Error>(())
/// ```
#[cfg(feature = "alloc")]
#[derive(Clone, Debug)]
pub struct RopeMeanBuf {
    mean: alloc::vec::Vec<f32>,
    frequencies: alloc::vec::Vec<f32>,
    waves: alloc::vec::Vec<f32>, // as `RopeMean::new` fills it
}

#[cfg(feature = "alloc")]
impl RopeMeanBuf {
    /// As [`RopeMean::new`].
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::NotFinite`].
    pub fn new(mean: &[f32], frequencies: &[f32]) -> Result<Self, Error> {
        let mut waves = alloc::vec![0.0; RopeMean::storage_len(mean.len())];
        RopeMean::new(mean, frequencies, &mut waves)?;
        Ok(Self { mean: mean.to_vec(), frequencies: frequencies.to_vec(), waves })
    }

    /// Borrows the mean.
    #[must_use]
    pub fn view(&self) -> RopeMean<'_> {
        RopeMean { mean: &self.mean, frequencies: &self.frequencies, waves: &self.waves }
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

    /// Portable code that the compiler vectorizes for each instruction set. The angle addition formulas move
    /// the query's coefficients to the block's first position once, so that every pair costs two
    /// multiply-adds per position.
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
