//! The mean of what coding loses of a block of values. Attention averages the errors of single tokens, but not
//! what they have in common, which is a large part of the loss of values of one bit a component and less.

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

    /// Adds the errors of a token.
    pub fn add(&mut self, errors: impl Iterator<Item = f32>) {
        self.sums.iter_mut().zip(errors).for_each(|(sum, error)| *sum += error);
        self.tokens += 1;
        if self.tokens == BLOCK {
            self.means.extend(self.sums.iter().map(|sum| f16::from_f32(sum / BLOCK as f32)));
            self.sums.fill(0.0);
            self.tokens = 0;
        }
    }

    /// Keeps the first `len` tokens. Those that stay of a block that the cut is in keep its mean.
    pub fn truncate(&mut self, len: usize) {
        let (dim, blocks) = (self.sums.len(), len / BLOCK);
        let left = len % BLOCK;
        if let Some(mean) = self.means.get(blocks * dim..(blocks + 1) * dim) {
            mean.convert_to_f32_slice(&mut self.sums);
            self.tokens = 1;
        }
        let scale = left as f32 / self.tokens.max(1) as f32;
        self.sums.iter_mut().for_each(|sum| *sum *= scale);
        self.tokens = left;
        self.means.truncate(blocks * dim);
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
    fn truncated_blocks_keep_their_mean() {
        for (n, len) in [(300, 300), (300, 280), (600, 300), (512, 256), (300, 0)] {
            let mut errors = of(0..n);
            errors.truncate(len);
            assert_eq!(errors.size(), len / 256 * 4 + 8);
            let start = len / 256 * 256;
            let mean = (start + n.min(start + 256) - 1) as f32 / 2.0;
            let expected = sums(&of(0..start), start)[0] + (len - start) as f32 * mean;
            assert!((sums(&errors, len.max(1))[0] - expected).abs() <= 1e-3 * expected, "{n} {len}");
            if len == 0 {
                assert_eq!(sums(&errors, 1), [0.0, 0.0]);
            }
        }
    }
}
