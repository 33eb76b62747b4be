//! The element types of rows: `f32`, and the two types of 16 bits that frames can also keep losslessly.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::ElementType;

mod sealed {
    use crate::ElementType;

    pub trait Sealed: Copy {
        /// Converts exactly.
        fn widen(self) -> f32;
        /// The nearest finite value, ties to even. The argument is not NaN.
        fn narrow(x: f32) -> Self;
        /// The bits of an element of 16 bits; for an `f32`, those of the nearest finite element of type `to`,
        /// or of its infinity or NaN.
        fn to_u16(self, to: ElementType) -> u16;
        /// The element with these bits; an `f32` is widened from type `from`.
        fn from_u16(bits: u16, from: ElementType) -> Self;
        /// The bits of elements of 16 bits.
        fn bits(_: &[Self]) -> Option<&[u16]> {
            None
        }
        /// As [`Self::bits`].
        fn bits_mut(_: &mut [Self]) -> Option<&mut [u16]> {
            None
        }
    }
}
pub(crate) use sealed::Sealed;

/// Storage type of the elements of a cache: `f32`, [`half::f16`] or [`half::bf16`]. Arithmetic is in `f32`.
///
/// Elements are widened exactly. Decoded values are rounded to the nearest element, ties to even; values
/// beyond the largest finite element become that element.
// Not the conversions of `half`: these have no branches and no calls, so that kernel loops vectorize.
pub trait Element: Copy + Send + Sync + Sealed + 'static {
    /// The name of the type in the header of a frame.
    const TYPE: ElementType;
}

impl Element for f32 {
    const TYPE: ElementType = ElementType::F32;
}

impl Sealed for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
    #[inline(always)]
    fn narrow(x: f32) -> Self {
        x
    }
    #[inline(always)]
    fn to_u16(self, to: ElementType) -> u16 {
        match (to, self.is_finite()) {
            (ElementType::F16, true) => f16::narrow(self).to_bits(),
            (ElementType::F16, false) => f16::from_f32(self).to_bits(),
            (_, true) => bf16::narrow(self).to_bits(),
            (_, false) => bf16::from_f32(self).to_bits(),
        }
    }
    #[inline(always)]
    fn from_u16(bits: u16, from: ElementType) -> Self {
        if from == ElementType::F16 { f16::from_bits(bits).widen() } else { bf16::from_bits(bits).widen() }
    }
}

impl Element for f16 {
    const TYPE: ElementType = ElementType::F16;
}

/// Mantissa bits that `f32` has beyond those of `f16`.
const EXTRA: u32 = 13;
/// The difference of the exponent biases, in the exponent field of `f32`.
const REBIAS: u32 = (127 - 15) << 23;
/// The bits of 2^-14, the smallest normal `f16`.
const LEAST_NORMAL: u32 = (127 - 14) << 23;
/// The bits of 65504, the largest `f16`.
const LARGEST: u32 = 0x477f_e000;

impl Sealed for f16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        let bits = u32::from(self.to_bits());
        let (sign, magnitude) = (bits >> 15 << 31, (bits & 0x7fff) << EXTRA);
        // Infinities and NaN have the largest exponent in both types.
        let rebias = if magnitude < 0x1f << 23 { REBIAS } else { 2 * REBIAS };
        // Under the exponent of the smallest normal value, the mantissa of a subnormal exceeds that value by
        // the result.
        let subnormal = f32::from_bits(LEAST_NORMAL | magnitude) - f32::from_bits(LEAST_NORMAL);
        let value = if magnitude < 1 << 23 { subnormal.to_bits() } else { magnitude + rebias };
        f32::from_bits(sign | value)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let (sign, magnitude) = (bits >> 31 << 15, (bits & 0x7fff_ffff).min(LARGEST));
        let odd = magnitude >> EXTRA & 1;
        // Wraps for subnormal values only, which do not use it.
        let normal = (magnitude + (1 << (EXTRA - 1)) - 1 + odd).wrapping_sub(REBIAS) >> EXTRA;
        // The last bit of a value in 1/2..1 is 2^-24, the smallest subnormal `f16`: the addition rounds to
        // it.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5_f32.to_bits();
        let value = if magnitude < LEAST_NORMAL { subnormal } else { normal };
        Self::from_bits((sign | value) as u16)
    }
    #[inline(always)]
    fn to_u16(self, _: ElementType) -> u16 {
        Self::to_bits(self)
    }
    #[inline(always)]
    fn from_u16(bits: u16, _: ElementType) -> Self {
        Self::from_bits(bits)
    }
    fn bits(rows: &[Self]) -> Option<&[u16]> {
        Some(rows.reinterpret_cast())
    }
    fn bits_mut(rows: &mut [Self]) -> Option<&mut [u16]> {
        Some(rows.reinterpret_cast_mut())
    }
}

impl Element for bf16 {
    const TYPE: ElementType = ElementType::Bf16;
}

impl Sealed for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }

    #[inline(always)]
    fn narrow(x: f32) -> Self {
        let bits = x.to_bits();
        let (sign, magnitude) = (bits >> 31 << 15, (bits & 0x7fff_ffff).min(0x7f7f_0000));
        Self::from_bits((sign | (magnitude + 0x7fff + (magnitude >> 16 & 1)) >> 16) as u16)
    }
    #[inline(always)]
    fn to_u16(self, _: ElementType) -> u16 {
        Self::to_bits(self)
    }
    #[inline(always)]
    fn from_u16(bits: u16, _: ElementType) -> Self {
        Self::from_bits(bits)
    }
    fn bits(rows: &[Self]) -> Option<&[u16]> {
        Some(rows.reinterpret_cast())
    }
    fn bits_mut(rows: &mut [Self]) -> Option<&mut [u16]> {
        Some(rows.reinterpret_cast_mut())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widening_is_exact() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(
                half.widen().to_bits() == half.to_f32().to_bits() || half.is_nan() && half.widen().is_nan()
            );
            assert!(brain.widen().to_bits() == brain.to_f32().to_bits() || brain.is_nan());
        }
    }

    #[test]
    fn narrowing_rounds_to_the_nearest_finite_element() {
        // All exponents and signs, with mantissas around the ties of both types.
        for top in 0..1 << 15 {
            for low in [0, 1, 0x7fff, 0x8000, 0x8001, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x1_ffff]
            {
                let x = f32::from_bits((top << 17) | low);
                if x.is_nan() {
                    continue;
                }
                let (half, brain) = (f16::narrow(x), bf16::narrow(x));
                let largest = |x: f32, largest: f32| x.clamp(-largest, largest);
                assert_eq!(half.to_bits(), f16::from_f32(largest(x, f16::MAX.to_f32())).to_bits(), "{x:e}");
                assert_eq!(
                    brain.to_bits(),
                    bf16::from_f32(largest(x, bf16::MAX.to_f32())).to_bits(),
                    "{x:e}"
                );
            }
        }
    }
}
