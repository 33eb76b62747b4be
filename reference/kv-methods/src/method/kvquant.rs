//! KVQuant (Hooper et al., "KVQuant: Towards 10 Million Context Length LLM Inference with KV Cache
//! Quantization", NeurIPS 2024, arXiv 2401.18079): non-uniform levels of a layer (nuq), for keys before RoPE
//! in the range of each channel, which is the calibration's, and for values in the range of each token, all
//! heads together; what is outside of the range, 1 % of the elements, is exact and sparse.
//!
//! There are two differences: the levels are those of k-means without the paper's weights, since a profile
//! has no gradients, and not only the first token stays exact but sinks and window.

mod store;

use std::sync::Arc;

use kv_attend::owner::{Pair, Side};
use kv_model::Config;

use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use crate::cache::{Geometry, Store};
use crate::calibrate::Calibration;
use crate::{Error, Profile, Result};
use store::{Levels, NuqStore, Scale, Tables};

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

    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        let kv_dim = Geometry::of(&samples.model.config).kv_dim();
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

#[cfg(test)]
mod tests {
    use kv_llama::Rng;

    use super::*;

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
