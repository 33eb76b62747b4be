//! Scalar quantizers of the rows of a block.

use half::f16;
use kv_llama::Rng;

use super::store::BlockCodec;
use crate::cache::rounded;
use crate::pack::{pack_bits, unpack_bits};

/// A uniform quantizer of a group of elements: `x = min + step * code`, both in half precision.
#[derive(Clone, Copy)]
struct Scale {
    min: f32,
    step: f32,
}

impl Scale {
    const BYTES: usize = 4;

    fn fit(values: impl Iterator<Item = f32>, bits: u32) -> Self {
        let (min, max) = values.fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), x| (a.min(x), b.max(x)));
        let step = (max - min) / largest_code(bits);
        Self { min: rounded::<f16>(min).to_f32(), step: rounded::<f16>(step).to_f32() }
    }

    fn code(self, x: f32, bits: u32) -> u8 {
        if self.step > 0.0 {
            ((x - self.min) / self.step).round().clamp(0.0, largest_code(bits)) as u8
        } else {
            0
        }
    }

    fn element(self, code: u8) -> f32 {
        self.min + self.step * f32::from(code)
    }

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let (min, step) = (f16::from_f32(self.min).to_le_bytes(), f16::from_f32(self.step).to_le_bytes());
        [min[0], min[1], step[0], step[1]]
    }

    fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let half = |a, b| f16::from_le_bytes([a, b]).to_f32();
        Self { min: half(bytes[0], bytes[1]), step: half(bytes[2], bytes[3]) }
    }
}

fn largest_code(bits: u32) -> f32 {
    ((1_u32 << bits) - 1) as f32
}

pub(crate) fn packed_len(n: usize, bits: u32) -> usize {
    (n * bits as usize).div_ceil(8)
}

/// Appends codes of `bits` bits. If the width divides a byte, byte `i` of `len` bytes holds codes `i`,
/// `i + len`, `i + 2 len`, ... (as in ggml), so that unpacking vectorizes; other widths are packed bit by
/// bit.
pub(crate) fn pack(codes: &[u8], bits: u32, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    let len = packed_len(codes.len(), bits);
    bytes.resize(start + len, 0);
    if 8 % bits == 0 {
        for (part, codes) in (0..).zip(codes.chunks(len.max(1))) {
            for (byte, code) in bytes[start..].iter_mut().zip(codes) {
                *byte |= code << (part * bits);
            }
        }
    } else {
        pack_bits(codes.iter().map(|&code| code.into()), bits, &mut bytes[start..]);
    }
}

/// Maps every code that [`pack`] wrote to its element.
pub(crate) fn unpack(bytes: &[u8], bits: u32, out: &mut [f32], element: impl Fn(u8) -> f32) {
    if 8 % bits == 0 {
        let (len, mask) = (packed_len(out.len(), bits), (1_u32 << bits) - 1);
        for (part, out) in (0..).zip(out.chunks_mut(len.max(1))) {
            for (out, byte) in out.iter_mut().zip(bytes) {
                *out = element(byte >> (part * bits) & mask as u8);
            }
        }
    } else {
        let n = out.len();
        out.iter_mut().zip(unpack_bits(bytes, bits, n)).for_each(|(out, code)| *out = element(code as u8));
    }
}

/// One scale per channel over the tokens of the block (KIVI's keys, arXiv 2402.02750): outlier channels do
/// not affect others.
pub(crate) struct PerChannel {
    pub bits: u32,
}

impl BlockCodec for PerChannel {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        let column = |c: usize| rows.iter().skip(c).step_by(head_dim).copied();
        let scales: Vec<Scale> = (0..head_dim).map(|c| Scale::fit(column(c), self.bits)).collect();
        scales.iter().for_each(|scale| bytes.extend(scale.to_bytes()));
        for row in rows.chunks_exact(head_dim) {
            let codes: Vec<u8> =
                row.iter().zip(&scales).map(|(&x, scale)| scale.code(x, self.bits)).collect();
            pack(&codes, self.bits, bytes);
        }
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        let (scales, codes) = bytes.split_at(head_dim * Scale::BYTES);
        let scales = scales.as_chunks().0.iter().map(|&bytes| Scale::from_bytes(bytes));
        let (mins, steps): (Vec<f32>, Vec<f32>) = scales.map(|scale| (scale.min, scale.step)).unzip();
        for (row, codes) in
            rows.chunks_exact_mut(head_dim).zip(codes.chunks_exact(packed_len(head_dim, self.bits)))
        {
            unpack(codes, self.bits, row, f32::from);
            for ((x, min), step) in row.iter_mut().zip(&mins).zip(&steps) {
                *x = min + step * *x;
            }
        }
    }
}

