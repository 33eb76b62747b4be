//! The codec's planes: one for the keys (before RoPE) and one for the values of each layer.

use std::sync::Arc;

use codec_core::{Coder, FitOptions, ModelKind, PlaneBuf, PredictorKind, Steps, TransformBuf};
use rayon::prelude::*;
use svd_core::{Gram, Rotation};

use super::pqklt::single;
use super::zack::output_gram;
use crate::cache::{Geometry, mean_row};
use crate::calibrate::{Calibration, LayerSamples};
use crate::model::{Config, Model};
use crate::side::{Pair, Side};
use crate::{Error, Profile, Result};

/// What the profile depends on.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CacheGen {
    pub mode: Mode,
    pub predictor: Prediction,
    pub models: ModelKind,
    pub coder: Coder,
}

/// Which numbers become bins, and what a bin is worth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Mode {
    /// Coefficients of the query-metric KLT, values of `W_O`'s; steps so that both together take `bits` a value, values
    /// `offset` more than keys.
    Transform { bits: f32, offset: f32 },
    /// Channels, bins in deviations.
    Channels { k: f32, v: f32 },
    /// Channels, one step for all of a layer: this part of the root of their mean variance.
    Common { k: f32, v: f32 },
    /// As in the paper: anchors, bins that grow by layer third, a range coder.
    Paper { k: f32, v: f32 },
    /// As LMCache does: bins of each token's largest magnitude, more of them in the first layers.
    LmCache { bins: u8 },
}

/// How keys and values are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prediction {
    /// By what measures best on the sample.
    Best,
    None,
    Mean,
    Previous,
    Anchor,
}

/// CacheGen's groups of tokens.
const GROUP: u16 = 10;

impl Prediction {
    fn candidates(self) -> &'static [PredictorKind] {
        const ALL: [PredictorKind; 4] = [
            PredictorKind::Mean,
            PredictorKind::Previous,
            PredictorKind::None,
            PredictorKind::Anchor { group: GROUP },
        ];
        match self {
            // At equal steps anchors take a bit more (`benches/results/codec.md`): they are not tried.
            Self::Best => &ALL[..2],
            Self::Mean => &ALL[..1],
            Self::Previous => &ALL[1..2],
            Self::None => &ALL[2..3],
            Self::Anchor => &ALL[3..],
        }
    }
}

impl CacheGen {
    fn key(&self, side: Side, l: usize) -> String {
        let letter = side.letter();
        let Self { mode, predictor, models, coder } = self;
        format!("cachegen/{mode:?}/{predictor:?}/{models:?}/{coder:?}/{letter}/{l}/plane")
    }

    /// Fits a plane to the keys and one to the values of every layer.
    pub fn calibrate(&self, model: &Model, samples: &Calibration, profile: &mut Profile) -> Result<()> {
        let config = &model.config;
        let transforms = match self.mode {
            Mode::Transform { bits, offset } => PlaneTransform::all(model, samples, bits, offset)?,
            _ => vec![],
        };
        let planes: Vec<(String, Vec<u8>)> = (0..2 * config.n_layers)
            .into_par_iter()
            .map(|plane| {
                let (l, side) = (plane / 2, Side::ALL[plane % 2]);
                let layer = &samples.layers[l];
                let rows = Pair::new(&layer.keys, &layer.values)[side];
                let transform = transforms.get(plane);
                let given = match (transform, self.mode) {
                    (Some(transform), _) => transform.steps.clone(),
                    (None, Mode::Common { k, v }) => {
                        vec![Pair::new(k, v)[side] * deviation(rows, config.kv_dim()); config.kv_dim()]
                    }
                    (None, _) => vec![],
                };
                let options = FitOptions {
                    predictor: PredictorKind::Mean,
                    steps: self.steps(side, l, config, &given),
                    models: self.models,
                    coder: self.coder,
                };
                let transform = transform.map(|transform| transform.transform.clone());
                let candidates = self.predictor.candidates();
                let fitted = PlaneBuf::fit_best(rows, config.kv_dim(), transform, &options, candidates)?;
                Ok((self.key(side, l), fitted.to_bytes()))
            })
            .collect::<Result<_>>()?;
        planes.into_iter().for_each(|(key, bytes)| profile.put_bytes(key, bytes));
        Ok(())
    }

    fn steps<'a>(&self, side: Side, l: usize, config: &Config, given: &'a [f32]) -> Steps<'a> {
        match self.mode {
            Mode::Transform { .. } | Mode::Common { .. } => Steps::Given(given),
            Mode::Channels { k, v } => Steps::Deviations(Pair::new(k, v)[side]),
            Mode::Paper { k, v } => {
                let third = 1 + 3 * l / config.n_layers;
                Steps::Deviations(Pair::new(k, v)[side] * third as f32)
            }
            // Twice the bins in the first ten layers' keys and the first two layers' values.
            Mode::LmCache { bins } => {
                let fine = l < Pair::new(10, 2)[side];
                Steps::TokenAbsmax(bins * (1 + u8::from(fine)) / 2 - 1)
            }
        }
    }

    /// The planes of layer `l`: of keys and of values.
    pub fn planes(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Pair<PlaneBuf>> {
        Pair::try_of(|side| {
            let key = self.key(side, l);
            let plane =
                PlaneBuf::from_bytes(profile.bytes(&key)?).map_err(|e| Error::Profile(e.to_string()))?;
            if plane.channels() != geometry.kv_dim() {
                let what = format!("`{key}` has {} channels, not {}", plane.channels(), geometry.kv_dim());
                return Err(Error::Profile(what));
            }
            Ok(plane)
        })
    }
}

