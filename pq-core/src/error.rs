use core::fmt;

/// What was wrong with an argument, and by how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// `dim`, `m` or the number of vectors is zero.
    Zero {
        /// The argument that must not be zero.
        what: &'static str,
    },
    /// The subspaces do not divide the vector.
    DimNotDivisible {
        /// Length of a vector.
        dim: usize,
        /// Number of subspaces.
        m: usize,
    },
    /// Bits per code outside 1..=12.
    NbitsOutOfRange {
        /// The bits asked for.
        nbits: u32,
    },
    /// A product of sizes does not fit in `usize`.
    TooLarge,
    /// A slice has another length than the shapes say.
    Length {
        /// The argument.
        what: &'static str,
        /// Elements (bytes for codes) that the shapes ask for.
        expected: usize,
        /// Elements that were given.
        actual: usize,
    },
    /// Two arguments were made for different shapes.
    ShapeMismatch,
    /// More subspaces than an operation's integer sums allow.
    TooManySubspaces {
        /// Number of subspaces.
        m: usize,
        /// Most that are allowed.
        max: usize,
    },
    /// A code from outside is no centroid's index.
    CodeOutOfRange {
        /// Where it stands.
        index: usize,
        /// The code.
        code: u16,
        /// Centroids per subspace.
        ksub: usize,
    },
    /// Too few different lengths to fit a cost.
    Underdetermined {
        /// The profile.
        what: &'static str,
        /// Different lengths that the fit needs.
        needed: usize,
    },
    /// [`TrainOptions::tolerance`](crate::TrainOptions) is negative, infinite or NaN.
    Tolerance,
    /// This machine lacks the instructions of the backend that was asked for.
    BackendUnavailable,
    /// A NaN or an infinity where a finite number is needed.
    NotFinite {
        /// The argument.
        what: &'static str,
        /// Index of the first such element.
        index: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zero { what } => write!(f, "{what} must not be zero"),
            Self::DimNotDivisible { dim, m } => write!(f, "{m} subspaces do not divide dimension {dim}"),
            Self::NbitsOutOfRange { nbits } => write!(f, "{nbits} bits per code are outside 1..=12"),
            Self::TooLarge => write!(f, "the product of the sizes overflows"),
            Self::Length { what, expected, actual } => {
                write!(f, "{what} has length {actual}, expected {expected}")
            }
            Self::ShapeMismatch => write!(f, "the arguments were made for different shapes"),
            Self::TooManySubspaces { m, max } => write!(f, "{m} subspaces are more than {max}"),
            Self::CodeOutOfRange { index, code, ksub } => {
                write!(f, "code {code} at index {index} is not below {ksub} centroids")
            }
            Self::Underdetermined { what, needed } => {
                write!(f, "the {what} needs at least {needed} clearly different lengths")
            }
            Self::Tolerance => write!(f, "the tolerance must be a finite number of at least 0"),
            Self::BackendUnavailable => write!(f, "this machine lacks the instructions of the backend"),
            Self::NotFinite { what, index } => write!(f, "{what} is not finite at index {index}"),
        }
    }
}

impl core::error::Error for Error {}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}

pub(crate) fn check_finite<E: crate::Element>(what: &'static str, values: &[E]) -> Result<(), Error> {
    match values.iter().position(|x| !x.to_f32().is_finite()) {
        None => Ok(()),
        Some(index) => Err(Error::NotFinite { what, index }),
    }
}
