//! ggml's K-quants: blocks of 256 elements in groups of 16 or 32, whose scales are quantized too.
//!
//! Codes are unpacked in loops, not closures: the compiler may leave a closure as a function without the
//! features of the instruction set, in which every operation is a call.

use super::codes::{Block, Unpacked};
use super::lanes::Lanes;
use super::simple::at;

/// Q2_K: 16 groups of 16, a scale and a minimum of 4 bits each.
pub(super) struct Q2;

impl Block<84, 8, 16> for Q2 {
    const HAS_OFFSETS: bool = true;

    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 84]) -> Unpacked<L::Bytes, 8, 16> {
        let ([d, min], both) = (l.halves(at(b, 80)), at::<16>(b, 0));
        let mut codes = [l.load(at(b, 16)); 8];
        for (i, codes) in codes.iter_mut().enumerate() {
            *codes = two_bits(l, &b[16..80], i);
        }
        Unpacked {
            codes,
            scales: l.scaled(both.map(|x| (x & 15) as i8), d),
            offsets: l.scaled(both.map(|x| (x >> 4) as i8), -min),
        }
    }
}

/// Q3_K: 16 groups of 16, scales of 6 bits; the third bits are apart.
pub(super) struct Q3;

impl Block<110, 8, 16> for Q3 {
    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 110]) -> Unpacked<L::Bytes, 8, 16> {
        let (high, [_, d]) = (l.load(at(b, 0)), l.halves(at(b, 106)));
        let mut codes = [high; 8];
        for (i, codes) in codes.iter_mut().enumerate() {
            *codes = l.less(l.or(two_bits(l, &b[32..96], i), l.part::<1>(high, i as u32, 2)), 4);
        }
        // The nibbles of eight bytes are the low bits of the scales; pairs of bits of four bytes are the high
        // ones.
        let (low, high) = (u64::from_le_bytes(*at(b, 96)), u32::from_le_bytes(*at(b, 104)));
        let pairs = |bits: u32| u64::from(bits & 0x0303_0303) | u64::from(bits >> 2 & 0x0303_0303) << 32;
        let scales = [0, 4].map(|at| low >> at & 0x0f0f_0f0f_0f0f_0f0f | pairs(high >> at) << 4);
        let scales = scales.map(|scales| scales.to_le_bytes().map(|scale| scale as i8 - 32));
        Unpacked::scaled(codes, l.scaled::<16>(scales.as_flattened().as_chunks().0[0], d))
    }
}

/// Q4_K: 8 groups of 32, a scale and a minimum of 6 bits each.
pub(super) struct Q4;

impl Block<144, 8, 8> for Q4 {
    const HAS_OFFSETS: bool = true;

    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 144]) -> Unpacked<L::Bytes, 8, 8> {
        let mut codes = [l.load(at(b, 16)); 8];
        for (i, codes) in codes.iter_mut().enumerate() {
            *codes = nibbles32(l, &b[16..], i);
        }
        let (scales, offsets) = six_bits(l, at(b, 0));
        Unpacked { codes, scales, offsets }
    }
}

/// Q5_K: as Q4_K; the fifth bits are apart.
pub(super) struct Q5;

impl Block<176, 8, 8> for Q5 {
    const HAS_OFFSETS: bool = true;

    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 176]) -> Unpacked<L::Bytes, 8, 8> {
        let fifth = l.load(at(b, 16));
        let mut codes = [fifth; 8];
        for (i, codes) in codes.iter_mut().enumerate() {
            *codes = l.or(nibbles32(l, &b[48..], i), l.part::<1>(fifth, i as u32, 4));
        }
        let (scales, offsets) = six_bits(l, at(b, 0));
        Unpacked { codes, scales, offsets }
    }
}

/// Q6_K: 16 groups of 16 with signed scales of 8 bits; the two high bits are apart.
pub(super) struct Q6;

impl Block<210, 8, 16> for Q6 {
    #[inline(always)]
    fn unpack<L: Lanes>(l: L, b: &[u8; 210]) -> Unpacked<L::Bytes, 8, 16> {
        let (low, high, [_, d]) = (&b[..128], &b[128..192], l.halves(at(b, 206)));
        let mut codes = [l.load(at(b, 0)); 8];
        for (i, codes) in codes.iter_mut().enumerate() {
            let low = l.part::<4>(bytes32(l, low, i / 4 * 2 + i % 2), i as u32 % 4 / 2 * 4, 0);
            let high = l.part::<2>(bytes32(l, high, i / 4), i as u32 % 4 * 2, 4);
            *codes = l.less(l.or(low, high), 32);
        }
        Unpacked::scaled(codes, l.scaled(at::<16>(b, 192).map(|x| x as i8), d))
    }
}

/// `32 * i` bytes on.
#[inline(always)]
fn bytes32<L: Lanes>(l: L, bytes: &[u8], i: usize) -> L::Bytes {
    l.load(at(bytes, 32 * i))
}

/// Two bits of elements `32 * i` on: byte `j` of each 32 has those of elements `j`, `j + 32`, `j + 64`,
/// `j + 96`.
#[inline(always)]
fn two_bits<L: Lanes>(l: L, bytes: &[u8], i: usize) -> L::Bytes {
    l.part::<2>(bytes32(l, bytes, i / 4), i as u32 % 4 * 2, 0)
}

/// Nibbles of elements `32 * i` on: the low ones of 32 bytes, then the high ones.
#[inline(always)]
fn nibbles32<L: Lanes>(l: L, bytes: &[u8], i: usize) -> L::Bytes {
    l.part::<4>(bytes32(l, bytes, i / 2), i as u32 % 2 * 4, 0)
}

/// Scales and offsets of the groups of Q4_K and Q5_K, from two halves and 12 bytes: six bits of the first
/// four scales and of the first four minima, whose two high bits are those of the last four, and the nibbles
/// of these.
#[inline(always)]
fn six_bits<L: Lanes>(l: L, b: &[u8; 16]) -> ([f32; 8], [f32; 8]) {
    let [d, min] = l.halves(at(b, 0));
    let [scales, minima, nibbles] = [4, 8, 12].map(|first| u32::from_le_bytes(*at(b, first)));
    let first = |x: u32| x & 0x3f3f_3f3f;
    let last = |low: u32, high: u32| low & 0x0f0f_0f0f | high >> 2 & 0x3030_3030;
    let all = |low: u32, high: u32| u64::from(last(low, high)) << 32 | u64::from(first(high));
    let [scales, minima] = [all(nibbles, scales), all(nibbles >> 4, minima)];
    let bytes = |x: u64| x.to_le_bytes().map(|x| x as i8);
    (l.scaled(bytes(scales), d), l.scaled(bytes(minima), -min))
}
