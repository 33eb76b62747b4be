//! The error of every call of this crate.

/// An error of a cache on a device.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong.
    #[error("{0}")]
    Argument(String),
    /// The data of a calibration are wrong, or of another model.
    #[error("{0}")]
    Profile(String),
    /// The device has no memory for a buffer, or the memory limit is reached.
    #[error("{bytes} bytes of device memory for {purpose}: {reason}")]
    DeviceMemory {
        /// Bytes requested.
        bytes: usize,
        /// Their purpose.
        purpose: &'static str,
        /// The reason.
        reason: String,
    },
    /// The host has no memory for rows that the device reads.
    #[error("{bytes} bytes of host memory: {reason}")]
    HostMemory {
        /// Bytes requested.
        bytes: usize,
        /// The reason.
        reason: String,
    },
    /// The page pool of a cache is too small for the tokens of its sequences.
    #[error(
        "{needed} more pages of {page} tokens are needed, and {free} of {pages} are free: end a sequence, or give \
         the pool more tokens"
    )]
    Pages {
        /// Missing pages.
        needed: usize,
        /// Free pages.
        free: usize,
        /// All pages.
        pages: usize,
        /// Tokens per page.
        page: usize,
    },
    /// Rows cannot be coded: their tokens are undefined now.
    #[error("keys or values are not finite, or too large for the steps of their channels")]
    Rows,
    /// An error of the GPU.
    #[error("device: {0}")]
    Gpu(#[from] kv_gpu::Error),
    /// An error of `pq-core`.
    #[error("pq-core: {0}")]
    Pq(#[from] pq_core::Error),
    /// An error of `codec-core`.
    #[error("codec-core: {0}")]
    Codec(#[from] codec_core::Error),
    /// A stored frame is of other tokens, or of another level.
    #[cfg(feature = "load")]
    #[error("stream: {0}")]
    Stream(#[from] kv_stream::Error),
}

/// The result of every call that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// A wrong argument.
    pub(crate) fn argument(what: impl Into<String>) -> Self {
        Self::Argument(what.into())
    }
}
