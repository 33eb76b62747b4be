//! What can go wrong in a forward pass.

/// An error of a cache, or of an observer of [`prefill`](crate::prefill), which the loop only passes on.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// An error, with a one-line message for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument is wrong.
    #[error("{0}")]
    Argument(String),
    /// A cache operation that the cache does not support, or invalid input to it.
    #[error("{method} cache: {what}")]
    Cache {
        /// The method.
        method: &'static str,
        /// The unsupported operation or input.
        what: String,
    },
    /// The activations of a model exceed the range of `f32`.
    #[error("{model}: logits hold a NaN or an infinity")]
    Logits {
        /// The model's name.
        model: String,
    },
    /// An error of exact attention.
    #[error("attention: {0}")]
    Attend(#[from] kv_attend::Error),
    /// An error of the caller's: of a cache, or of an observer of activations.
    #[error("{0}")]
    Caller(BoxError),
    /// An error of the model's files.
    #[error(transparent)]
    Model(kv_model::Error),
}

/// The result of every call that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// Wrong arguments are those of this crate.
impl From<kv_model::Error> for Error {
    fn from(e: kv_model::Error) -> Self {
        match e {
            kv_model::Error::Argument(what) => Self::Argument(what),
            e => Self::Model(e),
        }
    }
}
