//! KVQuant (Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache
//! Quantization", NeurIPS 2024, arXiv 2401.18079): non-uniform levels of a layer (nuq), for keys before RoPE
//! in the range of each channel, which is the calibration's, and for values in the range of each token, all
//! heads together; what is outside of the range, 1 % of the elements, is exact and sparse.
//!
//! There are two differences: the levels are those of k-means without the paper's weights, since a profile
//! has no gradients, and not only the first token stays exact but sinks and window.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use kv_attend::owner::{Pair, Side};
use kv_llama::Footprint;
use kv_model::{Config, Model, Rope};
use svd_core::SoftmaxStats;

use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::scalar::{BLOCK, pack, packed_len, unpack};
use crate::cache::{Geometry, Store, attend_rows, rounded};
use crate::calibrate::Calibration;
use crate::{Error, Profile, Result};

pub(super) const KV_QUANT: Registration = Registration {
    names: &["kvquant"],
    help: "\
  kvquant           non-uniform levels, keys before RoPE per channel,     k=3 v=3
                      values per token, OUTLIERS percent exact and        outliers=1
                      sparse (KVQuant); levels are not weighted
",
    examples: &["kvquant:k=8:v=8:exact=f32:window=4", "kvquant:k=8:v=8:outliers=10:exact=f32:window=4"],
    parse: |s| {
        let bits = Pair::new(s.bits("k", 3)?, s.bits("v", 3)?);
        Ok(Arc::new(KvQuant { bits, outliers: s.percent("outliers", 1)? }))
    },
};

#[derive(Debug)]
struct KvQuant {
    bits: Pair<u32>,
    outliers: usize, // percent
}

/// Iterations of k-means.
const ITERATIONS: usize = 50;

impl KvQuant {
    fn key(&self, l: usize, what: &str) -> String {
        format!("kvquant/{}/{l}/{what}", self.outliers)
    }

    fn levels_key(&self, l: usize, side: Side) -> String {
        self.key(l, &format!("{}{}", side.letter(), self.bits[side]))
    }

    /// Outliers of a token's values (n_kv_heads * head_dim).
    const fn of_token(&self, kv_dim: usize) -> usize {
        (kv_dim * self.outliers + 50) / 100
    }

    /// The ranges of the channels, and the levels of keys and values, of layer `l`.
    fn tables(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Tables> {
        let kv_dim = geometry.kv_dim();
        let ranges = profile.factors(&self.key(l, "ranges"), 2 * kv_dim)?;
        let ranges = ranges.as_chunks().0.iter().copied().map(Scale::of).collect();
        let levels = Pair::try_of(|side| -> Result<Levels> {
            Ok(Levels(profile.levels(&self.levels_key(l, side), 1 << self.bits[side])?.to_vec()))
        })?;
        let (bits, outliers) = (self.bits, self.of_token(kv_dim));
        Ok(Tables { ranges, levels, bits, exact_keys: self.outliers > 0, outliers })
    }
}

impl Kind for KvQuant {
    fn check(&self, config: &Config) -> Result<()> {
        match config.kv_dim() > usize::from(u16::MAX) {
            true => {
                Err(Error::argument("method kvquant: a token has too many channels for indices of 16 bits"))
            }
            false => Ok(()),
        }
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn calibrate(&self, model: &Model, _: &Rope, samples: &Calibration, profile: &mut Profile) -> Result<()> {
        let kv_dim = Geometry::of(&model.config).kv_dim();
        for (l, layer) in samples.layers.iter().enumerate() {
            let ranges: Vec<[f32; 2]> =
                (0..kv_dim).map(|c| self.range(layer.keys.iter().skip(c).step_by(kv_dim))).collect();
            let inside = |x: f32| x.abs() <= 1.0;
            let of_row = |row: &[f32]| -> Vec<f32> {
                row.iter().zip(&ranges).map(|(&x, &range)| Scale::of(range).unit(x)).collect()
            };
            let keys = layer.keys.chunks_exact(kv_dim).flat_map(of_row).filter(|&x| inside(x)).collect();
            let of_token = |row: &[f32]| -> Vec<f32> {
                let (scale, outliers) = Scale::of_token(row, self.of_token(kv_dim));
                let rest = (0..kv_dim).filter(|c| outliers.binary_search(c).is_err());
                rest.map(|c| scale.unit(row[c])).collect()
            };
            let values = layer.values.chunks_exact(kv_dim).flat_map(of_token).collect();
            profile.put_floats(self.key(l, "ranges"), ranges.concat());
            for (side, sample) in [(Side::Keys, keys), (Side::Values, values)] {
                profile.put_floats(self.levels_key(l, side), levels(sample, self.bits[side]));
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Err(Limit::without_kernels("int4"))
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            let tables = Arc::new(self.tables(context.profile, context.geometry, l)?);
            Ok(NuqStore::new(context.geometry, context.rope(l), tables))
        })
    }
}

impl KvQuant {
    /// The smallest and the largest of a channel's keys, without the outliers of the calibration.
    fn range<'a>(&self, keys: impl Iterator<Item = &'a f32>) -> [f32; 2] {
        let mut keys: Vec<f32> = keys.copied().collect();
        keys.sort_by(f32::total_cmp);
        let outside = keys.len() * self.outliers / 200; // on either side
        let last = keys.len() - 1;
        [keys[outside.min(last / 2)], keys[last - outside.min(last / 2)]]
    }
}

/// The levels (1 << bits,) of k-means of a sample, ascending, from its quantiles on.
fn levels(mut sample: Vec<f32>, bits: u32) -> Vec<f32> {
    let k = 1 << bits;
    sample.sort_by(f32::total_cmp);
    let mut sums = vec![0.0];
    for (i, &x) in sample.iter().enumerate() {
        sums.push(sums[i] + f64::from(x));
    }
    let quantile = |i: usize| sample.get((2 * i + 1) * sample.len() / (2 * k)).copied().unwrap_or(0.0);
    let mut levels: Vec<f32> = (0..k).map(quantile).collect();
    for _ in 0..ITERATIONS {
        let ends = levels.windows(2).map(|pair| sample.partition_point(|&x| x <= 0.5 * (pair[0] + pair[1])));
        let ends: Vec<usize> = ends.chain([sample.len()]).collect();
        let mut start = 0;
        for (level, end) in levels.iter_mut().zip(ends) {
            if start < end {
                *level = ((sums[end] - sums[start]) / (end - start) as f64) as f32;
            }
            start = start.max(end);
        }
    }
    levels
}

/// A map of a range to -1 to 1.
#[derive(Clone, Copy)]
struct Scale {
    centre: f32,
    half: f32,
}

impl Scale {
    fn of([low, high]: [f32; 2]) -> Self {
        Self { centre: 0.5 * (low + high), half: 0.5 * (high - low) }
    }

