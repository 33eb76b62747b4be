//! Contexts encoded at several levels, in memory.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use codec_core::Place;
use kv_llama::{Decoder, KvCache, prefill};
use kv_methods::{Method, Profile};
use kv_model::{Model, Rope};
use kv_stream::{Bytes, ChunkCost, LayerKv, PrefillTime, RequestChunk, Source, Speeds, encode_frames};

use super::target::{Context, decode};
use crate::{Error, Result};

/// First tokens, which are recomputed at any level: they are exact and take no bytes.
pub const SINKS: usize = 4;

/// One codec profile of the planes of several `cachegen` methods, one level each.
///
/// # Errors
/// [`Error::Argument`] for no methods, more than [`codec_core::MAX_LEVELS`], or one without a bitstream;
/// [`kv_methods::Error::Profile`].
pub fn levels(methods: &[Method], model: &Model, profile: &Profile) -> Result<codec_core::Profile> {
    if methods.len() > codec_core::MAX_LEVELS {
        let what = format!("{} levels, not 1 to {}", methods.len(), codec_core::MAX_LEVELS);
        return Err(Error::Argument(what));
    }
    if methods.is_empty() {
        return Err(Error::argument("no levels"));
    }
    Ok(codec_core::Profile::join(Method::planes_of(methods, &model.config, profile)?)?)
}

/// A context in chunks, each at all levels of a profile, with the speeds of loading it.
#[derive(Clone)]
pub struct EncodedContext {
    context: Context,
    frames: Vec<Vec<Bytes>>, // by chunk and level
    values_per_token: usize,
    speeds: Speeds,
}

