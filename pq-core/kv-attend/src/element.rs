//! The three element types of rows, and what must be compiled for each of them.

use core::fmt;
use core::str::FromStr;

use half::{bf16, f16};

use crate::kernel::Attend;
use crate::simd::{Run, Simd};
use crate::{AnyRows, Backend, Rows};

mod sealed {
    use crate::kernel::Attend;
    use crate::simd::Simd;
    use crate::{AnyRows, Backend, Rows};

    pub trait Sealed: Copy {
        /// Loads `S::LANES` elements and widens them.
        ///
        /// # Safety
        /// `S::LANES` elements from `p` on are readable.
        unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32;

        /// Rounds `S::LANES` floats and stores them.
        ///
        /// # Safety
        /// `S::LANES` elements from `p` on are writable.
        unsafe fn store<S: Simd>(s: S, p: *mut Self, x: S::F32);

        fn any(rows: Rows<'_, Self>) -> AnyRows<'_>;

        /// Runs exact attention. Not generic, so that its loops are compiled in this crate alone.
        fn attend(backend: Backend, attend: Attend<'_, '_, Self>);
    }
}
use sealed::Sealed;

/// Storage type of one component of a row: `f32`, [`half::f16`] or [`half::bf16`]. Arithmetic is in `f32`, or
/// in `f64` where a function documents it.
pub trait Element: Copy + Default + Send + Sync + Sealed + 'static {
    /// Converts exactly.
    fn to_f32(self) -> f32;
    /// Rounds to nearest, ties to even: a float beyond the range of the type becomes infinite.
    fn from_f32(x: f32) -> Self;
    /// The largest finite element with the sign of an infinity; any other element as it is. A single infinity
    /// in a cache makes attention NaN.
    #[must_use]
    fn saturate(self) -> Self;
}

/// An [`Element`] as a value, where the type is known at run time only. Its text is `f32`, `f16` or `bf16`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ElementType {
    /// `f32`.
    F32,
    /// [`half::f16`].
    F16,
    /// [`half::bf16`].
    Bf16,
}

impl ElementType {
    /// All types.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Bytes of an element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ElementType {
    type Err = ParseElementTypeError;

    fn from_str(text: &str) -> Result<Self, ParseElementTypeError> {
        Self::ALL.into_iter().find(|element| element.name() == text).ok_or(ParseElementTypeError)
    }
}

/// The error of a text that names no [`ElementType`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseElementTypeError;

impl fmt::Display for ParseElementTypeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("must be one of f32, f16, bf16")
    }
}

impl core::error::Error for ParseElementTypeError {}

impl<'a, E: Element> From<Rows<'a, E>> for AnyRows<'a> {
    fn from(rows: Rows<'a, E>) -> Self {
        E::any(rows)
    }
}

impl Element for f32 {
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
    fn saturate(self) -> Self {
        if self.is_infinite() { Self::MAX.copysign(self) } else { self }
    }
}

impl Sealed for f32 {
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32 {
        // SAFETY: the caller guarantees it.
        unsafe { s.load(p) }
    }

    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, p: *mut Self, x: S::F32) {
        // SAFETY: the caller guarantees it.
        unsafe { s.store(p, x) }
    }

    fn any(rows: Rows<'_, Self>) -> AnyRows<'_> {
        AnyRows::F32(rows)
    }

    fn attend(backend: Backend, attend: Attend<'_, '_, Self>) {
        backend.run(attend);
    }
}

