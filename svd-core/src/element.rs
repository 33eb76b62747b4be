use half::{bf16, f16};

use crate::simd::Simd;

mod sealed {
    use crate::simd::Simd;

    pub trait Sealed: Copy {
        /// Widens `S::LANES` elements.
        ///
        /// # Safety
        /// They are readable from `p` on.
        unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32;
    }
}
pub(crate) use sealed::Sealed;

/// Storage type of one component of a row: `f32`, [`half::f16`] or [`half::bf16`]. Arithmetic is done in `f32`, or `f64`
/// where a function says so.
pub trait Element: Copy + Default + Send + Sync + Sealed + 'static {
    /// Exact.
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
        // SAFETY: the caller's promise.
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
        // SAFETY: the caller's promise; `f16` is its 16 bits.
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
        // SAFETY: the caller's promise; `bf16` is its 16 bits.
        unsafe { s.load_bf16(p.cast()) }
    }
}
