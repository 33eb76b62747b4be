//! The decode step of a batch as one graph, and the prefill before it.

mod launch;
mod load;
pub(super) mod picks;
pub(super) mod prompt;
mod sequences;

use std::sync::Arc;

use cudarc::driver::CudaGraph;
use kv_device::{Allocating, Buffer, DeviceCache, Gpu, Timed};
use kv_gpu::pq::Prefetch;
use kv_gpu::{DevicePtr, Kernel};
use kv_llama::Sampling;
use kv_model::Rope;

use super::products::{Context, StepProducts};
use super::weights::Weights;
use crate::ranks::{Communicator, Rank};
use crate::{Error, Result};
use picks::{NO_TOKEN, Picks};
use prompt::Prompts;

/// Default chunk size of a prompt, in tokens. Packed weights are unpacked once per segment of up to eight
/// chunks and products of few rows are slower, so smaller chunks take longer per token; larger ones take more
/// memory.
pub const CHUNK: usize = 8192;

/// Runs steps of a batch of sequences over a cache: the model on the device, one graph per step.
pub struct Decoder {
    gpu: Arc<Gpu>,
    weights: Arc<Weights>,
    cache: DeviceCache,
    batch: usize,
    products: StepProducts,
    begin: Kernel,
    sequences: Sequences,
    activations: Activations,
    cos: Buffer<f32>, // (capacity, head_dim / 2)
    sin: Buffer<f32>,
    picks: Picks,
    graph: Option<CudaGraph>,
    communicator: Option<Arc<dyn Communicator>>, // of ranks; dropped after the graph with its exchanges
    prompts: Option<Prompts>,                    // made by the first ones
    short_prompts: Option<Prompts>,              // the same, of few tokens with packed weights
    logits_of_all: Option<Buffer<f32>>,          // (batch, vocab), of which one sequence's are used
    longest: usize,                              // position of the furthest token, at most
    lengths: Option<Vec<usize>>,                 // of the sequences, until a step may end one
    clears: u64,                                 // how often the sequences have been emptied
    ended: Vec<bool>,                            // whether a sequence is empty and idle
}

/// The sequences of a batch, on the device. (batch,) each.
struct Sequences {
    tokens: Buffer<u32>,        // to be fed next
    positions: Buffer<u32>,     // of these tokens
    running: Buffer<u32>,       // 0 once a sequence has ended
    slots: Buffer<u32>,         // their rows among all exact rows, for the first head
    exact_lengths: Buffer<u32>, // exact tokens, these included
    coded_lengths: Buffer<u32>, // tokens that are not exact
}

impl Sequences {
    /// What caches read of them.
    const fn of_cache(&self) -> kv_device::Sequences {
        kv_device::Sequences {
            positions: self.positions.pointer(),
            exact_lengths: self.exact_lengths.pointer(),
            coded_lengths: self.coded_lengths.pointer(),
        }
    }
}

/// The activations of a step, (batch, ...) each.
struct Activations {
    residual: Buffer<f32>, // hidden
    queries: Buffer<u16>,  // n_heads, head_dim
    attended: Buffer<u16>, // n_heads, head_dim
    logits: Buffer<f32>,   // vocab
}

/// A part of a step, for [`Decoder::time`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Products with weights, and the operations fused with them: norms, RoPE and append, SwiGLU, residual
    /// sums. Also the kernels after RoPE: the part of a rotated mean in the scores, and maps of queries and
    /// keys.
    Products,
    /// Attention.
    Attention,
    /// Embedding and the choice of tokens.
    Rest,
}

impl Decoder {
    /// A decoder of a batch over an empty cache. Compiles the kernels that are not compiled yet.
    ///
    /// # Errors
    /// [`Error::Argument`] for more sequences than the [layout](crate::WeightLayout::most_sequences) of the
    /// weights takes, and for weights of a part of a model; [`Error::Blas`] for weights in rows without
    /// cuBLASLt; [`Error::Device`].
    pub fn new(gpu: Arc<Gpu>, weights: Arc<Weights>, cache: DeviceCache, batch: usize) -> Result<Self> {
        Self::of_rank(&Rank::alone(gpu), weights, cache, batch)
    }

