//! A receiver that decodes chunks into caches on a thread of its own.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Scope;

use codec_core::Profile;
use rayon::prelude::*;

use super::frame::{ChunkFrame, LayerKv};
use super::link::{Clock, RealClock};
use super::{ChunkCost, ChunkId, Computed, Payload, Receiver};
use crate::cache::KvCache;
use crate::forward::Decoder;
use crate::{Error, Result};

/// Most chunks that wait to be decoded. Beyond them the link waits.
const QUEUE: usize = 2;

/// A context that is loaded in chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// Tokens from position 0 on.
    pub tokens: Vec<u32>,
    /// Positions of the tokens of every chunk, in order.
    pub chunks: Vec<Range<usize>>,
    /// First tokens that no frame holds. They are recomputed at any level.
    pub exact: usize,
}

impl Context {
    /// Positions of the tokens in the frames of a chunk.
    pub(super) fn coded(&self, chunk: usize) -> Range<usize> {
        let Range { start, end } = self.chunks[chunk];
        start.max(self.exact).min(end)..end
    }
}

/// Caches to be filled, one for each context.
pub struct Target<'a> {
    /// The contexts of the requests.
    pub contexts: Vec<Context>,
    /// The codec's planes at every level.
    pub planes: &'a Profile,
    /// The requests' caches. A cache ends after the first chunk that could not be added to it.
    pub caches: Vec<&'a mut dyn KvCache>,
    /// The decoder that recomputes chunks.
    pub decoder: &'a mut Decoder,
}

/// Decodes chunks on a thread of its own and rayon's.
pub struct CacheReceiver<'a> {
    jobs: SyncSender<(ChunkId, Payload)>,
    results: mpsc::Receiver<Result<Computed>>,
    costs: &'a [Vec<ChunkCost>],
    waiting: VecDeque<f64>, // expected seconds of every chunk that `finish` waits for
    done: Arc<AtomicUsize>, // those of them that are done
    recomputed: Arc<Recomputed>, // by the thread
}

/// Seconds of all recomputations.
#[derive(Default)]
struct Recomputed(Mutex<(f64, f64)>); // measured, expected

impl Recomputed {
    fn add(&self, measured: f64, expected: f64) {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *sums = (sums.0 + measured, sums.1 + expected);
    }

    /// Measured over expected; 1 where nothing is known.
    fn pace(&self) -> f64 {
        let (measured, expected) = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pace = measured / expected;
        if pace.is_finite() && pace > 0.0 { pace } else { 1.0 }
    }
}

impl<'a> CacheReceiver<'a> {
    /// A receiver that fills `target` in a thread of `scope` until it is dropped. Its times are those of
    /// `clock`; `costs` are those of the requests' chunks.
    ///
    /// # Errors
    /// [`Error::Argument`] unless there are as many caches as contexts.
    pub fn new<'scope, 'env>(
        scope: &'scope Scope<'scope, 'env>,
        mut target: Target<'env>,
        clock: RealClock,
        costs: &'env [Vec<ChunkCost>],
    ) -> Result<Self>
    where
        'env: 'a,
    {
        if target.caches.len() != target.contexts.len() {
            return Err(Error::argument("every context needs a cache"));
        }
        let (jobs, queue) = mpsc::sync_channel::<(ChunkId, Payload)>(QUEUE);
        let (answer, results) = mpsc::channel();
        let done = Arc::new(AtomicUsize::new(0));
        let recomputed = Arc::<Recomputed>::default();
        let (counter, sums) = (done.clone(), recomputed.clone());
        scope.spawn(move || {
            for (chunk, payload) in queue {
                let (start, text) = (clock.now(), !payload.is_level());
                let computed = target.add(chunk, payload);
                if text {
                    sums.add(clock.now() - start, costs[chunk.request][chunk.index].recompute);
                }
                let failed = computed.is_err();
                let computed = computed.map(|damaged| Computed { chunk, start, end: clock.now(), damaged });
                counter.fetch_add(1, Ordering::Release);
                // A cache that lacks a chunk can take no more.
                if answer.send(computed).is_err() || failed {
                    break;
                }
            }
        });
        Ok(Self { jobs, results, costs, waiting: VecDeque::new(), done, recomputed })
    }
}

impl Target<'_> {
    /// Appends a chunk to its cache. Returns the reason if bytes could not be decoded and it was recomputed.
    fn add(&mut self, id: ChunkId, payload: Payload) -> Result<Option<String>> {
        let context = &self.contexts[id.request];
        let (range, coded) = (context.chunks[id.index].clone(), context.coded(id.index));
        let cache = &mut *self.caches[id.request];
        let decoded = match payload {
            Payload::Text => Err(None),
            Payload::Damaged(what) => Err(Some(what)),
            Payload::Level(level, bytes) => {
                decode(self.planes, &bytes, &coded, level).map_err(|e| Some(e.to_string()))
            }
        };
        let layers = match decoded {
            Ok(layers) => layers,
            Err(damaged) => {
                self.decoder.prefill(&context.tokens[range], cache)?;
                return Ok(damaged);
            }
        };
        if coded.start > range.start {
            self.decoder.prefill(&context.tokens[range.start..coded.start], cache)?;
        }
        for (l, LayerKv { keys, values }) in layers.iter().enumerate() {
            cache.prefill(l, coded.start, keys, values)?;
        }
        Ok(None)
    }
}

/// The rows of all layers out of the frame of these tokens at this level.
pub(super) fn decode(
    planes: &Profile,
    bytes: &[u8],
    tokens: &Range<usize>,
    level: usize,
) -> Result<Vec<LayerKv>> {
    let frame = ChunkFrame::parse(planes, bytes, tokens, level)?;
    let layers = (0..planes.info().layers).into_par_iter().map(|layer| Ok(frame.layer(layer)?));
    layers.collect()
}

fn ended() -> Error {
    Error::Stream("the thread that decodes has ended".into())
}

impl Receiver for CacheReceiver<'_> {
    fn submit(&mut self, _: f64, chunk: ChunkId, payload: Payload) -> Result<()> {
        let cost = &self.costs[chunk.request][chunk.index];
        self.waiting.push_back(if payload.is_level() { cost.decode } else { cost.recompute });
        match self.jobs.send((chunk, payload)) {
            Ok(()) => Ok(()),
            // The thread says why before it ends.
            Err(_) => self.finish().and(Err(ended())),
        }
    }

    fn backlog(&self, _: f64) -> f64 {
        self.waiting.iter().skip(self.done.load(Ordering::Acquire)).sum()
    }

    fn pace(&self) -> f64 {
        self.recomputed.pace()
    }

    fn finish(&mut self) -> Result<Vec<Computed>> {
        let results = (0..self.waiting.len()).map(|_| self.results.recv().map_err(|_| ended())?);
        let computed = results.collect::<Result<_>>()?;
        self.waiting.clear();
        self.done.store(0, Ordering::Release);
        Ok(computed)
    }
}
