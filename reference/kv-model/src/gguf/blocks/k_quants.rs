//! ggml's K-quants: blocks of 256 elements in groups of 16 or 32, whose scales are quantized too.

use std::array::from_fn;

use super::codes::{Block, Group, Word32, bytes32, half, less, or, part};

/// Q2_K: 16 groups of 16, a scale and a minimum of 4 bits each.
pub(super) struct Q2;

impl Block<84, 8, 16> for Q2 {
    #[inline(always)]
    fn unpack(b: &[u8; 84]) -> ([Word32; 8], [Group; 16]) {
        let (scales, d, min) = (&b[..16], half(&b[80..]), half(&b[82..]));
        let group = |group: usize| Group {
            scale: d * f32::from(scales[group] & 15),
            offset: -(min * f32::from(scales[group] >> 4)),
        };
        (words(|i| two_bits(&b[16..80], i)), from_fn(group))
    }
}

/// Q3_K: 16 groups of 16, scales of 6 bits; the third bits are apart.
pub(super) struct Q3;

impl Block<110, 8, 16> for Q3 {
    #[inline(always)]
    fn unpack(b: &[u8; 110]) -> ([Word32; 8], [Group; 16]) {
        let (high, scales, d) = (bytes32(b, 0), &b[96..108], half(&b[108..]));
        let group = |group: usize| {
            let low = if group < 8 { scales[group] & 15 } else { scales[group - 8] >> 4 };
            let scale = low | (scales[8 + group % 4] >> (2 * (group / 4)) & 3) << 4;
            Group::scaled(d * (f32::from(scale) - 32.0))
        };
        (words(|i| less(or(two_bits(&b[32..96], i), part::<1>(high, i, 2)), 4)), from_fn(group))
    }
}

/// Q4_K: 8 groups of 32, a scale and a minimum of 6 bits each.
pub(super) struct Q4;

impl Block<144, 8, 8> for Q4 {
    #[inline(always)]
    fn unpack(b: &[u8; 144]) -> ([Word32; 8], [Group; 8]) {
        (words(|i| nibbles32(&b[16..], i)), six_bits(b))
    }
}

/// Q5_K: as Q4_K; the fifth bits are apart.
pub(super) struct Q5;

impl Block<176, 8, 8> for Q5 {
    #[inline(always)]
    fn unpack(b: &[u8; 176]) -> ([Word32; 8], [Group; 8]) {
        let fifth = bytes32(&b[16..], 0);
        (words(|i| or(nibbles32(&b[48..], i), part::<1>(fifth, i, 4))), six_bits(b))
    }
}

/// Q6_K: 16 groups of 16 with signed scales of 8 bits; the two high bits are apart.
pub(super) struct Q6;

impl Block<210, 8, 16> for Q6 {
    #[inline(always)]
    fn unpack(b: &[u8; 210]) -> ([Word32; 8], [Group; 16]) {
        let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half(&b[208..]));
        let codes = |i: usize| {
            let low = part::<4>(bytes32(low, i / 4 * 2 + i % 2), i % 4 / 2 * 4, 0);
            let high = part::<2>(bytes32(high, i / 4), i % 4 * 2, 4);
            less(or(low, high), 32)
        };
        (words(codes), from_fn(|group| Group::scaled(d * f32::from(scales[group] as i8))))
    }
}

/// Codes `32 * i` of a block, for all `i`.
#[inline(always)]
fn words(word: impl Fn(usize) -> Word32) -> [Word32; 8] {
    let mut words = [[0; 4]; 8];
    for (i, out) in words.iter_mut().enumerate() {
        *out = word(i);
    }
    words
}

/// Two bits of elements `32 * i` on: byte `j` of each 32 has those of elements `j`, `j + 32`, `j + 64`, `j + 96`.
#[inline(always)]
fn two_bits(bytes: &[u8], i: usize) -> Word32 {
    part::<2>(bytes32(bytes, i / 4), i % 4 * 2, 0)
}

/// Nibbles of elements `32 * i` on: the low ones of 32 bytes, then the high ones.
#[inline(always)]
fn nibbles32(bytes: &[u8], i: usize) -> Word32 {
    part::<4>(bytes32(bytes, i / 2), i % 2 * 4, 0)
}

/// Scales and minima of the groups of Q4_K and Q5_K: two halves, then 12 bytes.
#[inline(always)]
fn six_bits(b: &[u8]) -> [Group; 8] {
    let (d, min, scales) = (half(b), half(&b[2..]), &b[4..16]);
    from_fn(|group| {
        let (scale, minimum) = if group < 4 {
            (scales[group] & 63, scales[group + 4] & 63)
        } else {
            let low = scales[group + 4];
            (low & 15 | scales[group - 4] >> 6 << 4, low >> 4 | scales[group] >> 6 << 4)
        };
        Group { scale: d * f32::from(scale), offset: -(min * f32::from(minimum)) }
    })
}
