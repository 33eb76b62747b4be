//! Links of a given bandwidth: on a simulated clock, or on the real one.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use super::{Bytes, ChunkId, Link};
use crate::rng::Rng;
use crate::{Error, Result, files};

/// Bytes per second of a gigabit per second.
pub const GBPS: f64 = 1e9 / 8.0;

/// Seconds between changes of a random bandwidth.
const PERIOD: f64 = 0.25;

/// Bandwidth over time.
#[derive(Clone, Debug, PartialEq)]
pub enum Bandwidth {
    /// Start in seconds, and bytes per second; from 0 on and in ascending order. The last rate holds from
    /// then on.
    Steps(Vec<(f64, f64)>),
    /// Uniform between two rates in bytes per second, drawn again every quarter of a second.
    Random {
        /// Lowest rate.
        low: f64,
        /// Highest rate.
        high: f64,
        /// Seed of the rates.
        seed: u64,
    },
}

impl Bandwidth {
    /// The rate at second `t`, in bytes per second, and its end.
    fn at(&self, t: f64) -> (f64, f64) {
        match self {
            Self::Steps(steps) => {
                let after = steps.partition_point(|step| step.0 <= t);
                let rate = steps[..after].last().map_or(0.0, |step| step.1);
                (rate, steps.get(after).map_or(f64::INFINITY, |step| step.0))
            }
            &Self::Random { low, high, seed } => {
                let period = (t / PERIOD).floor();
                // The state of a SplitMix64 generator after `period` draws.
                let state = (period as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed << 32);
                (low + (high - low) * Rng(state).uniform(), (period + 1.0) * PERIOD)
            }
        }
    }

    /// The same random bandwidth with another seed; other bandwidths are unchanged.
    #[must_use]
    pub fn seeded(self, seed: u64) -> Self {
        match self {
            Self::Random { low, high, .. } => Self::Random { low, high, seed },
            steps => steps,
        }
    }

    /// The file that a text names, if it is neither a rate nor a range of rates.
    #[must_use]
    fn file_of(text: &str) -> Option<&Path> {
        let is_file = !text.starts_with("random:") && text.parse::<f64>().is_err();
        is_file.then(|| Path::new(text))
    }

    fn from_file(path: &Path) -> Result<Self> {
        let (text, mut steps) = (files::read_text(path)?, vec![]);
        for (i, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let mut numbers = line.split_whitespace().map(str::parse::<f64>);
            let (Some(Ok(from)), Some(Ok(gbps)), None) = (numbers.next(), numbers.next(), numbers.next())
            else {
                return Err(Error::file(path, format!("line {}: `SECONDS GBPS` is expected", i + 1)));
            };
            let last = steps.last().map_or(-1.0, |step: &(f64, f64)| step.0);
            let rising = if steps.is_empty() { from == 0.0 } else { from.is_finite() && from > last };
            let Some(rate) = rate(gbps).filter(|_| rising) else {
                let what = "seconds rise from 0, and rates are finite and not negative";
                return Err(Error::file(path, format!("line {}: {what}", i + 1)));
            };
            steps.push((from, rate));
        }
        match steps.is_empty() {
            true => Err(Error::file(path, "has no bandwidth")),
            false => Ok(Self::Steps(steps)),
        }
    }
}

/// Bytes per second; none unless they are finite and not negative.
fn rate(gbps: f64) -> Option<f64> {
    let rate = gbps * GBPS;
    (rate.is_finite() && rate >= 0.0).then_some(rate)
}

/// A number of Gbit/s; `random:LOW-HIGH`; or a file with a line `SECONDS GBPS` for every change.
impl FromStr for Bandwidth {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let rate = |text: &str| text.parse().ok().and_then(rate);
        if let Some(range) = text.strip_prefix("random:") {
            let range = range.split_once('-').and_then(|(low, high)| Some((rate(low)?, rate(high)?)));
            return match range {
                Some((low, high)) if low <= high => Ok(Self::Random { low, high, seed: 0 }),
                _ => Err(Error::Argument(format!("bandwidth `{text}` is not `random:LOW-HIGH` in Gbit/s"))),
            };
        }
        match (Self::file_of(text), rate(text)) {
            (Some(path), _) => Self::from_file(path),
            (None, Some(rate)) => Ok(Self::Steps(vec![(0.0, rate)])),
            (None, None) => Err(Error::Argument(format!("a bandwidth of {text} Gbit/s"))),
        }
    }
}

