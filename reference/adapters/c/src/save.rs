//! Saved bytes, to and from buffers of the caller.

use crate::args;
use crate::error::Result;

/// Bytes of one saved object.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_bytes {
    /// The first byte.
    pub data: *const u8,
    /// Number of bytes.
    pub len: usize,
}

/// Copies `bytes` to a buffer, and writes their number also if the buffer is too short.
pub(crate) unsafe fn save(bytes: &[u8], buffer: *mut u8, len: usize, written: *mut usize) -> Result {
    let written = args::out(written, "written")?;
    let buffer = args::slice_mut(buffer, len, "buffer")?;
    written.write(bytes.len());
    let actual = buffer.len();
    let Some(buffer) = buffer.get_mut(..bytes.len()) else {
        return Err(pq_core::Error::TooShort { what: "buffer", needed: bytes.len(), actual }.into());
    };
    buffer.copy_from_slice(bytes);
    Ok(())
}

/// Reads one object of each of some bytes.
pub(crate) unsafe fn load<T, E: Into<crate::error::Error>>(
    parts: *const kvc_bytes,
    n: usize,
    read: impl Fn(&[u8]) -> std::result::Result<T, E>,
) -> Result<Vec<T>> {
    if n == 0 {
        return Err(pq_core::Error::Zero { what: "number of heads" }.into());
    }
    let parts = args::slice(parts, n, "saved heads")?.iter();
    parts.map(|part| read(args::slice(part.data, part.len, "a saved head")?).map_err(Into::into)).collect()
}
