//! Vector instructions for kernels over rows.
//!
//! A kernel is written once over [`Simd`], next to its scalar definition. [`Run::run`] compiles it for each
//! instruction set: it is inlined into one function with the set's target features. The file of a set lists
//! its instructions.

pub use crate::dot::dot;
pub use crate::exp::{exp, tanh};

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

/// An operation as scalar and as vector code. `vector` must be `#[inline(always)]`, so that it is compiled
/// with the features of the function that it is inlined into.
pub trait Kernel {
    /// What both forms return.
    type Output;

    /// The definition of the result.
    fn scalar(self) -> Self::Output;

    /// The operation on the registers of `s`.
    fn vector<S: Simd>(self, s: S) -> Self::Output;
}

/// Runs a kernel on a backend.
pub trait Run {
    /// Runs `kernel` compiled for this instruction set, or its scalar code if the machine lacks the set.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;
}

/// An instruction set. A value proves that the CPU supports it: only `run` in the set's file constructs one,
/// after the backend has been found available.
pub trait Simd: Copy {
    /// `LANES` floats.
    type F32: Copy;
    /// `LANES / 2` doubles.
    type F64: Copy;

    /// Floats of a register.
    const LANES: usize;
    /// Whether the set has 32 vector registers instead of 16.
    const WIDE: bool;

    /// `x` in every lane.
    fn splat(self, x: f32) -> Self::F32;
    /// Loads a register.
    ///
    /// # Safety
    /// `LANES` floats from `p` on are readable.
    unsafe fn load(self, p: *const f32) -> Self::F32;
    /// Loads `LANES` `f16` elements and widens them.
    ///
    /// # Safety
    /// `LANES` elements from `p` on are readable.
    unsafe fn load_f16(self, p: *const u16) -> Self::F32;
    /// Loads `LANES` `bf16` elements and widens them.
    ///
    /// # Safety
    /// `LANES` elements from `p` on are readable.
    unsafe fn load_bf16(self, p: *const u16) -> Self::F32;
    /// The products of `N` signed bytes and `N` integers of 16 bits, 16 or 32, added up in the lanes:
    /// exactly, then rounded to floats.
    ///
    /// # Safety
    /// `N` bytes from `a` on and `N` integers from `b` on are readable.
    unsafe fn dot_i8_i16<const N: usize>(self, a: *const i8, b: *const i16) -> Self::F32;
    /// Stores a register.
    ///
    /// # Safety
    /// `LANES` floats from `p` on are writable.
    unsafe fn store(self, p: *mut f32, x: Self::F32);
    /// Stores `LANES` floats as `f16`, rounded to nearest, ties to even.
    ///
    /// # Safety
    /// `LANES` elements from `p` on are writable.
    unsafe fn store_f16(self, p: *mut u16, x: Self::F32);
    /// Stores `LANES` floats as `bf16`, rounded to nearest, ties to even.
    ///
    /// # Safety
    /// `LANES` elements from `p` on are writable.
    unsafe fn store_bf16(self, p: *mut u16, x: Self::F32);
    /// `a * b + c`, rounded once.
    fn mul_add(self, a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// The sums of the lanes of four registers, in an order that depends on the set.
    fn sum4(self, x: [Self::F32; 4]) -> [f32; 4];
    /// Prefetches the cache line at `p` into L2. `p` need not be readable.
    fn prefetch(self, p: *const u8);

    /// Zeros.
    fn zero_f64(self) -> Self::F64;
    /// Broadcasts the double at `p`.
    ///
    /// # Safety
    /// `p` is readable.
    unsafe fn splat_f64(self, p: *const f64) -> Self::F64;
    /// Loads a register of doubles.
    ///
    /// # Safety
    /// `LANES / 2` doubles from `p` on are readable.
    unsafe fn load_f64(self, p: *const f64) -> Self::F64;
    /// Stores a register of doubles.
    ///
    /// # Safety
    /// `LANES / 2` doubles from `p` on are writable.
    unsafe fn store_f64(self, p: *mut f64, x: Self::F64);
    /// `a + b`.
    fn add_f64(self, a: Self::F64, b: Self::F64) -> Self::F64;
    /// `a * b + c`, rounded once.
    fn mul_add_f64(self, a: Self::F64, b: Self::F64, c: Self::F64) -> Self::F64;
}
