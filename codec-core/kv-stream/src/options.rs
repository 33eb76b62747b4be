//! How a stream chooses the encoding of each chunk.

use codec_core::{Encoding, Plans, StreamPolicy};

use crate::{Error, Result};

/// Maximum of [`Options::timeout`]: a day in seconds.
pub const MOST_SECONDS: f64 = 86_400.0;

/// The fraction of a deadline that a policy keeps in reserve by default.
pub const RESERVE: f64 = 0.1;

/// The choice of encodings.
#[derive(Clone, Debug, PartialEq)]
pub enum Choice {
    /// By the policy, chunk by chunk.
    Adaptive(StreamPolicy),
    /// Given: chunk `i` has encoding `i` modulo their number.
    Given(Vec<Encoding>),
}

impl Choice {
    /// The choice that a text names: `adaptive`, by this policy; `uniform`, by the paper's, which sends all
    /// remaining chunks in one encoding; or encodings given in turn, `text` or the index of a level, such as
    /// `0,text,2`.
    ///
    /// # Errors
    /// [`Error::Argument`] for another text, and for a level that is not below `levels`.
    pub fn parse(text: &str, levels: usize, policy: StreamPolicy) -> Result<Self> {
        let encoding = |text: &str| match text.trim() {
            "text" => Ok(Encoding::Text),
            level => {
                level.parse().ok().filter(|&level| level < levels).map(Encoding::Level).ok_or_else(|| {
                    let plural = if levels == 1 { "" } else { "s" };
                    let known = format!("one of {levels} level{plural} from 0 on");
                    Error::Argument(format!("`{text}` is neither `text` nor {known}"))
                })
            }
        };
        Ok(match text {
            "adaptive" => Self::Adaptive(policy),
            "uniform" => Self::Adaptive(StreamPolicy { plans: Plans::Uniform, ..policy }),
            list => Self::Given(list.split(',').map(encoding).collect::<Result<_>>()?),
        })
    }
}

/// The level of the first chunk where no throughput is known: the middle one, or with no deadline the last.
#[must_use]
pub fn first_level(slo: f64, levels: usize) -> usize {
    if slo == 0.0 { levels.saturating_sub(1) } else { levels / 2 }
}

/// Options of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// The choice of encodings.
    pub choice: Choice,
    /// Maximum requests streamed together (CacheGen's `B`); others wait for the previous batch.
    pub batch: usize,
    /// Seconds without a byte after which a transfer counts as stalled, at most [`MOST_SECONDS`].
    pub timeout: f64,
    /// After damage, a stall or an error of the link, recompute the missing chunks instead of returning an
    /// error.
    pub fall_back: bool,
}

impl Options {
    /// One request at a time by this policy; a transfer has stalled after five seconds, and what the link
    /// does not bring is recomputed.
    #[must_use]
    pub const fn adaptive(policy: StreamPolicy) -> Self {
        Self { choice: Choice::Adaptive(policy), batch: 1, timeout: 5.0, fall_back: true }
    }
}
