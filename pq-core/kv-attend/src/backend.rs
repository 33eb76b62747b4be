//! The instruction sets that kernels are compiled for, and whether this machine has them.

use crate::Error;

/// An instruction set that the kernels are compiled for.
///
/// The scalar code defines every result; a backend is a way to compute it. Integer results, sums of table
/// entries and Grams agree bit for bit between backends. Sums with fused multiply-adds differ by rounding,
/// within the tolerances of the crates' tests.
///
/// A backend is one set of CPU features: a kernel is compiled for all of them, and the machine must have all
/// of them, whatever the kernel uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// Portable Rust, the definition of every result.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C (Haswell, Zen and later).
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL, VBMI and VNNI (Ice Lake, Zen 4 and later).
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
    /// features of the compilation target count. NEON must always be a feature of the target. Under Miri only
    /// the scalar backend is available.
    #[must_use]
    #[inline] // every call of every crate checks
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

    /// Checks that this machine can run the backend.
    ///
    /// # Errors
    /// [`Error::BackendUnavailable`].
    #[inline]
    pub fn check(self) -> Result<(), Error> {
        if self.is_available() { Ok(()) } else { Err(Error::BackendUnavailable) }
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn has_avx2() -> bool {
    crate::cpu_features!(Avx2 => detect)
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn has_avx512() -> bool {
    crate::cpu_features!(Avx512 => detect)
}
