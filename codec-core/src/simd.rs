//! The vector operations of the kernels.
//!
//! A kernel is written once, over [`Simd`], next to its scalar definition.
//! [`Backend::run`](crate::Backend::run) compiles it for each instruction set by inlining it into one
//! function that has the set's target features. Each set implements [`Simd`] in its own file. Vectors have
//! the 32 lanes of a tile, of 16 bits ([`Simd::Row`]) or 32 bits ([`Simd::Wide`]).

/// Defines `is_available` and `run` from one list of target features.
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

        /// Runs a kernel compiled for the set. Callers have checked that the set is available.
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

/// Bytes that a refill may load: a word for each lane, and one register more.
pub(crate) const REFILL_BYTES: usize = 2 * LANES + 64;

/// Words that a spill may store: one for each lane, and one register more.
pub(crate) const SPILL_WORDS: usize = LANES + 16;

/// An operation with a scalar and a vector implementation. `vector` must be `#[inline(always)]`, so that it
/// is compiled with the features of the function that it is inlined into.
pub(crate) trait Kernel {
    type Output;

    /// The scalar implementation, which defines the result.
    fn scalar(self) -> Self::Output;

    /// The vector implementation. By default it is the scalar one, which the compiler vectorizes if it is
    /// `#[inline(always)]`.
    #[inline(always)]
    fn vector<S: Simd>(self, _s: S) -> Self::Output
    where
        Self: Sized,
    {
        self.scalar()
    }
}

/// An instruction set. A value of the type proves that the CPU has the set: only `run` in the set's file
/// creates one, after the backend has been checked.
pub(crate) trait Simd: Copy {
    /// 32 lanes of 16 bits.
    type Row: Copy;
    /// 32 lanes of 32 bits.
    type Wide: Copy;
    /// One flag per lane.
    type Mask: Copy;

    fn splat(self, x: u16) -> Self::Row;
    fn load(self, row: &Row) -> Self::Row;
    fn store(self, row: &mut Row, x: Self::Row);
    fn add(self, a: Self::Row, b: Self::Row) -> Self::Row;
    fn sub(self, a: Self::Row, b: Self::Row) -> Self::Row;
    /// The smaller of both, unsigned.
    fn min(self, a: Self::Row, b: Self::Row) -> Self::Row;
    /// The larger of both, unsigned.
    fn max(self, a: Self::Row, b: Self::Row) -> Self::Row;
    /// [`last_key`](crate::model::tables::last_key) of slots.
    fn last_keys(self, slots: Self::Row) -> Self::Row;
    /// [`slot_of`](crate::model::tables::slot_of) keys.
    fn slots_of(self, keys: Self::Row) -> Self::Row;
    /// `a >= b`, for operands below 2^15.
    fn at_least(self, a: Self::Row, b: Self::Row) -> Self::Mask;
    fn any(self, mask: Self::Mask) -> bool;
    fn select(self, mask: Self::Mask, yes: Self::Row, no: Self::Row) -> Self::Row;

    fn load_wide(self, x: &[u32; LANES]) -> Self::Wide;
    fn store_wide(self, out: &mut [u32; LANES], x: Self::Wide);
    /// The lower 12 bits.
    fn slots(self, states: Self::Wide) -> Self::Row;
    /// `width * (state >> 12) + offset`.
    fn advance(self, states: Self::Wide, width: Self::Row, offset: Self::Row) -> Self::Wide;
    /// `state >> bits`, and `code << bits` with the bits shifted out of the state as its low bits.
    fn take_low_bits(self, states: Self::Wide, code: Self::Row, bits: Self::Wide) -> (Self::Wide, Self::Row);
    /// Renormalization: in lane order, each state below 2^16 is shifted left by 16 and takes the next
    /// little-endian word as its lower half. Returns the bytes consumed.
    ///
    /// `words` must have at least [`REFILL_BYTES`].
    fn refill(self, states: &mut Self::Wide, words: &[u8]) -> usize;

    fn splat_wide(self, x: u32) -> Self::Wide;
    fn widen(self, x: Self::Row) -> Self::Wide;
    /// `32 - x`.
    fn sub_from_32(self, x: Self::Wide) -> Self::Wide;
    /// `code >> bits`, and the bits shifted out.
    fn split(self, code: Self::Row, bits: Self::Wide) -> (Self::Row, Self::Row);
    /// `state << bits | low`.
    fn join(self, states: Self::Wide, low: Self::Row, bits: Self::Wide) -> Self::Wide;
    /// Renormalization of the encoder: the lower halves of the states with `state >> shift >= bound` are
    /// written in lane order to the end of `words`, and those states are shifted right by 16. Shifts by 32
    /// give 0. Returns the words written; the words before them may change.
    ///
    /// `words` must have at least [`SPILL_WORDS`].
    fn spill(self, states: &mut Self::Wide, shift: Self::Wide, bound: Self::Wide, words: &mut [u16])
    -> usize;
    /// `((state / width) << 12) + state % width + start`, for states below `width << 20`.
    fn encode(self, states: Self::Wide, start: Self::Row, width: Self::Row) -> Self::Wide;
}
