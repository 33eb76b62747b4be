//! The choice of the next chunk's encoding while a context is streamed. The policy measures no time and sends
//! nothing.
//!
//! The expected delay of a plan for the remaining chunks comes from two resources that work at the same time:
//! the link transfers chunks one after the other, and the receiver decodes or recomputes each of them after
//! its own transfer and after the chunk before it.

use crate::Error;

/// Default number of tokens in a chunk (CacheGen, 5.3).
pub const CHUNK_TOKENS: usize = 1500;

/// Maximum number of levels that a [`Decision`] records.
pub const MAX_LEVELS: usize = 16;

/// Share of the measured throughput that a plan of [`Plans::TextFirst`] may count on. Throughput varies: a
/// plan that needs the full throughput of the last chunk is late as often as not.
const TRUST: f64 = 0.5;

/// Share of the delay that a new plan must save before a transfer is abandoned: the rate of a transfer's
/// first milliseconds is uncertain.
const WORTHWHILE: f64 = 0.1;

/// The encodings of a chunk that can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// The text, from which keys and values are recomputed without loss.
    Text,
    /// A level, as an index into [`ChunkSizes::levels`].
    Level(usize),
}

/// The costs of a chunk's encodings, for one request.
#[derive(Clone, Copy, Debug)]
pub struct ChunkSizes<'a> {
    /// Bytes of each level, the least lossy level first. All chunks have the same levels.
    pub levels: &'a [u64],
    /// Seconds to decode a level.
    pub decode: f64,
    /// Bytes of the text, 0 if the receiver has it.
    pub text: u64,
    /// Seconds to recompute keys and values from the text.
    pub recompute: f64,
    /// Concurrent requests that load a chunk at this position (CacheGen's `N_i`). Each of them pays every
    /// cost.
    pub requests: usize,
}

/// The plans that a policy considers for the remaining chunks, and its choice if none is in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plans {
    /// One encoding for all chunks, as in the paper. A plan is in time if it meets the objective at the
    /// measured throughput; if none is, the fastest is started.
    Uniform,
    /// The first chunks, from none to all, as text, and the rest at one level, so that early chunks, which
    /// are the cheapest to recompute, are recomputed while later ones are transferred. A plan is in time if
    /// half the measured throughput suffices. If none is, throughput may still rise, so the plan that needs
    /// the lowest throughput is started: as much text as can be recomputed before the objective, and the last
    /// level for the rest; if there is too little time for any plan, the fastest.
    TextFirst,
}

/// The service level objective and the prior knowledge of the streaming policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamPolicy {
    /// Service level objective: seconds from the request to the last chunk. With 0 no plan is in time, and
    /// the fastest one is chosen.
    pub slo: f64,
    /// Level of the first chunk if no throughput is known.
    pub first_level: usize,
    /// Throughput in bytes per second known before the first chunk, if any.
    pub prior: Option<f64>,
    /// The plans to choose from.
    pub plans: Plans,
}

/// The state of a stream when a decision is made.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// Throughput of the last transfer in bytes per second, if there was one.
    pub measured: Option<f64>,
    /// Seconds since the context was requested.
    pub elapsed: f64,
    /// Seconds of decoding and recomputation that earlier chunks still need.
    pub computing: f64,
}

/// The origin of the throughput in a [`Decision`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Throughput {
    /// Measured on the previous chunk, in bytes per second.
    Measured(f64),
    /// [`StreamPolicy::prior`], in bytes per second.
    Prior(f64),
    /// No throughput is known.
    Unknown,
}

/// The reason for an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It starts the least lossy plan that is expected to be in time.
    InTime,
    /// No plan is expected to be in time, and it starts the one that [`Plans`] defines for this case.
    NoneInTime,
    /// No throughput is known, and it is the policy's first level.
    NoThroughput,
}

/// The chosen encoding and the inputs of the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The encoding to send.
    pub encoding: Encoding,
    /// Why that encoding was chosen.
    pub reason: Reason,
    /// The throughput that the choice assumes, and where it comes from.
    pub throughput: Throughput,
    /// Seconds until the service level objective.
    pub remaining: f64,
    /// Chunks, from this one on, that the chosen plan sends as text.
    pub text_chunks: usize,
    /// Seconds that the chosen plan takes.
    pub delay: Option<f64>,
    /// Seconds for all remaining chunks as text.
    pub text_delay: Option<f64>,
    /// Seconds for all remaining chunks at each level.
    pub level_delays: [Option<f64>; MAX_LEVELS],
}

/// When the link and the receiver finish their queued work, in seconds from now.
#[derive(Clone, Copy, Debug, Default)]
struct Pipeline {
    link: f64,
    receiver: f64,
}

impl Pipeline {
    /// Adds a chunk for each of `requests`.
    fn push(&mut self, requests: usize, transfer: f64, compute: f64) {
        let n = requests as f64;
        self.link += n * transfer;
        // All but the first request's work may overlap with the transfers after it.
        let first = self.receiver.max(self.link - (n - 1.0) * transfer) + n * compute;
        self.receiver = first.max(self.link + compute);
    }
}

