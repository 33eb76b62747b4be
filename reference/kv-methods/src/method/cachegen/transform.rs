//! The query-metric transform of the codec's planes, and the steps for a target rate.
//!
//! Equal steps in the metric, and no bits for coefficients far below one, are reverse water-filling (Cover,
//! Thomas, "Elements of Information Theory", 10.3.3). KVTC (arXiv 2511.01815) has principal components of the
//! heads of all layers, regardless of queries and `W_O`, and chooses the bits of groups of them by dynamic
//! programming.

use std::sync::Arc;

use codec_core::TransformBuf;
use kv_attend::owner::{Pair, Side};
use rayon::prelude::*;
use svd_core::{Gram, Rotation, Rows};

use super::grouped;
use crate::Result;
use crate::cache::Geometry;
use crate::calibrate::{Calibration, LayerSamples, mean_row, single};

/// Bits at which sensitivities are measured, and what values have more than keys there.
const MEASURED: (f32, f32) = (2.0, 1.2);

/// Coefficients of several heads with a deviation below this many steps have no place in a plane: they are
/// zeros, unless the text differs from the sample. At 1.25 bits on another text (12 M, 3 layers), the KL is
/// 0.0131, with all coefficients 0.0138, and with a bound of 0.3, which drops more than the text can do
/// without, 0.0167.
const LEAST: f64 = 0.125;

/// The least sensitivity, as a fraction of the mean: few tokens do not tell smaller ones.
const LEAST_COST: f64 = 1e-3;

/// How planes share the bits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Shares {
    /// Values have so many bits more than keys, but neither side less than half of the other's: at low rates
    /// the offset alone would leave almost none to keys.
    ///
    /// Keys share one step, in units of the noise of attention logits. Values have a step per head, halfway
    /// between a common step and a common rate, since the metric of `W_O` ignores the later layers; where
    /// heads are mixed, their metric has that weight instead.
    Offset(f32),
    /// By the divergence that errors in each layer and side cause, to this power: at 1, coefficients have
    /// equal steps in units of divergence.
    Sensitivity(f64),
}

/// The transforms of all planes, and the unit in which each one's steps are equal.
pub(crate) struct Rotations {
    sides: Pair<Vec<(Rotation, f64)>>,
    per_plane: usize,
    least: f64, // steps of a coefficient that has a place in a plane
    shares: Shares,
}

/// The transform of a plane and its steps.
pub(crate) struct PlaneTransform {
    pub transform: Arc<TransformBuf>,
    pub steps: Vec<f32>,
}

impl Rotations {
    /// Transforms that mix `heads` heads: one, those of a layer, or those of a group of layers.
    pub fn of(samples: &Calibration<'_>, heads: usize, shares: Shares) -> Result<Self> {
        let geometry = Geometry::of(&samples.model.config);
        let of_heads = samples.layers.par_iter().enumerate();
        let of_heads = of_heads.map(|(l, layer)| head_rotations(samples, geometry, l, layer));
        let of_heads: Vec<Pair<Vec<Rotation>>> = of_heads.collect::<Result<_>>()?;
        let units = match shares {
            Shares::Offset(_) => {
                Pair::new(vec![1.0; of_heads.len() * geometry.n_kv_heads], spreads(&of_heads))
            }
            Shares::Sensitivity(power) => sensitive_units(samples, &of_heads, power)?,
        };
        let sides = Pair::try_of(|side| match heads {
            1 => {
                let heads = of_heads.iter().flat_map(|layer| layer[side].iter().cloned());
                Ok(heads.zip(units[side].iter().copied()).collect())
            }
            _ => {
                let joint = (0..units[side].len() / heads).into_par_iter().map(|group| {
                    let part = group * heads..(group + 1) * heads;
                    Ok((joint_rotation(samples, geometry, side, part, &units[side])?, 1.0))
                });
                joint.collect::<Result<Vec<_>>>()
            }
        })?;
        let per_plane = if heads == 1 { geometry.n_kv_heads } else { 1 };
        // Planes of single heads keep all coefficients, so that a device decodes them; so do those of samples
        // that are too small to tell which ones matter.
        let tokens = samples.layers[0].keys.len() / geometry.kv_dim();
        let is_sampled = tokens >= 2 * heads * geometry.head_dim;
        let least = if heads > 1 && is_sampled { LEAST } else { 0.0 };
        Ok(Self { sides, per_plane, least, shares })
    }

