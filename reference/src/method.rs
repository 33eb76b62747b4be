//! The methods by name: `name[:key=value]...`, for example `million:k=64x8:v=32x8:window=128`.

mod build;
mod cachegen;
mod fold;
mod million;
mod pqklt;
mod settings;
mod zack;

use std::str::FromStr;

use pq_core::Window;

pub use build::Prepared;
use cachegen::{CacheGen, Mode, Prediction};
use codec_core::{Coder, ModelKind};
use million::Million;
use pqklt::PqKlt;
use settings::{Bits, CoderName, Element, Layers, ModeName, Models, OptionalBits, Settings, Switch};
use zack::RankRule;

use crate::cache::{ElementType, KeySpace};
use crate::side::Pair;
use crate::{Error, Result};

/// A method with its setting.
#[derive(Clone, Debug, PartialEq)]
pub struct Method {
    /// Its name, as on the command line.
    pub name: &'static str,
    /// Its setting in the form that parses again; what was left at the common defaults is left out.
    pub setting: String,
    kind: Kind,
    window: Window,
    exact: ElementType,
    exact_layers: Vec<usize>,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Dense,
    Uniform { k: u32, v: u32, group: usize },
    Rotated { k: u32, v: u32, group: usize },
    LloydMax { k: u32, v: u32 },
    Streaming,
    Oracle { ratio: f64 },
    PqCache { ratio: f64, code: PqCode, iterations: usize },
    Million(Million),
    PqKlt(PqKlt),
    SnapKv { tokens: f64 },
    Zack(Zack),
    CacheGen(CacheGen),
}

/// A product quantizer: `m` subspaces of `nbits` bits, written `MxB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PqCode {
    m: usize,
    nbits: u32,
}

/// ZACK, and what it is combined with.
#[derive(Clone, Debug, PartialEq)]
struct Zack {
    parts: Pair<f64>, // of the dimensions that stay
    basis: Basis,
    rule: RankRule,
    multiple: usize,
    bits: Option<u32>, // of what is left, coded as by `int4`
    tokens: f64,       // part of the prompt's tokens that stays
}

/// Which rotation ZACK uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Basis {
    Closed,
    Stacked,
    Principal,
}

/// Every method with what can be set and its default, for the help text.
pub const METHODS_HELP: &str = "\
A method is NAME[:KEY=VALUE]...; several are separated by commas.

  dense             every number exact                                    dtype=f32|f16|bf16
  int8, int4, int2  uniform: keys per channel, values per token (as KIVI) k=BITS v=BITS group=64
  rotated           Hadamard, then uniform per token                      k=4 v=4 group=32
  lloydmax          random rotation, optimal levels (as TurboQuant)       k=4 v=4
  streaming         sinks and window only (StreamingLLM)
  oracle            exact top-k, this part of the tokens                  ratio=0.2
  pqcache           top-k by PQ codes, exact rows offloaded               ratio=0.2 code=16x8 iterations=10
  million           attention on PQ codes                                 k=64x8 v=64x8 iterations=8
                                                                          outliers=PERCENT kept exact
  pqklt             attention on PQ codes of transformed rows             k=32x6 v=32x6 keys=mean|rope norms=on|off
                                                                          iterations=8 refine=0
  snapkv            the prompt's tokens that its end attends to           tokens=0.5
  zack              rotated, ranks cut to these parts, values folded      k=0.75 v=0.75 basis=closed|stacked|principal
                      with evicted tokens, with codes as int4's           tokens=PART bits=BITS
                                                                          ranks=removal|loss|uniform multiple=1
  cachegen          bitstream and back: mode=transform (query-metric KLT) bits=3 offset=1.2 (values above keys)
                      mode=channels, bins in standard deviations          k=0.5 v=0.5
                      mode=common, bins in mean deviations                k=0.5 v=0.5
                      mode=paper, anchors, bins grow by layer third       k=0.5 v=0.5
                      mode=lmcache, bins of each token's largest          bins=16 (first layers twice as many)
                                                                          predictor=best|none|mean|previous|anchor
                                                                          models=families|tables|context
                                                                          coder=lanes|range

