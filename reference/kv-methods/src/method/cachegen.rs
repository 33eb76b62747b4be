//! CacheGen: a bitstream of keys (before RoPE) and values, through the codec's planes, one for each side of
//! each layer.

mod settings;
mod store;
mod transform;

use std::sync::Arc;

use codec_core::{FitOptions, LayerRows, ModelInfo, Place, PlaneBuf, PredictorKind, Steps};
use kv_attend::owner::{Pair, Side};
#[cfg(feature = "cuda")]
use kv_device::plan::{Bitstream, Plan};
use kv_model::Config;

use super::kind::{BuildContext, Kind, LOSSLESS, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use crate::cache::Store;
use crate::calibrate::{Calibration, LayerSamples, mean_row};
use crate::{Error, Profile, Result};
use settings::{CacheGen, Mode, Over, parse};
use store::CacheGenStore;
use transform::Rotations;

pub(super) const CACHE_GEN: Registration = Registration {
    names: &["cachegen"],
    help: "\
  cachegen          bitstream and back: mode=transform (query-metric KLT) bits=3 offset=1.2 (values above keys)
                      over=head|layer|model|N layers (one KLT for them)   over=head
                      sensitivity=0.5 (bits by the KL that errors of each layer and side cost, to this power)
                      mode=lossless, every bit of rows of 16 bits         rows=bf16|f16
                      mode=channels, bins in standard deviations          k=0.5 v=0.5
                      mode=common, bins in mean deviations                k=0.5 v=0.5
                      mode=paper, anchors, bins grow by layer third       k=0.5 v=0.5
                      mode=lmcache, bins of each token's largest          bins=16 (first layers twice as many)
                                                                          predictor=best|none|mean|previous|anchor
                                                                          models=families|tables|context
                                                                          coder=lanes|range
",
    examples: &[
        "cachegen:bits=8:exact=f32:window=4:batch=10",
        "cachegen:over=model:bits=8:exact=f32:window=4:batch=10",
        "cachegen:over=model:sensitivity=1:bits=8:exact=f32:window=4:batch=10",
        "cachegen:mode=lossless:rows=f16:exact=f32:window=4:batch=10",
        "cachegen:mode=channels:k=0.01:v=0.01:predictor=previous:models=context:coder=range:exact=f32:window=4:batch=10",
        "cachegen:mode=common:k=0.01:v=0.01:exact=f32:window=4:batch=10",
        "cachegen:mode=paper:k=0.01:v=0.01:exact=f32:window=4:batch=10",
        "cachegen:mode=lmcache:bins=64:exact=f32:window=4:batch=10",
    ],
    parse: |s| Ok(Arc::new(parse(s)?)),
};

/// The codec's sides.
#[cfg(feature = "cuda")]
const CODEC_SIDES: Pair<codec_core::Side> = Pair::new(codec_core::Side::Keys, codec_core::Side::Values);

impl CacheGen {
    fn key(&self) -> String {
        let Self { mode, predictor, models, coder } = self;
        format!("cachegen/{mode:?}/{predictor:?}/{models:?}/{coder:?}/planes")
    }

    fn steps<'a>(&self, side: Side, l: usize, config: &Config, given: &'a [f32]) -> Steps<'a> {
        match self.mode {
            Mode::Transform { .. } | Mode::Common { .. } | Mode::Lossless { .. } => Steps::Given(given),
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

    /// The planes of all layers.
    fn planes_of(&self, profile: &Profile, config: &Config) -> Result<codec_core::Profile> {
        let key = self.key();
        let planes = codec_core::Profile::from_bytes(profile.bytes(&key)?)
            .map_err(|e| Error::Profile(format!("`{key}`: {e}")))?;
        if *planes.info() != self.model_info(config) {
            return Err(Error::Profile(format!("`{key}` is of a model of another shape")));
        }
        Ok(planes)
    }

    /// Layers that are coded together.
    const fn group(&self, config: &Config) -> usize {
        match self.mode {
            Mode::Transform { over: Over::Layers(n), .. } => n,
            Mode::Transform { over: Over::Model, .. } => config.n_layers,
            _ => 1,
        }
    }

    /// Whether a store or a device has its frames: those of single layers.
    const fn codes_layers(&self) -> bool {
        matches!(self.mode, Mode::Transform { over: Over::Head | Over::Layers(1), .. })
            || !matches!(self.mode, Mode::Transform { .. })
    }

    /// The model that the planes belong to, identified by its hash in the file. Layers that are coded
    /// together are one layer, which has the heads of all of them.
    const fn model_info(&self, config: &Config) -> ModelInfo {
        let &Config { n_layers, n_kv_heads, head_dim, .. } = config;
        let group = self.group(config);
        let (layers, heads) = (n_layers / group, group * n_kv_heads);
        ModelInfo { model_id: 0, layers, heads, head_dim, keys_rotated: false }
    }
}

impl Kind for CacheGen {
    fn batch(&self) -> usize {
        64
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn check(&self, config: &Config) -> Result<()> {
        let group = self.group(config);
        if !config.n_layers.is_multiple_of(group) {
            let layers = config.n_layers;
            return Err(Error::Argument(format!(
                "over={group} does not divide the {layers} layers of the model"
            )));
        }
        let dim = group * config.kv_dim();
        let most = codec_core::MAX_HEAD_DIM;
        if matches!(self.mode, Mode::Transform { over: Over::Layers(_) | Over::Model, .. }) && dim > most {
            return Err(Error::Argument(format!(
                "over={group}: a transform of {dim} channels, not at most {most}"
            )));
        }
        Ok(())
    }

    /// Fits a plane to the keys and one to the values of every layer, or group of layers.
    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        let config = &samples.model.config;
        let info = self.model_info(config);
        let transforms = match self.mode {
            Mode::Transform { bits, shares, over } => {
                let heads = if over == Over::Head { 1 } else { info.heads };
                let name = format!("cachegen/{over:?}/{shares:?}/rotations");
                let make = || Rotations::of(samples, heads, shares);
                samples.shared.get(&name, make)?.planes(bits)?
            }
            _ => vec![],
        };
        let groups: Vec<_> =
            samples.layers.chunks(self.group(config)).map(|layers| grouped(layers, config)).collect();
        let rows: Vec<_> =
            groups.iter().map(|[keys, values]| LayerRows { keys: &keys[..], values }).collect();
        let tokens = rows.first().map_or(0, |rows| rows.keys.len() / info.channels());
        let place = Place::nhd(info.heads, info.head_dim);
        if let Mode::Lossless { rows: element } = self.mode {
            let planes = codec_core::Profile::fit_lossless(info, element.into(), tokens, &rows, &place)?;
            profile.put_bytes(self.key(), planes.to_bytes());
            return Ok(());
        }
        let fit = |_, l: usize, side: codec_core::Side, rows: &[f32]| {
            let side = match side {
                codec_core::Side::Keys => Side::Keys,
                codec_core::Side::Values => Side::Values,
            };
            let transform = transforms.get(2 * l + usize::from(side == Side::Values));
            let given = match (transform, self.mode) {
                (Some(transform), _) => transform.steps.clone(),
                (None, Mode::Common { k, v }) => {
                    vec![Pair::new(k, v)[side] * deviation(rows, info.channels()); info.channels()]
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
            PlaneBuf::fit_best(rows, info.channels(), transform, &options, self.predictor.candidates())
        };
        let planes = codec_core::Profile::fit(info, 1, tokens, &rows, &place, fit)?;
        profile.put_bytes(self.key(), planes.to_bytes());
        Ok(())
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        let (planes, group) = (self.planes_of(context.profile, context.config)?, self.group(context.config));
        if group > 1 && !context.exact_layers.is_empty() {
            return Err(Error::argument("exact-layers: layers that are coded together must all be coded"));
        }
        context.layers(|l| {
            let is_last = l % group == group - 1;
            let planes = is_last.then(|| planes.layer(l / group)).transpose()?;
            Ok(CacheGenStore::new(context.geometry, group, planes, context.dense(l)))
        })
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }

    fn coarseness(&self) -> Option<(&'static str, Pair<f32>)> {
        self.codes_layers().then_some(match self.mode {
            Mode::Transform { bits, .. } => ("bits", Pair::of(|_| -bits)),
            Mode::Lossless { .. } => (LOSSLESS, Pair::of(|_| 0.0)),
            Mode::Channels { k, v } => ("deviations", Pair::new(k, v)),
            Mode::Common { k, v } => ("mean deviations", Pair::new(k, v)),
            Mode::Paper { k, v } => ("deviations by layer third", Pair::new(k, v)),
            Mode::LmCache { bins } => ("bins", Pair::of(|_| -f32::from(bins))),
        })
    }

    fn planes(&self, config: &Config, profile: &Profile) -> Option<Result<codec_core::Profile>> {
        self.codes_layers().then(|| self.planes_of(profile, config))
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for CacheGen {
    fn limits(&self, window: pq_core::Window) -> Vec<Limit> {
        vec![
            Limit::new(
                matches!(self.mode, Mode::Lossless { .. }),
                "mode=lossless",
                "a device does not encode without loss",
                "mode=transform, channels or common",
            ),
            Limit::new(
                matches!(self.mode, Mode::Transform { over: Over::Layers(_) | Over::Model, .. }),
                "over=layer",
                "a device has a transform of each head",
                "over=head",
            ),
            Limit::new(
                matches!(self.mode, Mode::LmCache { .. }),
                "mode=lmcache",
                "a device encodes with the same steps for all tokens",
                "mode=transform, channels or common",
            ),
            Limit::new(
                self.predictor == settings::Prediction::Anchor,
                "predictor=anchor",
                "a device encodes without anchors",
                "another predictor",
            ),
            Limit::new(
                self.coder == codec_core::Coder::Range,
                "coder=range",
                "a device encodes in interleaved lanes",
                "coder=lanes",
            ),
            Limit::of_last_token(window),
        ]
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let has_transform = matches!(self.mode, Mode::Transform { .. });
        let layers = |profile| -> Result<Vec<_>> {
            let planes = self.planes_of(profile, config)?;
            let layer = |l| Pair::try_of(|side| Ok(planes.plane(0, l, CODEC_SIDES[side])?.clone()));
            (0..config.n_layers).map(layer).collect()
        };
        let planes = profile.map(layers).transpose()?;
        Ok(Plan::Bitstream(Bitstream { has_transform, models: self.models }, planes))
    }
}

/// The rows of layers that are coded together: keys, then values, (n, layers * n_kv_heads * head_dim) each.
fn grouped(layers: &[LayerSamples], config: &Config) -> [Vec<f32>; 2] {
    let (kv_dim, tokens) = (config.kv_dim(), layers[0].keys.len() / config.kv_dim());
    let join = |rows: fn(&LayerSamples) -> &[f32]| {
        let token = |t: usize| layers.iter().flat_map(move |layer| &rows(layer)[t * kv_dim..][..kv_dim]);
        (0..tokens).flat_map(token).copied().collect()
    };
    [join(|layer| &layer.keys), join(|layer| &layer.values)]
}

/// The root of the mean variance of the channels. It is positive even for constant rows, such as a pruned
/// head's, since the step derives from it.
fn deviation(rows: &[f32], channels: usize) -> f32 {
    let mean = mean_row(rows, channels);
    let squares: f64 = rows
        .chunks_exact(channels)
        .flat_map(|row| row.iter().zip(&mean))
        .map(|(x, m)| f64::from(x - m).powi(2))
        .sum();
    (squares / rows.len() as f64).sqrt().max(1e-12) as f32
}

#[cfg(test)]
mod tests {
    use codec_core::{Coder, ModelKind};

    use super::settings::Prediction;
    use super::*;

    #[cfg(feature = "cuda")]
    #[test]
    fn what_a_device_does_not_encode_is_refused_by_name() {
        use crate::method::Method;

        let config = crate::fixture::model().config;
        let on_device = |spec: &str| {
            let method = spec.parse::<Method>().unwrap().on_device(&config)?;
            method.device_plan(&config, None).map(|plan| matches!(plan, Plan::Bitstream(..)))
        };
        for (spec, named) in [
            ("cachegen:mode=paper", "predictor: "),
            ("cachegen:predictor=anchor", "predictor: "),
            ("cachegen:mode=paper:predictor=mean", "coder: "),
            ("cachegen:mode=channels:coder=range", "coder: "),
            ("cachegen:mode=lmcache", "mode: "),
            ("cachegen:mode=lossless", "mode: "),
            ("cachegen:over=layer", "over: "),
            ("cachegen:exact-layers=0", "exact-layers: "),
        ] {
            let error = on_device(spec).unwrap_err().to_string();
            assert!(error.contains(named) && error.contains("--device cpu"), "{spec}: {error}");
        }
        for spec in [
            "cachegen",
            "cachegen:mode=channels:models=context",
            "cachegen:mode=paper:predictor=mean:coder=lanes",
        ] {
            assert!(on_device(spec).unwrap(), "{spec}");
        }
    }

    #[test]
    fn rows_that_do_not_vary_have_a_step() {
        for row in [[0.0; 4], [-3.0; 4], [1e-40; 4]] {
            let rows = row.repeat(20);
            let steps = [0.25 * deviation(&rows, 4); 4];
            let options = FitOptions {
                predictor: PredictorKind::Mean,
                steps: Steps::Given(&steps),
                models: ModelKind::Tables,
                coder: Coder::InterleavedRans,
            };
            PlaneBuf::fit_best(&rows, 4, None, &options, Prediction::Best.candidates()).unwrap();
        }
    }
}
