//! Streams on a simulated clock.

use clap::Args;
use kv_benches::cli::check_number;
use kv_reference::{Error, Result};
use kv_stream::{ChunkCost, GPU_DECODE_RATE, MOST_SECONDS, Machine, PrefillTime, Speeds, Trace, simulate};
use serde::Serialize;

use crate::table::table;
use crate::{BITS, StreamArgs};

/// Time streams of contexts of a given shape on a simulated clock
#[derive(Args)]
#[command(after_help = "Example:\n  stream_speed simulate --tokens 32768 --values 65536 --bits 4.1,3.1,2.1 \
                  --recompute 8192=0.207,131072=10.712 --link random:0.1-10 --slo 1 --trials 1000")]
pub struct Simulate {
    /// Tokens of the context
    #[arg(long, value_name = "N")]
    tokens: usize,
    /// Numbers in the keys and values of a token, such as 65536 of 32 layers with 8 heads of 128
    #[arg(long, value_name = "N")]
    values: usize,
    /// Bits a value of each level, the least lossy first
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = BITS)]
    bits: Vec<f64>,
    /// Measured times of prefill, TOKENS=SECONDS
    #[arg(long, value_name = "LIST", value_delimiter = ',', required = true, value_parser = point)]
    recompute: Vec<(f64, f64)>,
    /// Billions of values that are decoded in a second
    #[arg(long, value_name = "RATE", default_value_t = GPU_DECODE_RATE / 1e9, allow_negative_numbers = true)]
    decode_rate: f64,
    /// Seconds from the loaded cache to the first token
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, allow_negative_numbers = true)]
    rest: f64,
    /// Runs, each with a random bandwidth of its own
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    trials: u64,
    /// What the bandwidths are drawn from
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    stream: StreamArgs,
}

fn point(text: &str) -> std::result::Result<(f64, f64), String> {
    let point =
        text.split_once('=').and_then(|(n, t)| Some((n.trim().parse().ok()?, t.trim().parse().ok()?)));
    point.ok_or_else(|| format!("`{text}` is not TOKENS=SECONDS"))
}

/// A run of `stream_speed simulate`.
#[derive(Serialize)]
struct Simulated {
    tokens: usize,
    decode_rate: f64, // values a second
    requests: usize,
    encoding: String,
    slo: f64,
    trials: Vec<Trial>,
    trace: Trace, // of the first trial
}

/// The times of one trial, in seconds since the requests.
#[derive(Serialize)]
struct Trial {
    first_token: f64,       // of the last request
    first_tokens: Vec<f64>, // of each request
    transferred: f64,
    computing: f64,
    bytes: u64,
    /// Tokens of all requests at each level; the last number is of text.
    tokens: Vec<usize>,
}

impl Trial {
    fn new(trace: &Trace, rest: f64, levels: usize) -> Self {
        let (mut tokens, recomputed) = trace.tokens(levels);
        tokens.push(recomputed);
        let &Trace { transferred, computing, bytes, .. } = trace;
        let first_tokens = trace.loaded.iter().map(|loaded| loaded + rest).collect();
        Self { first_token: trace.seconds() + rest, first_tokens, transferred, computing, bytes, tokens }
    }
}

impl Simulate {
    pub fn run(self) -> Result<()> {
        for &bits in &self.bits {
            check_number("--bits", bits, "numbers above 0", |x| x > 0.0)?;
        }
        check_number("--decode-rate", self.decode_rate, "a rate above 0", |x| x > 0.0)?;
        let rest = format!("a number of seconds from 0 to {MOST_SECONDS}");
        check_number("--rest", self.rest, &rest, |x| (0.0..=MOST_SECONDS).contains(&x))?;
        for (option, count) in [("--tokens", self.tokens), ("--values", self.values)] {
            check_number(option, count as f64, "above 0", |x| x > 0.0)?;
        }
        let options = self.stream.options(&self.bits)?;
        let machine = Machine {
            values_per_token: self.values,
            bits: self.bits.clone(),
            speeds: Speeds {
                prefill: PrefillTime::fit(&self.recompute)
                    .map_err(|e| Error::Argument(format!("--recompute: {e}")))?,
                decode_rate: self.decode_rate * 1e9,
            },
        };
        let requests: Vec<Vec<ChunkCost>> =
            vec![machine.chunks(self.tokens, self.stream.chunk)?; self.stream.requests];
        let (mut trials, mut first) = (vec![], None);
        for trial in 0..self.trials {
            let link = self.stream.link.clone().seeded(self.seed.wrapping_add(trial));
            let trace = simulate(&requests, link, self.stream.latency, &options)?;
            trials.push(Trial::new(&trace, self.rest, self.bits.len()));
            first.get_or_insert(trace);
        }
        let trace = first.ok_or_else(|| Error::argument("no trial"))?;
        let result = Simulated {
            tokens: self.tokens,
            decode_rate: machine.speeds.decode_rate,
            requests: self.stream.requests,
            encoding: self.stream.encoding.clone(),
            slo: self.stream.slo,
            trials,
            trace,
        };
        println!("{}\n\n{}", table(&result.trace), result.notes().join("\n"));
        self.stream.json.write(&result)
    }
}

impl Simulated {
    fn notes(&self) -> Vec<String> {
        let mut times: Vec<f64> = self.trials.iter().map(|trial| trial.first_token).collect();
        times.sort_by(f64::total_cmp);
        let late = times.iter().filter(|&&seconds| seconds > self.slo).count();
        let mut notes = vec![format!(
            "Simulated: {} requests of {} tokens; first token after {:.1} ms in the median of {} trials, \
             {:.1} ms at most.",
            self.requests,
            self.tokens,
            1e3 * times[times.len() / 2],
            times.len(),
            1e3 * times[times.len() - 1]
        )];
        if self.slo > 0.0 {
            notes.push(format!("{late} of {} trials took longer than {} s.", times.len(), self.slo));
        }
        notes
    }
}
