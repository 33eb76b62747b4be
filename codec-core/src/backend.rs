//! The instruction sets that kernels are compiled for, and the dispatch to one of them.

use crate::Error;
use crate::simd::Kernel;

/// An instruction set that the hot loops are compiled for.
///
/// Results have the same bits on all backends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Portable Rust. It defines every result.
    Scalar,
    /// x86-64 with AVX2, FMA, BMI1, BMI2, POPCNT and LZCNT (Haswell, Zen 1 and later).
    Avx2,
    /// The features of [`Self::Avx2`] and AVX-512 F, BW, DQ and VL (Skylake-X, Zen 4 and later).
    Avx512,
    /// AArch64 with NEON.
    Neon,
}

impl Backend {
    /// All backends, the preferred ones last.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512];

    /// Whether this machine can run the backend.
    ///
    /// Feature `std` detects the features of the running CPU. Without it, only those that the compilation
    /// target guarantees count.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            _ if cfg!(miri) => false,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => crate::simd::avx2::is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => crate::simd::avx512::is_available(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => cfg!(target_feature = "neon"),
            _ => false,
        }
    }

    /// The fastest backend that this machine can run.
    #[must_use]
    pub fn detect() -> Self {
        Self::ALL.into_iter().rev().find(|backend| backend.is_available()).unwrap_or(Self::Scalar)
    }

    pub(crate) fn check(self) -> Result<(), Error> {
        if self.is_available() { Ok(()) } else { Err(Error::BackendUnavailable) }
    }

    /// Runs `kernel` compiled for this instruction set, or its scalar definition if the machine lacks the
    /// set.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 if self.is_available() => crate::simd::avx512::run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 if self.is_available() => crate::simd::avx2::run(kernel),
            #[cfg(target_arch = "aarch64")]
            Self::Neon if self.is_available() => crate::simd::neon::run(kernel),
            _ => kernel.scalar(),
        }
    }
}
