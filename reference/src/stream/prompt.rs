//! A prompt over a store: the stored prefix is loaded, the rest is computed and, if requested, stored.

use std::time::Instant;

use codec_core::{ModelInfo, Place, Profile};
use kv_attend::SoftmaxStats;
#[cfg(feature = "cuda")]
use kv_device::Loader;
use kv_llama::{Decoder, Footprint, KvCache, PromptRows, prefill};
use kv_model::{Model, Rope};
use kv_store::{Check, ChunkKey, Error, KvStore, Put, Space, StoreLink, StoredChunk, encode_chunk};
use kv_stream::{Caches, LayerKv, MOST_CHUNKS, Outcome, RealClock, Speeds, Trace, serve_into};

use super::target::{Context, Target};
use crate::Result;
#[cfg(feature = "cuda")]
use crate::device::StreamTarget;

/// A store, and the common properties of its caches.
#[derive(Clone, Copy, Debug)]
pub struct PromptStore<'a> {
    /// The store.
    pub store: &'a KvStore,
    /// The space of the caches.
    pub space: &'a Space,
    /// The codec's planes at every level.
    pub profile: &'a Profile,
}

/// How a cache is filled.
#[derive(Clone, Debug, PartialEq)]
pub struct FillOptions {
    /// How the stored prefix is streamed.
    pub stream: kv_stream::Options,
    /// Speeds of recomputing and decoding that an adaptive stream assumes.
    pub speeds: Speeds,
    /// Chunk size in tokens for computing the rest.
    pub chunk: usize,
    /// Whether to store missing chunks, and replace damaged ones.
    pub keep: bool,
}

/// How many chunks of a context were written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calculated {
    /// Chunks that were missing and are stored now.
    pub stored: usize,
    /// Chunks that were damaged and are replaced.
    pub repaired: usize,
}

/// The outcome of a prompt.
#[derive(Debug, Default)]
pub struct Filled {
    /// Tokens of the stored prefix.
    pub prefix: usize,
    /// How it was streamed, if there is one.
    pub trace: Option<Trace>,
    /// Chunks that were stored.
    pub stored: usize,
    /// Logits (vocab_size,) after the prompt.
    pub logits: Vec<f32>,
    /// A damaged manifest, which may have shortened the stored prefix.
    pub damage: Option<kv_store::Error>,
    /// The error of a store that did not answer or could not be written. It costs time, not the answer.
    pub store_error: Option<kv_store::Error>,
}

impl Filled {
    /// Indices of the chunks that turned out to be damaged. They were recomputed.
    pub fn damaged(&self) -> impl Iterator<Item = usize> + '_ {
        let events = self.trace.iter().flat_map(|trace| &trace.events);
        events.filter(|event| matches!(event.outcome, Outcome::Damaged(_))).map(|event| event.chunk)
    }
}

/// A step of [`PromptStore::calculate`] that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Keys and values of a layer are computed: its index, and the number of layers.
    Layer(usize, usize),
    /// A chunk is stored: its index, and the number of chunks.
    Chunk(usize, usize),
}

