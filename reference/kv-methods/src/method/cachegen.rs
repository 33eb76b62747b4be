//! CacheGen: a bitstream of keys (before RoPE) and values, through the codec's planes, one for each side of
//! each layer.

mod store;
mod transform;

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use codec_core::{Coder, FitOptions, LayerRows, ModelInfo, ModelKind, Place, PlaneBuf, PredictorKind, Steps};
use kv_attend::owner::{Pair, Side};
#[cfg(feature = "cuda")]
use kv_device::plan::{Bitstream, Plan};
use kv_model::{Config, Model, Rope};

use super::kind::{BuildContext, Kind, LOSSLESS, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::settings::{Bits, Settings, words};
use crate::cache::Store;
use crate::calibrate::{Calibration, LayerSamples, mean_row};
use crate::{Error, Profile, Result};
use store::CacheGenStore;
use transform::{Rotations, Shares};

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

#[derive(Debug)]
struct CacheGen {
    mode: Mode,
    predictor: Prediction,
    models: ModelKind,
    coder: Coder,
}

/// The quantized elements and their step sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// Coefficients of the query-metric KLT (for values, in the metric of `W_O`), with steps such that both
    /// sides take `bits` per element on average.
    Transform { bits: f32, shares: Shares, over: Over },
    /// The bits of 16-bit elements.
    Lossless { rows: HalfType },
    /// Channels, with bins in standard deviations.
    Channels { k: f32, v: f32 },
    /// Channels, with one step per layer: this fraction of the root of their mean variance.
    Common { k: f32, v: f32 },
    /// As in the paper: anchors, bins that grow by layer third, a range coder.
    Paper { k: f32, v: f32 },
    /// As in LMCache: bins relative to each token's largest magnitude, more of them in the first layers.
    LmCache { bins: u8 },
}

/// The heads that one transform mixes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Over {
    Head,
    /// The heads of this many layers, which divides the model's.
    Layers(usize),
    /// The heads of all layers.
    Model,
}

impl FromStr for Over {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let layers = || text.parse().ok().filter(|&n| n > 0).map(Self::Layers);
        match text {
            "head" => Ok(Self::Head),
            "layer" => Ok(Self::Layers(1)),
            "model" => Ok(Self::Model),
            _ => layers().ok_or_else(|| "must be head, layer, model or a number of layers".into()),
        }
    }
}

impl Display for Over {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Head => f.write_str("head"),
            Self::Layers(1) => f.write_str("layer"),
            Self::Layers(n) => n.fmt(f),
            Self::Model => f.write_str("model"),
        }
    }
}

/// Element types of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HalfType {
    Bf16,
    F16,
}
words!(HalfType, "bf16" => HalfType::Bf16, "f16" => HalfType::F16);

impl From<HalfType> for codec_core::ElementType {
    fn from(rows: HalfType) -> Self {
        match rows {
            HalfType::Bf16 => Self::Bf16,
            HalfType::F16 => Self::F16,
        }
    }
}

/// How keys and values are predicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prediction {
    /// Whichever measures best on the sample.
    Best,
    None,
    Mean,
    Previous,
    Anchor,
}

words!(Prediction, "best" => Prediction::Best, "none" => Prediction::None, "mean" => Prediction::Mean,
    "previous" => Prediction::Previous, "anchor" => Prediction::Anchor);

/// The modes by name.
#[derive(Clone, Copy, PartialEq)]
enum ModeName {
    Transform,
    Lossless,
    Channels,
    Common,
    Paper,
    LmCache,
}
words!(ModeName, "transform" => ModeName::Transform, "lossless" => ModeName::Lossless,
    "channels" => ModeName::Channels, "common" => ModeName::Common, "paper" => ModeName::Paper,
    "lmcache" => ModeName::LmCache);

/// [`ModelKind`] on the command line.
#[derive(Clone, Copy, PartialEq)]
struct Models(ModelKind);

impl From<ModelKind> for Models {
    fn from(kind: ModelKind) -> Self {
        Self(kind)
    }
}
words!(Models, "families" => ModelKind::Families, "tables" => ModelKind::Tables,
    "context" => ModelKind::ContextTables);

/// [`Coder`] on the command line.
#[derive(Clone, Copy, PartialEq)]
struct CoderName(Coder);

impl From<Coder> for CoderName {
    fn from(coder: Coder) -> Self {
        Self(coder)
    }
}
words!(CoderName, "lanes" => Coder::InterleavedRans, "range" => Coder::Range);

fn parse(s: &mut Settings<'_>) -> Result<CacheGen> {
    let (mode, predictor, models) = match s.own("mode", ModeName::Transform)? {
        ModeName::Transform => {
            let bits = s.bin("bits", 3.0)?;
            let shares = match s.is_first(["sensitivity", "offset"])? {
                true => Shares::Sensitivity(s.common_part("sensitivity", 1.0)?),
                false => Shares::Offset(s.common("offset", Bits(1.2))?.0),
            };
            let over = s.common("over", Over::Head)?;
            (Mode::Transform { bits, shares, over }, Prediction::Best, ModelKind::Tables)
        }
        ModeName::Lossless => {
            let rows = s.own("rows", HalfType::Bf16)?;
            let (predictor, models, coder) = (Prediction::None, ModelKind::Tables, Coder::InterleavedRans);
            return Ok(CacheGen { mode: Mode::Lossless { rows }, predictor, models, coder });
        }
        ModeName::Channels => {
            let (k, v) = (s.bin("k", 0.5)?, s.bin("v", 0.5)?);
            (Mode::Channels { k, v }, Prediction::Mean, ModelKind::Families)
        }
        ModeName::Common => {
            let (k, v) = (s.bin("k", 0.5)?, s.bin("v", 0.5)?);
            (Mode::Common { k, v }, Prediction::Best, ModelKind::Tables)
        }
        ModeName::Paper => {
            let (k, v) = (s.bin("k", 0.5)?, s.bin("v", 0.5)?);
            (Mode::Paper { k, v }, Prediction::Anchor, ModelKind::Tables)
        }
        ModeName::LmCache => {
            (Mode::LmCache { bins: s.bins("bins", 16)? }, Prediction::None, ModelKind::Tables)
        }
    };
    let predictor = s.common("predictor", predictor)?;
    let models = s.common("models", Models(models))?.0;
    let coder = if let Mode::Paper { .. } = mode { Coder::Range } else { Coder::InterleavedRans };
    let coder = s.common("coder", CoderName(coder))?.0;
    Ok(CacheGen { mode, predictor, models, coder })
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
    fn calibrate(
        &self,
        model: &Model,
        rope: &Rope,
        samples: &Calibration,
        profile: &mut Profile,
    ) -> Result<()> {
        let config = &model.config;
        let info = self.model_info(config);
        let transforms = match self.mode {
            Mode::Transform { bits, shares, over } => {
                let heads = if over == Over::Head { 1 } else { info.heads };
                let name = format!("cachegen/{over:?}/{shares:?}/rotations");
                let make = || Rotations::of(model, rope, samples, heads, shares);
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
                self.predictor == Prediction::Anchor,
                "predictor=anchor",
                "a device encodes without anchors",
                "another predictor",
            ),
            Limit::new(
                self.coder == Coder::Range,
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
    use super::*;

    #[cfg(feature = "cuda")]
    #[test]
    fn what_a_device_does_not_encode_is_refused_by_name() {
        use crate::method::Method;

        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/gqa");
        let config = Model::load(&path).unwrap().config;
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
