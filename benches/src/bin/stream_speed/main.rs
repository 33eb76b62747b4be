//! Streams of stored contexts before a deadline, over shaped and simulated links: `peers/streaming.py` makes
//! the tables.

mod load;
mod simulate;
mod table;
mod time;

use clap::{Args, Parser};
use codec_core::{CHUNK_TOKENS, Plans, StreamPolicy};
use kv_benches::cli::{JsonArgs, check_number};
use kv_model::files;
use kv_reference::{Error, Result};
use kv_stream::{Bandwidth, Choice, GBPS, MOST_SECONDS, Options, RESERVE, first_level};

#[derive(Parser)]
enum Command {
    Load(load::Load),
    Simulate(simulate::Simulate),
    Time(time::Time),
}

fn main() -> Result<()> {
    match Command::parse() {
        Command::Load(command) => command.run(),
        Command::Simulate(command) => command.run(),
        Command::Time(command) => command.run(),
    }
}

/// How chunks are chosen and sent.
#[derive(Args)]
struct StreamArgs {
    /// Bandwidth: Gbit/s, `random:LOW-HIGH`, or a file with a line `SECONDS GBPS` for every change
    #[arg(long, value_name = "RATE|FILE", default_value = "3", allow_negative_numbers = true)]
    #[arg(value_parser = bandwidth)]
    link: Bandwidth,
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
}

/// Parses a bandwidth: what is neither a number nor a range of random rates is the file of a trace.
fn bandwidth(text: &str) -> Result<Bandwidth> {
    if text.starts_with("random:") || text.parse::<f64>().is_ok() {
        return Ok(text.parse()?);
    }
    let path = text.as_ref();
    Bandwidth::parse_trace(&files::read_text(path)?).map_err(|e| Error::file(path, e))
}

/// Bits a value of the levels unless others are asked for.
const BITS: &str = "4.1,3.1,2.0";

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
        for (option, seconds) in [("--latency", self.latency), ("--slo", self.slo)] {
            check_number(option, seconds, "a number of seconds from 0 on", |x| x >= 0.0)?;
        }
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
        let choice = Choice::parse(&self.encoding, levels, policy)?;
        Ok(Options { choice, batch: self.batch, timeout: self.timeout, fall_back: !self.strict })
    }
}
