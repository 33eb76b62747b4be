//! The codes of a layer's tokens.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use kv_attend::owner::{Pair, Side};
use kv_llama::Footprint;
use kv_model::Rope;

use crate::Result;
use crate::cache::{Geometry, Store, Sums, attend_rows, rounded};
use crate::method::scalar::{BLOCK, pack, packed_len, unpack};

/// A map of a range to -1 to 1.
#[derive(Clone, Copy)]
pub(super) struct Scale {
    centre: f32,
    half: f32,
}

impl Scale {
    pub fn of([low, high]: [f32; 2]) -> Self {
        Self { centre: 0.5 * (low + high), half: 0.5 * (high - low) }
    }

    /// The range of a token's values without its outliers, in half precision, and the channels of the
    /// outliers, ascending: the largest half of them, and the smallest.
    pub fn of_token(row: &[f32], outliers: usize) -> (Self, Vec<usize>) {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[a].total_cmp(&row[b]));
        let inside = outliers / 2..row.len() - outliers.div_ceil(2);
        let [low, high] = [inside.start, inside.end - 1].map(|i| row[order[i]]);
        let [centre, half] = [0.5 * (low + high), 0.5 * (high - low)].map(|x| rounded::<f16>(x).to_f32());
        let mut outside = [&order[..inside.start], &order[inside.end..]].concat();
        outside.sort_unstable();
        (Self { centre, half }, outside)
    }

    pub fn unit(self, x: f32) -> f32 {
        if self.half > 0.0 { (x - self.centre) / self.half } else { 0.0 }
    }

    fn element(self, unit: f32) -> f32 {
        self.centre + self.half * unit
    }
}

/// Levels, ascending.
pub(super) struct Levels(pub Vec<f32>);

impl Levels {
    pub fn code(&self, unit: f32) -> u8 {
        self.0.windows(2).filter(|pair| unit > 0.5 * (pair[0] + pair[1])).count() as u8
    }
}

/// What a layer's codes are relative to.
pub(super) struct Tables {
    pub ranges: Vec<Scale>, // (n_kv_heads * head_dim,) of keys
    pub levels: Pair<Levels>,
    pub bits: Pair<u32>,
    pub exact_keys: bool, // whether keys outside of the ranges are
    pub outliers: usize,  // of a token's values
}

/// The codes of the keys of a layer's tokens, or of their values.
#[derive(Clone, Default)]
struct Codes {
    packed: Vec<u8>,           // (tokens, n_kv_heads, bytes of a head)
    scales: Vec<[f16; 2]>,     // of values, per token: centre and half of the range
    outliers: Vec<(u16, f16)>, // of all tokens: the channel, ascending in a token, and the element
    ends: Vec<u32>,            // (tokens,): of their outliers
}

impl Codes {
    /// Appends a token with channels in `scale`; those of `outliers`, ascending, stay exact.
    fn push(
        &mut self,
        row: &[f32],
        scale: impl Fn(usize) -> Scale,
        outliers: &[usize],
        (levels, bits, head_dim): (&Levels, u32, usize),
    ) {
        let codes: Vec<u8> = row.iter().enumerate().map(|(c, &x)| levels.code(scale(c).unit(x))).collect();
        codes.chunks_exact(head_dim).for_each(|codes| pack(codes, bits, &mut self.packed));
        self.outliers.extend(outliers.iter().map(|&c| (c as u16, rounded::<f16>(row[c]))));
        self.ends.push(self.outliers.len() as u32);
    }

    fn truncate(&mut self, tokens: usize) {
        if tokens < self.ends.len() {
            self.packed.truncate(self.packed.len() / self.ends.len() * tokens);
            self.scales.truncate(tokens);
            self.ends.truncate(tokens);
            self.outliers.truncate(self.ends.last().map_or(0, |&end| end as usize));
        }
    }

    /// The outliers of a token.
    fn outliers(&self, t: usize) -> &[(u16, f16)] {
        let start = t.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.outliers[start as usize..self.ends[t] as usize]
    }

