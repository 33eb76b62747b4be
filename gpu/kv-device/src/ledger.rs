//! Accounting of device memory by purpose, and its limit.

use std::cell::Cell;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use bytesize::ByteSize;

use crate::{Error, Result};

thread_local! {
    static PURPOSE: Cell<&'static str> = const { Cell::new("buffers") };
}

/// While it lives, [buffers](crate::Buffer) allocated by this thread count for one purpose, which an error
/// names.
pub struct Allocating {
    before: &'static str,
}

impl Allocating {
    /// Begins to count for `purpose`.
    #[must_use]
    pub fn new(purpose: &'static str) -> Self {
        Self { before: PURPOSE.replace(purpose) }
    }
}

impl Drop for Allocating {
    fn drop(&mut self) {
        PURPOSE.set(self.before);
    }
}

/// The bytes of all buffers of a device, by purpose.
///
/// The driver takes more: its context, kernel code, and the memory of cuBLASLt.
pub(crate) struct Ledger {
    limit: usize,
    held: Mutex<Vec<(&'static str, usize)>>, // in order of first use
}

impl Ledger {
    pub const fn new(limit: usize) -> Self {
        Self { limit, held: Mutex::new(vec![]) }
    }

    /// Counts a buffer before it is allocated, and returns its purpose.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if it exceeds the limit.
    pub fn add(&self, bytes: usize) -> Result<&'static str> {
        let purpose = PURPOSE.get();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = held.iter().map(|(_, bytes)| bytes).sum();
        if bytes > self.limit.saturating_sub(all) {
            return Err(refused(bytes, purpose, &held, &format!("the limit is {}", shown(self.limit))));
        }
        match held.iter_mut().find(|(of, _)| *of == purpose) {
            Some((_, sum)) => *sum += bytes,
            None => held.push((purpose, bytes)),
        }
        Ok(purpose)
    }

    /// Counts a buffer that is freed, or was not allocated.
    pub fn subtract(&self, bytes: usize, purpose: &'static str) {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, sum)) = held.iter_mut().find(|(of, _)| *of == purpose) {
            *sum -= bytes;
        }
    }

    /// The error for a buffer that does not fit into the device's memory and is not, or no longer, counted.
    pub fn full(&self, bytes: usize, purpose: &'static str) -> Error {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        refused(bytes, purpose, &held, "the device has no more")
    }
}

fn refused(bytes: usize, purpose: &'static str, held: &[(&str, usize)], limit: &str) -> Error {
    let mut reason = limit.to_owned();
    for (of, sum) in held.iter().filter(|(_, sum)| *sum > 0) {
        let _ = write!(reason, ", {of} hold {}", shown(*sum)); // writing to a string does not fail
    }
    Error::DeviceMemory { bytes, purpose, reason }
}

fn shown(bytes: usize) -> ByteSize {
    ByteSize(bytes as u64)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_names_and_numbers() {
        let ledger = Ledger::new(24 << 30);
        let add = |purpose, bytes: usize| {
            let _purpose = Allocating::new(purpose);
            ledger.add(bytes)
        };
        assert_eq!(add("weights", 16 << 30).unwrap(), "weights");
        assert_eq!(add("caches", 4 << 30).unwrap(), "caches");
        assert_eq!(
            add("caches", (4 << 30) + 1).unwrap_err().to_string(),
            "4294967297 bytes of device memory for caches: the limit is 24.0 GiB, weights hold 16.0 GiB, caches \
             hold 4.0 GiB"
        );
        assert_eq!(add("caches", 4 << 30).unwrap(), "caches");
        ledger.subtract(8 << 30, "caches");
        let error = add("prompts", usize::MAX).unwrap_err().to_string();
        assert!(error.ends_with("24.0 GiB, weights hold 16.0 GiB"), "{error}");
        assert_eq!(ledger.add(8 << 30).unwrap(), "buffers");
    }
}
