//! What can be wrong with rows, attention and serialized caches, and the errors of the crates above, which
//! share most of it.

/// Defines the error of a crate: an enum of its own variants, each with its number and its message, and of
/// those that all crates of the family have. They are the same in all of them, so that `?` converts one error
/// into another.
///
/// An `enum Error from kv_attend::Error` also converts that error, and holds its other variants in one.
#[doc(hidden)]
#[macro_export]
macro_rules! define_error {
    (
        $(#[$attributes:meta])*
        pub enum Error $(from $attend:ty)? {
            $(
                $(#[$variant_doc:meta])*
                $variant:ident $({ $($(#[$field_doc:meta])* $field:ident: $type:ty,)+ })?
                    = $code:literal, $message:literal;
            )*
        }
    ) => {
        $(#[$attributes])*
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
                /// Elements (bytes for codes) or rows that the shapes require.
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
            /// A size or index, or a product or sum of sizes, exceeds what the operation supports, or the
            /// range of values that of their type.
            TooLarge,
            /// This machine lacks the instructions of the requested backend.
            BackendUnavailable,
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
            $($(#[$variant_doc])* $variant $({ $($(#[$field_doc])* $field: $type,)+ })?,)*
            $(
                /// An error of rows or exact attention that no other variant covers.
                Attend($attend),
            )?
        }

        impl Error {
            /// A number that identifies the kind of error. It never changes; the table is in the
            /// documentation of `kv-attend`.
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
                    $(Self::$variant { .. } => $code,)*
                    $(Self::Attend(error) => <$attend>::code(error),)?
                }
            }
        }

        impl core::fmt::Display for Error {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
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
                    Self::TooLarge => write!(f, "the sizes or values are too large"),
                    Self::BackendUnavailable => {
                        write!(f, "this machine lacks the instructions of the backend")
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
                    $(Self::$variant $({ $($field,)+ })? => write!(f, $message),)*
                    $(Self::Attend(error) => <$attend as core::fmt::Display>::fmt(&error, f),)?
                }
            }
        }

        impl core::error::Error for Error {}

        $(
            /// Variants that both crates have map to each other.
            impl From<$attend> for Error {
                fn from(error: $attend) -> Self {
                    type Inner = $attend;
                    match error {
                        Inner::Zero { what } => Self::Zero { what },
                        Inner::Length { what, expected, actual } => Self::Length { what, expected, actual },
                        Inner::TooShort { what, needed, actual } => Self::TooShort { what, needed, actual },
                        Inner::PartialRow { what, row, actual } => Self::PartialRow { what, row, actual },
                        Inner::TooLarge => Self::TooLarge,
                        Inner::BackendUnavailable => Self::BackendUnavailable,
                        Inner::BadMagic { what } => Self::BadMagic { what },
                        Inner::Version { what, version } => Self::Version { what, version },
                        Inner::Truncated { what } => Self::Truncated { what },
                        Inner::TrailingBytes { what, extra } => Self::TrailingBytes { what, extra },
                        Inner::BadField { what } => Self::BadField { what },
                        Inner::BadChecksum { what } => Self::BadChecksum { what },
                        other => Self::Attend(other),
                    }
                }
            }
        )?
    };
}

crate::define_error! {
    /// An invalid argument, with the offending values.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Error {
        /// The distance between rows is below the length of a row.
        Stride {
            /// Elements from one row to the next.
            row_stride: usize,
            /// Elements of a row.
            components: usize,
        } = 101, "the row stride is {row_stride}, expected at least the {components} components of a row";
        /// There are more query tokens than rows of keys, and no position of the first query was given.
        Causal {
            /// Query tokens.
            queries: usize,
            /// Rows of keys.
            tokens: usize,
        } = 102, "{queries} query tokens exceed the {tokens} rows of keys, and no position is given";
        /// An index in the list of tokens is out of range.
        Token {
            /// Position in the list.
            index: usize,
            /// The index found there.
            token: u32,
            /// Number of rows.
            rows: usize,
        } = 103, "token {token} at index {index} of the list is out of range for {rows} rows";
        /// The scale is NaN or infinite, or the cap of the scores is not a positive finite number.
        Attention {
            /// The field of [`Attention`](crate::Attention).
            what: &'static str,
        } = 104, "{what} is out of range";
        /// Rows have another element type than the cache.
        ElementType = 105, "the rows have another element type than the cache";
    }
}

pub(crate) fn check_len(what: &'static str, actual: usize, expected: usize) -> Result<(), Error> {
    if actual == expected { Ok(()) } else { Err(Error::Length { what, expected, actual }) }
}

pub(crate) fn check_at_least(what: &'static str, actual: usize, needed: usize) -> Result<(), Error> {
    if actual >= needed { Ok(()) } else { Err(Error::TooShort { what, needed, actual }) }
}
