//! What the vector kernels need of an instruction set.
//!
//! A kernel is written once, over [`Simd`], beside its scalar definition; [`Backend::run`](crate::Backend::run) compiles
//! it for each set by inlining it into one function that has the set's target features. Each set's file is the list of its
//! instructions. The unit is the 32 lanes of a tile: 16-bit numbers ([`Simd::Row`]) and 32-bit ones ([`Simd::Wide`]).

/// Defines from one list of target features whether the running CPU has them and `run`, which is compiled for them.
#[cfg(target_arch = "x86_64")]
macro_rules! features {
    ($set:ident: $($feature:tt)+) => {
        /// Whether the CPU has every feature that [`run`] is compiled for.
        pub(crate) fn is_available() -> bool {
            #[cfg(feature = "std")]
            return $(std::is_x86_feature_detected!($feature))&&+;
            #[cfg(not(feature = "std"))]
            return cfg!(all($(target_feature = $feature),+));
        }

        /// Compiles and runs a kernel. Callers have found the set available.
        pub(crate) fn run<K: Kernel>(kernel: K) -> K::Output {
            $(#[target_feature(enable = $feature)])+
            fn with_features<K: Kernel>(kernel: K) -> K::Output {
                kernel.vector($set(()))
            }
            // SAFETY: `Backend::run` calls this only where `is_available` has confirmed all features.
            unsafe { with_features(kernel) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;

use crate::model::tables::{LANES, Row};

/// Bytes that a refill may see: a word for each lane, and a register behind them.
pub(crate) const REFILL_BYTES: usize = 2 * LANES + 64;

/// Words that a spill may write: one for each lane, and a register before them.
pub(crate) const SPILL_WORDS: usize = LANES + 16;

/// An operation in its two forms. `vector` must be `#[inline(always)]`, so that it is compiled with the features of the
/// function that it is inlined into.
pub(crate) trait Kernel {
    type Output;

    /// The definition.
    fn scalar(self) -> Self::Output;

    /// The same on the registers of `s`; by default the definition, if it is `#[inline(always)]`, compiled to them.
    #[inline(always)]
    fn vector<S: Simd>(self, _s: S) -> Self::Output
    where
        Self: Sized,
    {
        self.scalar()
    }
}

/// An instruction set. A value of it proves that the CPU has it: only `run` in the set's file makes one, after the
/// backend has been found available.
pub(crate) trait Simd: Copy {
    /// 32 numbers of 16 bits.
    type Row: Copy;
    /// 32 numbers of 32 bits.
    type Wide: Copy;
    /// One flag for each of the 32.
    type Mask: Copy;

    fn splat(self, x: u16) -> Self::Row;
    fn load(self, row: &Row) -> Self::Row;
    fn store(self, row: &mut Row, x: Self::Row);
    fn sub(self, a: Self::Row, b: Self::Row) -> Self::Row;
    /// The smaller one, unsigned.
    fn min(self, a: Self::Row, b: Self::Row) -> Self::Row;
    /// `a >= b`, of numbers below 2^15.
    fn at_least(self, a: Self::Row, b: Self::Row) -> Self::Mask;
    fn any(self, mask: Self::Mask) -> bool;
    fn select(self, mask: Self::Mask, yes: Self::Row, no: Self::Row) -> Self::Row;
    /// `a + 1` where the mask is set, else `a`.
    fn count(self, mask: Self::Mask, a: Self::Row) -> Self::Row;

    fn load_wide(self, x: &[u32; LANES]) -> Self::Wide;
    fn store_wide(self, out: &mut [u32; LANES], x: Self::Wide);
    /// The lower 12 bits.
    fn slots(self, states: Self::Wide) -> Self::Row;
    /// `width * (state >> 12) + offset`.
    fn advance(self, states: Self::Wide, width: Self::Row, offset: Self::Row) -> Self::Wide;
    /// `state >> bits`, and `code << bits | ` the bits that were lost.
    fn take_low_bits(self, states: Self::Wide, code: Self::Row, bits: Self::Wide) -> (Self::Wide, Self::Row);
    /// States below 2^16 take a little-endian word each, in lane order, as their lower half. Returns the bytes taken.
    ///
    /// There must be [`REFILL_BYTES`].
    fn refill(self, states: &mut Self::Wide, words: &[u8]) -> usize;

    fn splat_wide(self, x: u32) -> Self::Wide;
    fn widen(self, x: Self::Row) -> Self::Wide;
    /// `32 - x`.
    fn sub_from_32(self, x: Self::Wide) -> Self::Wide;
    /// `code >> bits`, and what is lost.
    fn split(self, code: Self::Row, bits: Self::Wide) -> (Self::Row, Self::Row);
    /// `state << bits | low`.
    fn join(self, states: Self::Wide, low: Self::Row, bits: Self::Wide) -> Self::Wide;
    /// The lower halves of the states with `state >> shift >= bound` are written, in lane order, so that they end where `words`
    /// does; those states keep their upper halves. Shifts by 32 give 0. Returns the words written; what is before them may
    /// change.
    ///
    /// There must be [`SPILL_WORDS`].
    fn spill(self, states: &mut Self::Wide, shift: Self::Wide, bound: Self::Wide, words: &mut [u16])
    -> usize;
    /// `(state / width) << 12`, the remainder and `start`, for states below `width << 20`.
    fn encode(self, states: Self::Wide, start: Self::Row, width: Self::Row) -> Self::Wide;
}