/// One scale per group of neighbouring channels within a token (KIVI's values).
pub(crate) struct PerToken {
    pub bits: u32,
    pub group: usize,
}

impl BlockCodec for PerToken {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        for group in rows.chunks_exact(head_dim).flat_map(|row| row.chunks(self.group)) {
            let scale = Scale::fit(group.iter().copied(), self.bits);
            bytes.extend(scale.to_bytes());
            let codes: Vec<u8> = group.iter().map(|&x| scale.code(x, self.bits)).collect();
            pack(&codes, self.bits, bytes);
        }
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        let mut rest = bytes;
        for group in rows.chunks_exact_mut(head_dim).flat_map(|row| row.chunks_mut(self.group)) {
            let Some((&scale, codes)) = rest.split_first_chunk() else { return };
            let (codes, tail) = codes.split_at(packed_len(group.len(), self.bits));
            rest = tail;
            let scale = Scale::from_bytes(scale);
            unpack(codes, self.bits, group, |code| scale.element(code));
        }
    }
}

/// A Hadamard rotation of each row, in blocks of `size` components, before another codec: it spreads outliers
/// over all channels.
pub(crate) struct Rotated<C> {
    pub size: usize, // a power of two that divides the row
    pub codec: C,
}

impl<C: BlockCodec> BlockCodec for Rotated<C> {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        let mut rotated = rows.to_vec();
        hadamard(&mut rotated, self.size);
        self.codec.encode(&rotated, head_dim, bytes);
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        self.codec.decode(bytes, head_dim, rows);
    }

    fn rotate(&self, row: &mut [f32]) {
        hadamard(row, self.size);
    }

    fn rotate_back(&self, row: &mut [f32]) {
        hadamard(row, self.size);
    }
}

/// The largest power of two that divides `dim`.
pub(super) const fn largest_block(dim: usize) -> usize {
    1 << dim.trailing_zeros()
}

/// The orthonormal Walsh-Hadamard transform of each `size` components, a power of two; its own inverse.
fn hadamard(rows: &mut [f32], size: usize) {
    let scale = 1.0 / (size as f32).sqrt();
    for block in rows.chunks_exact_mut(size) {
        let mut half = 1;
        while half < size {
            for pair in block.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        block.iter_mut().for_each(|x| *x *= scale);
    }
}

/// TurboQuant's first stage (arXiv 2504.19874): a random rotation makes the components of a unit vector
/// nearly Gaussian, so that one scalar quantizer, optimal for the normal distribution, fits all of them. One
/// norm per token.
pub(crate) struct LloydMax {
    bits: u32,
    levels: Vec<f32>, // ascending, for the standard normal distribution
    signs: Vec<f32>,  // (head_dim,) of +-1: with the Hadamard transform, the random rotation
}

impl LloydMax {
    pub fn new(bits: u32, head_dim: usize, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let signs = (0..head_dim).map(|_| if rng.below(2) == 0 { 1.0 } else { -1.0 }).collect();
        Self { bits, levels: normal_levels(bits), signs }
    }

    fn row_bytes(&self, head_dim: usize) -> usize {
        2 + packed_len(head_dim, self.bits)
    }
}

impl BlockCodec for LloydMax {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        for row in rows.chunks_exact(head_dim) {
            let mut rotated = row.to_vec();
            self.rotate(&mut rotated);
            let norm: f16 = rounded(rotated.iter().map(|x| x * x).sum::<f32>().sqrt());
            bytes.extend_from_slice(&norm.to_le_bytes());
            let scale = if norm.to_f32() > 0.0 { (head_dim as f32).sqrt() / norm.to_f32() } else { 0.0 };
            let nearest = |&x: &f32| {
                self.levels.windows(2).filter(|pair| x * scale > 0.5 * (pair[0] + pair[1])).count() as u8
            };
            pack(&rotated.iter().map(nearest).collect::<Vec<_>>(), self.bits, bytes);
        }
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        for (bytes, row) in bytes.chunks_exact(self.row_bytes(head_dim)).zip(rows.chunks_exact_mut(head_dim))
        {
            let scale = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32() / (head_dim as f32).sqrt();
            unpack(&bytes[2..], self.bits, row, |code| self.levels[usize::from(code)] * scale);
        }
    }

    fn rotate(&self, row: &mut [f32]) {
        row.iter_mut().zip(&self.signs).for_each(|(x, sign)| *x *= sign);
        hadamard(row, largest_block(row.len()));
    }

    fn rotate_back(&self, row: &mut [f32]) {
        hadamard(row, largest_block(row.len()));
        row.iter_mut().zip(&self.signs).for_each(|(x, sign)| *x *= sign);
    }
}

