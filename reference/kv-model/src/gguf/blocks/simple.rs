//! Blocks of 32 elements with one scale, in half precision but for MXFP4.

use super::codes::{Block, Unpacked};
use super::lanes::Lanes;

/// Nibbles less 8, and a scale.
pub(super) struct Q4_0;

impl Block<18, 1, 1> for Q4_0 {
    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 18]) -> Unpacked<L::Bytes, 1, 1> {
        let [scale, _] = l.halves(at(b, 0));
        Unpacked::scaled([l.less(l.nibbles(at(b, 2)), 8)], [scale])
    }
}

/// Nibbles, a scale and an offset.
pub(super) struct Q4_1;

impl Block<20, 1, 1> for Q4_1 {
    const HAS_OFFSETS: bool = true;

    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 20]) -> Unpacked<L::Bytes, 1, 1> {
        let [scale, offset] = l.halves(at(b, 0));
        let codes = l.nibbles(at(b, 4));
        Unpacked { codes: [codes], scales: [scale], offsets: [offset] }
    }
}

/// Fifth bits and nibbles, less 16, and a scale.
pub(super) struct Q5_0;

impl Block<22, 1, 1> for Q5_0 {
    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 22]) -> Unpacked<L::Bytes, 1, 1> {
        let [scale, _] = l.halves(at(b, 0));
        let codes = l.or(l.nibbles(at(b, 6)), l.sixteens(u32::from_le_bytes(*at(b, 2))));
        Unpacked::scaled([l.less(codes, 16)], [scale])
    }
}

/// Fifth bits and nibbles, a scale and an offset.
pub(super) struct Q5_1;

impl Block<24, 1, 1> for Q5_1 {
    const HAS_OFFSETS: bool = true;

    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 24]) -> Unpacked<L::Bytes, 1, 1> {
        let [scale, offset] = l.halves(at(b, 0));
        let codes = l.or(l.nibbles(at(b, 8)), l.sixteens(u32::from_le_bytes(*at(b, 4))));
        Unpacked { codes: [codes], scales: [scale], offsets: [offset] }
    }
}

/// Signed bytes and a scale.
pub(super) struct Q8_0;

impl Block<34, 1, 1> for Q8_0 {
    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 34]) -> Unpacked<L::Bytes, 1, 1> {
        let [scale, _] = l.halves(at(b, 0));
        Unpacked::scaled([l.load(at(b, 2))], [scale])
    }
}

/// Nibbles that choose levels, and a scale.
pub(super) struct Iq4Nl;

impl Block<18, 1, 1> for Iq4Nl {
    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 18]) -> Unpacked<L::Bytes, 1, 1> {
        let [scale, _] = l.halves(at(b, 0));
        /// The levels.
        const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
        Unpacked::scaled([l.of_table(l.nibbles(at(b, 2)), &LEVELS)], [scale])
    }
}

/// 4-bit floats (E2M1), and a power of two as the scale (E8M0).
pub(super) struct Mxfp4;

impl Block<17, 1, 1> for Mxfp4 {
    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 17]) -> Unpacked<L::Bytes, 1, 1> {
        /// The values of 4-bit floats (E2M1), doubled.
        const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
        // 2^(b - 128), the first two of which are subnormal numbers.
        let scale = f32::from_bits(match u32::from(b[0]) {
            exponent @ 0..2 => 0x20_0000 << exponent,
            exponent => (exponent - 1) << 23,
        });
        Unpacked::scaled([l.of_table(l.nibbles(at(b, 1)), &E2M1)], [scale])
    }
}

/// `N` bytes from `first` on.
#[inline(always)]
pub(super) fn at<const N: usize>(bytes: &[u8], first: usize) -> &[u8; N] {
    &bytes[first..].as_chunks().0[0]
}
