//! Quantization of values to bins, and the mapping of bins to symbols.
//!
//! A bin is `x * (1 / step)`, rounded to nearest, ties to even. The reciprocal is an `f32` and every
//! operation is rounded separately (no fused multiply-add), so that all backends give the same bins.

/// Bins are `-MAX_BIN..=MAX_BIN`.
pub(crate) const MAX_BIN: i32 = 32767;

/// Adding it rounds magnitudes below 2^22 to nearest, ties to even.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

/// The bin of `x` steps, clamped to +-2^20, which exceeds [`MAX_BIN`].
#[inline(always)]
pub(crate) fn bin(x: f32) -> i32 {
    const LIMIT: f32 = (1 << 20) as f32;
    ((x.clamp(-LIMIT, LIMIT) + ROUND) - ROUND) as i32
}

/// The nearest finite value. NaN stays NaN.
#[inline(always)]
pub(crate) const fn clamp_finite(x: f32) -> f32 {
    x.clamp(-f32::MAX, f32::MAX)
}

/// 0, -1, 1, -2, 2, ... to 0, 1, 2, 3, 4, ...
#[inline(always)]
pub(crate) const fn zigzag(x: i32) -> u32 {
    ((x << 1) ^ (x >> 31)) as u32
}

/// The inverse of [`zigzag`].
#[inline(always)]
pub(crate) const fn unzigzag(x: u32) -> i32 {
    (x >> 1) as i32 ^ -((x & 1) as i32)
}

/// Added to a bin before it is split, so that the bins of symbol 0 are centred on zero.
#[inline(always)]
const fn half(low_bits: u32) -> i32 {
    (1 << low_bits) >> 1
}

/// The symbol of a bin, ignoring the escape.
#[inline(always)]
pub(crate) const fn symbol(bin: i32, low_bits: u32) -> u32 {
    zigzag((bin + half(low_bits)) >> low_bits)
}

/// The code of a bin: `symbol << low_bits | low`.
#[inline(always)]
pub(crate) const fn code(bin: i32, low_bits: u32) -> u32 {
    let low = (bin + half(low_bits)) & ((1 << low_bits) - 1);
    symbol(bin, low_bits) << low_bits | low as u32
}

/// The bin of a [`code`].
#[inline(always)]
pub(crate) const fn bin_of_code(code: u16, low_bits: u32) -> i32 {
    let low = code as i32 & ((1 << low_bits) - 1);
    (unzigzag(code as u32 >> low_bits) << low_bits) + low - half(low_bits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_even_and_the_range_is_bounded() {
        assert_eq!([0.5, 1.5, -0.5, -2.5, 2.4].map(bin), [0, 2, 0, -2, 2]);
        assert_eq!((bin(f32::MAX), bin(f32::NEG_INFINITY)), (1 << 20, -1 << 20));
    }

    #[test]
    fn codes_return_their_bins_and_their_symbols_grow_outwards() {
        for low_bits in 0..=8 {
            for bin in -3000..=3000 {
                let (code, symbol) = (code(bin, low_bits), symbol(bin, low_bits));
                assert_eq!(code >> low_bits, symbol);
                if let Ok(code) = u16::try_from(code) {
                    assert_eq!(bin_of_code(code, low_bits), bin);
                }
                assert!(symbol.abs_diff((2 * bin.unsigned_abs()) >> low_bits) <= 2);
            }
        }
    }
}
