//! Contexts encoded at several levels, and a receiver that decodes them into caches on threads of its own.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::thread::JoinHandle;
use std::time::Instant;

use codec_core::{Frame, FrameInfo, LayerRows, Place};
use rayon::prelude::*;

use super::link::Source;
use super::simulated::PrefillTime;
use super::{ChunkCost, ChunkId, Computed, Payload, Receiver};
use crate::cache::KvCache;
use crate::forward::{Decoder, prefill};
use crate::method::{Method, Prepared};
use crate::model::{Model, Rope};
use crate::side::Pair;
use crate::{Error, Profile, Result};

/// First tokens, which are recomputed at any level: they are exact and take no bytes.
pub const SINKS: usize = 4;

/// Chunks that wait to be decoded at most. Beyond them the link waits.
const QUEUE: usize = 2;

/// One codec profile of the planes of several `cachegen` methods, one level each.
///
/// # Errors
/// [`Error::Argument`] for no methods, more than [`codec_core::MAX_LEVELS`], or one without a bitstream;
/// [`Error::Profile`].
pub fn levels(methods: &[Method], model: &Model, profile: &Profile) -> Result<codec_core::Profile> {
    if methods.is_empty() || methods.len() > codec_core::MAX_LEVELS {
        return Err(Error::Argument(format!(
            "{} levels, not 1 to {}",
            methods.len(),
            codec_core::MAX_LEVELS
        )));
    }
    let (mut planes, mut info) = (vec![], None);
    for method in methods {
        let level = method.codec_planes(&model.config, profile)?;
        for layer in 0..model.config.n_layers {
            for side in [codec_core::Side::Keys, codec_core::Side::Values] {
                planes.push(level.plane(0, layer, side)?.clone());
            }
        }
        info = Some(*level.info());
    }
    let info = info.ok_or_else(|| Error::argument("no levels"))?;
    Ok(codec_core::Profile::new(info, planes)?)
}

/// A context in chunks, each at all levels of a profile, and what it takes to load it.
pub struct EncodedContext {
    tokens: Vec<u32>,
    chunks: Vec<EncodedChunk>,
}

struct EncodedChunk {
    tokens: Range<usize>,
    frames: Vec<Arc<[u8]>>, // by level; without the sinks
    recompute: f64,         // seconds
    decode: f64,            // seconds
}

impl EncodedContext {
    /// Runs the model over `tokens`, encodes every chunk at every level, and times both directions for the
    /// policy.
    ///
    /// # Errors
    /// [`Error::Argument`] for no more tokens than sinks or chunks no longer than them; errors of the model
    /// and the codec.
    pub fn encode(
        model: &Model,
        rope: &Rope,
        planes: &codec_core::Profile,
        tokens: &[u32],
        chunk_tokens: usize,
    ) -> Result<Self> {
        if tokens.len() <= SINKS || chunk_tokens <= SINKS {
            return Err(Error::Argument(format!("contexts and chunks need more than {SINKS} tokens")));
        }
        let mut layers = vec![];
        let timed = |tokens: &[u32], layers: &mut Vec<Pair<Vec<f32>>>| {
            let start = Instant::now();
            prefill(model, rope, tokens, &mut |_, activations| {
                layers.push(Pair::new(activations.k.to_vec(), activations.v.to_vec()));
                Ok(())
            })?;
            Result::Ok((tokens.len() as f64, start.elapsed().as_secs_f64().max(f64::MIN_POSITIVE)))
        };
        let part = timed(&tokens[..tokens.len().div_ceil(4)], &mut vec![])?;
        let whole = timed(tokens, &mut layers)?;
        let time = PrefillTime::fit(&[part, whole])?;
        let encode = |start: usize| {
            let range = start..tokens.len().min(start + chunk_tokens);
            let frames = frames(planes, &layers, range.start.max(SINKS)..range.end)?;
            let start = Instant::now();
            if let Some(frame) = frames.last() {
                decode(planes, frame, &range, frames.len() - 1)?;
            }
            let decode = start.elapsed().as_secs_f64();
            Ok(EncodedChunk { recompute: time.of(range.start, range.end), tokens: range, frames, decode })
        };
        let chunks = (0..tokens.len()).step_by(chunk_tokens).map(encode).collect::<Result<_>>()?;
        Ok(Self { tokens: tokens.to_vec(), chunks })
    }

