//! Chunks of contexts: their costs, and what arrives for them.

use bytes::Bytes;

/// A chunk of a request's context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestChunk {
    /// The request, in the order of the arguments of [`serve`](crate::serve).
    pub request: usize,
    /// The chunk's index in the context.
    pub index: usize,
}

/// The costs of a chunk's encodings.
#[derive(Clone, Debug, PartialEq)]
pub struct ChunkCost {
    /// Tokens.
    pub tokens: usize,
    /// Bytes of each level, the least lossy first.
    pub levels: Vec<u64>,
    /// Seconds to decode a level.
    pub decode: f64,
    /// Seconds to recompute keys and values on top of earlier chunks.
    pub recompute: f64,
}

/// A chunk as passed to a receiver.
#[derive(Clone, Debug, PartialEq)]
pub enum Payload {
    /// To be recomputed from tokens that the receiver has.
    Text,
    /// The bytes of a level.
    Level(usize, Bytes),
    /// Bytes that differ from those written, with the reason. The chunk is recomputed.
    Damaged(String),
}

impl Payload {
    pub(crate) const fn is_level(&self) -> bool {
        matches!(self, Self::Level(..))
    }
}
