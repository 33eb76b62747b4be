use crate::Error;
use crate::simd::Kernel;

/// An instruction set for which the kernels are compiled.
///
/// The scalar code defines every result. Grams have the same bits on every backend; sums in `f32` differ by
/// rounding, within the tolerances of the crate's tests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Portable Rust, the definition of every result.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F (and AVX2).
    Avx512,
    /// AArch64 with NEON.
    Neon,
}

impl Backend {
    /// All backends, the preferred ones last.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512];

    /// Whether this machine can run the backend.
    ///
    /// AVX2 and AVX-512 are detected at run time with feature `std`; without it, they must be features of the
    /// compilation target. NEON must always be a feature of the target. Under Miri only the scalar backend is
    /// available.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            _ if cfg!(miri) => false,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => has_avx512(),
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

    /// Runs `kernel` on this instruction set, or its scalar code if the machine lacks the set.
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

#[cfg(all(target_arch = "x86_64", feature = "std"))]
fn has_avx2() -> bool {
    std::is_x86_feature_detected!("avx2")
        && std::is_x86_feature_detected!("fma")
        && std::is_x86_feature_detected!("f16c")
}

#[cfg(all(target_arch = "x86_64", feature = "std"))]
fn has_avx512() -> bool {
    has_avx2() && std::is_x86_feature_detected!("avx512f")
}

#[cfg(all(target_arch = "x86_64", not(feature = "std")))]
const fn has_avx2() -> bool {
    cfg!(all(target_feature = "avx2", target_feature = "fma", target_feature = "f16c"))
}

#[cfg(all(target_arch = "x86_64", not(feature = "std")))]
const fn has_avx512() -> bool {
    has_avx2() && cfg!(target_feature = "avx512f")
}