    /// What the chunks' encodings cost on this machine.
    #[must_use]
    pub fn costs(&self) -> Vec<ChunkCost> {
        let cost = |chunk: &EncodedChunk| ChunkCost {
            tokens: chunk.tokens.len(),
            levels: chunk.frames.iter().map(|frame| frame.len() as u64).collect(),
            decode: chunk.decode,
            recompute: chunk.recompute,
        };
        self.chunks.iter().map(cost).collect()
    }

    /// Bytes of the whole context at each level.
    #[must_use]
    pub fn level_bytes(&self) -> Vec<usize> {
        let levels = self.chunks.first().map_or(0, |chunk| chunk.frames.len());
        (0..levels).map(|level| self.chunks.iter().map(|chunk| chunk.frames[level].len()).sum()).collect()
    }

    /// The encoded bytes of a chunk, to be replaced in tests and by tools.
    #[must_use]
    pub fn chunk_mut(&mut self, index: usize, level: usize) -> Option<&mut Arc<[u8]>> {
        self.chunks.get_mut(index)?.frames.get_mut(level)
    }

    fn frame(&self, chunk: ChunkId, level: usize) -> Result<&Arc<[u8]>> {
        let frame = self.chunks.get(chunk.index).and_then(|chunk| chunk.frames.get(level));
        frame.ok_or_else(|| Error::Stream(format!("chunk {} is not there at level {level}", chunk.index)))
    }
}

/// The same contexts, each of which may be several requests', as a link's source.
pub struct Memory(pub Vec<Arc<EncodedContext>>);

impl Source for Memory {
    fn bytes(&self, chunk: ChunkId, level: usize) -> Result<u64> {
        Ok(self.0[chunk.request].frame(chunk, level)?.len() as u64)
    }

    fn read(&self, chunk: ChunkId, level: usize) -> Result<Vec<u8>> {
        Ok(self.0[chunk.request].frame(chunk, level)?.to_vec())
    }
}

/// The frames of the tokens `range` at all levels.
fn frames(
    planes: &codec_core::Profile,
    layers: &[Pair<Vec<f32>>],
    range: Range<usize>,
) -> Result<Vec<Arc<[u8]>>> {
    let info = planes.info();
    let (channels, place) = (info.channels(), Place::nhd(info.heads, info.head_dim));
    let of =
        |rows: &'_ [f32]| -> Range<usize> { range.start * channels..(range.end * channels).min(rows.len()) };
    let rows: Vec<_> = layers
        .iter()
        .map(|layer| LayerRows {
            keys: &layer.keys[of(&layer.keys)],
            values: &layer.values[of(&layer.values)],
        })
        .collect();
    let frame = |level: usize| {
        let info = planes.frame_info(level as u8, range.len());
        let info = FrameInfo { first_token: range.start as u64, ..info };
        let mut bytes = vec![0; info.max_frame_len()];
        let len = planes.encode_into(&info, &rows, &place, &mut bytes)?;
        Ok(Arc::from(&bytes[..len]))
    };
    (0..planes.levels()).map(frame).collect()
}

/// Keys (before RoPE) and values of all layers out of a frame that must hold these tokens, less the sinks, at
/// this level.
fn decode(
    planes: &codec_core::Profile,
    bytes: &[u8],
    tokens: &Range<usize>,
    level: usize,
) -> Result<Vec<Pair<Vec<f32>>>> {
    let first = tokens.start.max(SINKS);
    let rows = (tokens.end - first) * planes.info().channels();
    let frame = Frame::parse(bytes, 2 * planes.info().layers * rows)?;
    let info = frame.info();
    if (info.first_token, info.tokens, usize::from(info.level)) != (first as u64, tokens.end - first, level) {
        return Err(Error::Stream(format!(
            "a frame of {} tokens from {} at level {}, not of {} from {first} at level {level}",
            info.tokens,
            info.first_token,
            info.level,
            tokens.end - first
        )));
    }
    let place = Place::nhd(info.heads, info.head_dim);
    let layer = |l| {
        let mut out = Pair::of(|_| vec![0.0; rows]);
        planes.decode_layer_to(&frame, l, None, &place, &mut out.keys, &mut out.values)?;
        Ok(out)
    };
    (0..info.layers).into_par_iter().map(layer).collect()
}

/// Decodes chunks into exact caches, one per request, on a thread of its own and rayon's.
pub struct CacheReceiver {
    jobs: SyncSender<(ChunkId, Payload)>,
    results: mpsc::Receiver<Result<Computed>>,
    worker: JoinHandle<Vec<Box<dyn KvCache>>>,
    contexts: Vec<Arc<EncodedContext>>,
    waiting: VecDeque<f64>, // seconds that each chunk is expected to take, of those that `finish` waits for
    done: Arc<AtomicUsize>, // how many of them are done
}

