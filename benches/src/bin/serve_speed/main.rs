//! Latency and throughput of requests that arrive at random: `peers/serving.py` makes the table.
//!
//! The scheduler of `kv_llama::serve` runs requests with the lengths of a trace ([`requests::Profile`]) over
//! the cache of each method. Every method has the same memory for its cache (`--memory`), so that what its
//! sequences take decides how many run at once. Arrivals are in real time.

mod memory;
mod requests;
mod rows;
mod run;
mod statistics;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use bytesize::ByteSize;
use clap::Parser;
use kv_benches::cli::{DeviceArgs, JsonArgs, ModelArgs, asset, check_number};
use kv_device::Gpu;
use kv_gpu::Element;
use kv_llama::serve::{Engine, Scheduler, Sequences};
use kv_llama::{Decoder, Rng};
use kv_llama_gpu::ranks::Shard;
use kv_llama_gpu::{Batch, WeightLayout, Weights, random_config};
use kv_methods::{Method, Prepared, Profile, calibrated};
use kv_model::{Config, Model, Rope};
use kv_reference::device::{self, method_cache};
use kv_reference::{Error, Result};
use memory::{Fitted, fitted};
use requests::Planned;
use rows::{Cache, Row, table};
use run::{Arrivals, run};
use serde::Serialize;
use statistics::Record;

/// Measure requests that arrive at random
#[derive(Parser)]
#[command(after_help = "Examples:
  serve_speed --random llama-3.1-8b --trace cocktail --memory 40GiB --rates 0,0.5,1,2
  serve_speed --device cpu --methods dense --sequences 4 --trace imdb --rates 0,2 --requests 10

Methods and their settings: kv methods")]
struct ServeSpeed {
    #[command(flatten)]
    model: ModelArgs,
    /// Methods to measure
    #[arg(long, value_name = "LIST")]
    #[arg(default_value = "dense:dtype=bf16:pages=64,million:exact=bf16:pages=64")]
    methods: String,
    /// Lengths of prompts and answers: those of a trace of ZACK's evaluation
    #[arg(long, value_enum, default_value_t = requests::Profile::Imdb)]
    trace: requests::Profile,
    /// Requests a second; at 0 each comes when the one before has its answer
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [0.0, 1.0, 2.0, 4.0])]
    rates: Vec<f64>,
    /// Requests of a rate, at most
    #[arg(long, value_name = "N", default_value_t = 200)]
    requests: usize,
    /// Requests that come one by one, at most
    #[arg(long, value_name = "N", default_value_t = 8)]
    alone: usize,
    /// Seconds in which the requests of a rate come; after as many more, those without an answer lose it
    #[arg(long, value_name = "S", default_value_t = 20.0)]
    seconds: f64,
    /// Skip the other rates of a method after one whose mean latency per token is beyond so many times that
    /// of requests one by one, or which leaves requests without an answer
    #[arg(long, value_name = "FACTOR")]
    until: Option<f64>,
    /// Prompt tokens that run between two steps, at most
    #[arg(long, value_name = "N", default_value = "2048")]
    chunk: NonZeroUsize,
    /// Sequences that run at once, at most
    #[arg(long, value_name = "N", default_value = "256")]
    sequences: NonZeroUsize,
    /// Bytes of a method's cache on a GPU
    #[arg(long, value_name = "SIZE", default_value = "40GiB")]
    memory: ByteSize,
    /// Seed of lengths, prompts and arrivals
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    json: JsonArgs,
}

/// Tokens of the text that codes are calibrated on.
const CALIBRATION: usize = 2048;

/// Requests of the warm-up, and tokens of their answers.
const WARM_UP: (usize, usize) = (2, 8);

/// What is written as JSON.
#[derive(Serialize)]
struct Output<'a> {
    model: &'a str,
    trace: String,
    chunk: usize,
    memory: u64,
    requests: usize,
    seconds: f64,
    seed: u64,
    rows: Vec<Row>,
}

/// A checkpoint with the text of its prompts, or a shape.
enum Source {
    Checkpoint { model: Arc<Model>, text: Vec<u32>, profile: Profile },
    Shape { name: String, config: Config },
}

fn main() -> Result<()> {
    ServeSpeed::parse().run()
}

