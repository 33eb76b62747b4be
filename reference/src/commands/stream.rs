#[cfg(feature = "cuda")]
mod time;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, Subcommand};
use codec_core::{CHUNK_TOKENS, Encoding, Plans, StreamPolicy};
use kv_reference::cache::KvCache;
use kv_reference::compare::{calibrated, check_room, run_start};
#[cfg(feature = "cuda")]
use kv_reference::device::{self, Gpu, PageLocked, StreamTarget, Weights, method_cache};
use kv_reference::eval::{Divergence, SharedPrompt, score_text};
use kv_reference::forward::Decoder;
use kv_reference::method::{Method, Prepared};
use kv_reference::model::{Model, Rope};
#[cfg(feature = "cuda")]
use kv_reference::stream::Bytes;
use kv_reference::stream::encoded::{EncodedContext, Memory, SINKS, levels};
use kv_reference::stream::link::{Bandwidth, GBPS, RealClock, ShapedLink};
use kv_reference::stream::receiver::{Target, serve_into};
use kv_reference::stream::simulated::{Machine, simulate};
use kv_reference::stream::speeds::{GPU_DECODE_RATE, PrefillTime, Speeds};
use kv_reference::stream::{Choice, ChunkCost, Options, Trace, page};
use kv_reference::{Error, Profile, Result};
use serde::Serialize;

use super::{DeviceArgs, Files, JsonArgs, ModelArgs, Stdout, TextArgs, count, few_tokens, progress};

#[derive(Args)]
pub struct Stream {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Encode a prompt at several levels and load it over a shaped link into a cache
    Load(Load),
    /// Time streams of contexts of a given shape on a simulated clock
    Simulate(Simulate),
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
    /// Write one HTML page with the decisions and a chart
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
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
        let times = [self.latency, self.slo, self.reserve];
        if !times.iter().all(|x| x.is_finite() && *x >= 0.0) || self.reserve >= 1.0 {
            return Err(Error::argument(
                "--latency, --slo and --reserve must not be negative, and --reserve must be below 1",
            ));
        }
        if !(1..=MOST_REQUESTS).contains(&self.requests) {
            return Err(Error::Argument(format!("--requests must be 1 to {MOST_REQUESTS}")));
        }
        if self.batch == 0 {
            return Err(Error::argument("--batch must be at least 1"));
        }
        if !self.timeout.is_finite() || self.timeout <= 0.0 {
            return Err(Error::argument("--timeout must be a number of seconds above 0"));
        }
        if self.chunk == 0 {
            return Err(Error::argument("--chunk must be at least 1"));
        }
        if let Some(first) = self.first.filter(|&first| first >= levels) {
            return Err(Error::Argument(format!(
                "--first must be below {levels}, the number of levels, not {first}"
            )));
        }
        if self.prior.is_some_and(|prior| !prior.is_finite() || prior <= 0.0) {
            return Err(Error::argument("--prior must be a rate above 0"));
        }
        let policy = StreamPolicy {
            slo: self.slo * (1.0 - self.reserve),
            first_level: self.first.unwrap_or(first_level(self.slo, levels)),
            prior: self.prior.map(|gbps| gbps * GBPS),
            plans: Plans::TextFirst,
        };
        let choice = choice("--encoding", &self.encoding, levels, policy)?;
        Ok(Options { choice, batch: self.batch, timeout: self.timeout, fall_back: !self.strict })
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

#[derive(Args)]
#[command(
    after_help = "Example:\n  kv stream load --context 4096 --chunk 512 --link random:0.01-0.1 --slo 0.5 \
                  --report page.html"
)]
struct Load {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 4096)]
    context: usize,
    /// Tokens to decode after it, by which the loaded cache is judged
    #[arg(long, value_name = "N", default_value_t = 192)]
    decode: usize,
    /// Most tokens to calibrate on, from the text before the prompt
    #[arg(long, value_name = "N", default_value_t = 4096)]
    calibration: usize,
    /// Bits a value that each level aims at, the least lossy first
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = BITS)]
    bits: Vec<f64>,
    #[command(flatten)]
    stream: StreamArgs,
    #[command(flatten)]
    device: DeviceArgs,
}