/// Time, in seconds from any origin.
pub trait Clock {
    /// The time.
    fn now(&self) -> f64;
    /// Waits until `then`.
    fn sleep_until(&self, then: f64);
}

/// A clock that jumps to the time waited for. Clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct SimulatedClock(Rc<Cell<f64>>);

impl Clock for SimulatedClock {
    fn now(&self) -> f64 {
        self.0.get()
    }

    fn sleep_until(&self, then: f64) {
        self.0.set(self.0.get().max(then));
    }
}

/// Seconds since an instant.
#[derive(Clone, Copy, Debug)]
pub struct RealClock(pub Instant);

impl Clock for RealClock {
    fn now(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }

    fn sleep_until(&self, then: f64) {
        if let Ok(wait) = Duration::try_from_secs_f64(then - self.now()) {
            thread::sleep(wait);
        }
    }
}

/// The source of a shaped link's chunks.
pub trait Source {
    /// Bytes of a chunk at a level.
    ///
    /// # Errors
    /// For a chunk or a level that does not exist.
    fn bytes(&self, chunk: ChunkId, level: usize) -> Result<u64>;

    /// The chunk itself; empty if only time is simulated.
    ///
    /// # Errors
    /// As [`Self::bytes`].
    fn read(&self, chunk: ChunkId, level: usize) -> Result<Bytes>;
}

/// A link over which the bytes of a source arrive at a given bandwidth.
pub struct ShapedLink<C, S> {
    clock: C,
    source: S,
    bandwidth: Bandwidth,
    latency: f64, // seconds from a request to its first byte
    transfer: Option<Running>,
}

struct Running {
    chunk: ChunkId,
    level: usize,
    total: f64,    // bytes
    received: f64, // bytes by `at`
    at: f64,
}

/// Less than a byte: the residue of rounded times.
const ROUNDING: f64 = 0.5;

impl<C: Clock, S: Source> ShapedLink<C, S> {
    /// A link with `latency` seconds between a request and its first byte.
    pub const fn new(clock: C, source: S, bandwidth: Bandwidth, latency: f64) -> Self {
        Self { clock, source, bandwidth, latency, transfer: None }
    }
}

fn no_transfer() -> Error {
    Error::Stream("the link has no transfer".into())
}

impl<C: Clock, S: Source> Link for ShapedLink<C, S> {
    fn now(&self) -> f64 {
        self.clock.now()
    }

    fn start(&mut self, chunk: ChunkId, level: usize) -> Result<()> {
        let total = self.source.bytes(chunk, level)? as f64;
        let at = self.clock.now() + self.latency;
        self.transfer = Some(Running { chunk, level, total, received: 0.0, at });
        Ok(())
    }

    fn wait(&mut self, until: f64) -> Result<u64> {
        let Self { clock, bandwidth, transfer: Some(running), .. } = self else { return Err(no_transfer()) };
        loop {
            let now = clock.now();
            let mut next = running.at; // when the rate changes or the transfer ends
            while running.at <= now {
                let (rate, holds) = bandwidth.at(running.at);
                let left = running.total - running.received;
                // Infinite at a rate of 0; later than `at`, despite rounding.
                next = holds.min((running.at + left / rate).next_up());
                let reached = next.min(now);
                running.received += rate * (reached - running.at);
                if running.total - running.received < ROUNDING {
                    return Ok(running.total as u64);
                }
                running.at = reached;
                if reached == now {
                    break;
                }
            }
            if now >= until {
                return Ok(running.received as u64);
            }
            clock.sleep_until(next.min(until));
        }
    }

