//! Blocks of 32 elements with one scale, in half precision but for MXFP4.

use super::codes::{Block, Group, Word32, bytes32, fifth_bits, half, less, nibbles16, of_table, or};

/// Nibbles less 8, and a scale.
pub(super) struct Q4_0;

impl Block<18, 1, 1> for Q4_0 {
    #[inline(always)]
    fn unpack(b: &[u8; 18]) -> ([Word32; 1], [Group; 1]) {
        ([less(nibbles16(&b[2..]), 8)], [Group::scaled(half(b))])
    }
}

/// Nibbles, a scale and an offset.
pub(super) struct Q4_1;

impl Block<20, 1, 1> for Q4_1 {
    #[inline(always)]
    fn unpack(b: &[u8; 20]) -> ([Word32; 1], [Group; 1]) {
        ([nibbles16(&b[4..])], [Group { scale: half(b), offset: half(&b[2..]) }])
    }
}

/// Fifth bits and nibbles, less 16, and a scale.
pub(super) struct Q5_0;

impl Block<22, 1, 1> for Q5_0 {
    #[inline(always)]
    fn unpack(b: &[u8; 22]) -> ([Word32; 1], [Group; 1]) {
        let codes = or(nibbles16(&b[6..]), fifth_bits(&b[2..]));
        ([less(codes, 16)], [Group::scaled(half(b))])
    }
}

/// Fifth bits and nibbles, a scale and an offset.
pub(super) struct Q5_1;

impl Block<24, 1, 1> for Q5_1 {
    #[inline(always)]
    fn unpack(b: &[u8; 24]) -> ([Word32; 1], [Group; 1]) {
        let codes = or(nibbles16(&b[8..]), fifth_bits(&b[4..]));
        ([codes], [Group { scale: half(b), offset: half(&b[2..]) }])
    }
}

/// Signed bytes and a scale.
pub(super) struct Q8_0;

impl Block<34, 1, 1> for Q8_0 {
    #[inline(always)]
    fn unpack(b: &[u8; 34]) -> ([Word32; 1], [Group; 1]) {
        ([bytes32(&b[2..], 0)], [Group::scaled(half(b))])
    }
}

/// Nibbles that choose levels, and a scale.
pub(super) struct Iq4Nl;

impl Block<18, 1, 1> for Iq4Nl {
    #[inline(always)]
    fn unpack(b: &[u8; 18]) -> ([Word32; 1], [Group; 1]) {
        /// The levels.
        const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
        ([of_table(nibbles16(&b[2..]), &LEVELS)], [Group::scaled(half(b))])
    }
}

/// 4-bit floats (E2M1), and a power of two as the scale (E8M0).
pub(super) struct Mxfp4;

impl Block<17, 1, 1> for Mxfp4 {
    #[inline(always)]
    fn unpack(b: &[u8; 17]) -> ([Word32; 1], [Group; 1]) {
        /// The values of 4-bit floats (E2M1), doubled.
        const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
        let scale = f64::from_bits((1023 - 128 + u64::from(b[0])) << 52) as f32;
        ([of_table(nibbles16(&b[1..]), &E2M1)], [Group::scaled(scale)])
    }
}
