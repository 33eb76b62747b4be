use crate::Error;
use crate::simd::Kernel;

/// An instruction set that the kernels are compiled for.
///
/// The scalar code defines every result; a backend is a way to compute it. Integer results and sums of table
/// entries agree bit for bit between backends. Sums with fused multiply-adds differ by rounding; the crate's
/// documentation has the tolerances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Portable Rust, the definition of every result.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VBMI (Ice Lake, Zen 4 and later).
    Avx512,
    /// AArch64 with NEON.
    Neon,
}

impl Backend {
    /// All backends in ascending order of preference.
    pub const ALL: [Self; 4] = [Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512];

    /// Whether this machine can run the backend.
    ///
    /// With feature `std` this detects every CPU feature that the code is compiled for. Without it, only the
    /// features of the compilation target count. NEON is a feature of every AArch64 target with floating
    /// point.
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

    /// Runs `kernel` compiled for this instruction set, or its scalar form if the machine lacks the set.
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
