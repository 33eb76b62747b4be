//! Caches of this crate behind a link: frames are decoded, chunks of text recomputed.

use std::ops::Range;

use codec_core::Profile;
use kv_llama::{Decoder, KvCache};
use kv_stream::{Caches, ChunkFrame, LayerKv, Payload, RequestChunk};
use rayon::prelude::*;

use crate::{Error, Result};

/// A context that is loaded in chunks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    /// Tokens from position 0 on.
    pub tokens: Vec<u32>,
    /// Positions of the tokens of every chunk, in order.
    pub chunks: Vec<Range<usize>>,
    /// First tokens, which no frame holds. They are recomputed at any level.
    pub exact: usize,
}

impl Context {
    /// Positions of the tokens in the frames of a chunk.
    pub(crate) fn coded(&self, chunk: usize) -> Range<usize> {
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
    /// The requests' caches. A cache ends after the first chunk that could not be appended.
    pub caches: Vec<&'a mut dyn KvCache>,
    /// The decoder that recomputes chunks.
    pub decoder: &'a mut Decoder,
}

/// [`Target`], in which chunks have ended once they have begun.
struct Added<'a> {
    target: Target<'a>,
    damaged: Option<String>, // of the last chunk
}

impl Caches for Added<'_> {
    const AHEAD: usize = 0;

    fn begin(&mut self, chunk: RequestChunk, payload: Payload) -> kv_stream::Result<()> {
        self.damaged = self.target.add(chunk, payload)?;
        Ok(())
    }

    fn end(&mut self) -> kv_stream::Result<Option<String>> {
        Ok(self.damaged.take())
    }
}

impl<'a> Target<'a> {
    /// The caches for [`serve_into`](kv_stream::serve_into).
    ///
    /// # Errors
    /// [`Error::Argument`] unless there are as many caches as contexts.
    pub fn into_caches(self) -> Result<impl Caches + 'a> {
        if self.caches.len() != self.contexts.len() {
            return Err(Error::argument("every context needs a cache"));
        }
        Ok(Added { target: self, damaged: None })
    }

    /// Appends a chunk to its cache. Returns the reason if bytes could not be decoded and it was recomputed.
    fn add(&mut self, id: RequestChunk, payload: Payload) -> Result<Option<String>> {
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

/// The rows of all layers from the frame of these tokens at this level.
pub(super) fn decode(
    planes: &Profile,
    bytes: &[u8],
    tokens: &Range<usize>,
    level: usize,
) -> kv_stream::Result<Vec<LayerKv>> {
    let frame = ChunkFrame::parse(planes, bytes, tokens, level)?;
    (0..planes.info().layers).into_par_iter().map(|layer| frame.layer(layer)).collect()
}
