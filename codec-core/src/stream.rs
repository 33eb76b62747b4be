//! The choice of the next chunk's encoding while a context is streamed. The policy measures no time and sends
//! nothing.

use crate::Error;

/// Default number of tokens in a chunk (CacheGen, 5.3).
pub const CHUNK_TOKENS: usize = 1500;

/// Most levels that a [`Decision`] records.
pub const MAX_LEVELS: usize = 16;

/// The encodings of a chunk that can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// The text, from which keys and values are recomputed without loss.
    Text,
    /// A level, as an index into [`ChunkSizes::levels`].
    Level(usize),
}

/// The costs of a chunk's encodings.
#[derive(Clone, Copy, Debug)]
pub struct ChunkSizes<'a> {
    /// Bytes of each level, the least lossy level first. All chunks have the same levels.
    pub levels: &'a [u64],
    /// Bytes of the text.
    pub text: u64,
    /// Seconds to recompute keys and values from the text, for one request.
    pub recompute: f64,
}

/// The service level objective and the prior knowledge of the streaming policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StreamPolicy {
    /// Service level objective: seconds from the request to the first token.
    pub slo: f64,
    /// Level of the first chunk if no throughput is known.
    pub first_level: usize,
    /// Throughput in bytes per second known before the first chunk, if any.
    pub prior: Option<f64>,
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
    /// It is the least lossy encoding that is expected in time.
    InTime,
    /// No encoding is expected in time, and it is the fastest one.
    NoneInTime,
    /// No throughput is known, and it is the policy's first level.
    NoThroughput,
}

/// The chosen encoding and the inputs of the choice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The encoding to send.
    pub encoding: Encoding,
    /// The reason for it.
    pub reason: Reason,
    /// The assumed throughput.
    pub throughput: Throughput,
    /// Seconds until the service level objective.
    pub remaining: f64,
    /// Seconds for all remaining chunks as text.
    pub text_delay: Option<f64>,
    /// Seconds for all remaining chunks at each level.
    pub level_delays: [Option<f64>; MAX_LEVELS],
}

impl StreamPolicy {
    /// Chooses the encoding of the first of `chunks`, the chunks that have not been sent.
    ///
    /// The delay of an encoding assumes it for all of `chunks`: bytes divided by the throughput, plus the
    /// recomputation of text, times `requests`. `measured` is the throughput of the previous chunk in bytes
    /// per second, `elapsed` the seconds since the request, `requests` the number of concurrent requests that
    /// load a chunk at this position.
    ///
    /// # Errors
    /// [`Error::Zero`] for no chunks, levels or requests; [`Error::TooLarge`] for more than [`MAX_LEVELS`]
    /// levels; [`Error::Length`] if chunks differ in their number of levels; [`Error::OutOfBounds`] if
    /// `first_level` does not exist; [`Error::BadTiming`] for times or throughputs that are not finite or not
    /// positive.
    /// # Source
    /// CacheGen (SIGCOMM 2024), 5.3 and algorithm 1.
    /// # Examples
    /// ```
    /// use codec_core::*;
    /// let chunk = ChunkSizes { levels: &[60_000_000, 30_000_000], text: 6_000, recompute: 2.0 };
    /// let policy = StreamPolicy { slo: 1.0, first_level: 0, prior: None };
    /// // Two chunks are left after 0.4 s, at 120 MB/s: only the second level is in time.
    /// let decision = policy.decide(&[chunk; 2], Some(120e6), 0.4, 1)?;
    /// assert_eq!(decision.encoding, Encoding::Level(1));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn decide(
        &self,
        chunks: &[ChunkSizes<'_>],
        measured: Option<f64>,
        elapsed: f64,
        requests: usize,
    ) -> Result<Decision, Error> {
        self.check(chunks, measured, elapsed, requests)?;
        let levels = chunks[0].levels.len();
        let remaining = self.slo - elapsed;
        let throughput = match (measured, self.prior) {
            (Some(rate), _) => Throughput::Measured(rate),
            (None, Some(rate)) => Throughput::Prior(rate),
            (None, None) => Throughput::Unknown,
        };
        let (Throughput::Measured(rate) | Throughput::Prior(rate)) = throughput else {
            return Ok(Decision {
                encoding: Encoding::Level(self.first_level),
                reason: Reason::NoThroughput,
                throughput,
                remaining,
                text_delay: None,
                level_delays: [None; MAX_LEVELS],
            });
        };
        let delay = |bytes: u64, computing: f64| requests as f64 * (bytes as f64 / rate + computing);
        let text: f64 = chunks.iter().map(|chunk| delay(chunk.text, chunk.recompute)).sum();
        let mut level_delays = [None; MAX_LEVELS];
        for (level, out) in level_delays[..levels].iter_mut().enumerate() {
            *out = Some(chunks.iter().map(|chunk| delay(chunk.levels[level], 0.0)).sum());
        }
        // The least lossy encoding first.
        let options = || {
            let levels = level_delays.iter().flatten().enumerate();
            core::iter::once((Encoding::Text, text))
                .chain(levels.map(|(level, &delay)| (Encoding::Level(level), delay)))
        };
        let in_time = options().find(|&(_, delay)| delay <= remaining);
        let fastest = options().min_by(|a, b| a.1.total_cmp(&b.1));
        let (encoding, reason) = match (in_time, fastest) {
            (Some((encoding, _)), _) => (encoding, Reason::InTime),
            (None, Some((encoding, _))) => (encoding, Reason::NoneInTime),
            (None, None) => return Err(Error::Zero { what: "levels" }),
        };
        Ok(Decision { encoding, reason, throughput, remaining, text_delay: Some(text), level_delays })
    }

