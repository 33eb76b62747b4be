//! The other end of a link: what turns chunks into keys and values.

use bytes::Bytes;

use crate::{Payload, RequestChunk, Result};

/// Turns arrived chunks into keys and values, in the order in which it gets them, while the link works.
pub trait Receiver {
    /// Takes a chunk to decode or to recompute.
    ///
    /// # Errors
    /// If the receiver can accept no more chunks. A chunk that cannot be decoded is recomputed, and
    /// [`Computed`] says so.
    fn submit(&mut self, now: f64, chunk: RequestChunk, payload: Payload) -> Result<()>;

    /// Whether it decodes chunks while they are in flight.
    fn takes_arriving(&self) -> bool {
        false
    }

    /// Offers the first bytes of a chunk in flight at a level. The whole chunk is submitted later, unless
    /// another choice or an error comes first.
    ///
    /// # Errors
    /// If the receiver can accept no more chunks.
    fn arriving(&mut self, _chunk: RequestChunk, _level: usize, _start: Bytes) -> Result<()> {
        Ok(())
    }

    /// Expected seconds of its remaining work, where those of recomputations are scaled by `pace`.
    fn backlog(&self, now: f64, pace: f64) -> f64;

    /// Measured over expected seconds of the recomputations so far, by which later expectations are scaled;
    /// none before the first one has ended.
    fn pace(&self) -> Option<f64> {
        Some(1.0)
    }

    /// Waits for all its work, and returns the chunks done since the last call, in order.
    ///
    /// # Errors
    /// Those of a recomputation and of the receiver.
    fn finish(&mut self) -> Result<Vec<Computed>>;
}

/// The work of a receiver on a chunk, on the link's clock.
#[derive(Clone, Debug, PartialEq)]
pub struct Computed {
    /// The chunk.
    pub chunk: RequestChunk,
    /// Start of its decoding or recomputation.
    pub start: f64,
    /// End of its decoding or recomputation.
    pub end: f64,
    /// The reason why bytes were not decoded and the chunk was recomputed.
    pub damaged: Option<String>,
}
