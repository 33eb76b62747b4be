//! Streams on a simulated clock: sizes and speeds are given, nothing is encoded.

use bytes::Bytes;

use crate::{
    Bandwidth, ChunkCost, Clock, Computed, Error, MOST_CHUNKS, Options, Payload, Receiver, RequestChunk,
    Result, ShapedLink, SimulatedClock, Source, Speeds, Trace, serve,
};

/// The sizes of a model and its codec, and the speeds of a machine.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Elements in the keys and values of a token.
    pub values_per_token: usize,
    /// Bits per element of each level, the least lossy first.
    pub bits: Vec<f64>,
    /// Speeds of the machine.
    pub speeds: Speeds,
}

impl Machine {
    /// The chunks of a context.
    ///
    /// # Errors
    /// [`Error::Argument`] for no tokens or levels, and sizes or speeds that are not positive.
    pub fn chunks(&self, tokens: usize, chunk_tokens: usize) -> Result<Vec<ChunkCost>> {
        let positive = |x: f64| x.is_finite() && x > 0.0;
        let sizes = [tokens, chunk_tokens, self.values_per_token, self.bits.len()];
        if sizes.contains(&0) || !self.bits.iter().chain([&self.speeds.decode_rate]).all(|&x| positive(x)) {
            return Err(Error::Argument("tokens, chunks, values, bits and rates must be above 0".into()));
        }
        let chunks = tokens.div_ceil(chunk_tokens);
        if chunks > MOST_CHUNKS {
            return Err(Error::Argument(format!("a context of {chunks} chunks, of at most {MOST_CHUNKS}")));
        }
        let chunk = |start: usize| {
            let end = tokens.min(start.saturating_add(chunk_tokens));
            let values = (end - start) as f64 * self.values_per_token as f64;
            let levels = self.bits.iter().map(|bits| (values * bits / 8.0).ceil() as u64).collect();
            self.speeds.cost(&(start..end), self.values_per_token, levels)
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
    fn bytes(&self, chunk: RequestChunk, level: usize) -> Result<u64> {
        Ok(self.0[chunk.request][chunk.index].levels[level])
    }

    fn read(&self, _: RequestChunk, _: usize) -> Result<Bytes> {
        Ok(Bytes::new())
    }
}

/// Decodes and recomputes one chunk after the other, in the time that each costs.
struct SimulatedReceiver<'a> {
    clock: SimulatedClock,
    requests: &'a [Vec<ChunkCost>],
    free: f64, // when its work ends
    done: Vec<Computed>,
}

impl Receiver for SimulatedReceiver<'_> {
    fn submit(&mut self, now: f64, chunk: RequestChunk, payload: Payload) -> Result<()> {
        let cost = &self.requests[chunk.request][chunk.index];
        let start = self.free.max(now);
        self.free = start + if payload.is_level() { cost.decode } else { cost.recompute };
        self.done.push(Computed { chunk, start, end: self.free, damaged: None });
        Ok(())
    }

    fn backlog(&self, now: f64, _: f64) -> f64 {
        (self.free - now).max(0.0)
    }

    fn finish(&mut self) -> Result<Vec<Computed>> {
        self.clock.sleep_until(self.free);
        Ok(std::mem::take(&mut self.done))
    }
}
