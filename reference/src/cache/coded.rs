//! Scalar codes of single numbers: what every user knows, as rivals.
//!
//! A [`CodedStore`] cuts the tokens of a head into blocks and leaves the coding of a block to a [`BlockCodec`], one for keys
//! (after RoPE) and one for values. To attend it decodes block by block. A codec that rotates its rows leaves them rotated:
//! the query is rotated instead, and the output turned back, once per step.

use std::sync::Arc;

use half::f16;
use pq_core::{pack_bits, unpack_bits};

use crate::Result;
use crate::cache::accumulate::Accumulator;
use crate::cache::exact::{attend_rows, saturating_f16};
use crate::cache::{Footprint, Geometry, Store};
use crate::model::Rope;
use crate::rng::Rng;

/// Codes rows (n, head_dim) of one head to bytes and back.
pub(crate) trait BlockCodec: Send + Sync {
    /// Appends the codes of `rows` to `bytes`.
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>);
    /// Fills `rows` from all of `bytes`; rows that were rotated stay so.
    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]);
    /// Rotates a row as the coded ones are.
    fn rotate(&self, _row: &mut [f32]) {}
    /// Undoes [`Self::rotate`].
    fn rotate_back(&self, _row: &mut [f32]) {}
}

/// Blocks of codes per head.
#[derive(Clone)]
pub(crate) struct CodedStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    codecs: [Arc<dyn BlockCodec>; 2], // of keys and values
    block: usize,                     // tokens
    blocks: Vec<Block>,
    len: usize,
}

#[derive(Clone)]
struct Block {
    coded: usize,             // tokens that the codes hold
    valid: usize,             // tokens that truncation has left
    codes: Vec<[Vec<u8>; 2]>, // per head: keys and values
}

impl CodedStore {
    pub fn new(geometry: Geometry, rope: Arc<Rope>, codecs: [Arc<dyn BlockCodec>; 2], block: usize) -> Self {
        Self { geometry, rope, codecs, block, blocks: vec![], len: 0 }
    }
}

impl Store for CodedStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let kv_dim = self.geometry.kv_dim();
        let mut rotated = k.to_vec();
        self.rope.rotate_rows(&mut rotated, kv_dim, pos);
        for (k, v) in rotated.chunks(self.block * kv_dim).zip(v.chunks(self.block * kv_dim)) {
            let codes = (0..self.geometry.n_kv_heads)
                .map(|head| {
                    let mut codes = [vec![], vec![]];
                    for ((rows, codec), bytes) in [k, v].into_iter().zip(&self.codecs).zip(&mut codes) {
                        codec.encode(&self.geometry.head_rows(head, rows), self.geometry.head_dim, bytes);
                    }
                    codes
                })
                .collect();
            let tokens = k.len() / kv_dim;
            self.blocks.push(Block { coded: tokens, valid: tokens, codes });
            self.len += tokens;
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.len = len;
        let mut left = len;
        for block in &mut self.blocks {
            block.valid = block.valid.min(left);
            left -= block.valid;
        }
        self.blocks.retain(|block| block.valid > 0);
        Ok(())
    }

    fn attend(&self, head: usize, q: &[f32], group: &mut [Accumulator]) -> Result<()> {
        let head_dim = self.geometry.head_dim;
        let longest = self.blocks.iter().map(|block| block.coded).max().unwrap_or(0);
        let mut rows = [vec![0.0; longest * head_dim], vec![0.0; longest * head_dim]];
        let mut q = q.to_vec();
        q.chunks_exact_mut(head_dim).for_each(|q| self.codecs[0].rotate(q));
        let mut rotated = vec![Accumulator::new(head_dim); group.len()];
        for block in &self.blocks {
            for ((rows, codec), bytes) in rows.iter_mut().zip(&self.codecs).zip(&block.codes[head]) {
                codec.decode(bytes, head_dim, &mut rows[..block.coded * head_dim]);
            }
            let valid = block.valid * head_dim;
            attend_rows(&q, &rows[0][..valid], &rows[1][..valid], head_dim, &mut rotated)?;
        }
        for (mut rotated, accumulator) in rotated.into_iter().zip(group) {
            self.codecs[1].rotate_back(rotated.values_mut());
            accumulator.merge_with(&rotated);
        }
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        let kept = self.blocks.iter().flat_map(|block| block.codes.iter().flatten()).map(Vec::len).sum();
        Footprint { kept, ..Footprint::default() }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}

