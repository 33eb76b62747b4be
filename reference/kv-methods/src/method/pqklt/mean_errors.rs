//! The mean of what coding loses of a block of values. Attention averages the errors of single tokens, but not
//! what they have in common, which is a large part of the loss of values of one bit a component and less.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;
use svd_core::SoftmaxStats;

/// Tokens of a block.
const BLOCK: usize = 256;

/// The mean errors of one head's values, in the basis of their codes: value minus decoded value.
#[derive(Clone)]
pub(crate) struct MeanErrors {
    means: Vec<f16>, // (whole blocks, head_dim)
    sums: Vec<f32>,  // (head_dim,): of the last block, which has fewer tokens
    tokens: usize,   // of the last block
}

impl MeanErrors {
    pub fn new(head_dim: usize) -> Self {
        Self { means: vec![], sums: vec![0.0; head_dim], tokens: 0 }
    }

    /// Adds the errors of tokens, given their rows (n, head_dim) and what their codes stand for.
    pub fn add_rows(&mut self, rows: &[f32], decoded: &[f32]) {
        let dim = self.sums.len();
        let tokens = rows.chunks_exact(dim).zip(decoded.chunks_exact(dim));
        tokens.for_each(|(row, decoded)| self.add(row.iter().zip(decoded).map(|(x, y)| x - y)));
    }

    fn add(&mut self, errors: impl Iterator<Item = f32>) {
        self.sums.iter_mut().zip(errors).for_each(|(sum, error)| *sum += error);
        self.tokens += 1;
        if self.tokens == BLOCK {
            self.means.extend(self.sums.iter().map(|sum| f16::from_f32(sum / BLOCK as f32)));
            self.sums.fill(0.0);
            self.tokens = 0;
        }
    }

    /// The tokens of the first `len` that are in no whole block.
    pub fn rest(len: usize) -> Range<usize> {
        len - len % BLOCK..len
    }

    /// Keeps the whole blocks of the first `len` tokens. The tokens of [`Self::rest`] are then to be added.
    pub fn keep_blocks(&mut self, len: usize) {
        self.means.truncate(len / BLOCK * self.sums.len());
        self.sums.fill(0.0);
        self.tokens = 0;
    }

    /// Adds to the sums of weighted values `out` (group, head_dim) what their codes lack on average, given the
    /// scores (group, tokens) and the statistics of their softmax.
    pub fn add_to(&self, scores: &[f32], stats: &[SoftmaxStats], out: &mut [f32]) {
        let dim = self.sums.len();
        let mut means = vec![0.0; self.means.len()];
        self.means.convert_to_f32_slice(&mut means);
        means.extend(self.sums.iter().map(|sum| sum / self.tokens.max(1) as f32));
        let tokens = scores.len() / stats.len().max(1);
        let of_queries = scores.chunks_exact(tokens.max(1)).zip(stats);
        for ((scores, stats), out) in of_queries.zip(out.chunks_exact_mut(dim)) {
            if stats.max == f32::NEG_INFINITY {
                continue;
            }
            for (scores, mean) in scores.chunks(BLOCK).zip(means.chunks_exact(dim)) {
                let weight: f32 = scores.iter().map(|score| (score - stats.max).exp()).sum();
                out.iter_mut().zip(mean).for_each(|(out, mean)| *out += weight * mean);
            }
        }
    }

    /// Bytes of the means.
    pub fn size(&self) -> usize {
        size_of_val(&self.means[..]) + size_of_val(&self.sums[..])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(tokens: impl Iterator<Item = usize>) -> MeanErrors {
        let mut errors = MeanErrors::new(2);
        tokens.for_each(|t| errors.add([t as f32, -1.0].into_iter()));
        errors
    }

    /// With equal scores every token adds the mean of its block.
    fn sums(errors: &MeanErrors, n: usize) -> [f32; 2] {
        let (stats, mut out) = (SoftmaxStats { max: 0.5, sum: n as f32 }, [0.0; 2]);
        errors.add_to(&vec![0.5; n], &[stats], &mut out);
        out
    }

    #[test]
    fn blocks_add_their_means_times_their_weights() {
        for n in [1, 255, 256, 257, 600] {
            let [sum, ones] = sums(&of(0..n), n);
            assert!((sum / (n * (n - 1) / 2).max(1) as f32 - 1.0).abs() < 1e-3 || n == 1, "{n}: {sum}");
            assert_eq!(ones, -(n as f32));
        }
        // Tokens that the softmax leaves out add nothing, and the others their block's mean.
        let mut scores = vec![f32::NEG_INFINITY; 300];
        scores[299] = 2.0;
        let mut out = [1.0, 1.0];
        of(0..300).add_to(&scores, &[SoftmaxStats { max: 2.0, sum: 1.0 }], &mut out);
        assert_eq!(out, [1.0 + 277.5, 0.0]);
        of(0..300).add_to(&scores[..256], &[SoftmaxStats::EMPTY], &mut out);
        assert_eq!(out, [1.0 + 277.5, 0.0]);
    }

    #[test]
    fn what_is_added_again_after_a_cut_is_what_was_there() {
        for (n, len) in [(300, 280), (600, 300), (512, 256), (600, 511), (300, 0)] {
            let mut errors = of(0..n);
            errors.keep_blocks(len);
            MeanErrors::rest(len).for_each(|t| errors.add([t as f32, -1.0].into_iter()));
            assert_eq!(errors.size(), of(0..len).size());
            assert_eq!(sums(&errors, len.max(1)), sums(&of(0..len), len.max(1)), "{n} {len}");
        }
    }
}
