use core::fmt;

/// What was wrong with an argument, and by how much.
#[derive(Clone, Copy, Debug, PartialEq)]
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
    /// More columns asked for than the basis has.
    Rank {
        /// The rank asked for.
        rank: usize,
        /// The dimension.
        dim: usize,
    },
    /// A NaN or an infinity in the data.
    NotFinite {
        /// The argument.
        what: &'static str,
    },
    /// A fraction outside its range.
    Fraction {
        /// The argument.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// An order that repeats a component or names one that does not exist.
    Order {
        /// The component.
        component: usize,
    },
    /// Singular values that are not finite, not negative and descending.
    Spectrum {
        /// The first one that is out of place.
        component: usize,
    },
    /// A budget below the smallest ranks.
    Budget {
        /// Components that the smallest ranks take.
        least: usize,
        /// Components that the budget allows.
        components: usize,
    },
    /// This machine lacks the instruction set.
    BackendUnavailable,
    /// A product of sizes does not fit, or there are more processors than any machine has.
    TooLarge,
    /// The eigenvalue iteration did not converge.
    NoConvergence,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Zero { what } => write!(f, "{what} must not be zero"),
            Self::Length { what, expected, actual } => {
                write!(f, "{what} has length {actual}, expected {expected}")
            }
            Self::Rank { rank, dim } => write!(f, "rank {rank} is above dimension {dim}"),
            Self::NotFinite { what } => write!(f, "{what} holds a NaN or an infinity"),
            Self::Fraction { what, value } => write!(f, "{what} is {value}, outside 0..=1"),
            Self::Order { component } => write!(f, "component {component} is repeated or does not exist"),
            Self::Spectrum { component } => {
                write!(f, "singular value {component} is not finite, not negative and at most the one before")
            }
            Self::Budget { least, components } => {
                write!(f, "the budget of {components} components is below the smallest ranks, {least}")
            }
            Self::BackendUnavailable => write!(f, "this machine lacks the instruction set"),
            Self::TooLarge => write!(f, "the sizes are too large"),
            Self::NoConvergence => write!(f, "the eigenvalue iteration did not converge"),
        }
    }
}

impl core::error::Error for Error {}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}