For all but dense: sinks=4 window=64 (tokens kept exact), batch=N (tokens that leave the window at once: 64 for int,
cachegen and zack's codes, else 1), exact=f16|bf16|f32 (how), exact-layers=0+5 (layers left uncompressed).";

/// What `kv compare` runs when no methods are named: each method near-lossless and aggressive.
pub const DEFAULT_METHODS: &str = "dense,dense:dtype=f16,int8,int4,int2,rotated,rotated:k=2:v=2,lloydmax,lloydmax:k=2:v=2,\
streaming:window=1280,streaming:window=128,oracle:ratio=0.2,oracle:ratio=0.1,pqcache:ratio=0.2,\
pqcache:ratio=0.1:code=2x6,million,million:k=32x8:v=32x8,pqklt:k=64x6:v=64x6,pqklt:k=64x4:v=64x4,zack,zack:k=0.5:v=0.5,zack:k=0.75:v=0.75:bits=4,cachegen,cachegen:bits=2,\
cachegen:mode=paper";

impl Method {
    /// Parses methods separated by commas.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the method and what is wrong with it.
    pub fn parse_list(list: &str) -> Result<Vec<Self>> {
        list.split(',').map(|spec| spec.trim().parse()).collect()
    }

    /// Its name and setting in the form that parses again.
    #[must_use]
    pub fn spec(&self) -> String {
        if self.setting.is_empty() { self.name.to_owned() } else { format!("{}:{}", self.name, self.setting) }
    }
}

impl FromStr for Method {
    type Err = Error;

    fn from_str(spec: &str) -> Result<Self> {
        let mut s = Settings::new(spec)?;
        let uniform = |s: &mut Settings<'_>, bits: u32| -> Result<Kind> {
            let (k, v) = (s.bits("k", bits)?, s.bits("v", bits)?);
            Ok(Kind::Uniform { k, v, group: s.positive("group", 64)? })
        };
        let (name, kind) = match s.name {
            "dense" => {
                let exact = s.own("dtype", Element(ElementType::F32))?.0;
                s.finish()?;
                // Rows go straight to the store: the window's way of holding them would be another.
                let window = Window { sinks: 0, recent: 0, batch: 1 };
                let setting = s.shown();
                return Ok(Self {
                    name: "dense",
                    setting,
                    kind: Kind::Dense,
                    window,
                    exact,
                    exact_layers: vec![],
                });
            }
            "int8" => ("int8", uniform(&mut s, 8)?),
            "int4" => ("int4", uniform(&mut s, 4)?),
            "int2" => ("int2", uniform(&mut s, 2)?),
            "rotated" => {
                let (k, v) = (s.bits("k", 4)?, s.bits("v", 4)?);
                ("rotated", Kind::Rotated { k, v, group: s.positive("group", 32)? })
            }
            "lloydmax" => ("lloydmax", Kind::LloydMax { k: s.bits("k", 4)?, v: s.bits("v", 4)? }),
            "streaming" => ("streaming", Kind::Streaming),
            "oracle" => ("oracle", Kind::Oracle { ratio: s.part("ratio", 0.2)? }),
            "pqcache" => {
                let (ratio, code) = (s.part("ratio", 0.2)?, s.own("code", PqCode { m: 16, nbits: 8 })?);
                ("pqcache", Kind::PqCache { ratio, code, iterations: s.positive("iterations", 10)? })
            }
            "million" => {
                let code = PqCode { m: 64, nbits: 8 };
                let codes = Pair::new(s.own("k", code)?, s.own("v", code)?);
                let (iterations, outliers) = (s.positive("iterations", 8)?, s.percent("outliers", 0)?);
                ("million", Kind::Million(Million { codes, iterations, outliers }))
            }
            "pqklt" => {
                let code = PqCode { m: 32, nbits: 6 };
                let codes = Pair::new(s.own("k", code)?, s.own("v", code)?);
                let space = s.own("keys", KeySpace::RotatedMean)?;
                let norms = s.common("norms", Switch::On)? == Switch::On;
                let (iterations, refine) = (s.positive("iterations", 8)?, s.count("refine", 0)?);
                ("pqklt", Kind::PqKlt(PqKlt { codes, space, norms, iterations, refine }))
            }
            "snapkv" => ("snapkv", Kind::SnapKv { tokens: s.part("tokens", 0.5)? }),
            "zack" => {
                let parts = Pair::new(s.part("k", 0.75)?, s.part("v", 0.75)?);
                let basis = s.own("basis", Basis::Closed)?;
                let rule = s.common("ranks", RankRule::Removal)?;
                let multiple = s.common_count("multiple", 1)?;
                let bits = s.common("bits", OptionalBits(None))?.0;
                let tokens = s.common_part("tokens", 1.0)?;
                ("zack", Kind::Zack(Zack { parts, basis, rule, multiple, bits, tokens }))
            }
            "cachegen" => {
                let (mode, predictor, models) = match s.own("mode", ModeName::Transform)? {
                    ModeName::Transform => {
                        let (bits, offset) = (s.bin("bits", 3.0)?, s.common("offset", Bits(1.2))?.0);
                        (Mode::Transform { bits, offset }, Prediction::Best, ModelKind::Tables)
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
                let coder = if let Mode::Paper { .. } = mode { Coder::Range } else { Coder::Lanes };
                let coder = s.common("coder", CoderName(coder))?.0;
                ("cachegen", Kind::CacheGen(CacheGen { mode, predictor, models, coder }))
            }
            other => {
                return Err(Error::Argument(format!(
                    "there is no method `{other}`; `kv compare --help` lists them"
                )));
            }
        };
        let batch = match kind {
            Kind::Uniform { group, .. } => group,
            Kind::CacheGen(_) | Kind::Zack(Zack { bits: Some(_), .. }) => 64,
            _ => 1,
        };
        let window = Window {
            sinks: s.tokens("sinks", 4)?,
            recent: s.tokens("window", 64)?,
            batch: s.tokens("batch", batch)?,
        };
        let exact = s.common("exact", Element(ElementType::F16))?.0;
        let exact_layers = s.common("exact-layers", Layers(vec![]))?.0;
        s.finish()?;
        Ok(Self { name, setting: s.shown(), kind, window, exact, exact_layers })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_parse_again() {
        for method in Method::parse_list(DEFAULT_METHODS).unwrap() {
            assert_eq!(method.spec().parse::<Method>().unwrap(), method);
        }
        let method: Method = "million:v=32x8:window=128:exact-layers=0+5".parse().unwrap();
        assert_eq!(method.setting, "k=64x8:v=32x8:iterations=8:window=128:exact-layers=0+5");
        assert_eq!(method.exact_layers, [0, 5]);
    }

    #[test]
    fn wrong_settings_are_errors() {
        for spec in [
            "",
            "dens",
            "dense:f16",
            "dense:dtype=f64",
            "int4:k=9",
            "int4:k=0",
            "int4:bits=4",
            "zack:k=0",
            "zack:k=1.5",
            "zack:k=nan",
            "zack:bits=9",
            "zack:ranks=best",
            "zack:multiple=0",
            "snapkv:tokens=0",
            "million:k=64",
            "million:k=64x",
            "pqcache:ratio=-1",
            "cachegen:bits=0",
            "cachegen:mode=paper:bits=2",
            "cachegen:mode=lmcache:bins=3",
            "cachegen:predictor=x",
            "streaming:window=-3",
            "oracle:sinks=4:sinks=5",
            "int2:exact-layers=a",
        ] {
            assert!(spec.parse::<Method>().is_err(), "{spec}");
        }
    }
}