/// The implementations of a type of 16 bits, given its loads and stores.
macro_rules! sixteen_bits {
    ($element:ident, $any:ident, $load:ident, $store:ident) => {
        impl Element for $element {
            fn to_f32(self) -> f32 {
                Self::to_f32(self)
            }
            fn from_f32(x: f32) -> Self {
                Self::from_f32(x)
            }
            fn saturate(self) -> Self {
                if self.is_infinite() { Self::MAX.copysign(self) } else { self }
            }
        }

        impl Sealed for $element {
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, p: *const Self) -> S::F32 {
                // SAFETY: the caller guarantees it; the type has the layout of `u16`.
                unsafe { s.$load(p.cast()) }
            }

            #[inline(always)]
            unsafe fn store<S: Simd>(s: S, p: *mut Self, x: S::F32) {
                // SAFETY: the caller guarantees it; the type has the layout of `u16`.
                unsafe { s.$store(p.cast(), x) }
            }

            fn any(rows: Rows<'_, Self>) -> AnyRows<'_> {
                AnyRows::$any(rows)
            }

            fn attend(backend: Backend, attend: Attend<'_, '_, Self>) {
                backend.run(attend);
            }
        }
    };
}

sixteen_bits!(f16, F16, load_f16, store_f16);
sixteen_bits!(bf16, Bf16, load_bf16, store_bf16);

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;
    use crate::simd::Kernel;

    struct Store<'a, E>(&'a [f32; 16], &'a mut [E; 16]);

    impl<E: Element> Kernel for Store<'_, E> {
        type Output = ();

        fn scalar(self) {
            self.1.iter_mut().zip(self.0).for_each(|(out, &x)| *out = E::from_f32(x));
        }

        #[inline(always)]
        fn vector<S: Simd>(self, s: S) {
            for at in (0..16).step_by(S::LANES) {
                // SAFETY: 16 floats and 16 elements in registers of LANES.
                unsafe { E::store(s, self.1.as_mut_ptr().add(at), s.load(self.0.as_ptr().add(at))) };
            }
        }
    }

    #[test]
    fn infinities_saturate_and_nothing_else_does() {
        fn check<E: Element>(most: f32) {
            for (x, expected) in [
                (f32::INFINITY, most),
                (f32::NEG_INFINITY, -most),
                (most, most),
                (f32::MAX, most),
                (1.0, 1.0),
                (-0.0, -0.0),
            ] {
                let got = E::from_f32(x).saturate().to_f32();
                assert_eq!(got.to_bits(), expected.to_bits(), "{x}");
            }
            assert!(E::from_f32(f32::NAN).saturate().to_f32().is_nan());
        }
        check::<f32>(f32::MAX);
        check::<f16>(f16::MAX.to_f32());
        check::<bf16>(bf16::MAX.to_f32());
    }

    #[test]
    fn element_types_parse_as_they_print() {
        for element in ElementType::ALL {
            assert_eq!(std::format!("{element}").parse(), Ok(element));
        }
        assert_eq!("F16".parse::<ElementType>(), Err(ParseElementTypeError));
    }

    #[test]
    fn vectors_round_as_single_floats_do() {
        fn check<E: Element + PartialEq + core::fmt::Debug>(floats: &[f32; 16]) {
            for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                let mut out = [E::default(); 16];
                backend.run(Store(floats, &mut out));
                for (x, &float) in out.iter().zip(floats) {
                    let nan = float.is_nan() && x.to_f32().is_nan();
                    assert!(nan || *x == E::from_f32(float), "{backend:?}: {float} to {x:?}");
                }
            }
        }
        // Steps over all floats, and floats next to the halves between neighbours of both types.
        let all = (0..=u32::MAX).step_by(65_521).map(f32::from_bits);
        let ties = (0..=u16::MAX).flat_map(|bits| {
            let (tie, half) = ((u32::from(bits) << 16) | 0x8000, f16::from_bits(bits).to_f32().to_bits());
            [tie - 1, tie, tie + 1, half ^ 0x0fff, half ^ 0x1000, half ^ 0x1001].map(f32::from_bits)
        });
        let floats: Vec<f32> = all.chain(ties).collect();
        for floats in floats.as_chunks::<16>().0 {
            check::<f32>(floats);
            check::<f16>(floats);
            check::<bf16>(floats);
        }
    }
}