impl Source {
    /// That of the options, with a profile for these methods, which are then fitted to where they run.
    fn open(args: &ModelArgs, methods: &mut [Method], on_gpu: bool) -> Result<Self> {
        let mut fit = |config: &Config| -> Result<()> {
            let mut methods = methods.iter_mut().filter(|_| on_gpu);
            methods.try_for_each(|method| {
                device::fitted(method, config, Shard::WHOLE).map(|fitted| *method = fitted)
            })
        };
        if let Some(name) = args.random()? {
            let config = random_config(name)?;
            fit(&config)?;
            return Ok(Self::Shape { name: name.to_owned(), config });
        }
        let (model, path) = (Arc::new(args.load()?), asset("sotu-heldout.txt"));
        fit(&model.config)?;
        let text = std::fs::read_to_string(&path).map_err(|e| Error::io(&path, e))?;
        let text = model.tokenizer()?.encode(&text)?;
        let calibration = &text[..CALIBRATION.min(text.len()).min(model.config.max_seq_len)];
        let profile = calibrated(&model, &Rope::new(&model.config, calibration.len()), calibration, methods)?;
        Ok(Self::Checkpoint { model, text, profile })
    }

    fn config(&self) -> &Config {
        match self {
            Self::Checkpoint { model, .. } => &model.config,
            Self::Shape { config, .. } => config,
        }
    }

    fn name(&self) -> &str {
        match self {
            Self::Checkpoint { model, .. } => &model.name,
            Self::Shape { name, .. } => name,
        }
    }

    /// A prompt: of a shape any tokens, of a checkpoint its text from anywhere on.
    fn prompt(&self, rng: &mut Rng, length: usize) -> Vec<u32> {
        match self {
            Self::Checkpoint { text, .. } => {
                let start = rng.below(text.len());
                text.iter().copied().cycle().skip(start).take(length).collect()
            }
            Self::Shape { config, .. } => (0..length).map(|_| rng.below(config.vocab_size) as u32).collect(),
        }
    }

    /// The weights for a method.
    fn weights(
        &self,
        gpu: &Gpu,
        method: &Method,
        (element, layout): (Element, WeightLayout),
    ) -> Result<Weights> {
        match self {
            Self::Checkpoint { model, profile, .. } => {
                Ok(Weights::of(gpu, &*method.device_model(model, profile)?, element, layout)?)
            }
            Self::Shape { name, .. } => Ok(Weights::random(gpu, name, element, layout)?),
        }
    }

    /// What was calibrated; of a shape nothing.
    const fn profile(&self) -> Option<&Profile> {
        match self {
            Self::Checkpoint { profile, .. } => Some(profile),
            Self::Shape { .. } => None,
        }
    }
}

impl ServeSpeed {
    fn run(self) -> Result<()> {
        for &rate in &self.rates {
            check_number("--rates", rate, "at least 0", |x| x >= 0.0)?;
        }
        if let Some(until) = self.until {
            check_number("--until", until, "at least 1", |x| x >= 1.0)?;
        }
        check_number("--seconds", self.seconds, "above 0 and at most a day", |x| x > 0.0 && x <= 86_400.0)?;
        let mut methods = Method::parse_list(&self.methods)?;
        let gpu = self.device.gpu()?;
        let source = Source::open(&self.model, &mut methods, gpu.is_some())?;
        let (longest, most) = (self.trace.most(), source.config().max_seq_len);
        if longest > most {
            let (trace, name) = (self.trace, source.name());
            let what = format!(
                "--trace: requests of {trace:?} have up to {longest} tokens, and {name} takes {most}"
            );
            return Err(Error::Argument(what));
        }
        let count = self.requests.max(self.alone);
        let requests = self.trace.requests(count, self.seed, |rng, length| source.prompt(rng, length));
        let mut output = Output {
            model: source.name(),
            trace: format!("{:?}", self.trace).to_lowercase(),
            chunk: self.chunk.get(),
            memory: self.memory.0,
            requests: self.requests,
            seconds: self.seconds,
            seed: self.seed,
            rows: vec![],
        };
        let mut kept = None;
        for method in &methods {
            output.rows.extend(match &gpu {
                Some(gpu) => self.on_gpu(gpu, method, &source, &requests, &mut kept)?,
                None => self.on_cpu(method, &source, &requests)?,
            });
            self.json.write(&output)?; // also if a later method fails
        }
        println!("{}", table(&output.rows));
        Ok(())
    }

