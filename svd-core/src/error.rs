use core::fmt;

/// Why an argument was rejected.
#[derive(Clone, Copy, Debug, PartialEq)]
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
        /// Elements that the shapes require.
        expected: usize,
        /// Elements of the argument.
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
    /// A causal head has more queries than keys.
    Causal {
        /// Its queries.
        rows: usize,
        /// Its keys.
        tokens: usize,
    },
    /// The rank is above the dimension.
    Rank {
        /// The requested rank.
        rank: usize,
        /// The dimension.
        dim: usize,
    },
    /// The data contain a NaN, an infinity, or a value that finite data cannot produce.
    NotFinite {
        /// The argument.
        what: &'static str,
    },
    /// A fraction is outside 0..=1.
    Fraction {
        /// The argument.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// An order repeats a component, or has one out of range.
    Order {
        /// The component.
        component: usize,
    },
    /// Singular values are not finite, nonnegative and in descending order.
    Spectrum {
        /// The first offending component.
        component: usize,
    },
    /// The budget is below the sum of the smallest ranks.
    Budget {
        /// The sum of the smallest ranks.
        least: usize,
        /// Components that the budget allows.
        components: usize,
    },
    /// This machine lacks the instructions of the backend.
    BackendUnavailable,
    /// A size, or a product or sum of sizes, exceeds what the operation supports.
    TooLarge,
    /// The eigenvalue iteration did not converge.
    NoConvergence,
    /// The bytes do not begin with the magic of the expected type.
    BadMagic {
        /// The expected type.
        what: &'static str,
    },
    /// This crate does not read the format version.
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
    /// An error of rows or exact attention that no other variant covers.
    Attend(kv_attend::Error),
}

impl Error {
    /// A number that identifies the kind of error. It never changes; the table is in the documentation of
    /// `kv-attend`.
    #[must_use]
    pub const fn code(&self) -> u32 {
        match self {
            Self::Zero { .. } => 1,
            Self::Length { .. } => 2,
            Self::TooShort { .. } => 3,
            Self::PartialRow { .. } => 4,
            Self::TooLarge => 5,
            Self::BackendUnavailable => 6,
            Self::NotFinite { .. } => 7,
            Self::BadMagic { .. } => 8,
            Self::Version { .. } => 9,
            Self::Truncated { .. } => 10,
            Self::TrailingBytes { .. } => 11,
            Self::BadField { .. } => 12,
            Self::BadChecksum { .. } => 13,
            Self::Attend(error) => error.code(),
            Self::Causal { .. } => 301,
            Self::Rank { .. } => 302,
            Self::Fraction { .. } => 303,
            Self::Order { .. } => 304,
            Self::Spectrum { .. } => 305,
            Self::Budget { .. } => 306,
            Self::NoConvergence => 307,
        }
    }
}

/// Variants that both crates have map to each other.
impl From<kv_attend::Error> for Error {
    fn from(error: kv_attend::Error) -> Self {
        use kv_attend::Error as Attend;
        match error {
            Attend::Zero { what } => Self::Zero { what },
            Attend::Length { what, expected, actual } => Self::Length { what, expected, actual },
            Attend::TooShort { what, needed, actual } => Self::TooShort { what, needed, actual },
            Attend::PartialRow { what, row, actual } => Self::PartialRow { what, row, actual },
            Attend::TooLarge => Self::TooLarge,
            Attend::BackendUnavailable => Self::BackendUnavailable,
            Attend::BadMagic { what } => Self::BadMagic { what },
            Attend::Version { what, version } => Self::Version { what, version },
            Attend::Truncated { what } => Self::Truncated { what },
            Attend::TrailingBytes { what, extra } => Self::TrailingBytes { what, extra },
            Attend::BadField { what } => Self::BadField { what },
            Attend::BadChecksum { what } => Self::BadChecksum { what },
            other => Self::Attend(other),
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
            Self::Causal { rows, tokens } => {
                write!(f, "a causal head has {rows} rows, expected at most its {tokens} tokens")
            }
            Self::Rank { rank, dim } => write!(f, "rank {rank} is above dimension {dim}"),
            Self::NotFinite { what } => write!(f, "{what}: a value is NaN, infinite or out of range"),
            Self::Fraction { what, value } => write!(f, "{what} is {value}, outside 0..=1"),
            Self::Order { component } => write!(f, "component {component} is repeated or does not exist"),
            Self::Spectrum { component } => {
                write!(
                    f,
                    "singular value {component} is not finite, is negative, or exceeds the one before it"
                )
            }
            Self::Budget { least, components } => {
                write!(f, "the budget is {components} components, the smallest ranks need {least}")
            }
            Self::BackendUnavailable => write!(f, "this machine lacks the instructions of the backend"),
            Self::TooLarge => write!(f, "the sizes are too large"),
            Self::NoConvergence => write!(f, "the eigenvalue iteration did not converge"),
            Self::BadMagic { what } => write!(f, "the bytes are not those of {what}"),
            Self::Version { what, version } => {
                write!(f, "version {version} of the bytes of {what} is not known")
            }
            Self::Truncated { what } => write!(f, "the bytes of {what} end too early"),
            Self::TrailingBytes { what, extra } => write!(f, "{extra} bytes follow those of {what}"),
            Self::BadField { what } => write!(f, "the saved {what} does not fit"),
            Self::BadChecksum { what } => write!(f, "the bytes of {what} do not match their checksum"),
            Self::Attend(error) => error.fmt(f),
        }
    }
}

impl core::error::Error for Error {}

#[cfg(feature = "alloc")]
pub(crate) fn check_at_least(what: &'static str, actual: usize, needed: usize) -> Result<(), Error> {
    if actual >= needed { Ok(()) } else { Err(Error::TooShort { what, needed, actual }) }
}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}

/// Counts the rows of `row` elements, at least 1 each, that a slice of `actual` elements consists of.
pub(crate) fn count_rows(what: &'static str, actual: usize, row: usize) -> Result<usize, Error> {
    if actual.is_multiple_of(row) { Ok(actual / row) } else { Err(Error::PartialRow { what, row, actual }) }
}
