//! Bandwidth over time.

use std::str::FromStr;

use crate::{Error, Result};

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
    pub(crate) fn at(&self, t: f64) -> (f64, f64) {
        match self {
            Self::Steps(steps) => {
                let after = steps.partition_point(|step| step.0 <= t);
                let rate = steps[..after].last().map_or(0.0, |step| step.1);
                (rate, steps.get(after).map_or(f64::INFINITY, |step| step.0))
            }
            &Self::Random { low, high, seed } => {
                let period = (t / PERIOD).floor();
                let rate = low + (high - low) * uniform(seed << 32, period as u64);
                (rate, (period + 1.0) * PERIOD)
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

    /// The bandwidth of a trace: a line `SECONDS GBPS` for every change. `#` begins a comment.
    ///
    /// # Errors
    /// [`Error::Argument`] with the line that is no such pair, whose seconds do not rise from 0, or whose
    /// rate is negative or not finite; for a trace without a line.
    pub fn parse_trace(text: &str) -> Result<Self> {
        let mut steps = vec![];
        for (i, line) in text.lines().enumerate() {
            let line = line.split('#').next().unwrap_or_default().trim();
            if line.is_empty() {
                continue;
            }
            let wrong = |what: &str| Error::Argument(format!("line {}: {what}", i + 1));
            let mut numbers = line.split_whitespace().map(str::parse::<f64>);
            let (Some(Ok(from)), Some(Ok(gbps)), None) = (numbers.next(), numbers.next(), numbers.next())
            else {
                return Err(wrong("`SECONDS GBPS` is expected"));
            };
            let last = steps.last().map_or(-1.0, |step: &(f64, f64)| step.0);
            let rising = if steps.is_empty() { from == 0.0 } else { from.is_finite() && from > last };
            let Some(rate) = rate(gbps).filter(|_| rising) else {
                return Err(wrong("seconds rise from 0, and rates are finite and not negative"));
            };
            steps.push((from, rate));
        }
        match steps.is_empty() {
            true => Err(Error::Argument("the trace has no bandwidth".into())),
            false => Ok(Self::Steps(steps)),
        }
    }
}

/// Bytes per second; none unless they are finite and not negative.
fn rate(gbps: f64) -> Option<f64> {
    let rate = gbps * GBPS;
    (rate.is_finite() && rate >= 0.0).then_some(rate)
}

/// Number `i` of a SplitMix64 generator, in 0..1 (Steele, Lea, Flood, OOPSLA 2014).
const fn uniform(seed: u64, i: u64) -> f64 {
    let z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

/// A number of Gbit/s, or `random:LOW-HIGH`.
impl FromStr for Bandwidth {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let rate = |text: &str| text.parse().ok().and_then(rate);
        let Some(range) = text.strip_prefix("random:") else {
            let rate = rate(text).ok_or_else(|| Error::Argument(format!("a bandwidth of {text} Gbit/s")))?;
            return Ok(Self::Steps(vec![(0.0, rate)]));
        };
        let range = range.split_once('-').and_then(|(low, high)| Some((rate(low)?, rate(high)?)));
        match range {
            Some((low, high)) if low <= high => Ok(Self::Random { low, high, seed: 0 }),
            _ => Err(Error::Argument(format!("bandwidth `{text}` is not `random:LOW-HIGH` in Gbit/s"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let steps = Bandwidth::parse_trace("# seconds, Gbit/s\n0 8\n\n1.5 0 # an outage\n").unwrap();
        assert_eq!(steps, Bandwidth::Steps(vec![(0.0, 1e9), (1.5, 0.0)]));
        for text in ["", "1 8", "0 8\n0 9", "0 -1", "0 8 9", "0", "0 nan", "0 1e301", "0 8\ninf 3"] {
            assert!(matches!(Bandwidth::parse_trace(text), Err(Error::Argument(_))), "{text}");
        }
        for text in
            ["-1", "nan", "inf", "1e301", "a", "random:3", "random:3-1e301", "random:3-1", "random:a-b"]
        {
            assert!(matches!(text.parse::<Bandwidth>(), Err(Error::Argument(_))), "{text}");
        }
    }
}
