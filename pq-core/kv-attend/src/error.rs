use core::fmt;

/// An invalid argument, with the offending values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A size that must be positive is zero.
    Zero {
        /// The argument.
        what: &'static str,
    },
    /// An argument's length is not the one that the shapes require.
    Length {
        /// The argument.
        what: &'static str,
        /// Elements or rows that the shapes require.
        expected: usize,
        /// Elements or rows of the argument.
        actual: usize,
    },
    /// An argument is shorter than the operation needs.
    TooShort {
        /// The argument.
        what: &'static str,
        /// Minimum number of elements.
        needed: usize,
        /// Elements of the argument.
        actual: usize,
    },
    /// An argument does not consist of whole rows.
    PartialRow {
        /// The argument.
        what: &'static str,
        /// Elements of a row.
        row: usize,
        /// Elements of the argument.
        actual: usize,
    },
    /// A size, or a product of sizes, does not fit in `usize`.
    TooLarge,
    /// This machine lacks the instructions of the requested backend.
    BackendUnavailable,
    /// The distance between rows is below the length of a row.
    Stride {
        /// Elements from one row to the next.
        row_stride: usize,
        /// Elements of a row.
        components: usize,
    },
    /// There are more query tokens than rows of keys, and no position of the first query was given.
    Causal {
        /// Query tokens.
        queries: usize,
        /// Rows of keys.
        tokens: usize,
    },
    /// An index in the list of tokens is out of range.
    Token {
        /// Position in the list.
        index: usize,
        /// The index found there.
        token: u32,
        /// Number of rows.
        rows: usize,
    },
    /// The bytes do not begin with the magic of the expected type.
    BadMagic {
        /// The expected type.
        what: &'static str,
    },
    /// The format version is unknown.
    Version {
        /// The expected type.
        what: &'static str,
        /// The version found.
        version: u32,
    },
    /// The bytes end too early.
    Truncated {
        /// The expected type.
        what: &'static str,
    },
    /// Bytes follow the end.
    TrailingBytes {
        /// The type that was read.
        what: &'static str,
        /// Bytes after its end.
        extra: usize,
    },
    /// A field has an invalid value.
    BadField {
        /// The field.
        what: &'static str,
    },
    /// The bytes do not match the checksum that was saved with them.
    BadChecksum {
        /// The expected type.
        what: &'static str,
    },
    /// The scale is NaN or infinite, or the cap of the scores is not a positive finite number.
    Attention {
        /// The field of [`Attention`](crate::Attention).
        what: &'static str,
    },
}

impl Error {
    /// A number that identifies the kind of error. It never changes; the crate's documentation has the table.
    #[must_use]
    pub const fn code(&self) -> u32 {
        match self {
            Self::Zero { .. } => 1,
            Self::Length { .. } => 2,
            Self::TooShort { .. } => 3,
            Self::PartialRow { .. } => 4,
            Self::TooLarge => 5,
            Self::BackendUnavailable => 6,
            Self::BadMagic { .. } => 8,
            Self::Version { .. } => 9,
            Self::Truncated { .. } => 10,
            Self::TrailingBytes { .. } => 11,
            Self::BadField { .. } => 12,
            Self::BadChecksum { .. } => 13,
            Self::Stride { .. } => 101,
            Self::Causal { .. } => 102,
            Self::Token { .. } => 103,
            Self::Attention { .. } => 104,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zero { what } => write!(f, "{what} must not be zero"),
            Self::Length { what, expected, actual } => {
                write!(f, "{what} has length {actual}, expected exactly {expected}")
            }
            Self::TooShort { what, needed, actual } => {
                write!(f, "{what} has length {actual}, expected at least {needed}")
            }
            Self::PartialRow { what, row, actual } => {
                write!(f, "{what} has length {actual}, expected a multiple of {row}")
            }
            Self::TooLarge => write!(f, "the sizes are too large"),
            Self::BackendUnavailable => write!(f, "this machine lacks the instructions of the backend"),
            Self::Stride { row_stride, components } => {
                write!(
                    f,
                    "the row stride is {row_stride}, expected at least the {components} components of a row"
                )
            }
            Self::Causal { queries, tokens } => {
                write!(f, "{queries} query tokens exceed the {tokens} rows of keys, and no position is given")
            }
            Self::Token { index, token, rows } => {
                write!(f, "token {token} at index {index} of the list is out of range for {rows} rows")
            }
            Self::BadMagic { what } => write!(f, "the bytes are not those of {what}"),
            Self::Version { what, version } => {
                write!(f, "version {version} of the bytes of {what} is not known")
            }
            Self::Truncated { what } => write!(f, "the bytes of {what} end too early"),
            Self::TrailingBytes { what, extra } => write!(f, "{extra} bytes follow those of {what}"),
            Self::BadField { what } => write!(f, "the saved {what} does not fit"),
            Self::BadChecksum { what } => write!(f, "the bytes of {what} do not match their checksum"),
            Self::Attention { what } => write!(f, "{what} is out of range"),
        }
    }
}

impl core::error::Error for Error {}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}

pub(crate) fn check_at_least(what: &'static str, actual: usize, needed: usize) -> Result<(), Error> {
    if actual >= needed { Ok(()) } else { Err(Error::TooShort { what, needed, actual }) }
}
