use core::fmt;

/// Why an argument was refused.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Error {
    /// A size is zero that must not be.
    Zero {
        /// The argument.
        what: &'static str,
    },
    /// An argument does not have exactly the length that the shapes give.
    Length {
        /// The argument.
        what: &'static str,
        /// Elements that the shapes give.
        expected: usize,
        /// Elements of the argument.
        actual: usize,
    },
    /// An argument is shorter than the operation needs.
    TooShort {
        /// The argument.
        what: &'static str,
        /// Elements that the operation needs at least.
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
    /// The data contain a NaN or an infinity, or a value that no finite data give.
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
    /// An order repeats a component, or names one that does not exist.
    Order {
        /// The component.
        component: usize,
    },
    /// Singular values are not finite, nonnegative and in descending order.
    Spectrum {
        /// The first component that breaks the rule.
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
        }
    }
}

impl core::error::Error for Error {}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}

/// Counts the rows of `row` elements, at least 1 each, that a slice of `actual` elements consists of.
pub(crate) fn count_rows(what: &'static str, actual: usize, row: usize) -> Result<usize, Error> {
    if actual.is_multiple_of(row) { Ok(actual / row) } else { Err(Error::PartialRow { what, row, actual }) }
}