    /// The planes at `bits` an element: keys, then values, of each layer or group of layers.
    pub fn planes(&self, bits: f32) -> Result<Vec<PlaneTransform>> {
        let least = self.least;
        let steps = match self.shares {
            Shares::Offset(offset) => {
                let bits = sides_bits(bits, offset);
                Pair::of(|side| step_for_rate(sigmas(&self.sides[side]), bits[side], least))
            }
            Shares::Sensitivity(_) => {
                let step = step_for_rate(self.sides.iter().flat_map(|side| sigmas(side)), bits, least);
                Pair::new(step, step)
            }
        };
        let Pair { keys, values } = &self.sides;
        let planes = keys.chunks(self.per_plane).zip(values.chunks(self.per_plane));
        let planes = planes.flat_map(|(keys, values)| [(keys, steps.keys), (values, steps.values)]);
        planes.map(|(rotations, step)| PlaneTransform::new(rotations, step, least)).collect()
    }
}

impl PlaneTransform {
    /// The plane of transforms; `step` is in the unit of each.
    fn new(rotations: &[(Rotation, f64)], step: f64, least: f64) -> Result<Self> {
        let dim = rotations[0].0.dim();
        let coded = |(rotation, unit): &(Rotation, f64)| {
            rotation.sigma().iter().filter(|&&sigma| sigma >= least * unit * step).count()
        };
        let rank = rotations.iter().map(coded).max().unwrap_or(dim).max(1);
        let leading = |row: &[f64]| single(&row[..rank]);
        let into = rotations.iter().flat_map(|(rotation, _)| rotation.basis().chunks(dim).flat_map(leading));
        let back = rotations.iter().flat_map(|(rotation, _)| {
            let column = |c: usize| rotation.dual().iter().skip(c).step_by(dim).map(|&x| x as f32);
            (0..rank).flat_map(column)
        });
        let steps = rotations.iter().flat_map(|(_, unit)| std::iter::repeat_n((unit * step) as f32, rank));
        let (steps, into, back) = (steps.collect(), into.collect(), back.collect());
        Ok(Self { transform: Arc::new(TransformBuf::leading(dim, rank, into, back)?), steps })
    }
}

/// Bits of keys and values that differ by `offset`, within a factor of two.
fn sides_bits(bits: f32, offset: f32) -> Pair<f32> {
    let half = offset.clamp(-bits / 1.5, bits / 1.5) / 2.0;
    Pair::new(bits - half, bits + half)
}

/// Deviations of the coefficients of each transform, with its unit.
fn sigmas(rotations: &[(Rotation, f64)]) -> impl Iterator<Item = (&[f64], f64)> {
    rotations.iter().map(|(rotation, unit)| (rotation.sigma(), *unit))
}

/// The units of all heads' values: halfway between one and the spread of the head.
fn spreads(of_heads: &[Pair<Vec<Rotation>>]) -> Vec<f64> {
    let all: Vec<f64> =
        of_heads.iter().flat_map(|layer| &layer.values).map(|head| spread(head.sigma())).collect();
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    all.iter().map(|spread| ((spread + mean) / 2.0).exp()).collect()
}

