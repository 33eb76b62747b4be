//! Loads of contexts of a model's shape into its cache on a GPU.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use codec_core::{
    BlockIndex, CHUNK_TOKENS, Coder, Encoding, FitOptions, Frame, FrameInfo, ModelInfo, ModelKind, PlaneBuf,
    PredictorKind, Profile, Side, Steps, TransformBuf, assemble_frame, encode_frame,
};
use kv_benches::cli::{DeviceArgs, JsonArgs, table};
use kv_device::{Chunk, FRAMES, Gpu, Loader, PageLocked, Stages, hashed};
use kv_llama_gpu::{Decoder, RANDOM_MODELS, WeightLayout, Weights};
use kv_methods::Method;
use kv_model::Config;
use kv_reference::device::{StreamTarget, method_cache};
use kv_reference::stream::encoded::{EncodedContext, Memory};
use kv_reference::stream::target::Context;
use kv_reference::{Error, Result};
use kv_stream::{Bandwidth, Bytes, Choice, Options, RealClock, ShapedLink, Speeds, serve_into};
use rayon::prelude::*;
use serde::Serialize;

/// Time loads of contexts of a model's shape into its cache on a GPU
///
/// Frames come out of page-locked memory, stage by stage and then overlapped, and over links. Keys and values
/// are random numbers, with and without a transform. The levels have about 4, 3 and 2 bits a value.
#[derive(Args)]
#[command(
    after_help = "Example:\n  stream_speed time --random llama-3.1-8b --contexts 4096,32768 --links 10,100,400"
)]
pub struct Time {
    /// The model's shape: llama-2-7b, llama-3.1-8b or llama-3.1-70b/8
    #[arg(long, value_name = "NAME", default_value = "llama-3.1-8b")]
    random: String,
    /// Tokens of the contexts
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "4096,32768")]
    contexts: Vec<usize>,
    /// Tokens of a chunk
    #[arg(long, value_name = "N", default_value_t = CHUNK_TOKENS)]
    chunk: usize,
    /// Links in Gbit/s
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "10,100,400")]
    #[arg(allow_negative_numbers = true)]
    links: Vec<f64>,
    /// Runs of which the median counts
    #[arg(long, value_name = "N", default_value = "5")]
    rounds: NonZeroUsize,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    json: JsonArgs,
}

/// Most tokens of a context.
const MOST_TOKENS: usize = 1 << 20;

/// Steps of a level in standard deviations: 4, 3 and 2 bits a value of a normal distribution.
const STEPS: [f32; 3] = [0.25, 0.5, 1.0];

/// The levels: those with a transform, then those without.
const LEVELS: usize = 2 * STEPS.len();

#[derive(Serialize)]
struct Output {
    model: String,
    chunk: usize,
    rows: Vec<Row>,
}

/// A context at a level. Times in milliseconds, on the host's clock.
#[derive(Serialize)]
struct Row {
    tokens: usize,
    transform: bool,
    bits_per_value: f64,
    bytes: u64,
    /// The copy to the device alone, chunk by chunk.
    copy_ms: f64,
    /// Decoding alone, of what is on the device.
    decode_ms: f64,
    /// Comparing checksums alone.
    check_ms: f64,
    /// All of them, overlapped.
    load_ms: f64,
    links: Vec<Linked>,
}

/// A context behind a link.
#[derive(Serialize)]
struct Linked {
    gbps: f64,
    /// From the request to the last byte.
    transfer_ms: f64,
    /// From there to the loaded cache.
    decode_after_ms: f64,
    /// From there to the first token.
    rest_ms: f64,
}

