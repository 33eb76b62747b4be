//! The speeds of a machine: recomputing and decoding chunks.

use std::ops::Range;

use crate::{ChunkCost, Error, Result};

/// Elements that an H100 decodes per second with a transform, all layers at once (`benches/results/gpu.md`):
/// the rate assumed by simulated streams.
pub const GPU_DECODE_RATE: f64 = 238e9;

/// Seconds to compute keys and values of the first `n` tokens: `linear * n + quadratic * n^2`, for the
/// products with weights and for attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillTime {
    /// Seconds per token.
    pub linear: f64,
    /// Seconds per pair of tokens.
    pub quadratic: f64,
}

impl PrefillTime {
    /// Fits measured (tokens, seconds): least squares of the relative error, with no negative coefficient.
    ///
    /// # Errors
    /// [`Error::Argument`] for no points, and for tokens or seconds that are not positive.
    pub fn fit(points: &[(f64, f64)]) -> Result<Self> {
        Self::fit_chunks(&points.iter().map(|&(n, t)| (0.0..n, t)).collect::<Vec<_>>())
    }

    /// Fits measured (tokens of a chunk, seconds) as [`Self::fit`] does.
    ///
    /// # Errors
    /// [`Error::Argument`] for no chunks, and for tokens or seconds that are not positive.
    pub fn fit_chunks(chunks: &[(Range<f64>, f64)]) -> Result<Self> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let is_valid = |(chunk, t): &(Range<f64>, f64)| {
            chunk.start >= 0.0 && positive(chunk.end) && positive(chunk.end - chunk.start) && positive(*t)
        };
        if chunks.is_empty() || !chunks.iter().all(is_valid) {
            return Err(Error::Argument("times of prefill need tokens and seconds above 0".into()));
        }
        // Least squares of rows (tokens / t, pairs / t) times (linear, quadratic) = 1.
        let rows = || {
            chunks.iter().map(|(chunk, t)| {
                let (start, end) = (chunk.start, chunk.end);
                ((end - start) / t, (end * end - start * start) / t)
            })
        };
        let sum = |f: fn((f64, f64)) -> f64| rows().map(f).sum::<f64>();
        let (aa, ab, bb) = (sum(|(a, _)| a * a), sum(|(a, b)| a * b), sum(|(_, b)| b * b));
        let (a, b) = (sum(|(a, _)| a), sum(|(_, b)| b));
        let determinant = aa * bb - ab * ab;
        let (linear, quadratic) = ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant);
        // One point, or points on a line, determine only one coefficient.
        Ok(if determinant <= 1e-12 * aa * bb || quadratic < 0.0 {
            Self { linear: a / aa, quadratic: 0.0 }
        } else if linear < 0.0 {
            Self { linear: 0.0, quadratic: b / bb }
        } else {
            Self { linear, quadratic }
        })
    }

    /// Seconds for the tokens `start..end` on top of those before them.
    #[must_use]
    pub fn of(&self, start: usize, end: usize) -> f64 {
        let (start, end) = (start as f64, end as f64);
        self.linear * (end - start) + self.quadratic * (end * end - start * start)
    }
}

/// The speeds at which a machine turns chunks into keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speeds {
    /// Time of prefill.
    pub prefill: PrefillTime,
    /// Values decoded per second.
    pub decode_rate: f64,
}

impl Speeds {
    /// Chunks that take no time, for streams with given encodings.
    pub const UNKNOWN: Self =
        Self { prefill: PrefillTime { linear: 0.0, quadratic: 0.0 }, decode_rate: f64::INFINITY };

    /// The cost of a chunk of these tokens, whose levels have these sizes in bytes.
    #[must_use]
    pub fn cost(&self, tokens: &Range<usize>, values_per_token: usize, levels: Vec<u64>) -> ChunkCost {
        ChunkCost {
            tokens: tokens.len(),
            levels,
            decode: tokens.len() as f64 * values_per_token as f64 / self.decode_rate,
            recompute: self.prefill.of(tokens.start, tokens.end),
        }
    }
}