    /// The range of a token's values without its outliers, in half precision, and the channels of the
    /// outliers, ascending: the largest half of them, and the smallest.
    fn of_token(row: &[f32], outliers: usize) -> (Self, Vec<usize>) {
        let mut order: Vec<usize> = (0..row.len()).collect();
        order.sort_by(|&a, &b| row[a].total_cmp(&row[b]));
        let inside = outliers / 2..row.len() - outliers.div_ceil(2);
        let [low, high] = [inside.start, inside.end - 1].map(|i| row[order[i]]);
        let [centre, half] = [0.5 * (low + high), 0.5 * (high - low)].map(|x| rounded::<f16>(x).to_f32());
        let mut outside = [&order[..inside.start], &order[inside.end..]].concat();
        outside.sort_unstable();
        (Self { centre, half }, outside)
    }

    fn unit(self, x: f32) -> f32 {
        if self.half > 0.0 { (x - self.centre) / self.half } else { 0.0 }
    }

    fn element(self, unit: f32) -> f32 {
        self.centre + self.half * unit
    }
}

/// Levels, ascending.
struct Levels(Vec<f32>);

impl Levels {
    fn code(&self, unit: f32) -> u8 {
        self.0.windows(2).filter(|pair| unit > 0.5 * (pair[0] + pair[1])).count() as u8
    }
}

/// What a layer's codes are relative to.
struct Tables {
    ranges: Vec<Scale>, // (n_kv_heads * head_dim,) of keys
    levels: Pair<Levels>,
    bits: Pair<u32>,
    exact_keys: bool, // whether keys outside of the ranges are
    outliers: usize,  // of a token's values
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
struct NuqStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    tables: Arc<Tables>,
    codes: Pair<Codes>,
    start: usize, // position of the first token
}

impl NuqStore {
    fn new(geometry: Geometry, rope: Arc<Rope>, tables: Arc<Tables>) -> Self {
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

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        for start in (first..self.len()).step_by(BLOCK) {
            let tokens = start..self.len().min(start + BLOCK);
            let mut keys = self.decoded(Side::Keys, head, tokens.clone());
            self.rope.rotate_rows(&mut keys, self.geometry.head_dim, self.start + start);
            attend_rows(q, &keys, &self.decoded(Side::Values, head, tokens), out, stats)?;
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

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use kv_llama::Rng;

    #[test]
    fn elements_are_the_nearest_levels_or_exact() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/gqa");
        let config = Model::load(&path).unwrap().config;
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

    #[test]
    fn levels_are_the_means_of_what_is_nearest_to_them() {
        let mut rng = Rng(7);
        let sample: Vec<f32> = (0..3000).map(|_| (2.0 * rng.uniform() as f32 - 1.0).powi(3)).collect();
        let levels = Levels(levels(sample.clone(), 3));
        assert!(levels.0.len() == 8 && levels.0.is_sorted());
        for (code, &level) in levels.0.iter().enumerate() {
            let near: Vec<f64> =
                sample.iter().filter(|&&x| usize::from(levels.code(x)) == code).map(|&x| x.into()).collect();
            let mean = near.iter().sum::<f64>() / near.len() as f64;
            assert!((f64::from(level) - mean).abs() < 2e-3, "{level}, not {mean}");
        }
        assert_eq!(super::levels(vec![], 1), [0.0, 0.0]);
    }
}
