mod load;
mod simulate;
#[cfg(feature = "cuda")]
mod time;

use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Subcommand};
use codec_core::{CHUNK_TOKENS, Encoding, Plans, StreamPolicy};
use kv_reference::stream::link::{Bandwidth, GBPS};
use kv_reference::stream::{Choice, MOST_SECONDS, Options};
use kv_reference::{Error, Result};

use super::output::Output;
use super::{Files, JsonArgs, Stdout, check_number, check_seconds, count, no_effect};

#[derive(Args)]
pub struct Stream {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Load(load::Load),
    Simulate(simulate::Simulate),
    #[cfg(feature = "cuda")]
    Time(time::Time),
}

impl Stream {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        match self.command {
            Command::Load(command) => command.run(out),
            Command::Simulate(command) => command.run(out),
            #[cfg(feature = "cuda")]
            Command::Time(command) => command.run(out),
        }
    }
}

/// How chunks are chosen and sent.
#[derive(Args)]
struct StreamArgs {
    /// Bandwidth: Gbit/s, `random:LOW-HIGH`, or a file with a line `SECONDS GBPS` for every change
    #[arg(long, value_name = "RATE|FILE", default_value = "3", allow_negative_numbers = true)]
    link: LinkArg,
    /// Seconds between a request and its first byte
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, allow_negative_numbers = true)]
    latency: f64,
    /// Seconds in which the context is to be loaded; 0 as soon as possible
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, allow_negative_numbers = true)]
    slo: f64,
    /// `adaptive`; `uniform`, which is the paper's: one encoding for all remaining chunks; or encodings that
    /// are given in turn, `text` or the index of a level, such as 0,text,2
    #[arg(long, value_name = "LIST", default_value = "adaptive")]
    encoding: String,
    /// Level of the first chunk where no bandwidth is known [default: the middle one, or with --slo 0 the
    /// last]
    #[arg(long, value_name = "N")]
    first: Option<usize>,
    /// Bandwidth in Gbit/s that is known before the first chunk
    #[arg(long, value_name = "RATE", allow_negative_numbers = true)]
    prior: Option<f64>,
    /// Fraction of --slo that is kept in reserve when encodings are chosen
    #[arg(long, value_name = "FRACTION", default_value_t = RESERVE, allow_negative_numbers = true)]
    reserve: f64,
    /// Requests that arrive together
    #[arg(long, value_name = "N", default_value_t = 1)]
    requests: usize,
    /// Most requests that are streamed together
    #[arg(long, value_name = "N", default_value_t = 8)]
    batch: usize,
    /// Tokens of a chunk
    #[arg(long, value_name = "N", default_value_t = CHUNK_TOKENS)]
    chunk: usize,
    /// Seconds without a byte after which a transfer has stalled
    #[arg(long, value_name = "SECONDS", default_value_t = 1.0, allow_negative_numbers = true)]
    timeout: f64,
    /// Fail when the link stalls or fails, instead of recomputing what is missing
    #[arg(long)]
    strict: bool,
    #[command(flatten)]
    json: JsonArgs,
    /// Write one HTML page with the decisions and a chart
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// A bandwidth, and the file that it is from.
#[derive(Clone)]
struct LinkArg {
    bandwidth: Bandwidth,
    file: Option<PathBuf>,
}

impl FromStr for LinkArg {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Ok(Self { bandwidth: text.parse()?, file: Bandwidth::file_of(text).map(Into::into) })
    }
}

/// Bits a value of the levels unless others are asked for.
const BITS: &str = "4.1,3.1,2.0";

/// Fraction of a deadline that is kept in reserve.
pub(super) const RESERVE: f64 = 0.1;

/// Most requests of a run.
const MOST_REQUESTS: usize = 256;

