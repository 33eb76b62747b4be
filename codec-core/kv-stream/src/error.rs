//! What can go wrong with a stream.

use std::ops::Range;

/// An error of a transport or of an engine, which the loop only passes on.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error of a stream.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong.
    #[error("{0}")]
    Argument(String),
    /// A transfer brought no byte for longer than [`Options::timeout`](crate::Options::timeout).
    #[error("chunk {chunk} has stalled at {received} of {total} bytes for {idle:.1} s")]
    Stalled {
        /// The chunk's index in its context.
        chunk: usize,
        /// Bytes received.
        received: u64,
        /// Bytes of the chunk.
        total: u64,
        /// Seconds since the last byte.
        idle: f64,
    },
    /// A link was asked for bytes that no transfer brings.
    #[error("the link has no transfer")]
    NoTransfer,
    /// A chunk, or a level of it, that the link does not have.
    #[error("chunk {chunk} is not there at level {level}")]
    NoChunk {
        /// The chunk's index in its context.
        chunk: usize,
        /// The level.
        level: usize,
    },
    /// A frame holds other tokens, or another level, than the chunk that it stands for.
    #[error(
        "a frame of tokens {found:?} at level {found_level}, not of {expected:?} at level {expected_level}"
    )]
    OtherFrame {
        /// Positions of the frame's tokens.
        found: Range<u64>,
        /// The frame's level.
        found_level: usize,
        /// Positions of the chunk's tokens.
        expected: Range<usize>,
        /// The chunk's level.
        expected_level: usize,
    },
    /// The thread that fills the caches has ended before the stream.
    #[error("the thread that decodes has ended")]
    ReceiverEnded,
    /// A frame cannot be encoded, parsed or decoded, or the policy's settings are invalid.
    #[error("codec-core: {0}")]
    Codec(#[from] codec_core::Error),
    /// The caller has cancelled the link. The stream ends, whatever [`Options::fall_back`](crate::Options)
    /// says.
    #[error("cancelled")]
    Cancelled,
    /// The bytes of a chunk differ from those written. The next chunk may be sound.
    #[error(transparent)]
    Damage(BoxError),
    /// An error of the link's transport.
    #[error(transparent)]
    Link(BoxError),
    /// An error of the caches that the stream fills.
    #[error(transparent)]
    Caches(BoxError),
}

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;