    fn arrived(&self) -> Result<Option<Bytes>> {
        let &Running { chunk, level, received, .. } = self.transfer.as_ref().ok_or_else(no_transfer)?;
        let bytes = self.source.read(chunk, level)?;
        Ok(Some(bytes.slice(..bytes.len().min(received as usize))))
    }

    fn cancel(&mut self) {
        self.transfer = None;
    }

    fn take(&mut self) -> Result<Bytes> {
        let Running { chunk, level, .. } = self.transfer.take().ok_or_else(no_transfer)?;
        self.source.read(chunk, level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Sevens(u64);

    impl Source for Sevens {
        fn bytes(&self, _: ChunkId, _: usize) -> Result<u64> {
            Ok(self.0)
        }

        fn read(&self, _: ChunkId, _: usize) -> Result<Bytes> {
            Ok(vec![7; self.0 as usize].into())
        }
    }

    const CHUNK: ChunkId = ChunkId { request: 0, index: 0 };

    #[test]
    fn bytes_arrive_at_the_rate_of_the_moment() {
        let clock = SimulatedClock::default();
        let steps = Bandwidth::Steps(vec![(0.0, 100.0), (2.0, 0.0), (3.0, 400.0)]);
        let mut link = ShapedLink::new(clock.clone(), Sevens(500), steps, 0.5);
        link.start(CHUNK, 0).unwrap();
        assert_eq!((link.wait(0.25).unwrap(), clock.now()), (0, 0.25));
        assert_eq!((link.wait(1.5).unwrap(), clock.now()), (100, 1.5));
        assert_eq!((link.wait(2.5).unwrap(), clock.now()), (150, 2.5));
        assert_eq!(link.wait(9.0).unwrap(), 500);
        assert!((clock.now() - (3.0 + 350.0 / 400.0)).abs() < 1e-9);
        assert_eq!(link.take().unwrap().len(), 500);
        assert!(link.take().is_err() && link.wait(10.0).is_err());
        // At a rate of 0 only the clock advances.
        let mut link = ShapedLink::new(clock.clone(), Sevens(1), "0".parse().unwrap(), 0.0);
        link.start(CHUNK, 0).unwrap();
        assert_eq!((link.wait(1e6).unwrap(), clock.now()), (0, 1e6));
    }

    #[test]
    fn random_rates_are_a_function_of_time_and_seed() {
        let random: Bandwidth = "random:0.1-10".parse().unwrap();
        let rates = |seed| {
            let random = random.clone().seeded(seed);
            (0..4_000).map(move |i| random.at(0.25 * f64::from(i) + 0.1).0)
        };
        assert!(rates(1).eq(rates(1)) && rates(1).ne(rates(2)));
        let mean = rates(3).sum::<f64>() / 4_000.0 / GBPS;
        assert!((mean - 5.05).abs() < 0.2, "{mean}");
        assert!(rates(4).all(|rate| (0.1 * GBPS..=10.0 * GBPS).contains(&rate)));
    }

    #[test]
    fn bandwidths_are_read() {
        assert_eq!("0.8".parse::<Bandwidth>().unwrap(), Bandwidth::Steps(vec![(0.0, 1e8)]));
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("trace");
        let read = |text: &str| {
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().parse::<Bandwidth>()
        };
        let steps = read("# seconds, Gbit/s\n0 8\n\n1.5 0 # an outage\n").unwrap();
        assert_eq!(steps, Bandwidth::Steps(vec![(0.0, 1e9), (1.5, 0.0)]));
        for text in ["", "1 8", "0 8\n0 9", "0 -1", "0 8 9", "0", "0 nan", "0 1e301", "0 8\ninf 3"] {
            assert!(matches!(read(text), Err(Error::File { .. })), "{text}");
        }
        for text in ["-1", "nan", "inf", "1e301", "random:3", "random:3-1e301", "random:3-1", "random:a-b"] {
            assert!(matches!(text.parse::<Bandwidth>(), Err(Error::Argument(_))), "{text}");
        }
    }
}
