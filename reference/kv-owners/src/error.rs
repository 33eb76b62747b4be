//! The errors of the cores and of the owners, as one type.

use core::fmt;

/// An error of one of the cores, or of an owner.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// Of rows, codes or attention.
    Pq(pq_core::Error),
    /// Of a basis.
    Svd(svd_core::Error),
    /// Bits of keys are not 1/8 to 8 in eighths.
    KeyBits {
        /// Bits per component.
        bits: f32,
    },
    /// The scale of values is no power of two from 2^-126 to 2^126.
    ValueScale {
        /// The unit of the values.
        scale: f32,
    },
}

impl Error {
    /// The number of the error, in one space with those of the cores.
    #[must_use]
    pub const fn code(&self) -> u32 {
        match self {
            Self::Pq(error) => error.code(),
            Self::Svd(error) => error.code(),
            Self::KeyBits { .. } => 601,
            Self::ValueScale { .. } => 602,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pq(error) => error.fmt(f),
            Self::Svd(error) => error.fmt(f),
            Self::KeyBits { bits } => {
                write!(f, "{bits} bits per component of keys: expected 1/8 to 8 in eighths")
            }
            Self::ValueScale { scale } => {
                write!(f, "a scale of values of {scale}: expected a power of two from 2^-126 to 2^126")
            }
        }
    }
}

impl core::error::Error for Error {}

impl From<pq_core::Error> for Error {
    fn from(error: pq_core::Error) -> Self {
        Self::Pq(error)
    }
}

impl From<svd_core::Error> for Error {
    fn from(error: svd_core::Error) -> Self {
        Self::Svd(error)
    }
}

impl From<kv_attend::Error> for Error {
    fn from(error: kv_attend::Error) -> Self {
        Self::Pq(error.into())
    }
}
