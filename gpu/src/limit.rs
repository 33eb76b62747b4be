//! An older device to compile for, as text and as numbers.

use std::str::FromStr;

use crate::Error;

/// An older device, for which [`Device::limit_to`](crate::Device::limit_to) compiles kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Major and minor compute capability.
    pub capability: (i32, i32),
    /// Maximum bytes of shared memory of a block.
    pub shared_memory: usize,
}

impl FromStr for Limit {
    type Err = Error;

    /// Reads `8.0:163`: compute capability 8.0, 163 KiB of shared memory.
    fn from_str(text: &str) -> Result<Self, Error> {
        let read = || {
            let (capability, kib) = text.split_once(':')?;
            let (major, minor) = capability.split_once('.')?;
            let capability = (major.parse().ok()?, minor.parse().ok()?);
            Some(Self { capability, shared_memory: kib.parse::<usize>().ok()?.checked_mul(1 << 10)? })
        };
        read().ok_or_else(|| Error::Argument {
            operation: "Limit",
            problem: format!(
                "`{text}` is not of the form 8.0:163 (compute capability, KiB of shared memory)"
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_or_refused() {
        let a100 = Limit { capability: (8, 0), shared_memory: 163 << 10 };
        assert_eq!("8.0:163".parse(), Ok(a100));
        for text in ["", "8.0", "8:163", "8.0:", "8.0:-1", "8.0:99999999999999999999", "8.x:163"] {
            assert!(text.parse::<Limit>().is_err(), "{text}");
        }
    }
}