    /// As [`Self::new`] for a rank of a model in parts: its weights, a cache of its heads. All ranks call the
    /// same functions with the same arguments, in the same order; one that fails must end the others
    /// ([`Lockstep`](crate::ranks::Lockstep) does all that).
    ///
    /// # Errors
    /// As [`Self::new`], and [`Error::Argument`] for weights of another rank.
    pub fn of_rank(rank: &Rank, weights: Arc<Weights>, mut cache: DeviceCache, batch: usize) -> Result<Self> {
        let (Rank { gpu, communicator }, shard) = (rank.clone(), rank.shard());
        let _purpose = Allocating::new("steps");
        let config = &weights.config;
        let (layout, most) = (weights.layout, weights.layout.most_sequences());
        if batch == 0 || batch > most {
            return Err(Error::Argument(format!("a batch of {batch}: {layout:?} weights take 1 to {most}")));
        }
        if weights.shard != shard {
            let (weights, shard) = (weights.shard, shard);
            return Err(Error::Argument(format!("weights of {weights:?} for {shard:?}")));
        }
        let reads: Vec<Prefetch> = weights.layers.iter().map(|layer| layer.o.read()).collect();
        cache.prefetch_next(&gpu, &reads);
        let words = |n| Buffer::<u32>::zeros(&gpu, n);
        let (floats, halves) = (|n| Buffer::<f32>::zeros(&gpu, n), |n| Buffer::<u16>::zeros(&gpu, n));
        let q_dim = config.q_dim();
        let activations = Activations {
            residual: floats(batch * config.hidden_size)?,
            queries: halves(batch * q_dim)?,
            attended: halves(batch * q_dim)?,
            logits: floats(batch * config.vocab_size)?,
        };
        let context = Context { gpu: &gpu, weights: &weights, communicator: communicator.as_deref() };
        let products = StepProducts::new(
            &context,
            batch,
            cache.background_shared_memory(),
            (activations.residual.pointer(), activations.attended.pointer()),
            activations.logits.pointer(),
        )?;
        let rope = Rope::new(config, cache.capacity());
        let (cos, sin) = rope.tables();
        let step = picks::step_program(weights.element);
        let decoder = Self {
            products,
            begin: gpu.device().kernel(&step, "begin", 0)?,
            sequences: Sequences {
                tokens: words(batch)?,
                positions: words(batch)?,
                running: words(batch)?,
                slots: words(batch)?,
                exact_lengths: words(batch)?,
                coded_lengths: words(batch)?,
            },
            activations,
            cos: Buffer::of(&gpu, cos)?,
            sin: Buffer::of(&gpu, sin)?,
            picks: Picks::new(&gpu, config, weights.element, batch, cache.capacity())?,
            communicator,
            graph: None,
            prompts: None,
            short_prompts: None,
            logits_of_all: None,
            longest: 0,
            lengths: Some(vec![0; batch]),
            clears: 0,
            ended: vec![false; batch],
            batch,
            gpu,
            weights,
            cache,
        };
        decoder.gpu.synchronize()?;
        Ok(decoder)
    }

    /// Cosines and sines (capacity, head_dim / 2).
    const fn angles(&self) -> [DevicePtr<f32>; 2] {
        [self.cos.pointer(), self.sin.pointer()]
    }