/// Minimum and step of a group in half precision, then `bits` a number: `x = min + step * code`.
fn encode_group(values: &[f32], bits: u32, bytes: &mut Vec<u8>) {
    let (min, max) =
        values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(a, b), &x| (a.min(x), b.max(x)));
    let levels = ((1_u32 << bits) - 1) as f32;
    let (min, step) = (saturating_f16(min), saturating_f16((max - min) / levels));
    bytes.extend_from_slice(&min.to_le_bytes());
    bytes.extend_from_slice(&step.to_le_bytes());
    let (min, step) = (min.to_f32(), step.to_f32());
    let code = |&x: &f32| if step > 0.0 { ((x - min) / step).round().clamp(0.0, levels) as usize } else { 0 };
    let start = bytes.len();
    bytes.resize(start + (values.len() * bits as usize).div_ceil(8), 0);
    pack_bits(values.iter().map(code), bits, &mut bytes[start..]);
}

fn group_bytes(len: usize, bits: u32) -> usize {
    4 + (len * bits as usize).div_ceil(8)
}

/// Fills `out` from a group that [`encode_group`] wrote.
fn decode_group(bytes: &[u8], bits: u32, out: &mut [f32]) {
    let half = |at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    let (min, step) = (half(0), half(2));
    unpack(&bytes[4..], bits, out, |code| min + step * code as f32);
}

/// Maps every code of `bits` bits to its number. The widths that divide a byte are read a byte at a time.
fn unpack(bytes: &[u8], bits: u32, out: &mut [f32], number: impl Fn(usize) -> f32) {
    fn by_byte<const BITS: usize>(bytes: &[u8], out: &mut [f32], number: impl Fn(usize) -> f32) {
        for (byte, out) in bytes.iter().zip(out.chunks_mut(8 / BITS)) {
            for (i, out) in out.iter_mut().enumerate() {
                *out = number(usize::from(*byte) >> (i * BITS) & ((1 << BITS) - 1));
            }
        }
    }
    match bits {
        8 => by_byte::<8>(bytes, out, number),
        4 => by_byte::<4>(bytes, out, number),
        2 => by_byte::<2>(bytes, out, number),
        _ => {
            let n = out.len();
            out.iter_mut().zip(unpack_bits(bytes, bits, n)).for_each(|(out, code)| *out = number(code));
        }
    }
}

/// One group per channel over the tokens of the block (KIVI's keys, arXiv 2402.02750): outlier channels keep to themselves.
pub(crate) struct PerChannel {
    pub bits: u32,
}

impl BlockCodec for PerChannel {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        for c in 0..head_dim {
            let column: Vec<f32> = rows.iter().skip(c).step_by(head_dim).copied().collect();
            encode_group(&column, self.bits, bytes);
        }
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        let n = rows.len() / head_dim;
        let mut column = vec![0.0; n];
        for (c, bytes) in bytes.chunks_exact(group_bytes(n, self.bits)).enumerate() {
            decode_group(bytes, self.bits, &mut column);
            for (row, &x) in rows.chunks_exact_mut(head_dim).zip(&column) {
                row[c] = x;
            }
        }
    }
}

/// Groups of neighbouring channels within a token (KIVI's values; llama.cpp's q8_0 and q4_1 with their groups of 32).
pub(crate) struct PerToken {
    pub bits: u32,
    pub group: usize,
}

