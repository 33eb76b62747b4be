//! The receiver of a stream on a device.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use kv_device::{Chunk, FRAMES, Loader};
use kv_llama_gpu::{CHUNK, Decoder};
use kv_stream::{Bytes, Caches, Payload, PrefillTime, RequestChunk, Speeds};

use crate::stream::target::Context;
use crate::{Error, Result};

/// The cache of one request on the device, filled by a stream: frames are decoded and chunks of text
/// recomputed there.
pub struct StreamTarget<'a> {
    decoder: &'a mut Decoder,
    loader: &'a mut Loader,
    context: Context,
    begun: VecDeque<Begun>,
}

/// A chunk that has begun.
struct Begun {
    tokens: Range<usize>, // those of a frame, if there is one
    loads: bool,
    damaged: Option<String>,
}

impl<'a> StreamTarget<'a> {
    /// The decoder's cache, which is empty, for a context.
    pub const fn new(decoder: &'a mut Decoder, loader: &'a mut Loader, context: Context) -> Self {
        Self { decoder, loader, context, begun: VecDeque::new() }
    }

    /// What a stream expects of this device: the time of prefill, measured on these tokens and their first
    /// quarter, in a cache that is emptied. Decoding runs next to transfers and counts as nothing.
    ///
    /// # Errors
    /// What the decoder returns.
    pub fn speeds(decoder: &mut Decoder, tokens: &[u32]) -> Result<Speeds> {
        let mut timed = |tokens: &[u32]| {
            decoder.clear()?;
            let start = Instant::now();
            decoder.prefill(&[tokens.to_vec()], CHUNK)?;
            decoder.logits()?;
            Result::Ok((tokens.len() as f64, start.elapsed().as_secs_f64()))
        };
        timed(tokens)?; // the first prompt makes what later ones use
        let times = [timed(&tokens[..tokens.len().div_ceil(4)])?, timed(tokens)?];
        decoder.clear()?;
        Ok(Speeds { prefill: PrefillTime::fit(&times)?, decode_rate: f64::INFINITY })
    }

    /// Computes a chunk. A cache that takes a frame when it ends takes those before the chunk first.
    fn recompute(&mut self, tokens: Range<usize>) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        self.loader.forget_start()?; // of these rows
        if !self.decoder.loads_in_place() {
            self.end_loads()?;
        }
        Ok(self.decoder.prefill(&[self.context.tokens[tokens].to_vec()], CHUNK)?)
    }

    /// Waits for all frames on their way.
    fn end_loads(&mut self) -> Result<()> {
        (0..self.begun.len()).try_for_each(|i| if self.begun[i].loads { self.end_load(i) } else { Ok(()) })
    }

    /// Waits for the oldest frame on its way, that of a chunk in `begun`, and recomputes the chunk and what
    /// follows it if the frame is not what an encoder writes.
    fn end_load(&mut self, chunk: usize) -> Result<()> {
        match self.decoder.end_load(self.loader).map_err(Error::from) {
            Err(e) if is_of_frame(&e) => {
                // The chunks after it are gone, too.
                let start = self.begun[chunk].tokens.start;
                let end = self.begun.back().map_or(start, |last| last.tokens.end);
                for begun in self.begun.range_mut(chunk..).filter(|begun| begun.loads) {
                    (begun.loads, begun.damaged) = (false, Some(e.to_string()));
                }
                self.recompute(start..end)
            }
            ended => {
                self.begun[chunk].loads = false;
                ended
            }
        }
    }

    /// Begins to load a frame; what is wrong with it, if it cannot be loaded.
    fn load(&mut self, tokens: &Range<usize>, level: usize, bytes: Bytes) -> Result<Option<String>> {
        let chunk = Chunk { sequence: 0, position: tokens.start, count: tokens.len() };
        match self.decoder.begin_load(self.loader, chunk, level, bytes).map_err(Error::from) {
            Err(e) if is_of_frame(&e) => Ok(Some(e.to_string())),
            begun => begun.map(|()| None),
        }
    }
}

/// Whether an error is that of a frame.
const fn is_of_frame(e: &Error) -> bool {
    matches!(e, Error::Codec(_) | Error::Stream(_))
}

impl Caches for StreamTarget<'_> {
    const AHEAD: usize = FRAMES - 1;
    const TAKES_ARRIVING: bool = true;

    fn arriving(&mut self, chunk: RequestChunk, level: usize, start: Bytes) -> kv_stream::Result<()> {
        let (tokens, coded) = (self.context.chunks[chunk.index].clone(), self.context.coded(chunk.index));
        // Tokens before those of the frame are recomputed when the chunk begins.
        if coded.is_empty() || coded.start > tokens.start {
            return Ok(());
        }
        let chunk = Chunk { sequence: 0, position: coded.start, count: coded.len() };
        match self.decoder.begin_load_start(self.loader, chunk, level, start).map_err(Error::from) {
            // What is wrong with a frame is said when it begins.
            Err(e) if is_of_frame(&e) => Ok(()),
            begun => Ok(begun?),
        }
    }

    fn begin(&mut self, chunk: RequestChunk, payload: Payload) -> kv_stream::Result<()> {
        let mut tokens = self.context.chunks[chunk.index].clone();
        let damaged = match payload {
            Payload::Text => None,
            Payload::Damaged(what) => Some(what),
            Payload::Level(level, bytes) => {
                let coded = self.context.coded(chunk.index);
                self.recompute(tokens.start..coded.start)?;
                tokens = coded;
                let damaged = if tokens.is_empty() { None } else { self.load(&tokens, level, bytes)? };
                if damaged.is_none() {
                    self.begun.push_back(Begun { loads: !tokens.is_empty(), tokens, damaged });
                    return Ok(());
                }
                damaged
            }
        };
        self.recompute(tokens.clone())?;
        self.begun.push_back(Begun { tokens, loads: false, damaged });
        Ok(())
    }

    fn end(&mut self) -> kv_stream::Result<Option<String>> {
        if self.begun.front().is_some_and(|oldest| oldest.loads) {
            self.end_load(0)?;
        }
        Ok(self.begun.pop_front().and_then(|oldest| oldest.damaged))
    }
}
