//! One variant per way in which an argument, a stream or a pairing of both can be bad, and its stable number.

use core::fmt;

/// An invalid argument, or bytes that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A size is zero.
    Zero {
        /// The size.
        what: &'static str,
    },
    /// The length of a slice does not match the shapes.
    Length {
        /// The argument.
        what: &'static str,
        /// The length that the shapes require.
        expected: usize,
        /// The length that was given.
        actual: usize,
    },
    /// A slice is shorter than the shapes require. A longer one would do.
    TooShort {
        /// The argument.
        what: &'static str,
        /// The least length.
        needed: usize,
        /// The length that was given.
        actual: usize,
    },
    /// There are more elements than the format or the address space can count.
    TooLarge,
    /// A frame has more elements than the caller allows.
    Limit {
        /// Elements of the frame, according to its header.
        needed: usize,
        /// The caller's limit.
        limit: usize,
    },
    /// A NaN or an infinity where finite values are required.
    NotFinite {
        /// The argument.
        what: &'static str,
    },
    /// A value cannot be quantized: it is not finite after the mean is subtracted or the transform is
    /// applied.
    OutOfRange {
        /// The channel that it belongs to.
        channel: usize,
    },
    /// A quantization step is not a positive normal `f32` with a normal reciprocal.
    BadStep {
        /// The channel that it belongs to.
        channel: usize,
    },
    /// The probability model of a channel is invalid.
    BadModel {
        /// The channel.
        channel: usize,
    },
    /// The parts of a plane are invalid together.
    BadPlane {
        /// The rule that they violate.
        what: &'static str,
    },
    /// RoPE needs an even, positive number of components per head.
    OddHeadDim {
        /// The number that was given.
        head_dim: usize,
    },
    /// Lossless coding needs 16-bit elements.
    ElementNot16Bit,
    /// A lossless frame where a lossy one is required, or the reverse.
    WrongCoding {
        /// Whether the frame is lossless.
        lossless: bool,
    },
    /// The bytes do not start with the magic number of the format.
    BadMagic,
    /// This build does not know the version of the format.
    BadVersion {
        /// The version found.
        version: u8,
    },
    /// A field of a header has a value that this build does not know.
    BadField {
        /// The field.
        what: &'static str,
    },
    /// The bytes end too early.
    Truncated,
    /// There are bytes after the end.
    TrailingBytes,
    /// The bytes do not match their checksum.
    BadChecksum,
    /// The plane is not the one that the frame was encoded with.
    WrongPlane,
    /// The frame, or the header of a frame to encode, belongs to another model than the profile.
    WrongModel,
    /// An entry of a chunk's directory differs from the header of its frame.
    WrongEntry {
        /// The position of the frame in the chunk.
        frame: usize,
    },
    /// The coded data is invalid: no encoder writes it.
    Corrupt,
    /// An index is out of bounds.
    OutOfBounds {
        /// The kind of index.
        what: &'static str,
    },
    /// RoPE was requested for values, or for keys that were stored after RoPE.
    NotBeforeRope,
    /// A time or a throughput is negative, zero where it must not be, or not finite.
    BadTiming,
    /// The machine cannot run this [`Backend`](crate::Backend).
    BackendUnavailable,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zero { what } => write!(f, "{what} must not be zero"),
            Self::Length { what, expected, actual } => {
                write!(f, "{what} has length {actual}, expected {expected}")
            }
            Self::TooShort { what, needed, actual } => {
                write!(f, "{what} has length {actual}, at least {needed} are needed")
            }
            Self::TooLarge => write!(f, "too many elements"),
            Self::Limit { needed, limit } => {
                write!(f, "the frame has {needed} elements, at most {limit} are allowed")
            }
            Self::NotFinite { what } => write!(f, "{what} must be finite"),
            Self::OutOfRange { channel } => {
                write!(f, "a value of channel {channel} is too large to be quantized")
            }
            Self::BadStep { channel } => {
                write!(
                    f,
                    "the step of channel {channel} must be positive and finite, and so must its reciprocal"
                )
            }
            Self::BadModel { channel } => write!(f, "the probability model of channel {channel} is invalid"),
            Self::BadPlane { what } => write!(f, "{what}"),
            Self::OddHeadDim { head_dim } => {
                write!(f, "RoPE needs an even, positive head_dim, not {head_dim}")
            }
            Self::ElementNot16Bit => write!(f, "lossless coding needs f16 or bf16 elements"),
            Self::WrongCoding { lossless: true } => {
                write!(f, "the frame is lossless, use the functions and planes for lossless frames")
            }
            Self::WrongCoding { lossless: false } => {
                write!(f, "the frame is lossy, use the functions and planes for lossy frames")
            }
            Self::BadMagic => write!(f, "not a KV cache bitstream"),
            Self::BadVersion { version } => write!(f, "unknown version {version} of the format"),
            Self::BadField { what } => write!(f, "unknown {what} in a header"),
            Self::Truncated => write!(f, "the data ends too early"),
            Self::TrailingBytes => write!(f, "there are bytes after the end of the data"),
            Self::BadChecksum => write!(f, "the data does not match its checksum"),
            Self::WrongPlane => write!(f, "the plane is not the one that the frame was encoded with"),
            Self::WrongModel => write!(f, "the frame is of another model than the profile"),
            Self::WrongEntry { frame } => {
                write!(f, "the directory entry of frame {frame} differs from the frame's header")
            }
            Self::Corrupt => write!(f, "the coded data is corrupt"),
            Self::OutOfBounds { what } => write!(f, "{what} out of bounds"),
            Self::NotBeforeRope => write!(f, "RoPE applies only to keys that were stored before RoPE"),
            Self::BadTiming => {
                write!(f, "times must be finite and at least 0, throughputs finite and above 0")
            }
            Self::BackendUnavailable => write!(f, "this machine cannot run the backend"),
        }
    }
}