/// A plan: chunks as text, then a level, if any chunks are left.
#[derive(Clone, Copy)]
struct Plan {
    text_chunks: usize,
    level: Option<usize>,
    delay: f64,
}

impl Plan {
    const fn first(self) -> Encoding {
        match self.level {
            Some(level) if self.text_chunks == 0 => Encoding::Level(level),
            _ => Encoding::Text,
        }
    }
}

/// The least lossy plan that is in time, and the one to start if none is.
#[derive(Clone, Copy)]
struct Best {
    in_time: Option<Plan>,
    otherwise: Plan,
}

impl Best {
    const fn chosen(self) -> (Plan, Reason) {
        match self.in_time {
            Some(plan) => (plan, Reason::InTime),
            None => (self.otherwise, Reason::NoneInTime),
        }
    }
}

impl StreamPolicy {
    /// Chooses the encoding of the first of `chunks`, the chunks that have not been sent.
    ///
    /// Among the plans in time, text for all chunks is the least lossy; then the plan with the least lossy
    /// level, and of its plans the one with the most text. A plan is in time if it is expected to meet the
    /// objective at the throughput that [`Plans`] counts on, which also defines the choice if none is. While
    /// no throughput is known, the choice is text if it needs no transfer and is in time, else the first
    /// level.
    ///
    /// # Errors
    /// [`Error::Zero`] for no chunks, levels or requests; [`Error::TooLarge`] for more than [`MAX_LEVELS`]
    /// levels; [`Error::Length`] if chunks differ in their number of levels; [`Error::OutOfBounds`] if
    /// `first_level` does not exist; [`Error::BadTiming`] for times or throughputs that are not finite or not
    /// positive.
    /// # Cost
    /// n^2 * levels additions for n chunks with [`Plans::TextFirst`], 2 * n * levels with [`Plans::Uniform`];
    /// no allocation.
    /// # Source
    /// CacheGen (SIGCOMM 2024), 5.3 and algorithm 1. Recomputing the first chunks while the last ones are
    /// transferred: Jin et al., "Compute Or Load KV Cache? Why Not Both?" (Cake), arXiv 2410.03065.
    /// # Examples
    /// ```
    /// use codec_core::*;
    /// let levels = [30_000_000, 15_000_000];
    /// let chunk = ChunkSizes { levels: &levels, decode: 0.01, text: 0, recompute: 2.0, requests: 1 };
    /// let policy = StreamPolicy { slo: 1.0, first_level: 0, prior: None, plans: Plans::TextFirst };
    /// // Two chunks are left after 0.4 s, at 120 MB/s: only the second level is in time.
    /// let progress = Progress { measured: Some(120e6), elapsed: 0.4, computing: 0.0 };
    /// assert_eq!(policy.decide(&[chunk; 2], progress)?.encoding, Encoding::Level(1));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn decide(&self, chunks: &[ChunkSizes<'_>], progress: Progress) -> Result<Decision, Error> {
        self.check(chunks, progress)?;
        let remaining = self.slo - progress.elapsed;
        let throughput = match (progress.measured, self.prior) {
            (Some(rate), _) => Throughput::Measured(rate),
            (None, Some(rate)) => Throughput::Prior(rate),
            (None, None) => Throughput::Unknown,
        };
        let mut decision = Decision {
            encoding: Encoding::Level(self.first_level),
            reason: Reason::NoThroughput,
            throughput,
            remaining,
            text_chunks: 0,
            delay: None,
            text_delay: None,
            level_delays: [None; MAX_LEVELS],
        };
        let start = Pipeline { link: 0.0, receiver: progress.computing };
        let (Throughput::Measured(rate) | Throughput::Prior(rate)) = throughput else {
            // The time of text that needs no transfer does not depend on throughput.
            let delay = as_text(chunks, f64::INFINITY, start).receiver;
            if delay <= remaining && chunks.iter().all(|chunk| chunk.text == 0) {
                (decision.encoding, decision.reason) = (Encoding::Text, Reason::InTime);
                (decision.text_chunks, decision.delay) = (chunks.len(), Some(delay));
                decision.text_delay = Some(delay);
            }
            return Ok(decision);
        };
        let (plan, reason) = self.best(chunks, rate, start, remaining).chosen();
        (decision.encoding, decision.reason) = (plan.first(), reason);
        (decision.text_chunks, decision.delay) = (plan.text_chunks, Some(plan.delay));
        decision.text_delay = Some(as_text(chunks, rate, start).receiver);
        for (level, out) in decision.level_delays[..chunks[0].levels.len()].iter_mut().enumerate() {
            *out = Some(at_level(chunks, level, rate, start).receiver);
        }
        Ok(decision)
    }

    /// Reconsiders the choice while the first of `chunks` is in flight at `level`, with `left` bytes left for
    /// all its requests; `progress.measured` is the throughput of this transfer so far, and is assumed for
    /// the rest of it. Returns the decision to abandon the transfer, or `None` to continue.
    ///
    /// A transfer continues if it is expected to be in time, or if no other plan saves a tenth of the delay.
    ///
    /// # Errors
    /// As [`Self::decide`]; [`Error::OutOfBounds`] for a level that does not exist.
    pub fn reconsider(
        &self,
        chunks: &[ChunkSizes<'_>],
        level: usize,
        left: u64,
        progress: Progress,
    ) -> Result<Option<Decision>, Error> {
        let decision = self.decide(chunks, progress)?;
        if level >= chunks[0].levels.len() {
            return Err(Error::OutOfBounds { what: "level" });
        }
        let (Some(rate), Some(delay)) = (progress.measured.or(self.prior), decision.delay) else {
            return Ok(None);
        };
        let mut kept = Pipeline { link: 0.0, receiver: progress.computing };
        let requests = chunks[0].requests as f64;
        kept.push(1, left as f64 / rate, chunks[0].decode * requests);
        let kept = match &chunks[1..] {
            [] => kept.receiver,
            rest => self.best(rest, rate, kept, decision.remaining).chosen().0.delay,
        };
        let go_on = kept <= decision.remaining || delay > (1.0 - WORTHWHILE) * kept;
        Ok((!go_on && decision.encoding != Encoding::Level(level)).then_some(decision))
    }

    /// The best plans of `chunks`, which are not empty, after the queued work of `start`.
    fn best(&self, chunks: &[ChunkSizes<'_>], rate: f64, start: Pipeline, remaining: f64) -> Best {
        let (n, last) = (chunks.len(), chunks[0].levels.len() - 1);
        let all_text = Plan { text_chunks: n, level: None, delay: as_text(chunks, rate, start).receiver };
        let mut fastest = all_text;
        let mut finest = None; // of those in time: the least lossy level with the most text
        let mut least = None; // in time at the least throughput: the last level with the most text
        let (splits, trust) = match self.plans {
            Plans::Uniform => (1, 1.0),
            Plans::TextFirst => (n, TRUST),
        };
        let rates @ [expected, trusted, highest] = [rate, trust * rate, f64::INFINITY];
        let mut before = rates.map(|_| start); // the pipeline at each rate after the chunks as text
        for text_chunks in 0..splits {
            let rest = &chunks[text_chunks..];
            for level in 0..=last {
                let delay = at_level(rest, level, expected, before[0]).receiver;
                let plan = Plan { text_chunks, level: Some(level), delay };
                if delay < fastest.delay {
                    fastest = plan;
                }
                let is_finest = finest.is_none_or(|best: Plan| plan.level <= best.level);
                if is_finest && at_level(rest, level, trusted, before[1]).receiver <= remaining {
                    finest = Some(plan);
                }
                if level == last && at_level(rest, level, highest, before[2]).receiver < remaining {
                    least = Some(plan);
                }
            }
            for (before, rate) in before.iter_mut().zip(rates) {
                *before = as_text(&rest[..1], rate, *before);
            }
        }
        let all_text = (as_text(chunks, trusted, start).receiver <= remaining).then_some(all_text);
        let least = least.filter(|_| self.plans == Plans::TextFirst);
        Best { in_time: all_text.or(finest), otherwise: least.unwrap_or(fastest) }
    }

    fn check(&self, chunks: &[ChunkSizes<'_>], progress: Progress) -> Result<(), Error> {
        let levels = chunks.first().ok_or(Error::Zero { what: "chunks" })?.levels.len();
        if levels == 0 {
            return Err(Error::Zero { what: "levels" });
        }
        if levels > MAX_LEVELS {
            return Err(Error::TooLarge);
        }
        if self.first_level >= levels {
            return Err(Error::OutOfBounds { what: "level" });
        }
        for chunk in chunks {
            crate::error::check_len("levels", chunk.levels.len(), levels)?;
            if chunk.requests == 0 {
                return Err(Error::Zero { what: "requests" });
            }
        }
        let times = chunks.iter().flat_map(|chunk| [chunk.recompute, chunk.decode]);
        let times = times.chain([progress.elapsed, progress.computing, self.slo]);
        let rates = [progress.measured, self.prior];
        let positive = |rate: &f64| rate.is_finite() && *rate > 0.0;
        if { times }.all(|x| x.is_finite() && x >= 0.0) && rates.iter().flatten().all(positive) {
            Ok(())
        } else {
            Err(Error::BadTiming)
        }
    }
}

/// The pipeline after `chunks` as text.
fn as_text(chunks: &[ChunkSizes<'_>], rate: f64, mut pipeline: Pipeline) -> Pipeline {
    for chunk in chunks {
        pipeline.push(chunk.requests, chunk.text as f64 / rate, chunk.recompute);
    }
    pipeline
}

/// The pipeline after `chunks` at a level.
fn at_level(chunks: &[ChunkSizes<'_>], level: usize, rate: f64, mut pipeline: Pipeline) -> Pipeline {
    for chunk in chunks {
        pipeline.push(chunk.requests, chunk.levels[level] as f64 / rate, chunk.decode);
    }
    pipeline
}

#[cfg(test)]
mod tests;