impl PromptStore<'_> {
    /// Computes keys and values of a context exactly and stores the chunks that are missing, or damaged as
    /// far as `check` detects (CacheGen's `calculate_kv` and `store_kv`). Calls `done` after every layer of
    /// all tokens, then after every one of these chunks.
    ///
    /// # Errors
    /// Those of [`prefill`] and the store.
    pub fn calculate(
        &self,
        model: &Model,
        rope: &Rope,
        tokens: &[u32],
        check: Check,
        mut done: impl FnMut(Step),
    ) -> Result<Calculated> {
        let keys = self.space.chunks(tokens);
        let end = keys.last().map_or(0, |key| key.tokens.end);
        let mut found = self.store.find(self.space, &tokens[..end])?;
        let same = found.iter().zip(&keys).take_while(|(found, key)| found.key() == *key).count();
        found.truncate(same);
        let damaged = self.store.damaged(self.space, &found, check)?;
        let wanted: Vec<usize> = damaged.iter().copied().chain(found.len()..keys.len()).collect();
        let mut calculated = Calculated::default();
        let (Some(&first), Some(&last)) = (wanted.first(), wanted.last()) else { return Ok(calculated) };
        let (start, end) = (keys[first].tokens.start, keys[last].tokens.end);
        let skipped = start * model.config.kv_dim();
        let mut layers = vec![];
        prefill(model, rope, &tokens[..end], &mut |l, activations| {
            let (keys, values) = (activations.k[skipped..].to_vec(), activations.v[skipped..].to_vec());
            layers.push(LayerKv { keys, values });
            done(Step::Layer(l, model.config.n_layers));
            Ok(())
        })?;
        for i in wanted {
            match self.store_chunk(&keys[i], damaged.contains(&i), start, &layers)? {
                Put::Stored => calculated.stored += 1,
                Put::Repaired => calculated.repaired += 1,
                Put::Present => {}
            }
            done(Step::Chunk(i, keys.len()));
        }
        Ok(calculated)
    }

    /// Encodes a chunk from rows that start at position `first`, and stores it, also over a damaged one.
    fn store_chunk(
        &self,
        key: &ChunkKey,
        damaged: bool,
        first: usize,
        layers: &[LayerKv],
    ) -> kv_store::Result<Put> {
        let &ModelInfo { heads, head_dim, .. } = self.profile.info();
        let rows: Vec<_> = layers.iter().map(LayerKv::rows).collect();
        let place = Place { first_token: key.tokens.start - first, ..Place::nhd(heads, head_dim) };
        let object = encode_chunk(self.profile, key, &rows, &place)?.into();
        match damaged {
            true => self.store.replace_chunk(self.space, key, object).map(|()| Put::Repaired),
            false => self.store.put_chunk(self.space, key, object),
        }
    }

    /// Fills an empty cache with a prompt (CacheGen's `generate_with_kv`, up to the first token): streams the
    /// longest stored prefix, and computes the rest on top of it. At least the last token is computed.
    ///
    /// Chunks stored with [`FillOptions::keep`] hold rows computed on top of the loaded prefix, with its
    /// loss; [`Self::calculate`] stores exact ones.
    ///
    /// # Errors
    /// Those of [`kv_stream::serve`], the decoder and the cache; a cancelled store.
    pub fn fill(
        &self,
        decoder: &mut Decoder,
        cache: &mut dyn KvCache,
        prompt: &[u32],
        options: &FillOptions,
    ) -> Result<Filled> {
        let wanted = if options.keep { self.space.chunks(prompt) } else { vec![] };
        let mut filled = Filled::default();
        let mut found = self.prefix(prompt, &mut filled)?;
        // Rows of a loaded tail do not go into a longer chunk: they have the loss of its level.
        if let Some(tail) = found.last()
            && !wanted.is_empty()
            && !wanted.contains(tail.key())
        {
            found.pop();
        }
        let mut recorder = Recorder { cache, keep: options.keep, layers: vec![] };
        if let Some(last) = found.last() {
            filled.prefix = last.key().tokens.end;
            let target = Target {
                contexts: vec![context(prompt, &found)],
                planes: self.profile,
                caches: vec![&mut recorder],
                decoder,
            };
            filled.trace = Some(self.stream(target.into_caches()?, &found, options)?);
        }
        for tokens in prompt[filled.prefix..].chunks(options.chunk.max(1)) {
            filled.logits = decoder.prefill(tokens, &mut recorder)?.to_vec();
        }
        if filled.store_error.is_none() {
            match self.keep(&wanted, &found, &mut filled, &recorder.layers) {
                Err(e) if !matches!(e, Error::Cancelled) => filled.store_error = Some(e),
                kept => kept?,
            }
        }
        Ok(filled)
    }

    /// As [`Self::fill`], on a device: the empty cache of a decoder of one sequence, through a loader
    /// of the store's profile. Nothing is stored.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] for [`FillOptions::keep`] and for a batch; those of [`kv_stream::serve`],
    /// the loader and the decoder; a cancelled store.
    #[cfg(feature = "cuda")]
    pub fn fill_device(
        &self,
        decoder: &mut kv_llama_gpu::Decoder,
        loader: &mut Loader,
        prompt: &[u32],
        options: &FillOptions,
    ) -> Result<Filled> {
        if options.keep {
            return Err(crate::Error::argument("keys and values on a device are not stored"));
        }
        let mut filled = Filled::default();
        let found = self.prefix(prompt, &mut filled)?;
        if let Some(last) = found.last() {
            filled.prefix = last.key().tokens.end;
            let target = StreamTarget::new(decoder, loader, context(prompt, &found));
            filled.trace = Some(self.stream(target, &found, options)?);
        }
        decoder.prefill(&[prompt[filled.prefix..].to_vec()], options.chunk.max(1))?;
        filled.logits = decoder.logits()?;
        Ok(filled)
    }

    /// The stored prefix of a prompt, without its last token. A store that does not answer has none.
    fn prefix(&self, prompt: &[u32], filled: &mut Filled) -> Result<Vec<StoredChunk>> {
        let Some((_, before_last)) = prompt.split_last() else {
            return Err(crate::Error::argument("the prompt is empty"));
        };
        let mut found = match self.store.find_or_damage(self.space, before_last) {
            Err(e) if !matches!(e, Error::Cancelled) => {
                filled.store_error = Some(e);
                vec![]
            }
            found => {
                let (found, damage) = found?;
                filled.damage = damage;
                found
            }
        };
        found.truncate(MOST_CHUNKS);
        Ok(found)
    }

    /// Stores the requested chunks that are missing or damaged, from the rows of all tokens.
    fn keep(
        &self,
        wanted: &[ChunkKey],
        found: &[StoredChunk],
        filled: &mut Filled,
        layers: &[LayerKv],
    ) -> kv_store::Result<()> {
        let damaged: Vec<usize> = filled.damaged().collect();
        for key in wanted {
            let index = found.iter().position(|found| found.key() == key);
            if index.is_some_and(|index| !damaged.contains(&index)) {
                continue;
            }
            let put = self.store_chunk(key, index.is_some(), 0, layers)?;
            filled.stored += usize::from(put != Put::Present);
        }
        Ok(())
    }

    /// Streams chunks into an empty cache.
    fn stream(&self, caches: impl Caches, chunks: &[StoredChunk], options: &FillOptions) -> Result<Trace> {
        let clock = RealClock(Instant::now());
        let mut link = StoreLink::new(self.store, self.space, chunks, clock);
        let costs = [link.costs(&options.speeds)];
        Ok(serve_into(&mut link, caches, clock, &costs, &options.stream)?)
    }
}

