use std::collections::VecDeque;
use std::ops::Range;
use std::time::Instant;

use bytes::Bytes;

use super::{FRAMES, Loader};
use crate::device::{CHUNK, Decoder};
use crate::stream::receiver::{Caches, Context};
use crate::stream::speeds::{PrefillTime, Speeds};
use crate::stream::{ChunkId, Payload};
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

    fn recompute(&mut self, tokens: Range<usize>) -> Result<()> {
        if tokens.is_empty() {
            return Ok(());
        }
        self.decoder.prefill(&[self.context.tokens[tokens].to_vec()], CHUNK)
    }

    /// Begins to load a frame; what is wrong with it, if it cannot be loaded.
    fn load(&mut self, tokens: &Range<usize>, level: usize, bytes: Bytes) -> Result<Option<String>> {
        match self.decoder.begin_load(self.loader, tokens.clone(), level, bytes) {
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

    fn begin(&mut self, chunk: ChunkId, payload: Payload) -> Result<()> {
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

    fn end(&mut self) -> Result<Option<String>> {
        let Some(Begun { tokens, loads, damaged }) = self.begun.pop_front() else { return Ok(None) };
        if !loads {
            return Ok(damaged);
        }
        match self.decoder.end_load(self.loader) {
            Err(e) if is_of_frame(&e) => {
                // The chunks after it are gone, too.
                let end = self.begun.back().map_or(tokens.end, |last| last.tokens.end);
                self.recompute(tokens.start..end)?;
                for later in self.begun.iter_mut().filter(|later| later.loads) {
                    (later.loads, later.damaged) = (false, Some(e.to_string()));
                }
                Ok(Some(e.to_string()))
            }
            ended => ended.map(|()| None),
        }
    }
}
