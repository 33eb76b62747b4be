//! Errors of the crates as the exceptions that `kvcodes/errors.py` defines.

use pyo3::prelude::*;

/// An exception to raise.
#[derive(Debug)]
pub enum Error {
    /// A failure with its class, text and number in its crate.
    Known { class: &'static str, text: String, code: u32 },
    /// An exception of Python or of another package.
    Raised(PyErr),
}

pub type Result<T> = std::result::Result<T, Error>;

const ARGUMENT: &str = "ArgumentError";
const ELEMENT: &str = "ElementError";
const FORMAT: &str = "FormatError";
const STORE: &str = "StoreError";

impl Error {
    /// An argument that does not fit.
    pub fn argument(text: impl Into<String>) -> Self {
        Self::Known { class: ARGUMENT, text: text.into(), code: 0 }
    }

    /// A store that cannot be used.
    pub fn store(text: impl Into<String>) -> Self {
        Self::Known { class: STORE, text: text.into(), code: 0 }
    }

    /// Elements of a type that the operation does not take, or memory that it cannot use.
    pub fn element(text: impl Into<String>) -> Self {
        Self::Known { class: ELEMENT, text: text.into(), code: 0 }
    }
}

/// The classes of the crates whose errors `kv_attend::define_error` defines: numbers 8 to 13 are of saved
/// bytes.
fn of_family(code: u32, text: String) -> Error {
    let class = if (8..=13).contains(&code) { FORMAT } else { ARGUMENT };
    Error::Known { class, text, code }
}

impl From<kv_attend::Error> for Error {
    fn from(e: kv_attend::Error) -> Self {
        of_family(e.code(), e.to_string())
    }
}

impl From<pq_core::Error> for Error {
    fn from(e: pq_core::Error) -> Self {
        of_family(e.code(), e.to_string())
    }
}

impl From<svd_core::Error> for Error {
    fn from(e: svd_core::Error) -> Self {
        of_family(e.code(), e.to_string())
    }
}

impl From<kv_owners::Error> for Error {
    fn from(e: kv_owners::Error) -> Self {
        of_family(e.code(), e.to_string())
    }
}

impl From<codec_core::Error> for Error {
    fn from(e: codec_core::Error) -> Self {
        use codec_core::Error as E;
        let of_bytes = matches!(
            e,
            E::BadMagic
                | E::BadVersion { .. }
                | E::BadField { .. }
                | E::Truncated
                | E::TrailingBytes
                | E::BadChecksum
                | E::Corrupt
                | E::WrongPlane
                | E::WrongModel
                | E::WrongCoding { .. }
                | E::WrongEntry { .. }
        );
        let class = if of_bytes { FORMAT } else { ARGUMENT };
        Self::Known { class, text: e.to_string(), code: e.code() }
    }
}

impl From<kv_store::Error> for Error {
    fn from(e: kv_store::Error) -> Self {
        match e {
            kv_store::Error::Codec(e) => e.into(),
            e @ (kv_store::Error::Argument(_) | kv_store::Error::Limit { .. }) => {
                Self::argument(e.to_string())
            }
            e => Self::Known { class: STORE, text: e.to_string(), code: e.code() },
        }
    }
}

impl From<kv_stream::Error> for Error {
    fn from(e: kv_stream::Error) -> Self {
        match e {
            kv_stream::Error::Codec(e) => e.into(),
            e => Self::Known { class: STORE, text: e.to_string(), code: 0 },
        }
    }
}

impl From<PyErr> for Error {
    fn from(e: PyErr) -> Self {
        Self::Raised(e)
    }
}

impl From<Error> for PyErr {
    fn from(e: Error) -> Self {
        match e {
            Error::Raised(e) => e,
            Error::Known { class, text, code } => Python::attach(|py| {
                let exception = || py.import("kvcodes.errors")?.getattr(class)?.call1((text, code));
                exception().map_or_else(|e| e, PyErr::from_value)
            }),
        }
    }
}