impl Time {
    pub fn run(self) -> Result<()> {
        if self.chunk == 0 || !self.contexts.iter().all(|tokens| (1..=MOST_TOKENS).contains(tokens)) {
            return Err(Error::Argument(format!("a chunk has tokens, and a context 1 to {MOST_TOKENS}")));
        }
        if !RANDOM_MODELS.contains(&self.random.as_str()) {
            let models = RANDOM_MODELS.join(", ");
            return Err(Error::Argument(format!("no random model `{}`, only {models}", self.random)));
        }
        let link = |gbps: &f64| {
            let link = gbps.to_string().parse::<Bandwidth>();
            link.map_err(|e| Error::Argument(format!("--links: {e}")))
        };
        let links = self.links.iter().map(link).collect::<Result<Vec<_>>>()?;
        let gpu = self.device.require_gpu()?;
        let dense: Method = "dense:dtype=bf16".parse()?;
        let element = dense.device_element()?;
        let weights = Arc::new(Weights::random(&gpu, &self.random, element, WeightLayout::of_batch(1))?);
        let config = &weights.config;
        let longest = self.contexts.iter().copied().max().unwrap_or(1);
        let shape = Shape::new(config, self.chunk.min(longest))?;
        let mut output = Output { model: self.random.clone(), chunk: self.chunk, rows: vec![] };
        for &tokens in &self.contexts {
            eprintln!("{tokens} tokens");
            let cache = method_cache(&gpu, &dense, config, element, None, 1, tokens + 1)?;
            let mut decoder = Decoder::new(gpu.clone(), weights.clone(), cache, 1)?;
            let mut loader = decoder.loader(&shape.profile)?;
            let context = shape.context(&gpu, tokens)?;
            for level in 0..LEVELS {
                output.rows.push(self.row(&mut decoder, &mut loader, &context, level, &links)?);
            }
        }
        println!("{}\n\n{}", loads(&output), streams(&output));
        self.json.write(&output)
    }

    fn row(
        &self,
        decoder: &mut Decoder,
        loader: &mut Loader,
        context: &Arc<EncodedContext>,
        level: usize,
        links: &[Bandwidth],
    ) -> Result<Row> {
        let chunks = &context.context().chunks;
        let tokens = chunks.last().map_or(0, |chunk| chunk.end);
        let frames: Vec<Bytes> = (0..chunks.len())
            .map(|index| context.frame(index, level).cloned())
            .collect::<kv_stream::Result<_>>()?;
        // The first load makes room on the device.
        load(decoder, loader, chunks, level, &frames)?;
        let rounds = self.rounds.get();
        let stages = (0..rounds).map(|_| {
            decoder.clear()?;
            let mut sum = Stages::default();
            for (chunk, frame) in chunks.iter().zip(&frames) {
                let stages = decoder.load_in_stages(loader, of(chunk), level, frame.clone())?;
                sum.copy += stages.copy;
                sum.decode += stages.decode;
                sum.check += stages.check;
            }
            Ok(sum)
        });
        let stages = stages.collect::<Result<Vec<Stages>>>()?;
        let stage = |of: fn(&Stages) -> f64| 1e3 * median(stages.iter().map(of).collect());
        let loads = (0..rounds).map(|_| load(decoder, loader, chunks, level, &frames));
        let loads = loads.collect::<Result<Vec<_>>>()?;
        let bytes: usize = frames.iter().map(Bytes::len).sum();
        let values = context.values_per_token() * tokens;
        let linked = links.iter().zip(&self.links).map(|(link, &gbps)| {
            let runs = (0..rounds).map(|_| behind(decoder, loader, context, level, link));
            let runs = runs.collect::<Result<Vec<_>>>()?;
            let part = |part: usize| 1e3 * median(runs.iter().map(|run| run[part]).collect());
            Ok(Linked { gbps, transfer_ms: part(0), decode_after_ms: part(1), rest_ms: part(2) })
        });
        Ok(Row {
            tokens,
            transform: level < STEPS.len(),
            bits_per_value: 8.0 * bytes as f64 / values as f64,
            bytes: bytes as u64,
            copy_ms: stage(|stages| stages.copy),
            decode_ms: stage(|stages| stages.decode),
            check_ms: stage(|stages| stages.check),
            load_ms: 1e3 * median(loads),
            links: linked.collect::<Result<_>>()?,
        })
    }
}

