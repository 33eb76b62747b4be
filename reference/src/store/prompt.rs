//! A prompt over a store: the stored prefix is loaded, the rest is computed and, when asked, stored.

use codec_core::{Encoding, Profile};
use svd_core::SoftmaxStats;
use tracing::warn;

use super::{Choice, KvStore, LayerKv, Put, Space, StoredChunk, Transfer, encode_chunk, fill_cache};
use crate::Result;
use crate::cache::{Footprint, KvCache};
use crate::forward::{Decoder, prefill};
use crate::model::{Model, Rope};

/// A store with what its caches have in common.
#[derive(Clone, Copy, Debug)]
pub struct PromptStore<'a> {
    /// The store.
    pub store: &'a KvStore,
    /// What the caches belong to.
    pub space: &'a Space,
    /// The codec's planes at every level.
    pub profile: &'a Profile,
}

/// What became of a prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Filled {
    /// Tokens that were loaded, or recomputed as the choice of their chunk said.
    pub loaded: usize,
    /// Encoding and transfer of their chunks.
    pub chunks: Vec<(Encoding, Transfer)>,
    /// Chunks of the store that were damaged. Their tokens, and those after them, were computed.
    pub damaged: usize,
    /// Chunks that were stored.
    pub stored: usize,
    /// Logits (vocab_size,) of what follows the prompt.
    pub logits: Vec<f32>,
}

