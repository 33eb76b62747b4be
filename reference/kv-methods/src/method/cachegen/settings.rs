//! What `cachegen` is told, by name.

use std::fmt::Display;
use std::str::FromStr;

use codec_core::{Coder, ModelKind, PredictorKind};

use super::transform::Shares;
use crate::Result;
use crate::method::settings::{Bits, Settings, words};

#[derive(Debug)]
pub(super) struct CacheGen {
    pub mode: Mode,
    pub predictor: Prediction,
    pub models: ModelKind,
    pub coder: Coder,
}

/// The quantized elements and their step sizes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Mode {
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
pub(super) enum Over {
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
pub(super) enum HalfType {
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
pub(super) enum Prediction {
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

pub(super) fn parse(s: &mut Settings<'_>) -> Result<CacheGen> {
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
    pub fn candidates(self) -> &'static [PredictorKind] {
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