/// The units of all heads: steps of a moderate rate, divided by a power of the root of what they cost the
/// model. The divergence is quadratic in small steps, and a common derivative by the rate of all coefficients
/// needs equal divergences.
fn sensitive_units(
    samples: &Calibration<'_>,
    of_heads: &[Pair<Vec<Rotation>>],
    power: f64,
) -> Result<Pair<Vec<f64>>> {
    let (bits, offset) = MEASURED;
    let (bits, heads) = (sides_bits(bits, offset), of_heads[0].keys.len());
    let mut units = Pair::new(vec![1.0; of_heads.len() * heads], spreads(of_heads));
    for side in [Side::Keys, Side::Values] {
        let sigmas = of_heads.iter().flat_map(|layer| layer[side].iter().map(Rotation::sigma));
        let step = step_for_rate(sigmas.zip(units[side].iter().copied()), bits[side], 0.0);
        units[side].iter_mut().for_each(|unit| *unit *= step);
    }
    let costs = samples.shared.get("cachegen/sensitivities", || {
        let costs = samples.divergences(|l, side, rows| {
            let layer = &samples.layers[l];
            let sample = if side == Side::Keys { &layer.keys } else { &layer.values };
            let dim = samples.model.config.kv_dim();
            let mean = mean_row(sample, dim);
            for row in rows.chunks_exact_mut(dim) {
                row.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
                let parts = row.chunks_exact_mut(dim / heads).zip(&of_heads[l][side]);
                for ((part, rotation), step) in parts.zip(&units[side][l * heads..]) {
                    quantize(part, rotation, *step);
                }
                row.iter_mut().zip(&mean).for_each(|(x, mean)| *x += mean);
            }
            Ok(())
        })?;
        Ok(relative(costs))
    })?;
    for (l, costs) in costs.iter().enumerate() {
        for side in [Side::Keys, Side::Values] {
            let heads = &mut units[side][l * heads..][..heads];
            heads.iter_mut().for_each(|unit| *unit *= costs[side].powf(-power / 2.0));
        }
    }
    Ok(units)
}

/// Divergences relative to their mean.
fn relative(mut costs: Vec<Pair<f64>>) -> Vec<Pair<f64>> {
    let mean = costs.iter().flat_map(Pair::iter).sum::<f64>() / (2 * costs.len()) as f64;
    // A model whose layers cost nothing, such as a pruned one, has equal sensitivities.
    let relative = |x: f64| if mean > 0.0 { (x / mean).max(LEAST_COST) } else { 1.0 };
    costs.iter_mut().flat_map(Pair::iter_mut).for_each(|x| *x = relative(*x));
    costs
}

/// Replaces a vector by that of its coefficients rounded to steps.
fn quantize(x: &mut [f32], rotation: &Rotation, step: f64) {
    let dim = x.len();
    let mut coefficients = vec![0.0; dim];
    for (x, row) in x.iter().zip(rotation.basis().chunks_exact(dim)) {
        coefficients.iter_mut().zip(row).for_each(|(sum, a)| *sum += f64::from(*x) * a);
    }
    coefficients.iter_mut().for_each(|y| *y = (*y / step).round() * step);
    for (x, row) in x.iter_mut().zip(rotation.dual().chunks_exact(dim)) {
        *x = row.iter().zip(&coefficients).map(|(b, y)| b * y).sum::<f64>() as f32;
    }
}

/// The mean logarithm of deviations.
fn spread(sigma: &[f64]) -> f64 {
    sigma.iter().map(|x| x.max(1e-9).ln()).sum::<f64>() / sigma.len() as f64
}

