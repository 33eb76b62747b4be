//! The error of every call of this crate.

use std::path::Path;

/// An error, with a one-line message for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong.
    #[error("{0}")]
    Argument(String),
    /// An error of the forward pass, or of a cache in it.
    #[error(transparent)]
    Llama(kv_llama::Error),
    /// An error of a file, of a checkpoint, or of a feature that this build lacks.
    #[error(transparent)]
    Model(kv_model::Error),
    /// An error of a method, its cache or its profile.
    #[error(transparent)]
    Methods(kv_methods::Error),
    /// The threads of a command could not be started.
    #[error("threads: {0}")]
    Threads(rayon::ThreadPoolBuildError),
    /// Streaming a stored context failed.
    #[error("stream: {0}")]
    Stream(kv_stream::Error),
    /// An error of `codec-core`.
    #[error("codec-core: {0}")]
    Codec(#[from] codec_core::Error),
    /// An error of a store of caches.
    #[cfg(feature = "store")]
    #[error("store: {0}")]
    Store(#[from] kv_store::Error),
    /// An error of the GPU, or of a cache on it.
    #[cfg(feature = "cuda")]
    #[error("{0}")]
    Device(kv_device::Error),
    /// An error of the loop on a GPU.
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    LlamaGpu(kv_llama_gpu::Error),
}

/// The result of every call that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error about a file's contents: see [`kv_model::Error::file`].
    pub fn file(path: &Path, what: impl ToString) -> Self {
        Self::Model(kv_model::Error::file(path, what))
    }

    /// A file that could not be read or written.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Model(kv_model::Error::io(path, source))
    }

    /// A wrong argument.
    pub fn argument(what: impl Into<String>) -> Self {
        Self::Argument(what.into())
    }
}

/// Wrong arguments are those of this crate.
impl From<kv_model::Error> for Error {
    fn from(e: kv_model::Error) -> Self {
        match e {
            kv_model::Error::Argument(what) => Self::Argument(what),
            e => Self::Model(e),
        }
    }
}

/// Errors of this crate that a forward pass has passed on come back as they were.
impl From<kv_llama::Error> for Error {
    fn from(e: kv_llama::Error) -> Self {
        match e {
            kv_llama::Error::Argument(what) => Self::Argument(what),
            kv_llama::Error::Model(e) => Self::from(e),
            kv_llama::Error::Caller(e) => match e.downcast() {
                Ok(e) => *e,
                Err(e) => Self::from(kv_methods::Error::from(kv_llama::Error::Caller(e))),
            },
            e => Self::Llama(e),
        }
    }
}

/// Those that both crates have map to each other.
impl From<kv_methods::Error> for Error {
    fn from(e: kv_methods::Error) -> Self {
        match e {
            kv_methods::Error::Argument(what) => Self::Argument(what),
            kv_methods::Error::Llama(e) => Self::Llama(e),
            kv_methods::Error::Model(e) => Self::Model(e),
            kv_methods::Error::Codec(e) => Self::Codec(e),
            e => Self::Methods(e),
        }
    }
}

/// An error of a cache or of an observer, which a forward pass passes on.
impl From<Error> for kv_llama::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::Argument(what) => Self::Argument(what),
            Error::Llama(e) => e,
            e => Self::Caller(e.into()),
        }
    }
}

/// An error of caches that a stream fills.
impl From<Error> for kv_stream::Error {
    fn from(e: Error) -> Self {
        Self::Caches(e.into())
    }
}

/// Errors of the caches come back as they were; those that both crates have map to each other.
impl From<kv_stream::Error> for Error {
    fn from(e: kv_stream::Error) -> Self {
        match e {
            kv_stream::Error::Argument(what) => Self::Argument(what),
            kv_stream::Error::Codec(e) => Self::Codec(e),
            kv_stream::Error::Caches(e) => {
                e.downcast().map_or_else(|e| Self::Stream(kv_stream::Error::Caches(e)), |e| *e)
            }
            e => Self::Stream(e),
        }
    }
}

/// Those that both crates have map to each other.
#[cfg(feature = "cuda")]
impl From<kv_device::Error> for Error {
    fn from(e: kv_device::Error) -> Self {
        match e {
            kv_device::Error::Argument(what) => Self::Argument(what),
            kv_device::Error::Profile(what) => Self::Methods(kv_methods::Error::Profile(what)),
            kv_device::Error::Pq(e) => Self::Methods(e.into()),
            kv_device::Error::Codec(e) => Self::Codec(e),
            kv_device::Error::Stream(e) => Self::from(e),
            e => Self::Device(e),
        }
    }
}

/// Those that both crates have map to each other.
#[cfg(feature = "cuda")]
impl From<kv_llama_gpu::Error> for Error {
    fn from(e: kv_llama_gpu::Error) -> Self {
        match e {
            kv_llama_gpu::Error::Argument(what) => Self::Argument(what),
            kv_llama_gpu::Error::Codec(e) => Self::Codec(e),
            kv_llama_gpu::Error::Stream(e) => Self::from(e),
            kv_llama_gpu::Error::Device(e) => Self::from(e),
            kv_llama_gpu::Error::Llama(e) => Self::from(e),
            e => Self::LlamaGpu(e),
        }
    }
}

#[cfg(feature = "cuda")]
impl From<kv_gpu::Error> for Error {
    fn from(e: kv_gpu::Error) -> Self {
        Self::Device(e.into())
    }
}
