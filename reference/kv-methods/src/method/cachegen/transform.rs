//! The query-metric transform of the codec's planes, and the steps for a target rate.

use std::sync::Arc;

use codec_core::TransformBuf;
use kv_attend::owner::{Pair, Side};
use kv_model::Model;
use rayon::prelude::*;
use svd_core::{Gram, Rotation, Rows};

use super::grouped;
use crate::Result;
use crate::cache::Geometry;
use crate::calibrate::{Calibration, LayerSamples, output_gram, single};

/// The transform of a plane and its steps.
pub(crate) struct PlaneTransform {
    pub transform: Arc<TransformBuf>,
    pub steps: Vec<f32>,
}

impl PlaneTransform {
    /// The transforms of all planes: keys, then values, of each layer or group of layers. A transform mixes
    /// `heads` heads: one, those of a layer, or those of a group of layers.
    ///
    /// Keys share one step, in units of the noise of attention logits. Values have a step per head, halfway
    /// between a common step and a common rate, since the metric of `W_O` ignores the later layers; where
    /// heads are mixed, their metric has that weight instead.
    ///
    /// Values have `offset` bits more than keys, but neither side less than half of the other's bits: at low
    /// rates the offset alone would leave almost none to keys.
    pub fn all(
        model: &Model,
        samples: &Calibration,
        heads: usize,
        bits: f32,
        offset: f32,
    ) -> Result<Vec<Self>> {
        let geometry = Geometry::of(&model.config);
        let of_heads = samples.layers.par_iter().enumerate();
        let of_heads = of_heads.map(|(l, layer)| head_rotations(model, geometry, l, layer));
        let of_heads: Vec<Pair<Vec<Rotation>>> = of_heads.collect::<Result<_>>()?;
        let spreads: Vec<f64> =
            of_heads.iter().flat_map(|layer| &layer.values).map(|head| spread(head.sigma())).collect();
        let mean_spread = spreads.iter().sum::<f64>() / spreads.len() as f64;
        let value_units: Vec<f64> =
            spreads.iter().map(|spread| ((spread + mean_spread) / 2.0).exp()).collect();
        let half = offset.clamp(-bits / 1.5, bits / 1.5) / 2.0;
        let bits = Pair::new(bits - half, bits + half);
        let units = Pair::new(vec![1.0; value_units.len()], value_units);
        let sides = Pair::try_of(|side| {
            let mut rotations: Vec<(Rotation, f64)> = match heads {
                1 => {
                    let heads = of_heads.iter().flat_map(|layer| layer[side].iter().cloned());
                    heads.zip(units[side].iter().copied()).collect()
                }
                _ => {
                    let groups = 0..units[side].len() / heads;
                    let joint = groups.into_par_iter().map(|group| {
                        let part = group * heads..(group + 1) * heads;
                        Ok((joint_rotation(model, samples, geometry, side, part, &units[side])?, 1.0))
                    });
                    joint.collect::<Result<_>>()?
                }
            };
            let step = step_for_rate(rotations.iter().map(|(head, unit)| (head.sigma(), *unit)), bits[side]);
            rotations.iter_mut().for_each(|(_, unit)| *unit *= step);
            Result::Ok(rotations)
        })?;
        let per_plane = sides.keys.len() / (of_heads.len() / (heads / geometry.n_kv_heads).max(1));
        let planes = sides.keys.chunks(per_plane).zip(sides.values.chunks(per_plane));
        planes.flat_map(|(keys, values)| [keys, values]).map(Self::of_plane).collect()
    }

    /// The plane of transforms and their steps.
    fn of_plane(rotations: &[(Rotation, f64)]) -> Result<Self> {
        let dim = rotations[0].0.dim();
        let into = rotations.iter().flat_map(|(rotation, _)| single(rotation.basis())).collect();
        let transposed = |map: &[f64]| -> Vec<f32> {
            (0..dim * dim).map(|i| map[i % dim * dim + i / dim] as f32).collect()
        };
        let back = rotations.iter().flat_map(|(rotation, _)| transposed(rotation.dual())).collect();
        let steps = rotations.iter().flat_map(|&(_, step)| std::iter::repeat_n(step as f32, dim)).collect();
        Ok(Self { transform: Arc::new(TransformBuf::new(dim, into, back)?), steps })
    }
}

/// The mean logarithm of deviations.
fn spread(sigma: &[f64]) -> f64 {
    sigma.iter().map(|x| x.max(1e-9).ln()).sum::<f64>() / sigma.len() as f64
}

