use half::{bf16, f16};

use crate::simd::Simd;

mod sealed {
    use crate::simd::Simd;

    pub trait Sealed: Copy {
        /// Loads `S::LANES` elements and widens them.
        ///
        /// # Safety
        /// `S::LANES` elements from `p` on are readable.
        unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32;
    }
}
use sealed::Sealed;

/// Storage type of one component of a row: `f32`, [`half::f16`] or [`half::bf16`]. Arithmetic is in `f32`, or
/// in `f64` where a function documents it.
pub trait Element: Copy + Default + Send + Sync + Sealed + 'static {
    /// Converts exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Sealed for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32 {
        // SAFETY: the caller guarantees it.
        unsafe { s.load(p) }
    }
}

impl Element for f16 {
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Sealed for f16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32 {
        // SAFETY: the caller guarantees it; `f16` has the layout of `u16`.
        unsafe { s.load_f16(p.cast()) }
    }
}

impl Element for bf16 {
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Sealed for bf16 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32 {
        // SAFETY: the caller guarantees it; `bf16` has the layout of `u16`.
        unsafe { s.load_bf16(p.cast()) }
    }
}