    fn on_cpu(&self, method: &Method, source: &Source, requests: &[Planned]) -> Result<Vec<Row>> {
        let Source::Checkpoint { model, profile, .. } = source else {
            return Err(Error::argument("--random: hashed weights are on a GPU alone"));
        };
        let (places, capacity) = (self.sequences.get(), self.trace.most());
        let rope = Arc::new(Rope::new(&model.config, capacity));
        let Prepared { model, cache } = method.prepare(model, &rope, profile)?;
        let engine = Sequences::new(Decoder::new(model, rope), cache, (places, capacity));
        let cache = Cache { places, pool: None, device_bytes: None, host_bytes: None };
        self.rates(engine, method.spec(), &cache, requests)
    }

    /// `kept` are the weights of the method before, which are those of all methods of a shape.
    fn on_gpu(
        &self,
        gpu: &Arc<Gpu>,
        method: &Method,
        source: &Source,
        requests: &[Planned],
        kept: &mut Option<Arc<Weights>>,
    ) -> Result<Vec<Row>> {
        let config = source.config();
        let (element, capacity) = (method.device_element()?, self.trace.most().next_multiple_of(64));
        let cache = |method: &Method, places| {
            method_cache(gpu, method, config, element, source.profile(), places, capacity)
        };
        let memory = usize::try_from(self.memory.0).unwrap_or(usize::MAX);
        let most = self.sequences.get().min(WeightLayout::Rows.most_sequences());
        let bytes = |method: &Method, places| Ok(cache(method, places)?.bytes());
        let Fitted { method, places, pool } = fitted(method, (memory, most), self.trace.mean_held(), bytes)?;
        let layout = WeightLayout::of_batch(places);
        let suits = |weights: &Arc<Weights>| (weights.element, weights.layout) == (element, layout);
        let is_shape = matches!(source, Source::Shape { .. });
        let weights = match kept.take().filter(|weights| is_shape && suits(weights)) {
            Some(weights) => weights,
            None => Arc::new(source.weights(gpu, &method, (element, layout))?),
        };
        *kept = Some(weights.clone());
        let cache = cache(&method, places)?;
        let (device_bytes, host_bytes) = (Some(cache.bytes()), Some(cache.host_bytes()));
        let decoder = kv_llama_gpu::Decoder::new(gpu.clone(), weights, cache, places)?;
        let sizes = Cache { places, pool, device_bytes, host_bytes };
        self.rates(Batch::new(decoder)?, method.spec(), &sizes, requests)
    }

    /// The rows of all rates over an engine.
    fn rates<E: Engine>(
        &self,
        engine: E,
        method: String,
        cache: &Cache,
        requests: &[Planned],
    ) -> Result<Vec<Row>>
    where
        Error: From<E::Error>,
    {
        let mut scheduler = Scheduler::new(engine, vec![], self.chunk.get());
        let patience = Duration::from_secs_f64(self.seconds);
        let warm_up = requests.iter().take(WARM_UP.0).cloned();
        let warm_up: Vec<Planned> =
            warm_up.map(|request| Planned { answer: request.answer.min(WARM_UP.1), ..request }).collect();
        run(&mut scheduler, &warm_up, Arrivals::OneByOne, patience)?;
        let mut alone: Option<Vec<Record>> = None;
        let mut rows: Vec<Row> = vec![];
        for &rate in &self.rates {
            let (arrivals, requests) = match rate > 0.0 {
                true => (Arrivals::Poisson(rate), &requests[..self.requests]),
                false => (Arrivals::OneByOne, &requests[..self.alone]),
            };
            let done = run(&mut scheduler, requests, arrivals, patience)?;
            let row = Row::of(method.clone(), arrivals, cache, &done, alone.as_deref());
            eprintln!(
                "{method}, {arrivals:?}: {} of {} answers in {:.1} s",
                row.whole, row.came, row.seconds
            );
            if arrivals == Arrivals::OneByOne {
                alone = Some(done.records);
            }
            rows.push(row);
            if self.is_beyond(&rows) {
                break;
            }
        }
        Ok(rows)
    }

    /// Whether the last of these rates is so high that higher ones are skipped. One at which nothing came is
    /// not.
    fn is_beyond(&self, rows: &[Row]) -> bool {
        let mean = |row: &Row| row.normalized.map(|normalized| normalized.mean);
        let alone = rows.iter().find(|row| row.rate.is_none()).and_then(mean);
        let (Some(until), Some(alone), Some(last)) = (self.until, alone, rows.last()) else { return false };
        let is_late = || mean(last).is_none_or(|mean| mean > until * alone);
        last.rate.is_some() && last.came > 0 && (last.whole < last.came || is_late())
    }
}
