//! ggml's K-quants: blocks of 256 elements in groups of 16 or 32, whose scales are quantized too.

use super::half;

/// Q2_K: 16 groups of 16, a scale and a minimum of 4 bits each.
pub(super) fn q2(b: &[u8], out: &mut Vec<f32>) {
    let (scales, q, d, min) = (&b[..16], &b[16..80], half(&b[80..]), half(&b[82..]));
    for (group, &scale) in scales.iter().enumerate() {
        let (dl, ml) = (d * f32::from(scale & 15), min * f32::from(scale >> 4));
        let (start, shift) = two_bits(group);
        out.extend(q[start..][..16].iter().map(|q| dl * f32::from(q >> shift & 3) - ml));
    }
}

/// Q3_K: 16 groups of 16, scales of 6 bits; the third bits are apart.
pub(super) fn q3(b: &[u8], out: &mut Vec<f32>) {
    let (high, q, scales, d) = (&b[..32], &b[32..96], &b[96..108], half(&b[108..]));
    for group in 0..16 {
        let low = if group < 8 { scales[group] & 15 } else { scales[group - 8] >> 4 };
        let scale = low | (scales[8 + group % 4] >> (2 * (group / 4)) & 3) << 4;
        let dl = d * (f32::from(scale) - 32.0);
        let (start, shift) = two_bits(group);
        let bits = high[16 * (group % 2)..].iter().map(|high| high >> (group / 2) & 1);
        out.extend(q[start..][..16].iter().zip(bits).map(|(q, bit)| {
            let value = f32::from(q >> shift & 3 | bit << 2) - 4.0;
            dl * value
        }));
    }
}

/// Where the two low bits of a group of 16 are: the first byte, and the shift within each byte.
const fn two_bits(group: usize) -> (usize, usize) {
    (group / 8 * 32 + group % 2 * 16, group % 8 / 2 * 2)
}

/// Q4_K: 8 groups of 32, a scale and a minimum of 6 bits each.
pub(super) fn q4(b: &[u8], out: &mut Vec<f32>) {
    let (d, min, scales) = (half(b), half(&b[2..]), &b[4..16]);
    for group in 0..8 {
        let (scale, minimum) = six_bits(scales, group);
        let (dl, ml) = (d * scale, min * minimum);
        let q = b[16..][group / 2 * 32..][..32].iter().map(|q| q >> (group % 2 * 4) & 15);
        out.extend(q.map(|q| dl * f32::from(q) - ml));
    }
}

/// Q5_K: as Q4_K; the fifth bits are apart.
pub(super) fn q5(b: &[u8], out: &mut Vec<f32>) {
    let (d, min, scales, high) = (half(b), half(&b[2..]), &b[4..16], &b[16..48]);
    for group in 0..8 {
        let (scale, minimum) = six_bits(scales, group);
        let (dl, ml) = (d * scale, min * minimum);
        let q = b[48..][group / 2 * 32..][..32].iter().map(|q| q >> (group % 2 * 4) & 15);
        let q = q.zip(high).map(|(q, high)| q | (high >> group & 1) << 4);
        out.extend(q.map(|q| dl * f32::from(q) - ml));
    }
}

/// Scale and minimum of a group in the 12 bytes of Q4_K and Q5_K.
fn six_bits(scales: &[u8], group: usize) -> (f32, f32) {
    let (scale, minimum) = if group < 4 {
        (scales[group] & 63, scales[group + 4] & 63)
    } else {
        let low = scales[group + 4];
        (low & 15 | scales[group - 4] >> 6 << 4, low >> 4 | scales[group] >> 6 << 4)
    };
    (scale.into(), minimum.into())
}

/// Q6_K: 16 groups of 16 with signed scales of 8 bits; the two high bits are apart.
pub(super) fn q6(b: &[u8], out: &mut Vec<f32>) {
    let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half(&b[208..]));
    for (group, &scale) in scales.iter().enumerate() {
        let dl = d * f32::from(scale as i8);
        let (half, part, odd) = (group / 8, group % 8 / 2, group % 2);
        let low = low[half * 64 + part % 2 * 32 + odd * 16..].iter().map(|q| q >> (part / 2 * 4) & 15);
        let high = high[half * 32 + odd * 16..].iter().map(|q| q >> (part * 2) & 3);
        out.extend(low.zip(high).take(16).map(|(low, high)| dl * (f32::from(low | high << 4) - 32.0)));
    }
}
