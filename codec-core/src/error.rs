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
    /// Decoding would give more numbers than the caller allows.
    Limit {
        /// Numbers that the header speaks of.
        needed: usize,
        /// Most that the caller takes.
        limit: usize,
    },
    /// A NaN or an infinity where a finite number is needed.
    NotFinite {
        /// The argument.
        what: &'static str,
    },
    /// A number so many steps from zero that no bin can hold it, or too large for its own scale.
    OutOfRange {
        /// The channel it belongs to.
        channel: usize,
    },
    /// A step that is not a positive normal number with a finite reciprocal.
    BadStep {
        /// The channel it belongs to.
        channel: usize,
    },
    /// A channel's probability model is not one.
    BadModel {
        /// The channel it belongs to.
        channel: usize,
    },
    /// Parts of a plane that do not go together.
    BadPlane {
        /// What is wrong.
        what: &'static str,
    },
    /// The bytes do not start like what they should be.
    BadMagic,
    /// A version this build does not know.
    BadVersion {
        /// The version found.
        version: u8,
    },
    /// A field of a header has a value that this build does not know.
    BadField {
        /// The field.
        what: &'static str,
    },
    /// The bytes end early.
    Truncated,
    /// Bytes are left over.
    TrailingBytes,
    /// The checksum does not fit the bytes.
    BadChecksum,
    /// The bytes were encoded under another profile.
    WrongProfile,
    /// A chunk's directory says something else about a frame than the frame does.
    WrongEntry {
        /// The frame's place in the chunk.
        frame: usize,
    },
    /// A code that no encoder writes.
    Corrupt,
    /// There is no such layer, token tile or level.
    OutOfBounds {
        /// What was asked for.
        what: &'static str,
    },
    /// RoPE was asked for values, or for keys that are after it already.
    NotBeforeRope,
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
            Self::TooLarge => write!(f, "too many elements"),
            Self::Limit { needed, limit } => write!(f, "{needed} numbers where {limit} are allowed"),
            Self::NotFinite { what } => write!(f, "{what} holds a NaN or an infinity"),
            Self::OutOfRange { channel } => {
                write!(f, "a number of channel {channel} is too many steps from zero")
            }
            Self::BadStep { channel } => {
                write!(f, "the step of channel {channel} is not positive and finite")
            }
            Self::BadModel { channel } => write!(f, "the probability model of channel {channel} is broken"),
            Self::BadPlane { what } => write!(f, "{what}"),
            Self::BadMagic => write!(f, "not a KV bitstream"),
            Self::BadVersion { version } => write!(f, "unknown version {version}"),
            Self::BadField { what } => write!(f, "unknown {what}"),
            Self::Truncated => write!(f, "the bytes end early"),
            Self::TrailingBytes => write!(f, "bytes are left over"),
            Self::BadChecksum => write!(f, "the checksum does not fit"),
            Self::WrongProfile => write!(f, "the bytes were encoded under another profile"),
            Self::WrongEntry { frame } => {
                write!(f, "the directory's entry of frame {frame} is not what the frame says")
            }
            Self::Corrupt => write!(f, "a code that no encoder writes"),
            Self::OutOfBounds { what } => write!(f, "there is no such {what}"),
            Self::NotBeforeRope => write!(f, "these rows are not keys before RoPE"),
            Self::BackendUnavailable => write!(f, "this machine cannot run the backend"),
        }
    }
}

impl core::error::Error for Error {}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}