impl core::error::Error for Error {}

impl Error {
    /// The number of the variant, for callers in other languages and for logs. A number never changes its
    /// meaning; 0 is no error. Codes below 100 mean the same in `kv-attend`, `pq-core` and `svd-core`, whose own
    /// codes are from 101, 201 and 301 on.
    ///
    /// | shared | | this crate | | | |
    /// | --- | --- | --- | --- | --- | --- |
    /// | 1 | `Zero` | 401 | `Limit` | 409 | `BadTiming` |
    /// | 2 | `Length` | 402 | `OutOfRange` | 410 | `Corrupt` |
    /// | 3 | `TooShort` | 403 | `OutOfBounds` | 411 | `WrongPlane` |
    /// | 5 | `TooLarge` | 404 | `BadStep` | 412 | `WrongModel` |
    /// | 6 | `BackendUnavailable` | 405 | `BadModel` | 413 | `WrongCoding` |
    /// | 7 | `NotFinite` | 406 | `BadPlane` | 414 | `WrongEntry` |
    /// | 8 | `BadMagic` | 407 | `OddHeadDim` | 415 | `NotBeforeRope` |
    /// | 9 | `BadVersion` | 408 | `ElementNot16Bit` | | |
    /// | 10 | `Truncated` | | | | |
    /// | 11 | `TrailingBytes` | | | | |
    /// | 12 | `BadField` | | | | |
    /// | 13 | `BadChecksum` | | | | |
    #[must_use]
    pub const fn code(&self) -> u32 {
        match self {
            Self::Zero { .. } => 1,
            Self::Length { .. } => 2,
            Self::TooShort { .. } => 3,
            Self::TooLarge => 5,
            Self::BackendUnavailable => 6,
            Self::NotFinite { .. } => 7,
            Self::BadMagic => 8,
            Self::BadVersion { .. } => 9,
            Self::Truncated => 10,
            Self::TrailingBytes => 11,
            Self::BadField { .. } => 12,
            Self::BadChecksum => 13,
            Self::Limit { .. } => 401,
            Self::OutOfRange { .. } => 402,
            Self::OutOfBounds { .. } => 403,
            Self::BadStep { .. } => 404,
            Self::BadModel { .. } => 405,
            Self::BadPlane { .. } => 406,
            Self::OddHeadDim { .. } => 407,
            Self::ElementNot16Bit => 408,
            Self::BadTiming => 409,
            Self::Corrupt => 410,
            Self::WrongPlane => 411,
            Self::WrongModel => 412,
            Self::WrongCoding { .. } => 413,
            Self::WrongEntry { .. } => 414,
            Self::NotBeforeRope => 415,
        }
    }
}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers that other languages know; a new variant gets a new one.
    #[test]
    fn codes_do_not_change() {
        let what = "";
        let all = [
            (Error::Zero { what }, 1),
            (Error::Length { what, expected: 0, actual: 0 }, 2),
            (Error::TooShort { what, needed: 0, actual: 0 }, 3),
            (Error::TooLarge, 5),
            (Error::Limit { needed: 0, limit: 0 }, 401),
            (Error::NotFinite { what }, 7),
            (Error::OutOfRange { channel: 0 }, 402),
            (Error::OutOfBounds { what }, 403),
            (Error::BadStep { channel: 0 }, 404),
            (Error::BadModel { channel: 0 }, 405),
            (Error::BadPlane { what }, 406),
            (Error::OddHeadDim { head_dim: 0 }, 407),
            (Error::ElementNot16Bit, 408),
            (Error::BadTiming, 409),
            (Error::BackendUnavailable, 6),
            (Error::BadMagic, 8),
            (Error::BadVersion { version: 0 }, 9),
            (Error::BadField { what }, 12),
            (Error::Truncated, 10),
            (Error::TrailingBytes, 11),
            (Error::BadChecksum, 13),
            (Error::Corrupt, 410),
            (Error::WrongPlane, 411),
            (Error::WrongModel, 412),
            (Error::WrongCoding { lossless: true }, 413),
            (Error::WrongEntry { frame: 0 }, 414),
            (Error::NotBeforeRope, 415),
        ];
        for (error, code) in all {
            assert_eq!(error.code(), code, "{error:?}");
        }
    }
}