/// The root of the mean variance of the channels.
fn deviation(rows: &[f32], channels: usize) -> f32 {
    let mean = mean_row(rows, channels);
    let squares: f64 = rows
        .chunks_exact(channels)
        .flat_map(|row| row.iter().zip(&mean))
        .map(|(x, m)| f64::from(x - m).powi(2))
        .sum();
    (squares / rows.len() as f64).sqrt() as f32
}

/// The transform of a plane and its steps.
struct PlaneTransform {
    transform: Arc<TransformBuf>,
    steps: Vec<f32>,
}

impl PlaneTransform {
    /// Those of all planes: keys, then values, of each layer.
    ///
    /// Keys share one step, in units of the noise of attention logits. Values have a step for each head, halfway between one
    /// step for all and one rate for all: the metric of `W_O` knows nothing of the layers behind it.
    fn all(model: &Model, samples: &Calibration, bits: f32, offset: f32) -> Result<Vec<Self>> {
        let config = &model.config;
        let geometry = Geometry::of(config);
        let heads =
            samples.layers.par_iter().enumerate().map(|(l, layer)| head_rotations(model, geometry, l, layer));
        let heads: Vec<Pair<Vec<Rotation>>> = heads.collect::<Result<_>>()?;
        let sigmas = |side: Side| heads.iter().flat_map(move |layer| layer[side].iter().map(Rotation::sigma));
        let key_step = step_for_rate(
            sigmas(Side::Keys).map(|sigma| (sigma, 1.0)),
            (bits - offset / 2.0).max(bits / 8.0),
        );
        let spread = |sigma: &[f64]| sigma.iter().map(|x| x.max(1e-9).ln()).sum::<f64>() / sigma.len() as f64;
        let mean_spread = sigmas(Side::Values).map(spread).sum::<f64>() / sigmas(Side::Values).count() as f64;
        let halfway = |sigma: &[f64]| ((spread(sigma) + mean_spread) / 2.0).exp();
        let value_bits = (bits + offset / 2.0).max(bits / 8.0);
        let value_step = step_for_rate(sigmas(Side::Values).map(|sigma| (sigma, halfway(sigma))), value_bits);
        heads
            .iter()
            .flat_map(|layer| {
                let key_steps: Vec<f64> = layer.keys.iter().map(|_| key_step).collect();
                let value_steps =
                    layer.values.iter().map(|head| value_step * halfway(head.sigma())).collect();
                layer
                    .iter()
                    .zip([key_steps, value_steps])
                    .map(|(heads, steps)| Self::of_plane(geometry, heads, &steps))
            })
            .collect()
    }

    fn of_plane(geometry: Geometry, heads: &[Rotation], steps: &[f64]) -> Result<Self> {
        let dim = geometry.head_dim;
        let into = heads.iter().flat_map(|head| single(head.store())).collect();
        let transposed = |map: &[f64]| -> Vec<f32> {
            (0..dim * dim).map(|i| map[i % dim * dim + i / dim] as f32).collect()
        };
        let back = heads.iter().flat_map(|head| transposed(head.probe())).collect();
        let steps = steps.iter().flat_map(|&step| std::iter::repeat_n(step as f32, dim)).collect();
        Ok(Self { transform: Arc::new(TransformBuf::new(dim, into, back)?), steps })
    }
}

/// Query-metric rotations of a layer's heads: of keys before RoPE, and of values under what `W_O` makes of them, relative to
/// the residual stream that it adds to.
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
        let store = rotation.store().iter().map(|x| x * scale).collect();
        let probe = rotation.probe().iter().map(|x| x / scale).collect();
        let sigma = rotation.sigma().iter().map(|x| x * scale).collect();
        Ok(Rotation::from_parts(store, probe, sigma)?)
    });
    Ok(Pair::new(keys.collect::<Result<_>>()?, values.collect::<Result<_>>()?))
}

/// The query-metric rotation of one head's rows.
fn rotation<S: svd_core::Side>(
    geometry: Geometry,
    rows: &[f32],
    head: usize,
    metric: &Gram<S>,
) -> Result<Rotation> {
    let mut moment = Gram::new(geometry.head_dim)?;
    moment.add_columns(rows, geometry.kv_dim(), head * geometry.head_dim)?;
    Ok(Rotation::query_metric(&moment.centred(), metric)?)
}

/// The step that, times each head's own factor, gives Gaussian coefficients of these deviations `bits` on average.
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

/// Bits of a Gaussian of `sigma` steps, rounded to the nearest.
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
        // Both forms where they meet, and the entropy of a coin that hardly ever falls on its edge.
        assert!((gaussian_rate(4.000_001) - gaussian_rate(4.0)).abs() < 1e-3);
        assert!(gaussian_rate(0.1) < 1e-4);
    }
}
