//! Loads an encoded prompt over a shaped link into a cache, and compares what it then computes.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use kv_benches::cli::{DeviceArgs, asset};
use kv_device::{Gpu, PageLocked};
use kv_llama::{Decoder, KvCache};
use kv_llama_gpu::ranks::Lockstep;
use kv_llama_gpu::{WeightLayout, Weights};
use kv_methods::{Method, Prepared, Profile, calibrated};
use kv_model::{Model, Rope, files};
use kv_reference::compare::{check_room, run_start};
use kv_reference::device::{self, StreamTarget, method_cache};
use kv_reference::eval::{Divergence, SharedPrompt, score_text};
use kv_reference::stream::encoded::{EncodedContext, Memory, SINKS, levels};
use kv_reference::stream::target::Target;
use kv_reference::{Error, Result};
use kv_stream::{Bytes, Options, RealClock, ShapedLink, Trace, serve_into};
use serde::Serialize;

use crate::table::table;
use crate::{BITS, StreamArgs};

/// Encode a prompt at several levels and load it over a shaped link into a cache
#[derive(Args)]
#[command(
    after_help = "Example:\n  stream_speed load --context 4096 --chunk 512 --link random:0.01-0.1 --slo 0.5"
)]
pub struct Load {
    /// Hugging Face folder or GGUF file [default: the shipped tiny-llama-12m]
    #[arg(long, value_name = "DIR|FILE")]
    model: Option<PathBuf>,
    /// Text to run over [default: the shipped State of the Union addresses]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
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

/// The result of a run.
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
    pub fn run(self) -> Result<()> {
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
        let model = self.model.clone().unwrap_or_else(|| asset("tiny-llama-12m"));
        let model = Arc::new(Model::load(&model)?);
        let path = self.text.clone().unwrap_or_else(|| asset("sotu-heldout.txt"));
        let tokens = model.tokenizer()?.encode(&files::read_text(&path)?)?;
        check_room(&model.name, &model.config, (self.context, self.decode), "--context")?;
        let run = self.context + self.decode + 1;
        let start = run_start(&model.config, tokens.len(), run, self.calibration, "--context")?;
        let rope = Arc::new(Rope::new(&model.config, (self.context + self.decode).max(start)));
        let profile = calibrated(&model, &rope, &tokens[..start], &methods)?;
        let planes = levels(&methods, &model, &profile)?;
        let (prompt, rest) = tokens[start..].split_at(self.context);
        let decoded = &rest[..self.decode + 1];
        let context = EncodedContext::encode(&model, &rope, &planes, prompt, self.stream.chunk)?;
        let run = Run { load: &self, model: &model, rope: &rope, planes: &planes, prompt, decoded, options };
        let Judged { trace, divergence, first_token } = run.judge(&context)?;
        let values = (self.context * model.config.kv_values_per_token()) as f64;
        let level = |(method, bytes): (&Method, usize)| Level {
            setting: method.spec(),
            bits_per_value: 8.0 * bytes as f64 / values,
        };
        let result = Loaded {
            model: model.name.clone(),
            text: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
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
        println!("{}\n\n{}", table(&result.trace), result.notes().join("\n"));
        self.stream.json.write(&result)
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
        match self.load.device.gpu()? {
            Some(gpu) => self.on_device(&gpu, context),
            None => self.on_cpu(context),
        }
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
        let trace = serve_into(&mut link, target.into_caches()?, clock, &costs, &self.options)?;
        let shared = SharedPrompt::run(model, rope, prompt, [&dense])?;
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
    fn on_device(&self, gpu: &Arc<Gpu>, context: &EncodedContext) -> Result<Judged> {
        let &Self { model, planes, prompt, decoded, .. } = self;
        if self.load.stream.requests > 1 {
            return Err(Error::argument("a GPU loads one request: pass --requests 1 or --device cpu"));
        }
        let dense: Method = "dense:dtype=f16".parse()?;
        let element = dense.device_element()?;
        let weights = Arc::new(Weights::of(gpu, model, element, WeightLayout::of_batch(1))?);
        let capacity = prompt.len() + decoded.len();
        let cache = method_cache(gpu, &dense, &model.config, element, None, 1, capacity)?;
        let mut alone = Lockstep::alone(kv_llama_gpu::Decoder::new(gpu.clone(), weights, cache, 1)?);
        let reference = device::score_text(&mut alone, (prompt, kv_llama_gpu::CHUNK), decoded, None)?.logits;
        let decoder = alone.as_alone().ok_or_else(|| Error::argument("a decoder of several ranks"))?;
        let mut loader = decoder.loader(planes)?;
        let lock = |frame: &Bytes| Ok(Bytes::from_owner(PageLocked::of(gpu, frame)?));
        let context = context.with(StreamTarget::speeds(decoder, prompt)?, lock)?;
        let costs = [context.costs()];
        let target = StreamTarget::new(decoder, &mut loader, context.context().clone());
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
            format!("{} over {}, {} tokens: {}.", self.model, self.text, self.context, levels.join(", ")),
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