/// The query-metric rotation of heads of one or several layers together, of keys before RoPE, or of values in
/// the metric of `W_O`, relative to the residual stream. `heads` counts over the layers; an error in a head
/// is measured in its unit.
fn joint_rotation(
    samples: &Calibration<'_>,
    geometry: Geometry,
    side: Side,
    heads: std::ops::Range<usize>,
    units: &[f64],
) -> Result<Rotation> {
    let Geometry { n_kv_heads, head_dim, .. } = geometry;
    let layers = &samples.layers[heads.start / n_kv_heads..heads.end / n_kv_heads];
    let rows = grouped(layers, &samples.model.config);
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
                Ok((samples.output_gram(l, head_of_layer)?, unit.powi(-2)))
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
    samples: &Calibration<'_>,
    geometry: Geometry,
    l: usize,
    layer: &LayerSamples,
) -> Result<Pair<Vec<Rotation>>> {
    let heads = 0..geometry.n_kv_heads;
    let keys =
        heads.clone().map(|head| rotation(geometry, &layer.keys, head, &layer.plain_query_grams[head]));
    let values = heads.map(|head| {
        let rotation = rotation(geometry, &layer.values, head, &samples.output_gram(l, head)?)?;
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

/// The step that, multiplied by each transform's unit, codes Gaussian coefficients of these deviations with
/// `bits` on average. Those with less than `least` steps are not coded.
fn step_for_rate<'a>(all: impl Iterator<Item = (&'a [f64], f64)>, bits: f32, least: f64) -> f64 {
    let relative: Vec<f64> =
        all.flat_map(|(sigma, unit)| sigma.iter().map(move |x| (x / unit).max(1e-30))).collect();
    let rate = |step: f64| {
        let coded = relative.iter().map(|x| x / step).filter(|&x| x >= least);
        coded.map(gaussian_rate).sum::<f64>() / relative.len() as f64
    };
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

    /// A rotation of `dim` coefficients, with a basis and a dual that tell rows from columns.
    fn rotation(sigma: &[f64]) -> Rotation {
        let dim = sigma.len();
        let basis: Vec<f64> = (0..dim * dim).map(|i| i as f64).collect();
        let dual = basis.iter().map(|x| -x).collect();
        Rotation::from_parts(basis, dual, sigma.to_vec()).unwrap()
    }

    #[test]
    fn planes_of_many_heads_have_the_coefficients_worth_their_bits() {
        let plane = PlaneTransform::new(&[(rotation(&[8.0, 2.0, 0.2]), 2.0)], 1.0, 0.3).unwrap();
        let transform = plane.transform.view();
        assert_eq!((transform.head_dim(), transform.rank(), &plane.steps[..]), (3, 2, &[2.0; 2][..]));
        assert_eq!(transform.forward(), [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]);
        assert_eq!(transform.inverse(), [0.0, -3.0, -6.0, -1.0, -4.0, -7.0]);
        // Heads of one plane have the rank of the largest, and there is always one.
        let heads = [(rotation(&[8.0, 2.0, 0.2]), 1.0), (rotation(&[1.0, 0.0, 0.0]), 4.0)];
        let plane = PlaneTransform::new(&heads, 1.0, 0.3).unwrap();
        assert_eq!((plane.transform.view().rank(), &plane.steps[..]), (2, &[1.0, 1.0, 4.0, 4.0][..]));
        assert_eq!(PlaneTransform::new(&heads, 1e9, 0.3).unwrap().transform.view().rank(), 1);
        assert_eq!(PlaneTransform::new(&heads, 1e9, 0.0).unwrap().transform.view().rank(), 3);
    }

    #[test]
    fn rounding_is_in_coefficients() {
        let (basis, dual) = (vec![1.0, 1.0, 0.0, 2.0], vec![1.0, 0.0, -0.5, 0.5]);
        let rotation = Rotation::from_parts(basis, dual, vec![1.0; 2]).unwrap();
        let mut x = [0.4, 0.9];
        quantize(&mut x, &rotation, 0.5); // coefficients 0.4 and 2.2
        assert_eq!(x, [0.5, 0.75]);
    }

    #[test]
    fn steps_give_the_rate_asked_for() {
        let sigma = [3.0, 1.0, 0.1, 0.01];
        for bits in [0.5, 2.0, 6.0] {
            let step = step_for_rate([(&sigma[..], 2.0)].into_iter(), bits, 0.0);
            let rate = sigma.iter().map(|x| gaussian_rate(x / (2.0 * step))).sum::<f64>() / 4.0;
            assert!((rate - f64::from(bits)).abs() < 1e-4, "{bits} {rate}");
        }
        // Both forms at their boundary, and the entropy of a rare event.
        assert!((gaussian_rate(4.000_001) - gaussian_rate(4.0)).abs() < 1e-3);
        assert!(gaussian_rate(0.1) < 1e-4);
    }
}
