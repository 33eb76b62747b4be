//! ggml's K-quants: blocks of 256 elements in groups of 16 or 32, whose scales are quantized too.

use std::array::from_fn;

use super::codes::{Group, nibbles};
use super::half;

/// Q2_K: 16 groups of 16, a scale and a minimum of 4 bits each.
#[inline(always)]
pub(super) fn q2(b: &[u8; 84], codes: &mut [i8; 256]) -> [Group; 16] {
    let (scales, d, min) = (&b[..16], half(&b[80..]), half(&b[82..]));
    two_bits(&b[16..80], codes);
    from_fn(|group| Group {
        scale: d * f32::from(scales[group] & 15),
        offset: -(min * f32::from(scales[group] >> 4)),
    })
}

/// Q3_K: 16 groups of 16, scales of 6 bits; the third bits are apart.
#[inline(always)]
pub(super) fn q3(b: &[u8; 110], codes: &mut [i8; 256]) -> [Group; 16] {
    let (high, scales, d) = (&b[..32], &b[96..108], half(&b[108..]));
    two_bits(&b[32..96], codes);
    for (bit, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        codes
            .iter_mut()
            .zip(high)
            .for_each(|(code, high)| *code = (*code | ((high >> bit & 1) << 2) as i8) - 4);
    }
    from_fn(|group| {
        let low = if group < 8 { scales[group] & 15 } else { scales[group - 8] >> 4 };
        let scale = low | (scales[8 + group % 4] >> (2 * (group / 4)) & 3) << 4;
        Group::scaled(d * (f32::from(scale) - 32.0))
    })
}

/// The low two bits of 256 elements: byte `i` of each 32 has those of elements `i`, `i + 32`, `i + 64`, `i + 96`.
#[inline(always)]
fn two_bits(bytes: &[u8], codes: &mut [i8; 256]) {
    for (bytes, codes) in bytes.as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<128>().0) {
        for (part, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            codes.iter_mut().zip(bytes).for_each(|(code, q)| *code = (q >> (2 * part) & 3) as i8);
        }
    }
}

/// Q4_K: 8 groups of 32, a scale and a minimum of 6 bits each.
#[inline(always)]
pub(super) fn q4(b: &[u8; 144], codes: &mut [i8; 256]) -> [Group; 8] {
    low_nibbles(&b[16..], codes);
    six_bits(b)
}

/// Q5_K: as Q4_K; the fifth bits are apart.
#[inline(always)]
pub(super) fn q5(b: &[u8; 176], codes: &mut [i8; 256]) -> [Group; 8] {
    low_nibbles(&b[48..], codes);
    for (group, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        codes.iter_mut().zip(&b[16..48]).for_each(|(code, high)| *code |= ((high >> group & 1) << 4) as i8);
    }
    six_bits(b)
}

/// The low nibbles of 32 bytes, then the high ones; four times.
#[inline(always)]
fn low_nibbles(bytes: &[u8], codes: &mut [i8; 256]) {
    for (bytes, codes) in bytes.as_chunks::<32>().0.iter().zip(codes.as_chunks_mut::<64>().0) {
        nibbles(bytes, codes, |q| q as i8);
    }
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

/// Q6_K: 16 groups of 16 with signed scales of 8 bits; the two high bits are apart.
#[inline(always)]
pub(super) fn q6(b: &[u8; 210], codes: &mut [i8; 256]) -> [Group; 16] {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half(&b[208..]));
    let halves = low.as_chunks::<64>().0.iter().zip(high.as_chunks::<32>().0);
    for ((low, high), codes) in halves.zip(codes.as_chunks_mut::<128>().0) {
        nibbles(low, codes, |q| q as i8);
        for (part, codes) in codes.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            let high = high.iter().map(|high| ((high >> (2 * part) & 3) << 4) as i8);
            codes.iter_mut().zip(high).for_each(|(code, high)| *code = (*code | high) - 32);
        }
    }
    from_fn(|group| Group::scaled(d * f32::from(scales[group] as i8)))
}