/// A run of `kv stream load`.
#[derive(Serialize)]
struct Loaded {
    model: String,
    text: String,
    context: usize,
    encoding: String,
    levels: Vec<Level>,
    slo: f64,
    perplexity: f64,
    kl: f64,
    top1: f64,
    first_token: f64, // seconds of the first step over the loaded cache
    trace: Trace,
}

/// A level's size, in bits a value of the tokens that it holds.
#[derive(Serialize)]
struct Level {
    setting: String,
    bits_per_value: f64,
}

impl Load {
    fn run(self, out: &mut Stdout) -> Result<()> {
        if self.decode == 0 {
            return Err(Error::argument("decode needs at least one token"));
        }
        for (setting, tokens) in [("--context", self.context), ("--chunk", self.stream.chunk)] {
            if tokens <= SINKS {
                return Err(Error::Argument(format!("{setting} must be above {SINKS} tokens, not {tokens}")));
            }
        }
        let specs: Vec<_> = self.bits.iter().map(|bits| format!("cachegen:bits={bits}")).collect();
        let methods = Method::parse_list(&specs.join(","))?;
        let options = self.stream.options(&self.bits)?;
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        files.reads("--text", &self.text.path());
        let json = files.writes("--json", self.stream.json.json.clone())?;
        let report = files.writes("--report", self.stream.report.clone())?;
        let model = self.model.load()?;
        let (text, tokens) = self.text.tokens(&model)?;
        check_room(&model, self.context, self.decode, "--context")?;
        let run = self.context + self.decode + 1;
        let start = run_start(&model, tokens.len(), run, self.calibration, "--context")?;
        let rope = Arc::new(Rope::new(&model.config, (self.context + self.decode).max(start)));
        let bar = progress();
        bar.set_message("calibrating");
        let profile = few_tokens(
            calibrated(&model, &rope, &tokens[..start], &methods),
            "a longer --text, a larger --calibration, or a smaller --context or --decode",
        )?;
        let planes = levels(&methods, &model, &profile)?;
        let (prompt, rest) = tokens[start..].split_at(self.context);
        let decoded = &rest[..self.decode + 1];
        bar.set_message("encoding");
        let context = EncodedContext::encode(&model, &rope, &planes, prompt, self.stream.chunk)?;
        bar.set_message("loading");
        let run = Run { load: &self, model: &model, rope: &rope, planes: &planes, prompt, decoded, options };
        let Judged { trace, divergence, first_token } = run.judge(&context)?;
        bar.finish_and_clear();
        let values = (self.context * model.config.kv_values_per_token()) as f64;
        let level = |(method, bytes): (&Method, usize)| Level {
            setting: method.spec(),
            bits_per_value: 8.0 * bytes as f64 / values,
        };
        let result = Loaded {
            model: model.name.clone(),
            text,
            context: self.context,
            encoding: self.stream.encoding.clone(),
            levels: methods.iter().zip(context.level_bytes()).map(level).collect(),
            slo: self.stream.slo,
            perplexity: divergence.perplexity(),
            kl: divergence.kl(),
            top1: divergence.top1(),
            first_token,
            trace,
        };
        let notes = result.notes();
        out.print(format_args!("{}\n\n{}\n", page::table(&result.trace), notes.join("\n")));
        json.write_json(&result)?;
        report.write(|_| Ok(page::html(&result.trace, result.slo, &notes)?.into_bytes()))
    }
}

/// What a run loads, and what judges it.
struct Run<'a> {
    load: &'a Load,
    model: &'a Arc<Model>,
    rope: &'a Arc<Rope>,
    planes: &'a codec_core::Profile,
    prompt: &'a [u32],
    decoded: &'a [u32],
    options: Options,
}

