//! The record of a token and head: its exact key and value.

use std::iter;

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use half::{bf16, f16};
use kv_attend::{Element, ElementType, ExactTokens, Rows};

use crate::Result;
use crate::cache::Sums;
use crate::cache::exact::{attend_rows, attend_tokens, rounded};

/// The encoding of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowFormat {
    /// The key, then the value, in this element type.
    Exact(ElementType),
    /// The key, then the value, in 8 bits per component, including scales: a group of [`GROUP`] components is
    /// scaled by 63 over its largest magnitude and rounded to 7 bits, the high ones of a byte, whose lowest
    /// bit is a bit of the group's f16 scale. A record of 128 components a side takes two PCIe reads of 128
    /// bytes. Rows are padded to whole groups.
    ///
    /// If a group's largest magnitude is between 0.0039 and 4.1e6, so that its scale is a normal f16, the
    /// error of a component is at most half a step of 1/63 of that magnitude, and 1/2048 of it more since the
    /// scale is rounded. Below, the scale is rounded up to a multiple of 2^-24: the error is at most 2^-25
    /// more than half a step, which doubles it at 3.8e-6. Components beyond 63 * 65504 (4.1e6) become that
    /// magnitude, and NaN becomes 0.
    Int8,
}

/// Components that share a scale: one for each of its bits.
const GROUP: usize = 16;

impl RowFormat {
    /// Bytes of a record for heads of `dim` components, a multiple of 4.
    pub const fn row_bytes(self, dim: usize) -> usize {
        let bytes = match self {
            Self::Exact(element) => 2 * dim * element.size(),
            Self::Int8 => 2 * dim.next_multiple_of(GROUP),
        };
        bytes.next_multiple_of(size_of::<u32>())
    }

    /// Words of a record.
    pub const fn words(self, dim: usize) -> usize {
        self.row_bytes(dim) / size_of::<u32>()
    }

    /// Appends the record of a key and a value to `records`.
    pub fn push(self, key: &[f32], value: &[f32], records: &mut Vec<u32>) {
        let start = records.len();
        records.resize(start + self.words(key.len()), 0);
        let record = &mut records[start..];
        match self {
            Self::Exact(ElementType::F32) => write(record, key, value, |x| x),
            Self::Exact(ElementType::F16) => write(record, key, value, rounded::<f16>),
            Self::Exact(ElementType::Bf16) => write(record, key, value, rounded::<bf16>),
            Self::Int8 => {
                let bytes: &mut [i8] = cast_slice_mut(record);
                let rows = bytes.chunks_exact_mut(key.len().next_multiple_of(GROUP)).zip([key, value]);
                let groups =
                    rows.flat_map(|(bytes, row)| bytes.chunks_exact_mut(GROUP).zip(row.chunks(GROUP)));
                groups.for_each(|(bytes, group)| quantize(group, bytes));
            }
        }
    }

    /// The key of a record.
    pub fn key(self, record: &[u32], key: &mut [f32]) {
        match self {
            Self::Exact(ElementType::F32) => read(cast_slice::<_, f32>(record), key),
            Self::Exact(ElementType::F16) => read(cast_slice::<_, f16>(record), key),
            Self::Exact(ElementType::Bf16) => read(cast_slice::<_, bf16>(record), key),
            Self::Int8 => int8_row(record, 0, key),
        }
    }

    /// The value of a record.
    pub fn value(self, record: &[u32], value: &mut [f32]) {
        let dim = value.len();
        match self {
            Self::Exact(ElementType::F32) => read(&cast_slice::<_, f32>(record)[dim..], value),
            Self::Exact(ElementType::F16) => read(&cast_slice::<_, f16>(record)[dim..], value),
            Self::Exact(ElementType::Bf16) => read(&cast_slice::<_, bf16>(record)[dim..], value),
            Self::Int8 => int8_row(record, 1, value),
        }
    }