impl StreamArgs {
    /// The options for levels of so many bits a value.
    fn options(&self, bits: &[f64]) -> Result<Options> {
        if let Some(pair) = bits.windows(2).find(|pair| pair[0] <= pair[1]) {
            let what = format!("--bits: {} after {}: pass the least lossy level first", pair[1], pair[0]);
            return Err(Error::Argument(what));
        }
        let levels = bits.len();
        check_seconds("--latency", self.latency)?;
        check_seconds("--slo", self.slo)?;
        check_number("--reserve", self.reserve, "a fraction from 0 to below 1", |x| (0.0..1.0).contains(&x))?;
        if !(1..=MOST_REQUESTS).contains(&self.requests) {
            return Err(Error::Argument(format!("--requests must be 1 to {MOST_REQUESTS}")));
        }
        if self.batch == 0 {
            return Err(Error::argument("--batch must be at least 1"));
        }
        let timeout = format!("a number of seconds above 0, at most {MOST_SECONDS}");
        check_number("--timeout", self.timeout, &timeout, |x| x > 0.0 && x <= MOST_SECONDS)?;
        if self.chunk == 0 {
            return Err(Error::argument("--chunk must be at least 1"));
        }
        if let Some(first) = self.first.filter(|&first| first >= levels) {
            return Err(Error::Argument(format!(
                "--first must be below {levels}, the number of levels, not {first}"
            )));
        }
        self.prior.map_or(Ok(()), |prior| {
            check_number("--prior", prior, "a rate above 0", |x| x > 0.0 && (x * GBPS).is_finite())
        })?;
        let policy = StreamPolicy {
            slo: self.slo * (1.0 - self.reserve),
            first_level: self.first.unwrap_or(first_level(self.slo, levels)),
            prior: self.prior.map(|gbps| gbps * GBPS),
            plans: Plans::TextFirst,
        };
        let choice = choice("--encoding", &self.encoding, levels, policy)?;
        let is_reserved = self.reserve != RESERVE;
        if let Choice::Given(_) = choice {
            let given = [
                (self.first.is_some(), "--first"),
                (self.prior.is_some(), "--prior"),
                (is_reserved, "--reserve"),
            ];
            if let Some((_, option)) = given.iter().find(|(is_given, _)| *is_given) {
                return Err(no_effect(option, "on encodings that are given"));
            }
        }
        if self.first.is_some() && self.prior.is_some() {
            return Err(no_effect("--first", "with --prior, by which the first chunk's level is chosen"));
        }
        if is_reserved && self.slo == 0.0 {
            return Err(no_effect("--reserve", "without --slo"));
        }
        Ok(Options { choice, batch: self.batch, timeout: self.timeout, fall_back: !self.strict })
    }

    /// The outputs of `--json` and `--report` of a command that reads `files` and the link's file.
    fn outputs(&self, mut files: Files) -> Result<[Output; 2]> {
        self.link.file.iter().for_each(|path| files.reads("--link", path));
        Ok([files.writes("--json", self.json.json.clone())?, files.writes("--report", self.report.clone())?])
    }
}

/// The level of the first chunk where no bandwidth is known.
pub(super) fn first_level(slo: f64, levels: usize) -> usize {
    if slo == 0.0 { levels.saturating_sub(1) } else { levels / 2 }
}

/// The encodings that an option names: `adaptive` by this policy, `uniform`, or a list of text and levels.
pub(super) fn choice(option: &str, text: &str, levels: usize, policy: StreamPolicy) -> Result<Choice> {
    let encoding = |text: &str| match text.trim() {
        "text" => Ok(Encoding::Text),
        level => level.parse().ok().filter(|&level| level < levels).map(Encoding::Level).ok_or_else(|| {
            let levels = format!("one of {} from 0 on", count(levels, "level"));
            Error::Argument(format!("{option}: `{text}` is neither `text` nor {levels}"))
        }),
    };
    Ok(match text {
        "adaptive" => Choice::Adaptive(policy),
        "uniform" => Choice::Adaptive(StreamPolicy { plans: Plans::Uniform, ..policy }),
        list => Choice::Given(list.split(',').map(encoding).collect::<Result<_>>()?),
    })
}
