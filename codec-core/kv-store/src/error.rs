//! What can go wrong with a store.

use std::time::Duration;

use crate::backend_text;

/// An error of a store.
///
/// Bytes that differ from those written are rejected with an error, never returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The URL names no store that this build can open.
    #[error("{url}: {what}")]
    Url {
        /// The URL, without user and password.
        url: String,
        /// What is wrong with it.
        what: String,
    },
    /// The URL needs a client that this build lacks.
    #[error("{url}: needs a build with `--features {feature}`")]
    Feature {
        /// The URL, without user and password.
        url: String,
        /// The feature of this crate.
        feature: &'static str,
    },
    /// The store rejected a request, or it failed until the store had been away for too long.
    #[error("{}", backend_text::line(path, source))]
    Backend {
        /// The object.
        path: String,
        /// What the store said.
        source: object_store::Error,
    },
    /// The store gave no answer.
    #[error("{path}: no answer from {server}, which may be away for {budget:?}")]
    Timeout {
        /// The object.
        path: String,
        /// The store.
        server: String,
        /// How long it may be away.
        budget: Duration,
    },
    /// The server cannot write an object only if there is none.
    #[error(
        "{server}: the server has no conditional writes (PUT with `If-None-Match: *`), by which the first of \
         several writers of a chunk wins"
    )]
    NoConditions {
        /// The store.
        server: String,
    },
    /// The store acknowledged the write of an object, or said that it exists, and does not hold it.
    #[error("{path}: the store said that it is stored, and does not hold it")]
    NotKept {
        /// The object.
        path: String,
    },
    /// The store acknowledged the deletion of an object, and still holds it.
    #[error("{path}: the store said that it is deleted, and still holds it")]
    NotDeleted {
        /// The object.
        path: String,
    },
    /// The call was cancelled.
    #[error("cancelled")]
    Cancelled,
    /// An object named by its manifest is missing: it was deleted during the read.
    #[error("{path}: is not there, although a manifest names it")]
    Missing {
        /// The object.
        path: String,
    },
    /// An object is shorter or longer than it must be.
    #[error("{path}: is {actual} B long, where it must be {expected} B")]
    Length {
        /// The object.
        path: String,
        /// Bytes that the manifest or the request names.
        expected: u64,
        /// Bytes received, counted up to the first excess one.
        actual: u64,
    },
    /// An object is longer than any that is written there.
    #[error("{path}: is {actual} B long, of at most {limit} B")]
    TooLong {
        /// The object.
        path: String,
        /// Its bytes.
        actual: u64,
        /// The limit.
        limit: u64,
    },
    /// Bytes do not match the digest written with them.
    #[error("{path}: is damaged, or another object: its digest differs")]
    Digest {
        /// The object.
        path: String,
    },
    /// An object is not of this format, or is another one's in its place.
    #[error("{path}: {what}")]
    Object {
        /// The object.
        path: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// A size is beyond a limit.
    #[error("{what}: {actual}, at most {limit} are allowed")]
    Limit {
        /// The size.
        what: &'static str,
        /// The requested size.
        actual: u64,
        /// The limit.
        limit: u64,
    },
    /// An argument is wrong.
    #[error("{0}")]
    Argument(&'static str),
    /// A frame cannot be encoded, parsed or decoded.
    #[error("codec-core: {0}")]
    Codec(#[from] codec_core::Error),
    /// The system could not provide random numbers, threads or memory.
    #[error("{what}: {source}")]
    System {
        /// The requested resource.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The result of every call to a store.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// The number of the variant, for callers in other languages, in the space of `codec-core`'s: a number never
    /// changes its meaning, and an error of the codec keeps its own.
    ///
    /// | code | error | code | error | code | error |
    /// | --- | --- | --- | --- | --- | --- |
    /// | 501 | `Url` | 506 | `NotKept` | 511 | `TooLong` |
    /// | 502 | `Feature` | 507 | `NotDeleted` | 512 | `Digest` |
    /// | 503 | `Backend` | 508 | `Cancelled` | 513 | `Object` |
    /// | 504 | `Timeout` | 509 | `Missing` | 514 | `Limit` |
    /// | 505 | `NoConditions` | 510 | `Length` | 515 | `Argument` |
    /// | | | | | 516 | `System` |
    #[must_use]
    pub const fn code(&self) -> u32 {
        match self {
            Self::Url { .. } => 501,
            Self::Feature { .. } => 502,
            Self::Backend { .. } => 503,
            Self::Timeout { .. } => 504,
            Self::NoConditions { .. } => 505,
            Self::NotKept { .. } => 506,
            Self::NotDeleted { .. } => 507,
            Self::Cancelled => 508,
            Self::Missing { .. } => 509,
            Self::Length { .. } => 510,
            Self::TooLong { .. } => 511,
            Self::Digest { .. } => 512,
            Self::Object { .. } => 513,
            Self::Limit { .. } => 514,
            Self::Argument(_) => 515,
            Self::System { .. } => 516,
            Self::Codec(e) => e.code(),
        }
    }

    /// Whether another attempt may succeed. Damaged bytes count: a read may be stale, or corrupted in
    /// transit.
    pub(crate) fn is_transient(&self) -> bool {
        match self {
            Self::Backend { source, .. } => {
                matches!(source, object_store::Error::Generic { .. } | object_store::Error::JoinError { .. })
                    && !backend_text::is_final(source)
            }
            Self::Timeout { .. }
            | Self::Length { .. }
            | Self::Digest { .. }
            | Self::Object { .. }
            | Self::Missing { .. } => true,
            _ => false,
        }
    }

    /// Whether an object's bytes differ from those written.
    pub(crate) const fn is_torn(&self) -> bool {
        matches!(self, Self::Length { .. } | Self::TooLong { .. } | Self::Digest { .. } | Self::Object { .. })
    }

    /// Whether the store refused a request, did not answer, or does not do what it acknowledges: nothing is
    /// known about the object.
    #[must_use]
    pub const fn is_failure(&self) -> bool {
        matches!(
            self,
            Self::Backend { .. }
                | Self::Timeout { .. }
                | Self::NoConditions { .. }
                | Self::NotKept { .. }
                | Self::NotDeleted { .. }
        )
    }

    /// Whether the store holds wrong data for the chunk, as opposed to not answering: the chunk counts as not
    /// stored, and may be written again.
    #[must_use]
    pub const fn is_damage(&self) -> bool {
        matches!(
            self,
            Self::Missing { .. }
                | Self::Length { .. }
                | Self::TooLong { .. }
                | Self::Digest { .. }
                | Self::Object { .. }
                | Self::Limit { .. }
                | Self::Codec(_)
        )
    }
}

/// An error of a store as one of a link.
impl From<Error> for kv_stream::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::Cancelled => Self::Cancelled,
            e if e.is_damage() => Self::Damage(e.into()),
            e => Self::Link(e.into()),
        }
    }
}
