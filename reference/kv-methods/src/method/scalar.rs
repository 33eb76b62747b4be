//! Scalar-quantization baselines: uniform codes as in KIVI (`int8`, `int4`, `int2`) or after a Hadamard
//! rotation (`rotated`), those of llama.cpp's caches (`q8_0`, `q4_0`), and optimal levels after a random
//! rotation (`lloydmax`).

mod codecs;
mod floats;
mod ggml;
mod store;

use std::sync::Arc;

use kv_attend::owner::{Pair, Side};
#[cfg(feature = "cuda")]
use kv_device::Plan;

pub(super) use codecs::{PerChannel, PerToken, pack, packed_len, unpack};
pub(super) use floats::{Fp8, NvFp4};
pub(super) use store::{BlockCodec, CodedStore};

use kv_model::Config;

use super::kind::{BuildContext, Kind, Registration, SEED, SINKS_AND_WINDOW};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::settings::{Settings, Switch};
#[cfg(feature = "cuda")]
use crate::Profile;
use crate::cache::Store;
use crate::{Error, Result};
use codecs::{LloydMax, Rotated, largest_block};
use ggml::Ggml;

/// Tokens per decoded block of per-token codes.
pub(super) const BLOCK: usize = 64;

pub(super) const UNIFORM: Registration = Registration {
    names: &["int8", "int4", "int2", "kivi"],
    help: "\
  int8, int4, int2  uniform: keys per channel, values per token (as KIVI) k=BITS v=BITS group=64
  kivi              the same with KIVI's groups and residual: sinks=0     k=2 v=2 group=32
                      window=128; 32 tokens leave it at once, of KIVI's
                      keys the whole residual, of its values one
",
    examples: &[
        "int8:group=8:exact=f32:window=4",
        "int4:k=8:v=8:exact=f32:window=4:batch=10",
        "int2:exact-layers=0+1:exact=f32:window=4",
        "kivi:k=8:v=8:group=8:exact=f32:window=4",
    ],
    parse: |s| {
        let bits = match s.name {
            "int8" => 8,
            "int4" => 4,
            _ => 2,
        };
        let (exact, group) = if s.name == "kivi" { ([0, 128], 32) } else { (SINKS_AND_WINDOW, 64) };
        Ok(Arc::new(Scalar {
            bits: both(s, bits)?,
            codes: Codes::Uniform { group: s.positive("group", group)?, exact },
        }))
    },
};

pub(super) const ROTATED: Registration = Registration {
    names: &["rotated"],
    help: "\
  rotated           Hadamard, then uniform per token                      k=4 v=4 group=32
",
    examples: &["rotated:k=8:v=8:exact=f32:window=4"],
    parse: |s| {
        Ok(Arc::new(Scalar {
            bits: both(s, 4)?,
            codes: Codes::Rotated { group: s.positive("group", 32.min(s.head_dim))? },
        }))
    },
};

pub(super) const LLAMA_CPP: Registration = Registration {
    names: &["q8_0", "q4_0"],
    help: "\
  q8_0, q4_0        llama.cpp's cache types, rotated as it does           k=4|8 v=4|8 rotate=on|off
",
    examples: &["q8_0:exact=f32:window=4", "q4_0:k=8:v=8:rotate=off:exact=f32:window=4"],
    parse: |s| {
        let bits = both(s, if s.name == "q8_0" { 8 } else { 4 })?;
        let name = s.name;
        let kind = |side: Side| {
            let what = || format!("method {name}: {}={}: must be 4 or 8", side.letter(), bits[side]);
            Ggml::of_bits(bits[side]).ok_or_else(|| Error::Argument(what()))
        };
        let (kinds, rotate) = (Pair::try_of(kind)?, s.common("rotate", Switch::On)? == Switch::On);
        Ok(Arc::new(Scalar { bits, codes: Codes::LlamaCpp { kinds, rotate } }))
    },
};

pub(super) const LLOYD_MAX: Registration = Registration {
    names: &["lloydmax"],
    help: "\
  lloydmax          random rotation, optimal levels (as TurboQuant)       k=4 v=4
",
    examples: &["lloydmax:k=8:v=8:exact=f32:window=4"],
    parse: |s| Ok(Arc::new(Scalar { bits: both(s, 4)?, codes: Codes::LloydMax })),
};