    /// Adds the attention of scaled queries (group, dim) on the records whose indices are `rows`, in that
    /// order.
    pub fn attend(self, records: &[u32], rows: &[u32], q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        match self {
            Self::Exact(ElementType::F32) => attend::<f32>(cast_slice(records), rows, q, sums),
            Self::Exact(ElementType::F16) => attend::<f16>(cast_slice(records), rows, q, sums),
            Self::Exact(ElementType::Bf16) => attend::<bf16>(cast_slice(records), rows, q, sums),
            Self::Int8 => {
                let dim = q.len() / sums.stats.len();
                let words = self.words(dim);
                let (mut keys, mut values) = (vec![0.0; rows.len() * dim], vec![0.0; rows.len() * dim]);
                let places = keys.chunks_exact_mut(dim).zip(values.chunks_exact_mut(dim));
                for (&row, (key, value)) in rows.iter().zip(places) {
                    let record = &records[row as usize * words..][..words];
                    int8_row(record, 0, key);
                    int8_row(record, 1, value);
                }
                attend_rows(q, &keys, &values, sums)
            }
        }
    }
}

fn write<E: Pod>(record: &mut [u32], key: &[f32], value: &[f32], round: impl Fn(f32) -> E) {
    let elements: &mut [E] = cast_slice_mut(record);
    elements.iter_mut().zip(key.iter().chain(value)).for_each(|(element, &x)| *element = round(x));
}

fn read<E: Element>(elements: &[E], out: &mut [f32]) {
    out.iter_mut().zip(elements).for_each(|(out, x)| *out = x.to_f32());
}

fn attend<E: Element>(records: &[E], rows: &[u32], q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
    let dim = q.len() / sums.stats.len();
    let pairs = Rows::contiguous(records, 2 * dim)?;
    let tokens = ExactTokens::new(pairs.columns(0, dim)?, pairs.columns(dim, dim)?)?.chosen(rows)?;
    attend_tokens(q, &tokens, sums)
}

/// The scale of a group: 1/63 of its largest magnitude. A subnormal one has few bits: rounded down, it would
/// clamp the largest component.
fn scale_of(largest: f32) -> f16 {
    let exact = largest / 63.0;
    let nearest: f16 = rounded(exact);
    let up = nearest < f16::MIN_POSITIVE && nearest.to_f32() < exact;
    f16::from_bits(nearest.to_bits() + u16::from(up))
}

/// The bytes of a group of at most [`GROUP`] components, of which the last may be padding.
fn quantize(group: &[f32], bytes: &mut [i8]) {
    let scale = scale_of(group.iter().fold(0.0_f32, |max, x| max.max(x.abs())));
    let unit = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
    let padded = group.iter().copied().chain(iter::repeat(0.0));
    for ((i, byte), x) in bytes.iter_mut().enumerate().zip(padded) {
        let high = (x * unit).round().clamp(-63.0, 63.0) as i8;
        *byte = high << 1 | (scale.to_bits() >> i & 1) as i8;
    }
}

/// The scale in the lowest bits of a group's bytes.
fn scale(bytes: &[i8]) -> f32 {
    let bits = bytes.iter().rev().fold(0, |bits, byte| bits << 1 | (byte & 1) as u16);
    f16::from_bits(bits).to_f32()
}

/// The key (0) or the value (1) of an 8-bit record.
fn int8_row(record: &[u32], side: usize, out: &mut [f32]) {
    let len = out.len().next_multiple_of(GROUP);
    let bytes: &[i8] = &cast_slice(record)[side * len..][..len];
    for (out, bytes) in out.chunks_mut(GROUP).zip(bytes.chunks_exact(GROUP)) {
        let scale = scale(bytes);
        out.iter_mut().zip(bytes).for_each(|(out, &byte)| *out = scale * f32::from(byte >> 1));
    }
}

#[cfg(test)]
mod tests {
    use svd_core::SoftmaxStats;

    use super::*;

    fn row(dim: usize, seed: usize) -> Vec<f32> {
        (0..dim).map(|i| ((i + seed * dim) as f32 * 0.7).sin() * (1 + i % 5) as f32).collect()
    }