impl EncodedContext {
    /// Runs the model over `tokens`, encodes every chunk at every level, and measures the speeds of
    /// recomputing and decoding.
    ///
    /// # Errors
    /// [`Error::Argument`] unless there are more tokens than sinks and chunks are longer than the sinks;
    /// errors of the model and the codec.
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
        let timed = |tokens: &[u32], layers: &mut Vec<LayerKv>| {
            let start = Instant::now();
            prefill(model, rope, tokens, &mut |_, activations| {
                layers.push(LayerKv { keys: activations.k.to_vec(), values: activations.v.to_vec() });
                Ok(())
            })?;
            Result::Ok((tokens.len() as f64, start.elapsed().as_secs_f64().max(f64::MIN_POSITIVE)))
        };
        let part = timed(&tokens[..tokens.len().div_ceil(4)], &mut vec![])?;
        let whole = timed(tokens, &mut layers)?;
        let starts = (0..tokens.len()).step_by(chunk_tokens);
        let chunks: Vec<_> = starts.map(|start| start..tokens.len().min(start + chunk_tokens)).collect();
        let rows: Vec<_> = layers.iter().map(LayerKv::rows).collect();
        let place = Place::nhd(model.config.n_kv_heads, model.config.head_dim);
        let encode = |chunk: &Range<usize>| {
            let coded = chunk.start.max(SINKS)..chunk.end;
            let place = Place { first_token: coded.start, ..place };
            let frames = encode_frames(planes, &coded, &rows, &place)?;
            Ok(frames.into_iter().map(Bytes::from).collect())
        };
        let frames = chunks.iter().map(encode).collect::<Result<Vec<Vec<Bytes>>>>()?;
        let context = Context { tokens: tokens.to_vec(), chunks, exact: SINKS };
        let start = Instant::now();
        for (index, frames) in frames.iter().enumerate() {
            if let Some(frame) = frames.last() {
                decode(planes, frame, &context.coded(index), frames.len() - 1)?;
            }
        }
        let values_per_token = model.config.kv_values_per_token();
        let values = (tokens.len() * values_per_token) as f64;
        let decode_rate = values / start.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
        let speeds = Speeds { prefill: PrefillTime::fit(&[part, whole])?, decode_rate };
        Self::new(context, frames, values_per_token, speeds)
    }

    /// A context from the frames of its chunks, each at all levels.
    ///
    /// # Errors
    /// [`Error::Argument`] for a wrong number of chunks.
    pub fn new(
        context: Context,
        frames: Vec<Vec<Bytes>>,
        values_per_token: usize,
        speeds: Speeds,
    ) -> Result<Self> {
        if frames.len() != context.chunks.len() {
            let (frames, chunks) = (frames.len(), context.chunks.len());
            return Err(Error::Argument(format!("frames of {frames} chunks for {chunks}")));
        }
        Ok(Self { context, frames, values_per_token, speeds })
    }

    /// The same context with the speeds of another machine, and with its frames mapped by `frame`.
    ///
    /// # Errors
    /// Those of `frame`.
    pub fn with(&self, speeds: Speeds, frame: impl Fn(&Bytes) -> Result<Bytes>) -> Result<Self> {
        let levels = |levels: &Vec<Bytes>| levels.iter().map(&frame).collect();
        let frames = self.frames.iter().map(levels).collect::<Result<_>>()?;
        Self::new(self.context.clone(), frames, self.values_per_token, speeds)
    }

    /// Its tokens and chunks.
    #[must_use]
    pub const fn context(&self) -> &Context {
        &self.context
    }

    /// The speeds of this machine.
    #[must_use]
    pub const fn speeds(&self) -> Speeds {
        self.speeds
    }

    /// Fits the time of recomputing chunks into `cache`, which is empty and stays so: it is measured in a copy
    /// on the first chunk's tokens, at its beginning and over the first chunk's rows, repeated up to `depth`
    /// tokens.
    ///
    /// # Errors
    /// Those of the decoder, the cache and the codec.
    pub fn recomputing(
        &self,
        planes: &codec_core::Profile,
        decoder: &mut Decoder,
        cache: &dyn KvCache,
        depth: usize,
    ) -> Result<PrefillTime> {
        let tokens = &self.context.tokens[self.context.chunks[0].clone()];
        let rows = decode(planes, self.frame(0, 0)?, &self.context.coded(0), 0)?;
        let mut copy = cache.clone_box();
        let mut timed = |copy: &mut dyn KvCache| {
            let (from, start) = (copy.seq_len(), Instant::now());
            decoder.prefill(tokens, copy)?;
            let seconds = start.elapsed().as_secs_f64().max(f64::MIN_POSITIVE);
            Result::Ok((from as f64..copy.seq_len() as f64, seconds))
        };
        let first = timed(copy.as_mut())?;
        while copy.seq_len() + self.context.coded(0).len() <= depth {
            let pos = copy.seq_len();
            for (l, LayerKv { keys, values }) in rows.iter().enumerate() {
                copy.prefill(l, pos, keys, values)?;
            }
        }
        Ok(PrefillTime::fit_chunks(&[first, timed(copy.as_mut())?])?)
    }

    /// The costs of the chunks' encodings on this machine.
    #[must_use]
    pub fn costs(&self) -> Vec<ChunkCost> {
        let len = |frames: &Vec<Bytes>| frames.iter().map(|frame| frame.len() as u64).collect();
        let chunks = self.context.chunks.iter().zip(&self.frames);
        chunks.map(|(chunk, frames)| self.speeds.cost(chunk, self.values_per_token, len(frames))).collect()
    }

    /// Bytes of the whole context at each level.
    #[must_use]
    pub fn level_bytes(&self) -> Vec<usize> {
        let levels = self.frames.first().map_or(0, Vec::len);
        (0..levels).map(|level| self.frames.iter().map(|frames| frames[level].len()).sum()).collect()
    }

    /// The encoded bytes of a chunk, mutable for tests and tools.
    #[must_use]
    pub fn chunk_mut(&mut self, index: usize, level: usize) -> Option<&mut Bytes> {
        self.frames.get_mut(index)?.get_mut(level)
    }

    /// Elements in the keys and values of a token.
    #[must_use]
    pub const fn values_per_token(&self) -> usize {
        self.values_per_token
    }

    /// The encoded bytes of a chunk.
    ///
    /// # Errors
    /// [`kv_stream::Error::NoChunk`].
    pub fn frame(&self, index: usize, level: usize) -> kv_stream::Result<&Bytes> {
        let frame = self.frames.get(index).and_then(|frames| frames.get(level));
        frame.ok_or(kv_stream::Error::NoChunk { chunk: index, level })
    }
}

/// The contexts of requests, as a link's source. Several requests may share one.
pub struct Memory(pub Vec<Arc<EncodedContext>>);

impl Source for Memory {
    fn bytes(&self, chunk: RequestChunk, level: usize) -> kv_stream::Result<u64> {
        Ok(self.0[chunk.request].frame(chunk.index, level)?.len() as u64)
    }

    fn read(&self, chunk: RequestChunk, level: usize) -> kv_stream::Result<Bytes> {
        Ok(self.0[chunk.request].frame(chunk.index, level)?.clone())
    }
}