/// The `1 << bits` levels that minimise the squared error on the standard normal distribution: Lloyd's
/// iteration on a fine grid of +-6 deviations.
fn normal_levels(bits: u32) -> Vec<f32> {
    const GRID: i32 = 6_000; // points on either side
    let n = 1_usize << bits;
    let density: Vec<(f64, f64)> = (-GRID..=GRID)
        .map(|i| f64::from(i) * 6.0 / f64::from(GRID))
        .map(|x| (x, (-0.5 * x * x).exp()))
        .collect();
    let mut levels: Vec<f64> = (0..n).map(|i| ((i as f64 + 0.5) / n as f64 - 0.5) * 5.0).collect();
    for _ in 0..200 {
        let (mut mass, mut moment) = (vec![1e-300; n], vec![0.0; n]);
        let mut i = 0;
        for &(x, p) in &density {
            while i + 1 < n && x > 0.5 * (levels[i] + levels[i + 1]) {
                i += 1;
            }
            mass[i] += p;
            moment[i] += p * x;
        }
        levels = moment.iter().zip(&mass).map(|(moment, mass)| moment / mass).collect();
    }
    levels.into_iter().map(|x| x as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(codec: &dyn BlockCodec, rows: &[f32], head_dim: usize) -> (f32, usize) {
        let mut bytes = vec![];
        codec.encode(rows, head_dim, &mut bytes);
        let mut decoded = vec![0.0; rows.len()];
        codec.decode(&bytes, head_dim, &mut decoded);
        decoded.chunks_exact_mut(head_dim).for_each(|row| codec.rotate_back(row));
        let error = rows.iter().zip(&decoded).map(|(a, b)| (a - b).powi(2)).sum::<f32>();
        ((error / rows.iter().map(|x| x * x).sum::<f32>()).sqrt(), bytes.len())
    }

    #[test]
    fn every_codec_gets_better_with_bits_and_counts_its_bytes() {
        let head_dim = 96; // not a power of two
        let rows: Vec<f32> = (0..32 * head_dim).map(|i| ((i * 7919) % 2003) as f32 / 1000.0 - 1.0).collect();
        let mut last = [f32::INFINITY; 4];
        for bits in [2, 4, 8] {
            let codecs: [Box<dyn BlockCodec>; 4] = [
                Box::new(PerChannel { bits }),
                Box::new(PerToken { bits, group: 32 }),
                Box::new(Rotated { size: 32, codec: PerToken { bits, group: 32 } }),
                Box::new(LloydMax::new(bits, head_dim, 1)),
            ];
            let scales = [96 * 4, 32 * 3 * 4, 32 * 3 * 4, 32 * 2];
            for ((codec, last), scales) in codecs.iter().zip(&mut last).zip(scales) {
                let (error, bytes) = round_trip(codec.as_ref(), &rows, head_dim);
                assert!(error < *last / 2.0, "{bits} bits: {error} after {last}");
                assert_eq!(bytes, rows.len() * bits as usize / 8 + scales);
                *last = error;
            }
        }
    }

    #[test]
    fn rotation_is_by_sylvesters_matrix() {
        let row: Vec<f32> = (0..16_u8).map(|i| f32::from(i * i % 11) - 4.0).collect();
        for size in [1, 2, 8, 16] {
            let mut rotated = row.clone();
            hadamard(&mut rotated, size);
            for (i, &x) in rotated.iter().enumerate() {
                let sign = |j: usize| [1.0, -1.0][((i % size) & j).count_ones() as usize % 2];
                let block = &row[i / size * size..][..size];
                let sum: f64 = block.iter().enumerate().map(|(j, &x)| sign(j) * f64::from(x)).sum();
                assert!((f64::from(x) - sum / (size as f64).sqrt()).abs() < 1e-5, "{size}: {i}");
            }
            hadamard(&mut rotated, size);
            assert!(rotated.iter().zip(&row).all(|(a, b)| (a - b).abs() < 1e-5), "{size}");
        }
    }

    #[test]
    fn normal_levels_are_those_of_the_textbook() {
        // Max, "Quantizing for minimum distortion", 1960, table I: n = 4.
        for (level, expected) in normal_levels(2).iter().zip([-1.510, -0.4528, 0.4528, 1.510]) {
            assert!((level - expected).abs() < 2e-3, "{level}");
        }
    }

    #[test]
    fn constant_rows_are_exact_enough() {
        for codec in [&PerChannel { bits: 2 } as &dyn BlockCodec, &PerToken { bits: 2, group: 8 }] {
            assert!(round_trip(codec, &[0.5; 64], 8).0 < 1e-3);
        }
    }
}
