//! What can go wrong in a loop on a GPU.

use cudarc::driver::DriverError;

/// An error, with a one-line message for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong.
    #[error("{0}")]
    Argument(String),
    /// cuBLASLt, which prefill needs, is missing or rejected a matrix product.
    #[error("cuBLASLt: {0}")]
    Blas(String),
    /// NCCL is missing or has failed, or another rank has ended the exchanges.
    #[error("{0}")]
    Ranks(String),
    /// A rank has failed.
    #[error("rank {rank}: {source}")]
    Rank {
        /// Its number.
        rank: usize,
        /// Its error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A stored frame cannot be parsed or decoded.
    #[error("codec-core: {0}")]
    Codec(codec_core::Error),
    /// A stored frame is not that of its tokens and its level.
    #[error("stream: {0}")]
    Stream(kv_stream::Error),
    /// An error of the GPU, or of a cache on it.
    #[error(transparent)]
    Device(kv_device::Error),
    /// An error that the loop on a CPU has, too.
    #[error(transparent)]
    Llama(#[from] kv_llama::Error),
}

/// The result of every call that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A wrong argument.
    pub(crate) fn argument(what: impl Into<String>) -> Self {
        Self::Argument(what.into())
    }

    /// Names the operation that caused a driver error.
    pub(crate) fn driver(operation: &str, source: DriverError) -> Self {
        Self::from(kv_gpu::Error::Driver { operation: operation.to_owned(), source })
    }
}

/// Those that both crates have map to each other.
impl From<kv_device::Error> for Error {
    fn from(e: kv_device::Error) -> Self {
        use kv_device::Error::{Argument, Codec, Stream};
        match e {
            Argument(what) | Stream(kv_stream::Error::Argument(what)) => Self::Argument(what),
            Codec(e) | Stream(kv_stream::Error::Codec(e)) => Self::Codec(e),
            Stream(e) => Self::Stream(e),
            e => Self::Device(e),
        }
    }
}

impl From<kv_gpu::Error> for Error {
    fn from(e: kv_gpu::Error) -> Self {
        Self::Device(e.into())
    }
}
