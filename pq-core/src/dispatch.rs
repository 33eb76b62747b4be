//! Runs a kernel on a backend: it is compiled for each instruction set by being inlined into one function
//! with the target features of that set.

use kv_attend::Backend;

#[cfg(target_arch = "aarch64")]
use crate::simd::neon;
use crate::simd::{Kernel, Run};
#[cfg(target_arch = "x86_64")]
use crate::simd::{avx2, avx512};

impl Run for Backend {
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 if self.is_available() => avx512::run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 if self.is_available() => avx2::run(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Neon if self.is_available() => neon::run(kernel),
            _ => kernel.scalar(),
        }
    }
}