/// A loaded context.
struct Judged {
    trace: Trace,
    divergence: Divergence, // from the cache of the whole prompt
    first_token: f64,
}

impl Run<'_> {
    fn judge(&self, context: &EncodedContext) -> Result<Judged> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = self.load.device.gpu()? {
            match self.on_device(&Arc::new(gpu), context) {
                Err(e) if self.load.device.falls_back(&e) => {}
                judged => return judged,
            }
        }
        #[cfg(not(feature = "cuda"))]
        self.load.device.check()?;
        self.on_cpu(context)
    }

    fn link(&self, clock: RealClock, contexts: Vec<Arc<EncodedContext>>) -> ShapedLink<RealClock, Memory> {
        let StreamArgs { link, latency, .. } = &self.load.stream;
        ShapedLink::new(clock, Memory(contexts), link.clone(), *latency)
    }

    fn on_cpu(&self, context: &EncodedContext) -> Result<Judged> {
        let &Self { model, rope, planes, prompt, decoded, .. } = self;
        let requests = self.load.stream.requests;
        let costs = vec![context.costs(); requests];
        let dense: Method = "dense".parse()?;
        let empty = |_| Ok(dense.prepare(model, rope, &Profile::default())?.cache);
        let mut caches = (0..requests).map(empty).collect::<Result<Vec<_>>>()?;
        let mut decoder = Decoder::new(model.clone(), rope.clone());
        let clock = RealClock(Instant::now());
        let shared = Arc::new(context.clone());
        let mut link = self.link(clock, vec![shared; requests]);
        let target = Target {
            contexts: vec![context.context().clone(); requests],
            planes,
            caches: caches.iter_mut().map(|cache| &mut **cache as &mut dyn KvCache).collect(),
            decoder: &mut decoder,
        };
        let trace = serve_into(&mut link, target.into_caches(), clock, &costs, &self.options)?;
        let shared = SharedPrompt::run(model, rope, prompt)?;
        let Prepared { mut cache, .. } = shared.fill(&dense, model, rope, &Profile::default())?;
        let reference = score_text(&mut decoder, cache.as_mut(), decoded, None)?.logits;
        let last = caches.last_mut().ok_or_else(|| Error::argument("no request"))?;
        let first = Instant::now();
        decoder.step(decoded[0], last.as_mut())?;
        let first_token = first.elapsed().as_secs_f64();
        last.truncate(prompt.len())?;
        let divergence = score_text(&mut decoder, last.as_mut(), decoded, Some(&reference))?.divergence;
        Ok(Judged { trace, divergence, first_token })
    }

    /// On a GPU, out of page-locked memory.
    #[cfg(feature = "cuda")]
    fn on_device(&self, gpu: &Arc<Gpu>, context: &EncodedContext) -> Result<Judged> {
        let &Self { model, planes, prompt, decoded, .. } = self;
        if self.load.stream.requests > 1 {
            return Err(Error::argument("a GPU loads one request: pass --requests 1 or --device cpu"));
        }
        let dense: Method = "dense:dtype=f16".parse()?;
        let element = dense.device_element()?;
        let weights = Arc::new(Weights::of(gpu, model, element)?);
        let capacity = prompt.len() + decoded.len();
        let cache = method_cache(gpu, &dense, &model.config, element, None, 1, capacity)?;
        let mut decoder = device::Decoder::new(gpu.clone(), weights, cache, 1)?;
        let reference = device::score_text(&mut decoder, (prompt, device::CHUNK), decoded, None)?.logits;
        let mut loader = decoder.loader(planes)?;
        let lock = |frame: &Bytes| Ok(Bytes::from_owner(PageLocked::of(gpu, frame)?));
        let context = context.with(StreamTarget::speeds(&mut decoder, prompt)?, lock)?;
        let costs = [context.costs()];
        let target = StreamTarget::new(&mut decoder, &mut loader, context.context().clone());
        let clock = RealClock(Instant::now());
        let mut link = self.link(clock, vec![Arc::new(context)]);
        let trace = serve_into(&mut link, target, clock, &costs, &self.options)?;
        let (mut divergence, mut first_token) = (Divergence::default(), 0.0);
        for (i, (pair, reference)) in decoded.windows(2).zip(&reference).enumerate() {
            let start = Instant::now();
            decoder.feed(&pair[..1])?;
            decoder.step()?;
            let logits = decoder.logits()?;
            if i == 0 {
                first_token = start.elapsed().as_secs_f64();
            }
            divergence.add(&logits, reference, pair[1]);
        }
        Ok(Judged { trace, divergence, first_token })
    }
}