/// The query-metric rotation of heads of one or several layers together, of keys before RoPE, or of values in
/// the metric of `W_O`, relative to the residual stream. `heads` counts over the layers; an error in a head is
/// measured in its unit.
fn joint_rotation(
    model: &Model,
    samples: &Calibration,
    geometry: Geometry,
    side: Side,
    heads: std::ops::Range<usize>,
    units: &[f64],
) -> Result<Rotation> {
    let Geometry { n_kv_heads, head_dim, .. } = geometry;
    let layers = &samples.layers[heads.start / n_kv_heads..heads.end / n_kv_heads];
    let rows = grouped(layers, &model.config);
    let [keys, values] = &rows;
    match side {
        Side::Keys => {
            let metrics = layers.iter().flat_map(|layer| &layer.plain_query_grams);
            let metrics: Vec<_> =
                metrics.zip(&units[heads.clone()]).map(|(gram, unit)| (gram, unit.powi(-2))).collect();
            Ok(Rotation::joint_query_metric(&covariance(keys, heads.len() * head_dim)?, &metrics)?)
        }
        Side::Values => {
            let metric = |head: usize| {
                let (l, head_of_layer) = (head / n_kv_heads, head % n_kv_heads);
                let unit = units[head] * samples.layers[l].residual_rms;
                Ok((output_gram(model, l, head_of_layer)?, unit.powi(-2)))
            };
            let metrics = heads.clone().map(metric).collect::<Result<Vec<_>>>()?;
            let metrics: Vec<_> = metrics.iter().map(|(gram, weight)| (gram, *weight)).collect();
            Ok(Rotation::joint_query_metric(&covariance(values, heads.len() * head_dim)?, &metrics)?)
        }
    }
}

/// The second moment of rows (n, dim) about their mean.
fn covariance<S: svd_core::RopeSide>(rows: &[f32], dim: usize) -> Result<Gram<S>> {
    let mut moment = Gram::new(dim)?;
    moment.add_rows(Rows::contiguous(rows, dim)?)?;
    Ok(moment.centred())
}

/// Query-metric rotations of a layer's heads: of keys before RoPE, and of values in the metric of `W_O`,
/// relative to the residual stream.
fn head_rotations(
    model: &Model,
    geometry: Geometry,
    l: usize,
    layer: &LayerSamples,
) -> Result<Pair<Vec<Rotation>>> {
    let heads = 0..geometry.n_kv_heads;
    let keys =
        heads.clone().map(|head| rotation(geometry, &layer.keys, head, &layer.plain_query_grams[head]));
    let values = heads.map(|head| {
        let rotation = rotation(geometry, &layer.values, head, &output_gram(model, l, head)?)?;
        let scale = 1.0 / layer.residual_rms;
        let store = rotation.basis().iter().map(|x| x * scale).collect();
        let probe = rotation.dual().iter().map(|x| x / scale).collect();
        let sigma = rotation.sigma().iter().map(|x| x * scale).collect();
        Ok(Rotation::from_parts(store, probe, sigma)?)
    });
    Ok(Pair::new(keys.collect::<Result<_>>()?, values.collect::<Result<_>>()?))
}

/// The query-metric rotation of one head's rows.
fn rotation<S: svd_core::RopeSide>(
    geometry: Geometry,
    rows: &[f32],
    head: usize,
    metric: &Gram<S>,
) -> Result<Rotation> {
    let mut moment = Gram::new(geometry.head_dim)?;
    let rows = Rows::contiguous(rows, geometry.kv_dim())?;
    moment.add_rows(rows.columns(head * geometry.head_dim, geometry.head_dim)?)?;
    Ok(Rotation::query_metric(&moment.centred(), metric)?)
}

/// The step that, multiplied by each head's factor, codes Gaussian coefficients of these deviations with
/// `bits` on average.
fn step_for_rate<'a>(heads: impl Iterator<Item = (&'a [f64], f64)>, bits: f32) -> f64 {
    let relative: Vec<f64> =
        heads.flat_map(|(sigma, factor)| sigma.iter().map(move |x| (x / factor).max(1e-30))).collect();
    let rate =
        |step: f64| relative.iter().map(|x| gaussian_rate(x / step)).sum::<f64>() / relative.len() as f64;
    let (mut low, mut high) = (1e-12_f64.ln(), 1e12_f64.ln());
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if rate(middle.exp()) > bits.into() { low = middle } else { high = middle }
    }
    high.exp()
}

/// Entropy in bits of a Gaussian with a deviation of `sigma` steps, rounded to the nearest step.
fn gaussian_rate(sigma: f64) -> f64 {
    if sigma > 4.0 {
        // Rounding adds the variance of a step's uniform distribution.
        return (std::f64::consts::TAU * std::f64::consts::E * (sigma * sigma + 1.0 / 12.0)).log2() / 2.0;
    }
    let below = |x: f64| 0.5 * libm::erfc(-x / (sigma * std::f64::consts::SQRT_2));
    (0..=24)
        .map(|bin| {
            let p = below(f64::from(bin) + 0.5) - below(f64::from(bin) - 0.5);
            let cost = if p > 0.0 { -p * p.log2() } else { 0.0 };
            if bin == 0 { cost } else { 2.0 * cost }
        })
        .sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_give_the_rate_asked_for() {
        let sigma = [3.0, 1.0, 0.1, 0.01];
        for bits in [0.5, 2.0, 6.0] {
            let step = step_for_rate([(&sigma[..], 2.0)].into_iter(), bits);
            let rate = sigma.iter().map(|x| gaussian_rate(x / (2.0 * step))).sum::<f64>() / 4.0;
            assert!((rate - f64::from(bits)).abs() < 1e-4, "{bits} {rate}");
        }
        // Both forms at their boundary, and the entropy of a rare event.
        assert!((gaussian_rate(4.000_001) - gaussian_rate(4.0)).abs() < 1e-3);
        assert!(gaussian_rate(0.1) < 1e-4);
    }
}
