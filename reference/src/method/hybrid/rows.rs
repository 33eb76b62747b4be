//! The exact rows that steps read a few of.

use half::f16;

use crate::cache::{ElementType, ExactRows, Geometry, saturating_f16};
use crate::side::{Pair, Side};

/// Components that share a scale.
const GROUP: usize = 32;

/// Offloaded keys and values of every head.
#[derive(Clone)]
pub(super) enum OffloadedRows {
    Exact(ExactRows),
    Int8 { geometry: Geometry, heads: Vec<Pair<ByteRows>> },
}

/// Rows in 8 bits: each group of components is divided by a 127th of its largest magnitude, and rounded.
#[derive(Clone, Default)]
pub(super) struct ByteRows {
    bytes: Vec<i8>,   // (n, head_dim)
    scales: Vec<f16>, // (n, groups)
}

impl OffloadedRows {
    pub fn exact(element: ElementType, geometry: Geometry) -> Self {
        Self::Exact(ExactRows::new(element, geometry))
    }

    pub fn int8(geometry: Geometry) -> Self {
        Self::Int8 { geometry, heads: vec![Pair::default(); geometry.n_kv_heads] }
    }

    /// Appends rows (n, n_kv_heads * head_dim).
    pub fn push(&mut self, k: &[f32], v: &[f32]) {
        match self {
            Self::Exact(rows) => rows.push(k, v),
            Self::Int8 { geometry, heads } => {
                for (head, rows) in heads.iter_mut().enumerate() {
                    for (side, all) in [(Side::Keys, k), (Side::Values, v)] {
                        rows[side].push(&geometry.head_rows(head, all), geometry.head_dim);
                    }
                }
            }
        }
    }

    pub fn truncate(&mut self, len: usize) {
        match self {
            Self::Exact(rows) => rows.truncate(len),
            Self::Int8 { geometry, heads } => {
                let dim = geometry.head_dim;
                heads.iter_mut().flat_map(Pair::iter_mut).for_each(|rows| rows.truncate(len, dim));
            }
        }
    }

    /// One head's key and value of token `t`.
    pub fn read(&self, head: usize, t: usize, k: &mut [f32], v: &mut [f32]) {
        match self {
            Self::Exact(rows) => rows.read(head, t, k, v),
            Self::Int8 { heads, .. } => {
                heads[head].keys.read(t, k);
                heads[head].values.read(t, v);
            }
        }
    }

    /// Bytes of one head's key and value of a token.
    pub fn row_bytes(&self) -> usize {
        match self {
            Self::Exact(rows) => rows.row_bytes(),
            Self::Int8 { geometry, .. } => {
                2 * (geometry.head_dim + size_of::<f16>() * geometry.head_dim.div_ceil(GROUP))
            }
        }
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Exact(rows) => rows.bytes(),
            Self::Int8 { heads, .. } => {
                let bytes = |rows: &ByteRows| rows.bytes.len() + size_of_val(&rows.scales[..]);
                heads.iter().flat_map(Pair::iter).map(bytes).sum()
            }
        }
    }
}

impl ByteRows {
    fn push(&mut self, rows: &[f32], dim: usize) {
        for group in rows.chunks_exact(dim).flat_map(|row| row.chunks(GROUP)) {
            let largest = group.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
            let scale = saturating_f16(largest / 127.0);
            let unit = if scale.to_f32() > 0.0 { 1.0 / scale.to_f32() } else { 0.0 };
            self.bytes.extend(group.iter().map(|x| (x * unit).round() as i8));
            self.scales.push(scale);
        }
    }

    fn truncate(&mut self, len: usize, dim: usize) {
        self.bytes.truncate(len * dim);
        self.scales.truncate(len * dim.div_ceil(GROUP));
    }

    fn read(&self, t: usize, out: &mut [f32]) {
        let bytes = self.bytes[t * out.len()..].chunks(GROUP);
        let scales = &self.scales[t * out.len().div_ceil(GROUP)..];
        for ((out, scale), bytes) in out.chunks_mut(GROUP).zip(scales).zip(bytes) {
            out.iter_mut().zip(bytes).for_each(|(out, &byte)| *out = scale.to_f32() * f32::from(byte));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_bits_are_within_half_a_step_and_counted() {
        let geometry = Geometry { n_heads: 2, n_kv_heads: 2, head_dim: 48 };
        let rows: Vec<f32> = (0..3 * 96).map(|i| (i as f32 * 0.7).sin() * (1 + i % 5) as f32).collect();
        let mut held = OffloadedRows::int8(geometry);
        held.push(&rows, &rows);
        assert_eq!((held.bytes(), held.row_bytes()), (2 * 6 * (48 + 4), 2 * (48 + 4)));
        held.truncate(2);
        let (mut key, mut value) = ([0.0; 48], [0.0; 48]);
        held.read(1, 1, &mut key, &mut value);
        let row = &rows[96 + 48..][..48];
        for (x, y) in row.iter().zip(key) {
            assert!((x - y).abs() <= 0.51 * 5.0 / 127.0, "{y} for {x}");
        }
        assert_eq!(key, value);
    }
}
