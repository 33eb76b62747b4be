//! What can be wrong with the arguments and the saved bytes of a quantizer, and the number of each error.

kv_attend::define_error! {
    /// An invalid argument, with the offending values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Error from kv_attend::Error {
        /// An element that must be finite is NaN or infinite.
        NotFinite {
            /// The argument.
            what: &'static str,
            /// Index of the first such element.
            index: usize,
        } = 7, "{what} is not finite at index {index}";
        /// The vector length is not a multiple of the number of subspaces.
        DimNotDivisible {
            /// Length of a vector.
            dim: usize,
            /// Number of subspaces.
            m: usize,
        } = 201, "dimension {dim} is not divisible into {m} subspaces";
        /// Bits per code outside 1..=12.
        NbitsOutOfRange {
            /// The requested bits per code.
            nbits: u32,
        } = 202, "{nbits} bits per code are outside 1..=12";
        /// Two arguments have different quantizer shapes.
        ShapeMismatch = 203, "the arguments have different quantizer shapes";
        /// More subspaces than an operation's integer sums allow.
        TooManySubspaces {
            /// Number of subspaces.
            m: usize,
            /// Maximum allowed.
            max: usize,
        } = 204, "{m} subspaces exceed the maximum of {max}";
        /// A code is not the index of a centroid.
        CodeOutOfRange {
            /// Index of the code.
            index: usize,
            /// The code.
            code: u16,
            /// Centroids per subspace.
            ksub: usize,
        } = 205, "code {code} at index {index} is out of range for {ksub} centroids";
        /// A profile has too few distinct sequence lengths to fit a cost.
        Underdetermined {
            /// The profile.
            what: &'static str,
            /// Minimum number of distinct lengths.
            needed: usize,
        } = 206, "the {what} needs at least {needed} clearly different sequence lengths";
        /// [`TrainOptions::tolerance`](crate::TrainOptions) is negative, infinite or NaN.
        Tolerance = 207, "the tolerance must be finite and at least 0";
        /// A position that must be a multiple of the vectors of a block is not.
        Unaligned {
            /// The argument.
            what: &'static str,
            /// The position.
            at: usize,
            /// The required divisor.
            multiple: usize,
        } = 208, "{what} is {at}, expected a multiple of {multiple}";
        /// A page table names a page that the pool does not have.
        Page {
            /// Position in the table.
            index: usize,
            /// The page found there.
            page: u32,
            /// Pages of the pool.
            pages: usize,
        } = 209, "page {page} at index {index} of the table is out of range for {pages} pages";
        /// A token index is out of range.
        TokenOutOfRange {
            /// Index in the list of tokens.
            index: usize,
            /// The token.
            token: u32,
            /// Number of tokens.
            n: usize,
        } = 210, "token {token} at index {index} is out of range for {n} tokens";
        /// Pages have 16 or 32 tokens, or a multiple of 64.
        PageTokens {
            /// The requested tokens of a page.
            page_tokens: usize,
        } = 211, "pages of {page_tokens} tokens, expected 16, 32 or a multiple of 64";
        /// A field of a [`RowBudget`](crate::RowBudget) is negative, infinite or NaN, a share is above 1, or
        /// a variance of scores is negative.
        Budget {
            /// The field.
            what: &'static str,
        } = 212, "{what} is out of its range";
        /// The crate has no codebook of Gaussians for these subspaces.
        NoGaussian {
            /// Components of a subspace.
            dsub: usize,
            /// Bits per code.
            nbits: u32,
        } = 213, "no codebook of Gaussians has subspaces of {dsub} components and {nbits} bits";
    }
}

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