/// Tokens of the only sequence.
const fn of(tokens: &Range<usize>) -> Chunk {
    Chunk { sequence: 0, position: tokens.start, count: tokens.end - tokens.start }
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

/// Loads frames into the emptied cache; seconds.
fn load(
    decoder: &mut Decoder,
    loader: &mut Loader,
    chunks: &[Range<usize>],
    level: usize,
    frames: &[Bytes],
) -> Result<f64> {
    decoder.clear()?;
    let start = Instant::now();
    for (i, (chunk, frame)) in chunks.iter().zip(frames).enumerate() {
        if i >= FRAMES {
            decoder.end_load(loader)?;
        }
        decoder.begin_load(loader, of(chunk), level, frame.clone())?;
    }
    for _ in 0..chunks.len().min(FRAMES) {
        decoder.end_load(loader)?;
    }
    Ok(start.elapsed().as_secs_f64())
}

/// Streams a context into the emptied cache, and runs a last token: seconds of the transfer, of decoding
/// after it, and of the token.
fn behind(
    decoder: &mut Decoder,
    loader: &mut Loader,
    context: &Arc<EncodedContext>,
    level: usize,
    link: &Bandwidth,
) -> Result<[f64; 3]> {
    decoder.clear()?;
    let clock = RealClock(Instant::now());
    let mut link = ShapedLink::new(clock, Memory(vec![context.clone()]), link.clone(), 0.0);
    let choice = Choice::Given(vec![Encoding::Level(level)]);
    let options = Options { choice, batch: 1, timeout: 1.0, fall_back: false };
    let target = StreamTarget::new(decoder, loader, context.context().clone());
    let trace = serve_into(&mut link, target, clock, &[context.costs()], &options)?;
    let rest = Instant::now();
    decoder.feed(&[1])?;
    decoder.step()?;
    decoder.logits()?;
    Ok([trace.transferred, trace.seconds() - trace.transferred, rest.elapsed().as_secs_f64()])
}

/// Random keys and values of a chunk of a model, the same ones in every layer.
struct Shape {
    chunk: usize,
    profile: Profile,
    rows: Vec<f32>, // (chunk, heads, head_dim)
}

impl Shape {
    fn new(config: &Config, chunk: usize) -> Result<Self> {
        let info = ModelInfo {
            model_id: 0,
            layers: config.n_layers,
            heads: config.n_kv_heads,
            head_dim: config.head_dim,
            keys_rotated: false,
        };
        // Four uniform numbers of variance 1/4.
        let normal = |i| (0..4).map(|tensor| hashed(tensor, i, 0.75_f32.sqrt())).sum();
        let rows: Vec<f32> = (0..(chunk.max(2) * info.channels()) as u64).map(normal).collect();
        let transform = Arc::new(cosines(&info)?);
        let planes = (0..LEVELS).map(|level| {
            let options = FitOptions {
                predictor: PredictorKind::Mean,
                steps: Steps::Deviations(STEPS[level % STEPS.len()]),
                models: ModelKind::Tables,
                coder: Coder::InterleavedRans,
            };
            let transform = (level < STEPS.len()).then(|| transform.clone());
            let plane = PlaneBuf::fit(&rows, info.channels(), transform, &options)?;
            Ok(vec![plane; 2 * info.layers])
        });
        let planes = planes.collect::<Result<Vec<_>>>()?.concat();
        Ok(Self { chunk, profile: Profile::new(info, planes)?, rows })
    }

    /// A context in page-locked memory at all levels.
    fn context(&self, gpu: &Gpu, tokens: usize) -> Result<Arc<EncodedContext>> {
        let starts = (0..tokens).step_by(self.chunk);
        let chunks: Vec<_> = starts.map(|start| start..tokens.min(start + self.chunk)).collect();
        let frames = chunks.iter().map(|chunk| {
            let locked = |level| Ok(Bytes::from_owner(PageLocked::of(gpu, &self.frame(chunk, level)?)?));
            (0..LEVELS).into_par_iter().map(locked).collect()
        });
        let frames = frames.collect::<Result<Vec<Vec<Bytes>>>>()?;
        let context = Context { tokens: vec![1; tokens], chunks, exact: 0 };
        let values_per_token = 2 * self.profile.info().layers * self.profile.info().channels();
        Ok(Arc::new(EncodedContext::new(context, frames, values_per_token, Speeds::UNKNOWN)?))
    }

    /// A frame of these tokens. All layers hold the same numbers, of which one layer is encoded.
    fn frame(&self, tokens: &Range<usize>, level: usize) -> Result<Vec<u8>> {
        let &ModelInfo { layers, heads, head_dim, .. } = self.profile.info();
        let plane = self.profile.plane(level, 0, Side::Keys)?.view();
        let rows = &self.rows[..tokens.len() * plane.channels()];
        let (one, mut encoded) = (FrameInfo::new(1, heads, head_dim, tokens.len()), vec![]);
        encode_frame(&one, &[plane; 2], &[rows, rows], &mut encoded)?;
        // FORMAT.md of codec-core, "Frame": 64 bytes of header, two ids, and entries that end with the
        // lengths of the tiles.
        let (entries, tiles) =
            (encoded[64 + 2 * 4..].chunks_exact(12 + 2 * plane.channels().div_ceil(32)), 12..);
        let lengths = entries.take(2 * one.blocks()).flat_map(|entry| entry[tiles.clone()].chunks_exact(2));
        let lengths: Vec<u16> = lengths.map(|bytes| u16::from_le_bytes([bytes[0], bytes[1]])).collect();
        let first = BlockIndex { layer: 0, side: Side::Keys, block: 0 };
        let payload = &encoded[Frame::parse(&encoded, usize::MAX)?.block_range(first)?.start..];
        let level = u8::try_from(level).map_err(|_| Error::argument("a level above 255"))?;
        let info =
            FrameInfo { first_token: tokens.start as u64, ..self.profile.frame_info(level, tokens.len()) };
        let mut frame = vec![];
        let ids = vec![plane.id(); 2 * layers];
        assemble_frame(&info, &ids, &lengths.repeat(layers), &payload.repeat(layers), &mut frame)?;
        Ok(frame)
    }
}

/// The cosine transform as the map of every head.
fn cosines(info: &ModelInfo) -> Result<TransformBuf> {
    let dim = info.head_dim;
    let entry = |component: usize, coefficient: usize| {
        let angle = std::f64::consts::PI / dim as f64 * (component as f64 + 0.5) * coefficient as f64;
        let scale = if coefficient == 0 { 1.0 } else { 2.0 };
        (angle.cos() * (scale / dim as f64).sqrt()) as f32
    };
    let map = |entry: &dyn Fn(usize, usize) -> f32| {
        let one: Vec<f32> = (0..dim * dim).map(|i| entry(i / dim, i % dim)).collect();
        one.repeat(info.heads)
    };
    let inverse = map(&|coefficient, component| entry(component, coefficient));
    Ok(TransformBuf::new(dim, map(&entry), inverse)?)
}

/// The stages of loads out of page-locked memory.
fn loads(output: &Output) -> String {
    let header = [
        "tokens",
        "transform",
        "bits/value",
        "MB",
        "copy, ms",
        "GB/s",
        "decode, ms",
        "G values/s",
        "check, ms",
        "load, ms",
        "over the copy",
    ];
    let rows = output.rows.iter().map(|row| {
        let values = 8.0 * row.bytes as f64 / row.bits_per_value;
        [
            row.tokens.to_string(),
            row.transform.to_string(),
            format!("{:.2}", row.bits_per_value),
            format!("{:.1}", row.bytes as f64 / 1e6),
            format!("{:.2}", row.copy_ms),
            format!("{:.1}", row.bytes as f64 / row.copy_ms / 1e6),
            format!("{:.2}", row.decode_ms),
            format!("{:.0}", values / row.decode_ms / 1e6),
            format!("{:.2}", row.check_ms),
            format!("{:.2}", row.load_ms),
            format!("{:.2}", row.load_ms / row.copy_ms),
        ]
    });
    table(header, rows)
}

/// The times to the first token behind links.
fn streams(output: &Output) -> String {
    let header = [
        "tokens",
        "transform",
        "bits/value",
        "Gbit/s",
        "transfer, ms",
        "decode after it",
        "rest",
        "first token, ms",
        "decode over the transfer",
    ];
    let linked = output.rows.iter().flat_map(|row| row.links.iter().map(move |linked| (row, linked)));
    let rows = linked.map(|(row, &Linked { gbps, transfer_ms, decode_after_ms, rest_ms })| {
        [
            row.tokens.to_string(),
            row.transform.to_string(),
            format!("{:.2}", row.bits_per_value),
            gbps.to_string(),
            format!("{transfer_ms:.2}"),
            format!("{decode_after_ms:.2}"),
            format!("{rest_ms:.2}"),
            format!("{:.2}", transfer_ms + decode_after_ms + rest_ms),
            format!("{:.1} %", 100.0 * decode_after_ms / transfer_ms),
        ]
    });
    table(header, rows)
}
