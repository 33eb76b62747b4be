use std::path::{Path, PathBuf};

/// What went wrong, in one line for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file holds something this program cannot take.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// An argument is wrong.
    #[error("{0}")]
    Argument(String),
    /// A profile does not serve this model or this method.
    #[error("profile: {0}")]
    Profile(String),
    /// A cache was asked for something its method cannot do, or fed something it cannot take.
    #[error("{method} cache: {what}")]
    Cache {
        /// The method.
        method: &'static str,
        /// What it cannot do.
        what: String,
    },
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

/// The result of everything here.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A file that holds something this program cannot take.
    pub fn file(path: &Path, what: impl ToString) -> Self {
        Self::File { path: path.to_owned(), what: what.to_string() }
    }

    /// A file that could not be read or written.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// A wrong argument.
    pub fn argument(what: impl Into<String>) -> Self {
        Self::Argument(what.into())
    }
}