    fn size(&self) -> usize {
        // A channel has 16 bits, an element 16.
        self.packed.len() + 4 * self.scales.len() + 4 * self.outliers.len() + 4 * self.ends.len()
    }
}

/// Codes of a layer's tokens.
#[derive(Clone)]
pub(super) struct NuqStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    tables: Arc<Tables>,
    codes: Pair<Codes>,
    start: usize, // position of the first token
}

impl NuqStore {
    pub fn new(geometry: Geometry, rope: Arc<Rope>, tables: Arc<Tables>) -> Self {
        Self { geometry, rope, tables, codes: Pair::of(|_| Codes::default()), start: 0 }
    }

    /// One head's keys before RoPE, or values, of tokens: (n, head_dim).
    fn decoded(&self, side: Side, head: usize, tokens: Range<usize>) -> Vec<f32> {
        let Tables { ranges, levels, bits, .. } = &*self.tables;
        let (codes, dim, levels) = (&self.codes[side], self.geometry.head_dim, &levels[side].0);
        let (bytes, channels) = (packed_len(dim, bits[side]), head * dim..(head + 1) * dim);
        let mut rows = vec![0.0; tokens.len() * dim];
        for (t, row) in tokens.zip(rows.chunks_exact_mut(dim)) {
            let packed = &codes.packed[(t * self.geometry.n_kv_heads + head) * bytes..][..bytes];
            unpack(packed, bits[side], row, |code| levels[usize::from(code)]);
            match side {
                Side::Keys => {
                    row.iter_mut()
                        .zip(&ranges[channels.clone()])
                        .for_each(|(x, scale)| *x = scale.element(*x));
                }
                Side::Values => {
                    let [centre, half] = codes.scales[t].map(f16::to_f32);
                    row.iter_mut().for_each(|x| *x = Scale { centre, half }.element(*x));
                }
            }
            for &(c, x) in codes.outliers(t) {
                if channels.contains(&c.into()) {
                    row[usize::from(c) - channels.start] = x.to_f32();
                }
            }
        }
        rows
    }
}

