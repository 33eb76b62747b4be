//! Streams on a simulated clock: sizes and speeds are given, nothing is encoded.

use super::link::{Bandwidth, Clock, ShapedLink, SimulatedClock, Source};
use super::{ChunkCost, ChunkId, Computed, MOST_CHUNKS, Options, Payload, Receiver, Trace, serve};
use crate::{Error, Result};

/// Seconds to compute keys and values of the first `n` tokens: `linear * n + quadratic * n^2`, of the
/// products with weights and of attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PrefillTime {
    /// Seconds a token.
    pub linear: f64,
    /// Seconds a pair of tokens.
    pub quadratic: f64,
}

impl PrefillTime {
    /// Fits measured (tokens, seconds): least squares of the relative error, no part below 0.
    ///
    /// # Errors
    /// [`Error::Argument`] for no points, and for tokens or seconds that are not above 0.
    pub fn fit(points: &[(f64, f64)]) -> Result<Self> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        if points.is_empty() || !points.iter().all(|&(n, t)| positive(n) && positive(t)) {
            return Err(Error::argument("times of prefill need tokens and seconds above 0"));
        }
        // Rows (n / t, n^2 / t) times (linear, quadratic) are to be 1.
        let rows = || points.iter().map(|&(n, t)| (n / t, n * n / t));
        let sum = |f: fn((f64, f64)) -> f64| rows().map(f).sum::<f64>();
        let (aa, ab, bb) = (sum(|(a, _)| a * a), sum(|(a, b)| a * b), sum(|(_, b)| b * b));
        let (a, b) = (sum(|(a, _)| a), sum(|(_, b)| b));
        let determinant = aa * bb - ab * ab;
        let (linear, quadratic) = ((a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant);
        // One point, or points on a line, determine one part only.
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

/// The sizes of a model and its codec, and the speeds of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Numbers in the keys and values of a token.
    pub values_per_token: usize,
    /// Bits a value of each level, the least lossy first.
    pub bits: Vec<f64>,
    /// Values decoded per second.
    pub decode_rate: f64,
    /// Time of prefill.
    pub prefill: PrefillTime,
}

impl Machine {
    /// The chunks of a context.
    ///
    /// # Errors
    /// [`Error::Argument`] for no tokens or levels, and sizes or speeds that are not above 0.
    pub fn chunks(&self, tokens: usize, chunk_tokens: usize) -> Result<Vec<ChunkCost>> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let sizes = [tokens, chunk_tokens, self.values_per_token, self.bits.len()];
        if sizes.contains(&0) || !self.bits.iter().chain([&self.decode_rate]).all(|&x| positive(x)) {
            return Err(Error::argument("tokens, chunks, values, bits and rates must be above 0"));
        }
        let chunks = tokens.div_ceil(chunk_tokens);
        if chunks > MOST_CHUNKS {
            return Err(Error::Argument(format!("a context of {chunks} chunks, of at most {MOST_CHUNKS}")));
        }
        let chunk = |start: usize| {
            let end = tokens.min(start.saturating_add(chunk_tokens));
            let values = (end - start) as f64 * self.values_per_token as f64;
            ChunkCost {
                tokens: end - start,
                levels: self.bits.iter().map(|bits| (values * bits / 8.0).ceil() as u64).collect(),
                decode: values / self.decode_rate,
                recompute: self.prefill.of(start, end),
            }
        };
        Ok((0..tokens).step_by(chunk_tokens).map(chunk).collect())
    }
}

/// Runs a stream of these requests over a link of this bandwidth.
///
/// # Errors
/// As [`serve`].
pub fn simulate(
    requests: &[Vec<ChunkCost>],
    bandwidth: Bandwidth,
    latency: f64,
    options: &Options,
) -> Result<Trace> {
    let clock = SimulatedClock::default();
    let mut receiver = SimulatedReceiver { clock: clock.clone(), requests, free: 0.0, done: vec![] };
    let mut link = ShapedLink::new(clock, Sizes(requests), bandwidth, latency);
    serve(&mut link, &mut receiver, requests, options)
}

struct Sizes<'a>(&'a [Vec<ChunkCost>]);

impl Source for Sizes<'_> {
    fn bytes(&self, chunk: ChunkId, level: usize) -> Result<u64> {
        Ok(self.0[chunk.request][chunk.index].levels[level])
    }

    fn read(&self, _: ChunkId, _: usize) -> Result<Vec<u8>> {
        Ok(vec![])
    }
}

/// Decodes and recomputes one chunk after the other, in the time that each costs.
struct SimulatedReceiver<'a> {
    clock: SimulatedClock,
    requests: &'a [Vec<ChunkCost>],
    free: f64, // when its work is done
    done: Vec<Computed>,
}

impl Receiver for SimulatedReceiver<'_> {
    fn submit(&mut self, now: f64, chunk: ChunkId, payload: Payload) -> Result<()> {
        let cost = &self.requests[chunk.request][chunk.index];
        let start = self.free.max(now);
        self.free = start + if payload == Payload::Text { cost.recompute } else { cost.decode };
        self.done.push(Computed { chunk, start, end: self.free, damaged: None });
        Ok(())
    }

    fn backlog(&self, now: f64) -> f64 {
        (self.free - now).max(0.0)
    }

    fn finish(&mut self) -> Result<Vec<Computed>> {
        self.clock.sleep_until(self.free);
        Ok(std::mem::take(&mut self.done))
    }
}
