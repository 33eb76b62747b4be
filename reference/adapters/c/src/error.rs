//! Errors as codes, with a text per thread.

use std::cell::RefCell;
use std::ffi::c_char;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Success.
pub const KVC_OK: i32 = 0;
/// A size that must be positive is zero.
pub const KVC_ZERO: i32 = 1;
/// A buffer has not the length that the shapes require.
pub const KVC_LENGTH: i32 = 2;
/// A buffer is too short.
pub const KVC_TOO_SHORT: i32 = 3;
/// A buffer does not consist of whole rows.
pub const KVC_PARTIAL_ROW: i32 = 4;
/// A size, or a product of sizes, is too large.
pub const KVC_TOO_LARGE: i32 = 5;
/// A number is NaN or infinite.
pub const KVC_NOT_FINITE: i32 = 7;
/// Saved bytes are of another type.
pub const KVC_BAD_MAGIC: i32 = 8;
/// Saved bytes have an unknown version.
pub const KVC_VERSION: i32 = 9;
/// Saved bytes end too early.
pub const KVC_TRUNCATED: i32 = 10;
/// Bytes follow the saved ones.
pub const KVC_TRAILING_BYTES: i32 = 11;
/// A field of saved bytes or an argument has an invalid value, or a cache is of other books or heads.
pub const KVC_BAD_FIELD: i32 = 12;
/// Saved bytes are damaged.
pub const KVC_BAD_CHECKSUM: i32 = 13;
/// Rows have another element type than the cache.
pub const KVC_ELEMENT_TYPE: i32 = 105;
/// A frame is of another model than the profile.
pub const KVC_WRONG_MODEL: i32 = 412;
/// A pointer is NULL.
pub const KVC_NULL: i32 = 901;
/// A pointer is not aligned as its type requires.
pub const KVC_MISALIGNED: i32 = 902;
/// A text is not UTF-8.
pub const KVC_TEXT: i32 = 903;
/// A constant is none of those of its kind.
pub const KVC_CONSTANT: i32 = 904;
/// A defect of this library: it panicked. Handles that the call could change are to be freed.
pub const KVC_PANIC: i32 = 999;

/// What a function can fail with.
#[derive(Debug)]
pub(crate) enum Error {
    Null(&'static str),
    Misaligned(&'static str),
    Text(&'static str),
    Constant { what: &'static str, value: u32 },
    Owners(kv_owners::Error),
    Codec(codec_core::Error),
    Store(kv_store::Error),
}

pub(crate) type Result<T = ()> = std::result::Result<T, Error>;

impl Error {
    fn code(&self) -> i32 {
        match self {
            Self::Null(_) => KVC_NULL,
            Self::Misaligned(_) => KVC_MISALIGNED,
            Self::Text(_) => KVC_TEXT,
            Self::Constant { .. } => KVC_CONSTANT,
            Self::Owners(error) => error.code() as i32,
            Self::Codec(error) => error.code() as i32,
            Self::Store(error) => error.code() as i32,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null(what) => write!(f, "{what} is NULL"),
            Self::Misaligned(what) => write!(f, "{what} is not aligned"),
            Self::Text(what) => write!(f, "{what} is not UTF-8"),
            Self::Constant { what, value } => write!(f, "{value} is no {what}"),
            Self::Owners(error) => error.fmt(f),
            Self::Codec(error) => error.fmt(f),
            Self::Store(error) => error.fmt(f),
        }
    }
}

/// Errors of crates whose errors `kv-owners` has, and of those that this crate calls otherwise.
macro_rules! from {
    ($($error:ty => $variant:ident),+ $(,)?) => {$(
        impl From<$error> for Error {
            fn from(error: $error) -> Self {
                Self::$variant(error.into())
            }
        }
    )+};
}
from! {
    kv_attend::Error => Owners,
    pq_core::Error => Owners,
    svd_core::Error => Owners,
    kv_owners::Error => Owners,
    codec_core::Error => Codec,
    kv_store::Error => Store,
}

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs the body of a function: its error or panic becomes a code, and its text that of this thread.
pub(crate) fn call(body: impl FnOnce() -> Result) -> i32 {
    let (code, text) = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return KVC_OK,
        Ok(Err(error)) => (error.code(), error.to_string()),
        Err(_) => (KVC_PANIC, "a defect of the library: it panicked".into()),
    };
    // A thread that is ending has no text any more.
    let _ = LAST.try_with(|last| last.replace(text));
    code
}

/// Copies the text of the last error of this thread to `text`, with a final NUL, cut to `len` bytes. Returns the
/// bytes that the whole text needs, its NUL included; 1 if no call has failed. Later calls that succeed do not
/// change the text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_last_error(text: *mut c_char, len: usize) -> usize {
    let copy = |last: &RefCell<String>| {
        let last = last.borrow();
        if !text.is_null() && len > 0 {
            let n = last.len().min(len - 1);
            text.cast::<u8>().copy_from_nonoverlapping(last.as_ptr(), n);
            text.add(n).write(0);
        }
        last.len() + 1
    };
    LAST.try_with(copy).unwrap_or(1)
}