    fn context(&self) -> Context<'_> {
        Context { gpu: &self.gpu, weights: &self.weights, communicator: self.communicator.as_deref() }
    }

    /// Fills the cache with hashed rows as if every sequence had `tokens` tokens, and feeds token 1 next.
    ///
    /// # Errors
    /// [`Error::Argument`] for more tokens than the cache holds; [`Error::Device`].
    pub fn fill_random(&mut self, tokens: usize) -> Result<()> {
        let capacity = self.cache.capacity();
        if tokens >= capacity {
            return Err(Error::Argument(format!("{tokens} tokens leave a cache of {capacity} no room")));
        }
        self.cache.fill_random(&self.gpu, tokens)?;
        self.place(&vec![tokens as u32; self.batch])?;
        self.feed(&vec![1; self.batch])
    }

    /// Sets the sampling of later steps; until then it is greedy.
    pub fn choose(&mut self, sampling: Sampling) {
        self.picks.choose(sampling);
        self.graph = None; // captured with the previous sampling
    }

    /// Replaces the tokens that the next step feeds; ended sequences continue.
    ///
    /// # Errors
    /// [`Error::Argument`] for a wrong number of tokens, or tokens outside the vocabulary; [`Error::Device`].
    pub fn feed(&mut self, tokens: &[u32]) -> Result<()> {
        self.check_tokens(tokens)?;
        self.sequences.tokens.write(&self.gpu, tokens)?;
        self.run_those_not_ended()
    }

    /// Rejects tokens outside the vocabulary.
    fn check_tokens(&self, tokens: &[u32]) -> Result<()> {
        let vocab = self.weights.config.vocab_size;
        match tokens.iter().find(|&&token| token as usize >= vocab) {
            Some(token) => {
                Err(Error::Argument(format!("token {token} is outside the vocabulary of {vocab}")))
            }
            None => Ok(()),
        }
    }

    /// Launches a step of the whole batch: its graph, which the first call captures. Waits for nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] if the cache is full, and [`kv_device::Error::Pages`] if its pages are; the
    /// sequences are unchanged then. [`Error::Device`].
    pub fn step(&mut self) -> Result<()> {
        if self.communicator.as_ref().is_some_and(|communicator| !communicator.is_capturable()) {
            return self.step_eagerly();
        }
        self.prepare()?;
        let graph = match self.graph.take() {
            Some(graph) => graph,
            None => self.gpu.capture(|| self.launch(&[Part::Products, Part::Attention, Part::Rest]))?,
        };
        let launched = graph.launch().map_err(|e| Error::driver("launch a step", e));
        self.graph = Some(graph);
        launched
    }

    /// As [`Self::step`], without a graph.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_eagerly(&mut self) -> Result<()> {
        self.prepare()?;
        self.launch(&[Part::Products, Part::Attention, Part::Rest])
    }

    fn prepare(&mut self) -> Result<()> {
        let capacity = self.cache.capacity();
        // The furthest sequence may have ended, or have been emptied, since.
        if self.longest >= capacity {
            self.longest = self.lengths()?.into_iter().max().unwrap_or(0);
        }
        if self.longest >= capacity {
            return Err(Error::Argument(format!("the cache of {capacity} tokens is full")));
        }
        // SAFETY: the sequences have numbers of the batch, and are within the capacity, as has just been
        // checked.
        unsafe { self.cache.before_step(&self.gpu, &self.sequences.of_cache()) }?;
        self.longest += 1;
        self.lengths = None;
        Ok(())
    }

    /// Logits (batch, vocab_size) of the last step. Waits for it.
    ///
    /// # Errors
    /// [`kv_llama::Error::Logits`] for a NaN or an infinity among them; [`Error::Device`].
    pub fn logits(&self) -> Result<Vec<f32>> {
        let logits = self.unchecked_logits()?;
        self.check_finite(logits.iter().all(|x| x.is_finite()))?;
        Ok(logits)
    }

    /// The tokens that the next step feeds, (batch,), as chosen by the last step. Waits for it.
    ///
    /// # Errors
    /// [`kv_llama::Error::Logits`] if a sequence's logits held a NaN or an infinity, which ends it;
    /// [`Error::Device`].
    pub fn next_tokens(&self) -> Result<Vec<u32>> {
        self.choices()?.into_iter().map(|choice| choice.ok_or_else(|| self.not_finite())).collect()
    }

    /// The tokens that every sequence has picked since its prompt. Waits for the last step.
    ///
    /// # Errors
    /// As [`Self::next_tokens`].
    pub fn picked(&self) -> Result<Vec<Vec<u32>>> {
        let picked = self.picks.read(&self.gpu)?;
        self.check_finite(!picked.iter().any(|tokens| tokens.contains(&NO_TOKEN)))?;
        Ok(picked)
    }

    /// Number of sequences.
    #[must_use]
    pub const fn batch(&self) -> usize {
        self.batch
    }

    /// The cache.
    #[must_use]
    pub const fn cache(&self) -> &DeviceCache {
        &self.cache
    }

    /// Rows that steps have read from the host so far: [`DeviceCache::fetched_rows`].
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn fetched_rows(&self) -> Result<u64> {
        Ok(self.cache.fetched_rows(&self.gpu)?)
    }

    /// Exact rows that steps have selected so far: [`DeviceCache::selected_rows`].
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn selected_rows(&self) -> Result<Option<u64>> {
        Ok(self.cache.selected_rows(&self.gpu)?)
    }

    /// Milliseconds of each of `rounds` steps, on the device's clock.
    ///
    /// # Errors
    /// What [`Self::step`] returns.
    pub fn time(&mut self, rounds: usize) -> Result<Vec<f32>> {
        (0..rounds).map(|_| self.timed(Self::step)).collect()
    }

    /// Milliseconds of parts of a step, the median of `rounds`: launches of a graph that has these parts
    /// alone. The tokens, lengths and rows of the next step are unchanged.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn time_part(&mut self, part: Part, rounds: usize) -> Result<f32> {
        let graph = self.gpu.capture(|| self.launch(&[part]))?;
        let launch = |_: &mut Self| graph.launch().map_err(|e| Error::driver("launch a part", e));
        let mut times = (0..rounds.max(1)).map(|_| self.timed(launch)).collect::<Result<Vec<f32>>>()?;
        times.sort_by(f32::total_cmp);
        Ok(times[times.len() / 2])
    }

    fn timed(&mut self, run: impl FnOnce(&mut Self) -> Result<()>) -> Result<f32> {
        use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
        let stream = self.gpu.cuda_stream().clone();
        let event =
            || stream.record_event(Some(CU_EVENT_DEFAULT)).map_err(|e| Error::driver("record an event", e));
        let start = event()?;
        run(self)?;
        let end = event()?;
        start.elapsed_ms(&end).map_err(|e| Error::driver("time a step", e))
    }
}

impl Drop for Decoder {
    fn drop(&mut self) {
        // Buffers are freed next; an error of the device has been reported by the step that caused it.
        let _ = self.gpu.synchronize();
    }
}