    fn check(
        &self,
        chunks: &[ChunkSizes<'_>],
        measured: Option<f64>,
        elapsed: f64,
        requests: usize,
    ) -> Result<(), Error> {
        let levels = chunks.first().ok_or(Error::Zero { what: "chunks" })?.levels.len();
        if levels == 0 || requests == 0 {
            return Err(Error::Zero { what: if levels == 0 { "levels" } else { "requests" } });
        }
        if levels > MAX_LEVELS {
            return Err(Error::TooLarge);
        }
        if self.first_level >= levels {
            return Err(Error::OutOfBounds { what: "level" });
        }
        for chunk in chunks {
            crate::error::check_len("levels", chunk.levels.len(), levels)?;
        }
        let times = chunks.iter().map(|chunk| chunk.recompute).chain([elapsed, self.slo]);
        let rates = [measured, self.prior];
        let positive = |rate: &f64| rate.is_finite() && *rate > 0.0;
        if times.into_iter().all(|x| x.is_finite() && x >= 0.0) && rates.iter().flatten().all(positive) {
            Ok(())
        } else {
            Err(Error::BadTiming)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: StreamPolicy = StreamPolicy { slo: 2.0, first_level: 1, prior: None };

    fn chunks<'a>(n: usize, levels: &'a [u64]) -> std::vec::Vec<ChunkSizes<'a>> {
        std::vec![ChunkSizes { levels, text: 6_000, recompute: 0.5 }; n]
    }

    #[test]
    fn the_first_chunk_without_knowledge_gets_the_medium_level() {
        let decision = POLICY.decide(&chunks(4, &[400, 200, 100]), None, 0.0, 1).unwrap();
        assert_eq!((decision.encoding, decision.reason), (Encoding::Level(1), Reason::NoThroughput));
        assert_eq!(decision.throughput, Throughput::Unknown);
    }

    /// 4 chunks in 1.5 s: as text 4 * 0.5 s and more; at 1,000 bytes per second levels take 1.6, 0.8 and 0.4
    /// s.
    #[test]
    fn the_least_lossy_encoding_in_time_is_chosen() {
        let levels = [400, 200, 100];
        let decide = |n, measured, elapsed, requests| {
            let decision = POLICY.decide(&chunks(n, &levels), Some(measured), elapsed, requests).unwrap();
            (decision.encoding, decision.reason)
        };
        assert_eq!(decide(4, 1_000.0, 0.5, 1), (Encoding::Level(1), Reason::InTime));
        assert_eq!(decide(4, 1_000.0, 0.3, 1), (Encoding::Level(0), Reason::InTime));
        assert_eq!(decide(4, 1_000.0, 0.5, 3), (Encoding::Level(2), Reason::InTime));
        assert_eq!(decide(4, 10.0, 0.5, 1), (Encoding::Level(2), Reason::NoneInTime));
        assert_eq!(decide(2, 1e9, 0.5, 1), (Encoding::Text, Reason::InTime));
        assert_eq!(decide(4, 1e9, 1.999_99, 1).0, Encoding::Level(0));
        assert_eq!(decide(1, 1.0, 3.0, 1).1, Reason::NoneInTime);
    }

    #[test]
    fn a_decision_explains_itself() {
        let policy = StreamPolicy { prior: Some(1_000.0), ..POLICY };
        let decision = policy.decide(&chunks(3, &[400, 100]), None, 0.5, 2).unwrap();
        assert_eq!(decision.throughput, Throughput::Prior(1_000.0));
        assert_eq!(decision.remaining, 1.5);
        assert_eq!(decision.text_delay, Some(3.0 * 2.0 * (6.0 + 0.5)));
        let delays: std::vec::Vec<f64> = decision.level_delays.iter().flatten().copied().collect();
        assert!(delays.iter().zip([2.4, 0.6]).all(|(a, b)| (a - b).abs() < 1e-12));
        assert_eq!(decision.encoding, Encoding::Level(1));
    }

    #[test]
    fn bad_input_is_an_error() {
        let levels = [3, 2, 1];
        let good = chunks(1, &levels);
        assert_eq!(POLICY.decide(&[], None, 0.0, 1), Err(Error::Zero { what: "chunks" }));
        assert_eq!(POLICY.decide(&good, None, 0.0, 0), Err(Error::Zero { what: "requests" }));
        assert_eq!(POLICY.decide(&chunks(1, &[]), None, 0.0, 1), Err(Error::Zero { what: "levels" }));
        assert_eq!(POLICY.decide(&chunks(1, &[1]), None, 0.0, 1), Err(Error::OutOfBounds { what: "level" }));
        assert_eq!(POLICY.decide(&chunks(1, &[1; 17]), None, 0.0, 1), Err(Error::TooLarge));
        let mixed = [good[0], ChunkSizes { levels: &levels[1..], ..good[0] }];
        assert!(matches!(POLICY.decide(&mixed, None, 0.0, 1), Err(Error::Length { .. })));
        for (measured, elapsed) in [(0.0, 0.0), (f64::NAN, 0.0), (1.0, -1.0), (1.0, f64::INFINITY)] {
            assert_eq!(POLICY.decide(&good, Some(measured), elapsed, 1), Err(Error::BadTiming));
        }
    }
}