impl PromptStore<'_> {
    /// Computes keys and values of a context exactly and stores the chunks that are not there (CacheGen's
    /// `calculate_kv` and `store_kv`). Calls `done` with the index of each chunk and the number of all of
    /// them. Returns how many were stored.
    ///
    /// # Errors
    /// What [`prefill`] and the store return.
    pub fn calculate(
        &self,
        model: &Model,
        rope: &Rope,
        tokens: &[u32],
        mut done: impl FnMut(usize, usize),
    ) -> Result<usize> {
        let keys = self.space.chunks(tokens);
        let Some(end) = keys.last().map(|key| key.tokens.end) else { return Ok(0) };
        let found = self.store.find(self.space, &tokens[..end])?;
        let found = found.iter().zip(&keys).take_while(|(found, key)| found.key() == *key).count();
        let mut stored = 0;
        if found < keys.len() {
            let first = keys[found].tokens.start;
            let skipped = first * model.config.kv_dim();
            let mut layers = vec![];
            prefill(model, rope, &tokens[..end], &mut |_, activations| {
                let (keys, values) = (activations.k[skipped..].to_vec(), activations.v[skipped..].to_vec());
                layers.push(LayerKv { keys, values });
                Ok(())
            })?;
            for (i, key) in keys.iter().enumerate().skip(found) {
                let object = encode_chunk(self.profile, key, first, &layers)?;
                stored += usize::from(self.store.put_chunk(self.space, key, object.into())? == Put::Stored);
                done(i, keys.len());
            }
        }
        Ok(stored)
    }

    /// Fills an empty cache with a prompt (CacheGen's `generate_with_kv`, up to the first token): loads the
    /// longest stored prefix, whose encodings `choose` names as for [`KvStore::load`], and computes the rest
    /// over it, `chunk` tokens at once. At least the last token is computed.
    ///
    /// A damaged chunk ends the prefix. With `keep` the chunks of the prompt that are not stored are, and
    /// damaged ones are replaced. They hold what was computed over the loaded prefix, with its loss;
    /// [`Self::calculate`] stores exact ones.
    ///
    /// # Errors
    /// What the decoder and the cache return; what the store returns, but for damage.
    pub fn fill(
        &self,
        decoder: &mut Decoder,
        cache: &mut dyn KvCache,
        prompt: &[u32],
        chunk: usize,
        keep: bool,
        choose: impl FnMut(&Choice<'_>) -> Encoding + Send,
    ) -> Result<Filled> {
        let mut filled = Filled::default();
        let Some((_, before_last)) = prompt.split_last() else {
            return Err(crate::Error::argument("the prompt is empty"));
        };
        let wanted = if keep { self.space.chunks(prompt) } else { vec![] };
        let mut found = self.store.find(self.space, before_last)?;
        // Rows of a tail that has been loaded do not go into a longer chunk: they have lost what its level
        // loses.
        if let Some(tail) = found.last()
            && !wanted.is_empty()
            && !wanted.contains(tail.key())
        {
            found.pop();
        }
        self.load(decoder, cache, prompt, &found, choose, &mut filled)?;
        filled.loaded = cache.seq_len();
        let rest = &prompt[filled.loaded..];
        let mut compute = |cache: &mut dyn KvCache| -> Result<()> {
            for tokens in rest.chunks(chunk.max(1)) {
                filled.logits = decoder.prefill(tokens, cache)?.to_vec();
            }
            Ok(())
        };
        if !keep {
            compute(cache)?;
            return Ok(filled);
        }
        let mut recorder = Recorder::new(cache);
        compute(&mut recorder)?;
        let Recorder { first, layers, .. } = recorder;
        for key in wanted.iter().filter(|key| key.tokens.start >= first) {
            let object = encode_chunk(self.profile, key, first, &layers)?.into();
            if found.iter().any(|found| found.key() == key) {
                self.store.replace_chunk(self.space, key, object)?;
                filled.stored += 1;
            } else {
                filled.stored += usize::from(self.store.put_chunk(self.space, key, object)? == Put::Stored);
            }
        }
        Ok(filled)
    }

    /// Loads chunks into the cache, up to a damaged one.
    fn load(
        &self,
        decoder: &mut Decoder,
        cache: &mut dyn KvCache,
        prompt: &[u32],
        chunks: &[StoredChunk],
        choose: impl FnMut(&Choice<'_>) -> Encoding + Send,
        filled: &mut Filled,
    ) -> Result<()> {
        const AHEAD: usize = 1;
        let loaded = self.store.load(self.space, chunks, AHEAD, choose, |arrival| {
            match arrival.encoding {
                Encoding::Text => drop(decoder.prefill(&prompt[arrival.tokens.clone()], cache)?),
                Encoding::Level(_) => fill_cache(self.profile, &arrival, cache)?,
            }
            filled.chunks.push((arrival.encoding, arrival.transfer));
            Ok(())
        });
        match loaded {
            Err(crate::Error::Store(e)) if e.is_damage() => {
                warn!(error = %e, "the rest is computed");
                filled.damaged = 1;
                cache.truncate(filled.chunks.len().checked_sub(1).map_or(0, |i| chunks[i].key().tokens.end))
            }
            loaded => loaded,
        }
    }
}

/// A cache that also keeps the rows which it takes.
struct Recorder<'a> {
    cache: &'a mut dyn KvCache,
    first: usize, // position of the first row
    layers: Vec<LayerKv>,
}

impl<'a> Recorder<'a> {
    fn new(cache: &'a mut dyn KvCache) -> Self {
        Self { first: cache.seq_len(), cache, layers: vec![] }
    }
}

impl KvCache for Recorder<'_> {
    fn watch(&mut self, layer: usize, queries: &[f32]) {
        self.cache.watch(layer, queries);
    }

    fn prefill(&mut self, layer: usize, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        self.cache.prefill(layer, pos, k, v)?;
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, LayerKv::default);
        }
        self.layers[layer].keys.extend_from_slice(k);
        self.layers[layer].values.extend_from_slice(v);
        Ok(())
    }

    fn attend(&self, layer: usize, q: &[f32], out: &mut [f32]) -> Result<()> {
        self.cache.attend(layer, q, out)
    }

    fn attend_into(
        &self,
        layer: usize,
        pos: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        self.cache.attend_into(layer, pos, q, out, stats)
    }

    fn seq_len(&self) -> usize {
        self.cache.seq_len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.cache.truncate(len)
    }

    fn footprint(&self) -> Footprint {
        self.cache.footprint()
    }

    fn clone_box(&self) -> Box<dyn KvCache> {
        self.cache.clone_box()
    }
}