    #[test]
    fn eight_bits_are_within_half_a_step_and_counted() {
        for dim in [1_usize, 16, 31, 32, 33, 48, 128] {
            let format = RowFormat::Int8;
            assert_eq!(format.row_bytes(dim), 2 * dim.div_ceil(16) * 16);
            let mut records = vec![];
            (0..3).for_each(|t| format.push(&row(dim, t), &row(dim, t + 7), &mut records));
            assert_eq!(records.len() * 4, 3 * format.row_bytes(dim));
            let mut key = vec![0.0; dim];
            format.key(&records[format.words(dim)..][..format.words(dim)], &mut key);
            for (x, y) in row(dim, 1).iter().zip(&key) {
                // The scale is rounded, too.
                assert!((x - y).abs() <= 0.54 * 5.0 / 63.0, "{y} for {x} of {dim}");
            }
        }
    }

    #[test]
    fn any_group_keeps_its_scale() {
        for x in [0.0, f32::NAN, f32::INFINITY, 1e-9, 6e-6, 1.0] {
            let mut bytes = [0; GROUP];
            quantize(&[x; GROUP], &mut bytes);
            let largest = if x.is_nan() { 0.0 } else { x };
            assert_eq!(scale(&bytes), scale_of(largest).to_f32(), "{x}");
        }
    }

    #[test]
    fn errors_keep_their_bound_at_every_magnitude() {
        let round_trip = |x: [f32; GROUP]| {
            let (mut bytes, mut out) = ([0; GROUP], [0.0; GROUP]);
            quantize(&x, &mut bytes);
            out.iter_mut().zip(bytes).for_each(|(out, byte)| *out = scale(&bytes) * f32::from(byte >> 1));
            out
        };
        for exponent in -149..=21 {
            for mantissa in [1.0, 1.2, 1.4, 1.6, 1.8, 1.96] {
                let largest = (mantissa * 2_f64.powi(exponent)) as f32;
                let x = std::array::from_fn(|i| largest * (1.0 - 2.0 * i as f32 / 17.0));
                let step = f64::from(largest) / 63.0;
                let of_scale = if step < 2_f64.powi(-14) { 2_f64.powi(-24) } else { step / 2048.0 };
                let bound = 0.500_001 * (step + of_scale);
                for (x, y) in x.into_iter().zip(round_trip(x)) {
                    assert!(f64::from((x - y).abs()) <= bound, "{y} for {x} of {largest}");
                }
            }
        }
        assert_eq!(round_trip([1e30; GROUP]), [63.0 * 65504.0; GROUP]);
    }

    #[test]
    fn attention_on_records_is_attention_on_rows() {
        use ElementType::{Bf16, F16, F32};
        for format in [RowFormat::Exact(F32), RowFormat::Exact(F16), RowFormat::Exact(Bf16), RowFormat::Int8]
        {
            for dim in [1, 24, 128] {
                let mut records = vec![];
                (0..9).for_each(|t| format.push(&row(dim, t), &row(dim, t + 50), &mut records));
                let (q, rows) = ([row(dim, 90), row(dim, 91)].concat(), [7, 0, 3]);
                let (mut out, mut stats) = (vec![0.0; 2 * dim], vec![SoftmaxStats::EMPTY; 2]);
                let mut sums = Sums { out: &mut out, stats: &mut stats };
                format.attend(&records, &rows, &q, &mut sums).unwrap();
                let take = |seed: usize| rows.iter().flat_map(|&t| row(dim, t as usize + seed)).collect();
                let (keys, values): (Vec<f32>, Vec<f32>) = (take(0), take(50));
                let (mut expected, mut of) = (vec![0.0; 2 * dim], vec![SoftmaxStats::EMPTY; 2]);
                let mut sums = Sums { out: &mut expected, stats: &mut of };
                attend_rows(&q, &keys, &values, &mut sums).unwrap();
                for i in 0..2 * dim {
                    let (x, y) = (out[i] / stats[i / dim].sum, expected[i] / of[i / dim].sum);
                    assert!((x - y).abs() < 0.3, "{format:?} of {dim}: {x} for {y}");
                    assert!(format != RowFormat::Exact(F32) || (x - y).abs() < 1e-6, "{x} for {y}");
                }
            }
        }
    }
}
