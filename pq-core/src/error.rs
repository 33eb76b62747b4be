use core::fmt;

/// An invalid argument, with the offending values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// A size that must be positive is zero.
    Zero {
        /// The argument that must not be zero.
        what: &'static str,
    },
    /// The vector length is not a multiple of the number of subspaces.
    DimNotDivisible {
        /// Length of a vector.
        dim: usize,
        /// Number of subspaces.
        m: usize,
    },
    /// Bits per code outside 1..=12.
    NbitsOutOfRange {
        /// The requested bits per code.
        nbits: u32,
    },
    /// A product of sizes does not fit in `usize`, the range of a table does not fit in `f32`, or the index of a
    /// selected token does not fit in `u32`.
    TooLarge,
    /// A slice's length is not the one that the shapes require.
    Length {
        /// The argument.
        what: &'static str,
        /// Elements (bytes for codes) that the shapes require.
        expected: usize,
        /// Elements of the argument.
        actual: usize,
    },
    /// A slice is shorter than the required minimum.
    TooShort {
        /// The argument.
        what: &'static str,
        /// Minimum number of elements.
        needed: usize,
        /// Elements of the argument.
        actual: usize,
    },
    /// A slice does not consist of whole rows.
    PartialRow {
        /// The argument.
        what: &'static str,
        /// Elements of a row.
        row: usize,
        /// Elements of the argument.
        actual: usize,
    },
    /// Two arguments have different quantizer shapes.
    ShapeMismatch,
    /// More subspaces than an operation's integer sums allow.
    TooManySubspaces {
        /// Number of subspaces.
        m: usize,
        /// Maximum allowed.
        max: usize,
    },
    /// A code is not the index of a centroid.
    CodeOutOfRange {
        /// Index of the code.
        index: usize,
        /// The code.
        code: u16,
        /// Centroids per subspace.
        ksub: usize,
    },
    /// A token index is out of range.
    TokenOutOfRange {
        /// Index in the list of tokens.
        index: usize,
        /// The token.
        token: u32,
        /// Number of tokens.
        n: usize,
    },
    /// A profile has too few distinct sequence lengths to fit a cost.
    Underdetermined {
        /// The profile.
        what: &'static str,
        /// Minimum number of distinct lengths.
        needed: usize,
    },
    /// [`TrainOptions::tolerance`](crate::TrainOptions) is negative, infinite or NaN.
    Tolerance,
    /// This machine lacks the instructions of the requested backend.
    BackendUnavailable,
    /// An element that must be finite is NaN or infinite.
    NotFinite {
        /// The argument.
        what: &'static str,
        /// Index of the first such element.
        index: usize,
    },
    /// A field of a [`RowBudget`](crate::RowBudget) is negative, infinite or NaN, a share is above 1, or a
    /// variance of scores is negative.
    Budget {
        /// The field.
        what: &'static str,
    },
    /// A position that must be a multiple of the vectors of a block is not.
    Unaligned {
        /// The argument.
        what: &'static str,
        /// The position.
        at: usize,
        /// The required divisor.
        multiple: usize,
    },
    /// Pages have 16 or 32 tokens, or a multiple of 64.
    PageTokens {
        /// The requested tokens of a page.
        page_tokens: usize,
    },
    /// A page table names a page that the pool does not have.
    Page {
        /// Position in the table.
        index: usize,
        /// The page found there.
        page: u32,
        /// Pages of the pool.
        pages: usize,
    },
    /// The crate has no codebook of Gaussians for these subspaces.
    NoGaussian {
        /// Components of a subspace.
        dsub: usize,
        /// Bits per code.
        nbits: u32,
    },
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
            Self::DimNotDivisible { .. } => 201,
            Self::NbitsOutOfRange { .. } => 202,
            Self::ShapeMismatch => 203,
            Self::TooManySubspaces { .. } => 204,
            Self::CodeOutOfRange { .. } => 205,
            Self::Underdetermined { .. } => 206,
            Self::Tolerance => 207,
            Self::Unaligned { .. } => 208,
            Self::Page { .. } => 209,
            Self::TokenOutOfRange { .. } => 210,
            Self::PageTokens { .. } => 211,
            Self::Budget { .. } => 212,
            Self::NoGaussian { .. } => 213,
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
            Self::DimNotDivisible { dim, m } => {
                write!(f, "dimension {dim} is not divisible into {m} subspaces")
            }
            Self::NbitsOutOfRange { nbits } => write!(f, "{nbits} bits per code are outside 1..=12"),
            Self::TooLarge => write!(f, "the sizes or values are too large"),
            Self::Length { what, expected, actual } => {
                write!(f, "{what} has length {actual}, expected exactly {expected}")
            }
            Self::TooShort { what, needed, actual } => {
                write!(f, "{what} has length {actual}, expected at least {needed}")
            }
            Self::PartialRow { what, row, actual } => {
                write!(f, "{what} has length {actual}, expected a multiple of {row}")
            }
            Self::ShapeMismatch => write!(f, "the arguments have different quantizer shapes"),
            Self::TooManySubspaces { m, max } => write!(f, "{m} subspaces exceed the maximum of {max}"),
            Self::CodeOutOfRange { index, code, ksub } => {
                write!(f, "code {code} at index {index} is out of range for {ksub} centroids")
            }
            Self::TokenOutOfRange { index, token, n } => {
                write!(f, "token {token} at index {index} is out of range for {n} tokens")
            }
            Self::Underdetermined { what, needed } => {
                write!(f, "the {what} needs at least {needed} clearly different sequence lengths")
            }
            Self::Tolerance => write!(f, "the tolerance must be finite and at least 0"),
            Self::BackendUnavailable => write!(f, "this machine lacks the instructions of the backend"),
            Self::NotFinite { what, index } => write!(f, "{what} is not finite at index {index}"),
            Self::Budget { what } => write!(f, "{what} is out of its range"),
            Self::Unaligned { what, at, multiple } => {
                write!(f, "{what} is {at}, expected a multiple of {multiple}")
            }
            Self::PageTokens { page_tokens } => {
                write!(f, "pages of {page_tokens} tokens, expected 16, 32 or a multiple of 64")
            }
            Self::Page { index, page, pages } => {
                write!(f, "page {page} at index {index} of the table is out of range for {pages} pages")
            }
            Self::NoGaussian { dsub, nbits } => {
                write!(f, "no codebook of Gaussians has subspaces of {dsub} components and {nbits} bits")
            }
            Self::BadMagic { what } => write!(f, "the bytes are not those of {what}"),
            Self::Version { what, version } => {
                write!(f, "version {version} of the bytes of {what} is not known")
            }
            Self::Truncated { what } => write!(f, "the bytes of {what} end too early"),
            Self::TrailingBytes { what, extra } => {
                write!(f, "{extra} bytes follow those of {what}")
            }
            Self::BadField { what } => write!(f, "the saved {what} does not fit"),
            Self::BadChecksum { what } => write!(f, "the bytes of {what} do not match their checksum"),
            Self::Attend(error) => error.fmt(f),
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

/// Counts the rows of `row` elements, at least 1 each, that a slice of `actual` elements consists of.
pub(crate) fn count_rows(what: &'static str, actual: usize, row: usize) -> Result<usize, Error> {
    if actual.is_multiple_of(row) { Ok(actual / row) } else { Err(Error::PartialRow { what, row, actual }) }
}

pub(crate) fn check_finite<E: crate::Element>(what: &'static str, values: &[E]) -> Result<(), Error> {
    match values.iter().position(|x| !x.to_f32().is_finite()) {
        None => Ok(()),
        Some(index) => Err(Error::NotFinite { what, index }),
    }
}