/// A prompt whose first chunks are stored.
fn context(prompt: &[u32], chunks: &[StoredChunk]) -> Context {
    let chunks = chunks.iter().map(|chunk| chunk.key().tokens.clone()).collect();
    Context { tokens: prompt.to_vec(), chunks, exact: 0 }
}

/// A cache that also records the rows it gets, if they are to be stored.
struct Recorder<'a> {
    cache: &'a mut dyn KvCache,
    keep: bool,
    layers: Vec<LayerKv>,
}

impl KvCache for Recorder<'_> {
    fn prompt_rows(
        &self,
        layer: usize,
        keys: &[f32],
        values: &[f32],
    ) -> kv_llama::Result<Option<PromptRows>> {
        self.cache.prompt_rows(layer, keys, values)
    }

    fn watch(&mut self, layer: usize, queries: &[f32]) {
        self.cache.watch(layer, queries);
    }

    fn watches_all(&self) -> bool {
        self.cache.watches_all()
    }

    fn prefill(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> kv_llama::Result<()> {
        self.cache.prefill(layer, pos, k, v)?;
        if !self.keep {
            return Ok(());
        }
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, LayerKv::default);
        }
        self.layers[layer].keys.extend_from_slice(k);
        self.layers[layer].values.extend_from_slice(v);
        Ok(())
    }

    fn attend(&self, layer: usize, q: &[f32], out: &mut [f32]) -> kv_llama::Result<()> {
        self.cache.attend(layer, q, out)
    }

    fn attend_into(
        &self,
        layer: usize,
        pos: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> kv_llama::Result<()> {
        self.cache.attend_into(layer, pos, q, out, stats)
    }

    fn seq_len(&self) -> usize {
        self.cache.seq_len()
    }

    fn truncate(&mut self, len: usize) -> kv_llama::Result<()> {
        self.cache.truncate(len)
    }

    fn footprint(&self) -> Footprint {
        self.cache.footprint()
    }

    fn clone_box(&self) -> Box<dyn KvCache> {
        self.cache.clone_box()
    }
}