impl BlockCodec for PerToken {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        for group in rows.chunks_exact(head_dim).flat_map(|row| row.chunks(self.group)) {
            encode_group(group, self.bits, bytes);
        }
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        let mut rest = bytes;
        for group in rows.chunks_exact_mut(head_dim).flat_map(|row| row.chunks_mut(self.group)) {
            let (bytes, tail) = rest.split_at(group_bytes(group.len(), self.bits));
            rest = tail;
            decode_group(bytes, self.bits, group);
        }
    }
}

/// A Hadamard rotation of each row before another codec: it spreads outliers over all channels.
pub(crate) struct Rotated<C>(pub C);

impl<C: BlockCodec> BlockCodec for Rotated<C> {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        let mut rotated = rows.to_vec();
        rotated.chunks_exact_mut(head_dim).for_each(hadamard);
        self.0.encode(&rotated, head_dim, bytes);
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        self.0.decode(bytes, head_dim, rows);
    }

    fn rotate(&self, row: &mut [f32]) {
        hadamard(row);
    }

    fn rotate_back(&self, row: &mut [f32]) {
        hadamard(row);
    }
}

/// The orthonormal Walsh-Hadamard transform, its own inverse. A length that is no power of two is cut into blocks of its
/// largest power-of-two divisor.
fn hadamard(row: &mut [f32]) {
    let size = 1 << row.len().trailing_zeros();
    let scale = 1.0 / (size as f32).sqrt();
    for block in row.chunks_exact_mut(size) {
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

/// TurboQuant's first stage (arXiv 2504.19874): a random rotation makes the components of a unit vector nearly Gaussian, so
/// that one scalar quantizer, optimal for the normal distribution, serves them all. A norm per token.
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
        2 + (head_dim * self.bits as usize).div_ceil(8)
    }
}

impl BlockCodec for LloydMax {
    fn encode(&self, rows: &[f32], head_dim: usize, bytes: &mut Vec<u8>) {
        for row in rows.chunks_exact(head_dim) {
            let mut rotated = row.to_vec();
            self.rotate(&mut rotated);
            let norm = saturating_f16(rotated.iter().map(|x| x * x).sum::<f32>().sqrt());
            bytes.extend_from_slice(&norm.to_le_bytes());
            let scale = if norm.to_f32() > 0.0 { (head_dim as f32).sqrt() / norm.to_f32() } else { 0.0 };
            let nearest = |&x: &f32| {
                self.levels.windows(2).filter(|pair| x * scale > 0.5 * (pair[0] + pair[1])).count()
            };
            let start = bytes.len();
            bytes.resize(start + self.row_bytes(head_dim) - 2, 0);
            pack_bits(rotated.iter().map(nearest), self.bits, &mut bytes[start..]);
        }
    }

    fn decode(&self, bytes: &[u8], head_dim: usize, rows: &mut [f32]) {
        for (bytes, row) in bytes.chunks_exact(self.row_bytes(head_dim)).zip(rows.chunks_exact_mut(head_dim))
        {
            let scale = f16::from_le_bytes([bytes[0], bytes[1]]).to_f32() / (head_dim as f32).sqrt();
            unpack(&bytes[2..], self.bits, row, |code| self.levels[code] * scale);
        }
    }

    fn rotate(&self, row: &mut [f32]) {
        row.iter_mut().zip(&self.signs).for_each(|(x, sign)| *x *= sign);
        hadamard(row);
    }

    fn rotate_back(&self, row: &mut [f32]) {
        hadamard(row);
        row.iter_mut().zip(&self.signs).for_each(|(x, sign)| *x *= sign);
    }
}

/// The `1 << bits` levels that minimise the squared error on the standard normal distribution: Lloyd's iteration on a fine
/// grid of +-6 deviations.
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
                Box::new(Rotated(PerToken { bits, group: 32 })),
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