impl Store for NuqStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let Tables { ranges, levels, bits, exact_keys, outliers } = &*self.tables;
        let (kv_dim, dim) = (self.geometry.kv_dim(), self.geometry.head_dim);
        if self.len() == 0 {
            self.start = pos;
        }
        let of = |side: Side| (&levels[side], bits[side], dim);
        for (k, v) in k.chunks_exact(kv_dim).zip(v.chunks_exact(kv_dim)) {
            let outside = |c: &usize| *exact_keys && ranges[*c].unit(k[*c]).abs() > 1.0;
            let of_key: Vec<usize> = (0..kv_dim).filter(outside).collect();
            self.codes.keys.push(k, |c| ranges[c], &of_key, of(Side::Keys));
            let (scale, of_value) = Scale::of_token(v, *outliers);
            self.codes.values.push(v, |_| scale, &of_value, of(Side::Values));
            self.codes.values.scales.push([scale.centre, scale.half].map(f16::from_f32));
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.codes.keys.ends.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        Side::ALL.into_iter().for_each(|side| self.codes[side].truncate(len));
        Ok(())
    }

    fn attend(&self, head: usize, first: usize, q: &[f32], sums: &mut Sums<'_>) -> Result<()> {
        for start in (first..self.len()).step_by(BLOCK) {
            let tokens = start..self.len().min(start + BLOCK);
            let mut keys = self.decoded(Side::Keys, head, tokens.clone());
            self.rope.rotate_rows(&mut keys, self.geometry.head_dim, self.start + start);
            attend_rows(q, &keys, &self.decoded(Side::Values, head, tokens), sums)?;
        }
        Ok(())
    }

    fn footprint(&self) -> Footprint {
        let Tables { ranges, levels, .. } = &*self.tables;
        let levels: usize = levels.iter().map(|levels| size_of_val(&levels.0[..])).sum();
        Footprint {
            kept: self.codes.iter().map(Codes::size).sum(),
            shared: size_of_val(&ranges[..]) + levels,
            ..Footprint::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use kv_llama::Rng;

    use super::*;

    #[test]
    fn elements_are_the_nearest_levels_or_exact() {
        let config = crate::fixture::model().config;
        let (geometry, kv_dim, n) = (Geometry::of(&config), config.kv_dim(), 70);
        let mut rng = Rng(7);
        let mut random =
            || -> Vec<f32> { (0..n * kv_dim).map(|_| (4.0 * rng.uniform() as f32 - 2.0).powi(3)).collect() };
        let (k, v) = (random(), random());
        for (outliers, bits) in [(0, 3), (5, 3), (3, 4)] {
            let ranges: Vec<Scale> =
                (0..kv_dim).map(|c| Scale::of([-2.0 - 0.1 * c as f32, 3.0 + 0.05 * c as f32])).collect();
            let levels = || Levels((0..1 << bits).map(|i| ((i as f32 + 0.5) / 4.0 - 1.0).powi(3)).collect());
            let levels = Pair::of(|_| levels());
            let tables =
                Tables { ranges, levels, bits: Pair::new(bits, bits), exact_keys: outliers > 0, outliers };
            let rope = Arc::new(Rope::new(&config, 128));
            let mut store = NuqStore::new(geometry, rope, Arc::new(tables));
            store.push(0, &k, &v).unwrap();
            store.truncate(64).unwrap();
            store.push(64, &k[64 * kv_dim..], &v[64 * kv_dim..]).unwrap();
            let Tables { ranges, levels, .. } = &*store.tables.clone();
            let nearest = |unit: f64| {
                let levels = levels.keys.0.iter().map(|&x| f64::from(x));
                levels.min_by(|a, b| (a - unit).abs().total_cmp(&(b - unit).abs())).unwrap()
            };
            let half = |x: f64| f16::from_f64(x).to_f64();
            for t in 0..n {
                let [keys, values] = [&k, &v].map(|rows| -> Vec<f64> {
                    rows[t * kv_dim..][..kv_dim].iter().map(|&x| x.into()).collect()
                });
                let mut sorted = values.clone();
                sorted.sort_by(f64::total_cmp);
                let [low, high] = [sorted[outliers / 2], sorted[kv_dim - 1 - outliers.div_ceil(2)]];
                let (centre, width) = (half((low + high) / 2.0), half((high - low) / 2.0));
                for c in 0..kv_dim {
                    let Scale { centre: middle, half: reach } = ranges[c];
                    let (middle, reach) = (f64::from(middle), f64::from(reach));
                    let unit = (keys[c] - middle) / reach;
                    let key = if outliers > 0 && unit.abs() > 1.0 {
                        half(keys[c])
                    } else {
                        middle + reach * nearest(unit)
                    };
                    let value = if values[c] < low || values[c] > high {
                        half(values[c])
                    } else {
                        centre + width * nearest((values[c] - centre) / width)
                    };
                    let (head, at) = (c / config.head_dim, c % config.head_dim);
                    for (side, expected) in [(Side::Keys, key), (Side::Values, value)] {
                        let got = f64::from(store.decoded(side, head, t..t + 1)[at]);
                        assert!((got - expected).abs() < 1e-5, "{side:?} {t} {c}: {got}, not {expected}");
                    }
                }
            }
            // Codes, scales, 4 bytes an outlier and 4 for the end of a token's.
            let of_keys = store.codes.keys.outliers.len();
            let sparse = 4 * (of_keys + n * outliers) + 2 * 4 * n;
            assert_eq!(store.footprint().kept, 2 * n * kv_dim * bits as usize / 8 + 4 * n + sparse);
            assert_eq!(of_keys > 0, outliers > 0);
        }
    }
}
