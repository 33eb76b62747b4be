//! What can be wrong with tensors and caches.

use std::fmt;

use candle_core::DType;

/// An error of a cache.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// A tensor is not (batch, heads, tokens, dim) of this cache.
    Shape {
        /// The tensor.
        what: &'static str,
        /// The dimension that differs.
        dimension: &'static str,
        /// Its size in the cache.
        expected: usize,
        /// Its size in the tensor.
        actual: usize,
    },
    /// Rows are `f32`, `f16` or `bf16`.
    DType(DType),
    /// A tensor is not in memory of the host.
    Device,
    /// Attention to a cache without tokens.
    Empty,
    /// Of candle.
    Candle(candle_core::Error),
    /// Of the codes.
    Codes(kv_owners::Error),
}

/// The result of every call to a cache.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shape { what, dimension, expected, actual } => {
                write!(f, "{what}: {actual} {dimension}, the cache has {expected}")
            }
            Self::DType(dtype) => write!(f, "rows of {dtype:?}: expected F32, F16 or BF16"),
            Self::Device => write!(f, "the tensor is not on the CPU"),
            Self::Empty => write!(f, "the cache has no tokens"),
            Self::Candle(error) => error.fmt(f),
            Self::Codes(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for Error {}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Candle(error)
    }
}

impl From<kv_owners::Error> for Error {
    fn from(error: kv_owners::Error) -> Self {
        Self::Codes(error)
    }
}

/// For models, whose functions return candle's errors.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => Self::wrap(error),
        }
    }
}