/// What the thread works with.
struct Worker {
    contexts: Vec<Arc<EncodedContext>>,
    planes: Arc<codec_core::Profile>,
    caches: Vec<Box<dyn KvCache>>,
    decoder: Decoder,
    clock: Instant,
}

impl CacheReceiver {
    /// A receiver of these requests' contexts, by the clock of [`RealClock`](super::link::RealClock) with the
    /// same origin. Caches keep keys and values in 32 bits.
    ///
    /// # Errors
    /// What preparing a cache returns.
    pub fn new(
        model: &Arc<Model>,
        rope: &Arc<Rope>,
        planes: Arc<codec_core::Profile>,
        contexts: Vec<Arc<EncodedContext>>,
        clock: Instant,
    ) -> Result<Self> {
        let dense: Method = "dense".parse()?;
        let empty = |_| dense.prepare(model, rope, &Profile::default()).map(|Prepared { cache, .. }| cache);
        let caches = (0..contexts.len()).map(empty).collect::<Result<_>>()?;
        let decoder = Decoder::new(model.clone(), rope.clone());
        let mut worker = Worker { contexts: contexts.clone(), planes, caches, decoder, clock };
        let (jobs, queue) = mpsc::sync_channel(QUEUE);
        let (answer, results) = mpsc::channel();
        let done = Arc::new(AtomicUsize::new(0));
        let counter = done.clone();
        let worker = std::thread::spawn(move || {
            for (chunk, payload) in queue {
                let computed = worker.run(chunk, payload);
                let failed = computed.is_err();
                counter.fetch_add(1, Ordering::Release);
                // A cache that lacks a chunk can take no more.
                if answer.send(computed).is_err() || failed {
                    break;
                }
            }
            worker.caches
        });
        Ok(Self { jobs, results, worker, contexts, waiting: VecDeque::new(), done })
    }

    /// The caches, in the order of the contexts.
    ///
    /// # Errors
    /// [`Error::Stream`] if the thread that decodes has panicked.
    pub fn into_caches(self) -> Result<Vec<Box<dyn KvCache>>> {
        drop(self.jobs);
        self.worker.join().map_err(|_| ended())
    }
}

impl Worker {
    fn run(&mut self, id: ChunkId, payload: Payload) -> Result<Computed> {
        let start = self.clock.elapsed().as_secs_f64();
        let context = self.contexts[id.request].clone();
        let (tokens, range) = (&context.tokens, &context.chunks[id.index].tokens);
        let cache = self.caches[id.request].as_mut();
        let mut damaged = None;
        let decoded = match payload {
            Payload::Text => None,
            Payload::Level(level, bytes) => {
                let decoded = decode(&self.planes, &bytes, range, level);
                decoded.map_err(|e| damaged = Some(e.to_string())).ok()
            }
        };
        match decoded {
            Some(layers) => {
                let first = range.start.max(SINKS);
                if first > range.start {
                    self.decoder.prefill(&tokens[range.start..first], cache)?;
                }
                for (l, Pair { keys, values }) in layers.iter().enumerate() {
                    cache.prefill(l, first, keys, values)?;
                }
            }
            None => drop(self.decoder.prefill(&tokens[range.clone()], cache)?),
        }
        Ok(Computed { chunk: id, start, end: self.clock.elapsed().as_secs_f64(), damaged })
    }
}

fn ended() -> Error {
    Error::Stream("the thread that decodes has ended".into())
}

impl Receiver for CacheReceiver {
    fn submit(&mut self, _: f64, chunk: ChunkId, payload: Payload) -> Result<()> {
        let known = &self.contexts[chunk.request].chunks[chunk.index];
        self.waiting.push_back(if payload == Payload::Text { known.recompute } else { known.decode });
        match self.jobs.send((chunk, payload)) {
            Ok(()) => Ok(()),
            // The thread says why before it ends.
            Err(_) => self.finish().and(Err(ended())),
        }
    }

    fn backlog(&self, _: f64) -> f64 {
        self.waiting.iter().skip(self.done.load(Ordering::Acquire)).sum()
    }

    fn finish(&mut self) -> Result<Vec<Computed>> {
        let results = (0..self.waiting.len()).map(|_| self.results.recv().map_err(|_| ended())?);
        let computed = results.collect::<Result<_>>()?;
        self.waiting.clear();
        self.done.store(0, Ordering::Release);
        Ok(computed)
    }
}
