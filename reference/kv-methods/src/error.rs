//! What can go wrong with a method, its cache or its profile.

use std::path::Path;

/// An error, with a one-line message for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong.
    #[error("{0}")]
    Argument(String),
    /// A text has too few tokens to calibrate on.
    #[error("too few tokens to calibrate on: {tokens} of at least {least}")]
    FewTokens {
        /// Its tokens.
        tokens: usize,
        /// The minimum.
        least: usize,
    },
    /// A profile does not fit this model or this method.
    #[error("profile: {0}")]
    Profile(String),
    /// A profile lacks an entry; [`Method::prepare`](crate::Method::prepare) names the method instead.
    #[error("profile: holds no `{0}`")]
    MissingEntry(String),
    /// An error of the forward pass, or of a cache in it.
    #[error(transparent)]
    Llama(kv_llama::Error),
    /// An error of a file or of a checkpoint.
    #[error(transparent)]
    Model(kv_model::Error),
    /// An error of exact attention, which `pq-core` and `svd-core` share.
    #[error("attention: {0}")]
    Attend(#[from] svd_core::AttendError),
    /// An error of `pq-core`.
    #[error("pq-core: {0}")]
    Pq(#[from] pq_core::Error),
    /// An error of `svd-core`.
    #[error("svd-core: {0}")]
    Svd(#[from] svd_core::Error),
    /// An error of `codec-core`.
    #[error("codec-core: {0}")]
    Codec(#[from] codec_core::Error),
}

/// Errors of owners are those of the cores.
impl From<kv_owners::Error> for Error {
    fn from(e: kv_owners::Error) -> Self {
        match e {
            kv_owners::Error::Pq(e) => Self::Pq(e),
            kv_owners::Error::Svd(e) => Self::Svd(e),
            e => Self::Argument(e.to_string()),
        }
    }
}

/// The result of every call that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error about a file's contents: see [`kv_model::Error::file`].
    pub(crate) fn file(path: &Path, what: impl ToString) -> Self {
        Self::Model(kv_model::Error::file(path, what))
    }

    /// A file that could not be read or written.
    pub(crate) fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Model(kv_model::Error::io(path, source))
    }

    /// A wrong argument.
    pub(crate) fn argument(what: impl Into<String>) -> Self {
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
            kv_llama::Error::Caller(e) => {
                e.downcast().map_or_else(|e| Self::Llama(kv_llama::Error::Caller(e)), |e| *e)
            }
            e => Self::Llama(e),
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