fn both(s: &mut Settings<'_>, default: u32) -> Result<Pair<u32>> {
    Ok(Pair::new(s.bits("k", default)?, s.bits("v", default)?))
}

#[derive(Debug)]
struct Scalar {
    bits: Pair<u32>,
    codes: Codes,
}

#[derive(Debug)]
enum Codes {
    Uniform { group: usize, exact: [usize; 2] }, // sinks and window
    Rotated { group: usize },
    LlamaCpp { kinds: Pair<Ggml>, rotate: bool },
    LloydMax,
}

/// The Hadamard matrices of llama.cpp, where heads are multiples of 64 components: the largest that fits for
/// keys, of 64 for values.
fn llama_cpp_rotation(head_dim: usize) -> Option<Pair<usize>> {
    const VALUES: usize = 64;
    head_dim.is_multiple_of(VALUES).then(|| Pair::new(largest_block(head_dim), VALUES))
}

impl Kind for Scalar {
    /// Keys are coded per channel, in whole groups of tokens.
    fn batch(&self) -> usize {
        if let Codes::Uniform { group, .. } = self.codes { group } else { 1 }
    }

    fn sinks_and_window(&self) -> [usize; 2] {
        if let Codes::Uniform { exact, .. } = self.codes { exact } else { SINKS_AND_WINDOW }
    }

    fn check(&self, config: &Config) -> Result<()> {
        let head_dim = config.head_dim;
        if matches!(self.codes, Codes::LlamaCpp { .. }) && !head_dim.is_multiple_of(ggml::BLOCK) {
            return Err(Error::Argument(format!(
                "methods q8_0 and q4_0: blocks of {} components do not divide heads of {head_dim}",
                ggml::BLOCK
            )));
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        match self.codes {
            Codes::Uniform { .. } => Ok(self),
            Codes::Rotated { .. } | Codes::LlamaCpp { .. } | Codes::LloydMax => {
                Err(Limit::without_kernels("int4"))
            }
        }
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        let head_dim = context.geometry.head_dim;
        let (codecs, block): (Pair<Arc<dyn BlockCodec>>, usize) = match self.codes {
            Codes::Uniform { group, .. } => {
                let (keys, values) =
                    (PerChannel { bits: self.bits.keys }, PerToken { bits: self.bits.values, group });
                (Pair::new(Arc::new(keys), Arc::new(values)), group)
            }
            Codes::Rotated { group } => {
                let rotated =
                    |bits| Rotated { size: largest_block(head_dim), codec: PerToken { bits, group } };
                (Pair::of(|side| Arc::new(rotated(self.bits[side])) as _), BLOCK)
            }
            Codes::LlamaCpp { kinds, rotate } => {
                let rotation = llama_cpp_rotation(head_dim).filter(|_| rotate);
                let codec = |side: Side| -> Arc<dyn BlockCodec> {
                    match rotation {
                        Some(sizes) => Arc::new(Rotated { size: sizes[side], codec: kinds[side] }),
                        None => Arc::new(kinds[side]),
                    }
                };
                (Pair::of(codec), BLOCK)
            }
            Codes::LloydMax => {
                (Pair::of(|side| Arc::new(LloydMax::new(self.bits[side], head_dim, SEED)) as _), BLOCK)
            }
        };
        context
            .layers(|l| Ok(CodedStore::new(context.geometry, context.rope(l), None, codecs.clone(), block)))
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for Scalar {
    fn limits(&self, window: pq_core::Window) -> Vec<Limit> {
        let has_group = |group| matches!(self.codes, Codes::Uniform { group: own, .. } if own == group);
        vec![
            Limit::new(
                self.bits != Pair::new(4, 4),
                "k=8:v=8",
                "uniform codes on a device have 4 bits",
                "int4, or k=4:v=4",
            ),
            Limit::new(
                !has_group(BLOCK),
                "group=32",
                "uniform codes on a device are in groups of 64",
                "group=64",
            ),
            Limit::new(window.batch != BLOCK, "batch=32", "64 tokens leave the window at once", "batch=64"),
            Limit::of_last_token(window),
        ]
    }

    fn plan(&self, _: &Config, _: Option<&Profile>) -> Result<Plan> {
        Ok(Plan::Int4)
    }
}