impl Loaded {
    fn notes(&self) -> Vec<String> {
        let levels = self.levels.iter().enumerate();
        let levels: Vec<_> = levels
            .map(|(i, level)| format!("level {i} has {:.2} bits a value", level.bits_per_value))
            .collect();
        vec![
            format!(
                "{} over {}, {}: {}.",
                self.model,
                self.text,
                count(self.context, "token"),
                levels.join(", ")
            ),
            format!(
                "Loaded in {:.1} ms, the last byte arrived after {:.1} ms; \
                 {:.1} ms of decoding and recomputation; \
                 {:.1} ms for the first token.",
                1e3 * self.trace.seconds(),
                1e3 * self.trace.transferred,
                1e3 * self.trace.computing,
                1e3 * self.first_token
            ),
            format!(
                "Next to the exact cache: KL {:.5}, top-1 {:.1} %, perplexity {:.3}.",
                self.kl,
                100.0 * self.top1,
                self.perplexity
            ),
        ]
    }
}

#[derive(Args)]
#[command(after_help = "Example:\n  kv stream simulate --tokens 32768 --values 65536 --bits 4.1,3.1,2.1 \
                  --recompute 8192=0.207,131072=10.712 --link random:0.1-10 --slo 1 --trials 1000")]
struct Simulate {
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

/// A run of `kv stream simulate`.
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
        let mut tokens = vec![0; levels + 1];
        for event in trace.events.iter().filter(|event| event.computed_at.is_some()) {
            let level = event.encoding.strip_prefix("level ").and_then(|level| level.parse().ok());
            tokens[level.unwrap_or(levels)] += event.tokens;
        }
        let &Trace { transferred, computing, bytes, .. } = trace;
        let first_tokens = trace.loaded.iter().map(|loaded| loaded + rest).collect();
        Self { first_token: trace.seconds() + rest, first_tokens, transferred, computing, bytes, tokens }
    }
}

impl Simulate {
    fn run(self, out: &mut Stdout) -> Result<()> {
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
        if !self.rest.is_finite() || self.rest < 0.0 {
            return Err(Error::argument("--rest must not be negative"));
        }
        let mut files = Files::default();
        let json = files.writes("--json", self.stream.json.json.clone())?;
        let report = files.writes("--report", self.stream.report.clone())?;
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
        let notes = result.notes();
        out.print(format_args!("{}\n\n{}\n", page::table(&result.trace), notes.join("\n")));
        json.write_json(&result)?;
        report.write(|_| Ok(page::html(&result.trace, result.slo, &notes)?.into_bytes()))
    }
}

impl Simulated {
    fn notes(&self) -> Vec<String> {
        let mut times: Vec<f64> = self.trials.iter().map(|trial| trial.first_token).collect();
        times.sort_by(f64::total_cmp);
        let late = times.iter().filter(|&&seconds| seconds > self.slo).count();
        let mut notes = vec![format!(
            "Simulated: {} of {}; first token after {:.1} ms in the median of {}, {:.1} ms at most.",
            count(self.requests, "request"),
            count(self.tokens, "token"),
            1e3 * times[times.len() / 2],
            count(times.len(), "trial"),
            1e3 * times[times.len() - 1]
        )];
        if self.slo > 0.0 {
            notes.push(format!("{late} of {} took longer than {} s.", count(times.len(), "trial"), self.slo));
        }
        notes
    }
}
