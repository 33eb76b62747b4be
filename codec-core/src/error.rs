use core::fmt;

/// What was wrong with an argument or with bytes from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A size that must not be zero is.
    Zero {
        /// The argument.
        what: &'static str,
    },
    /// A slice has another length than the shapes say.
    Length {
        /// The argument.
        what: &'static str,
        /// Elements that the shapes ask for.
        expected: usize,
        /// Elements that were given.
        actual: usize,
    },
    /// More elements than the format or the address space can count.
    TooLarge,
    /// A NaN or an infinity where a finite number is needed.
    NotFinite {
        /// The argument.
        what: &'static str,
    },
    /// A step that is not a positive finite number.
    BadStep {
        /// The channel it belongs to.
        channel: usize,
    },
    /// An alphabet outside 2..=[`MAX_ALPHABET`](crate::MAX_ALPHABET), or even: it must have a middle and an escape.
    BadAlphabet {
        /// Symbols.
        alphabet: usize,
    },
    /// A channel's cumulative table does not rise at every symbol from 0 to `1 << PRECISION`.
    BadCdf {
        /// The channel it belongs to.
        channel: usize,
    },
    /// The bytes do not start like a frame or a profile.
    BadMagic,
    /// A version this build does not know.
    BadVersion {
        /// The version found.
        version: u8,
    },
    /// A predictor this build does not know.
    BadPredictor,
    /// The bytes end early.
    Truncated,
    /// Bytes are left over.
    TrailingBytes,
    /// The checksum does not fit the bytes.
    BadChecksum,
    /// The frame was encoded under another profile.
    WrongProfile,
    /// A code that no encoder writes.
    Corrupt,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zero { what } => write!(f, "{what} must not be zero"),
            Self::Length { what, expected, actual } => {
                write!(f, "{what} has length {actual}, expected {expected}")
            }
            Self::TooLarge => write!(f, "too many elements"),
            Self::NotFinite { what } => write!(f, "{what} holds a NaN or an infinity"),
            Self::BadStep { channel } => {
                write!(f, "the step of channel {channel} is not positive and finite")
            }
            Self::BadAlphabet { alphabet } => write!(f, "an alphabet of {alphabet} symbols is not possible"),
            Self::BadCdf { channel } => write!(f, "the cumulative table of channel {channel} is broken"),
            Self::BadMagic => write!(f, "not a KV bitstream"),
            Self::BadVersion { version } => write!(f, "unknown version {version}"),
            Self::BadPredictor => write!(f, "unknown predictor"),
            Self::Truncated => write!(f, "the bytes end early"),
            Self::TrailingBytes => write!(f, "bytes are left over"),
            Self::BadChecksum => write!(f, "the checksum does not fit"),
            Self::WrongProfile => write!(f, "the frame was encoded under another profile"),
            Self::Corrupt => write!(f, "a code that no encoder writes"),
        }
    }
}

impl core::error::Error for Error {}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}
