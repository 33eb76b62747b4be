//! What can be wrong with the arguments and the saved bytes of low-rank caches, and the number of each error.

kv_attend::define_error! {
    /// Why an argument was rejected.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Error from kv_attend::Error {
        /// The data contain a NaN, an infinity, or a value that finite data cannot produce.
        NotFinite {
            /// The argument.
            what: &'static str,
        } = 7, "{what}: a value is NaN, infinite or out of range";
        /// A causal head has more queries than keys.
        Causal {
            /// Its queries.
            rows: usize,
            /// Its keys.
            tokens: usize,
        } = 301, "a causal head has {rows} rows, expected at most its {tokens} tokens";
        /// The rank is above the dimension.
        Rank {
            /// The requested rank.
            rank: usize,
            /// The dimension.
            dim: usize,
        } = 302, "rank {rank} is above dimension {dim}";
        /// A fraction is outside 0..=1.
        Fraction {
            /// The argument.
            what: &'static str,
            /// Its value.
            value: f64,
        } = 303, "{what} is {value}, outside 0..=1";
        /// An order repeats a component, or has one out of range.
        Order {
            /// The component.
            component: usize,
        } = 304, "component {component} is repeated or does not exist";
        /// Singular values are not finite, nonnegative and in descending order.
        Spectrum {
            /// The first offending component.
            component: usize,
        } = 305, "singular value {component} is not finite, is negative, or exceeds the one before it";
        /// The budget is below the sum of the smallest ranks.
        Budget {
            /// The sum of the smallest ranks.
            least: usize,
            /// Components that the budget allows.
            components: usize,
        } = 306, "the budget is {components} components, the smallest ranks need {least}";
        /// The eigenvalue iteration did not converge.
        NoConvergence = 307, "the eigenvalue iteration did not converge";
    }
}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}

#[cfg(feature = "alloc")]
pub(crate) fn check_at_least(what: &'static str, actual: usize, needed: usize) -> Result<(), Error> {
    if actual >= needed { Ok(()) } else { Err(Error::TooShort { what, needed, actual }) }
}

/// Counts the rows of `row` elements, at least 1 each, that a slice of `actual` elements consists of.
pub(crate) fn count_rows(what: &'static str, actual: usize, row: usize) -> Result<usize, Error> {
    if actual.is_multiple_of(row) { Ok(actual / row) } else { Err(Error::PartialRow { what, row, actual }) }
}
