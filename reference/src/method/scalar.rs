//! Scalar-quantization baselines: uniform codes as in KIVI (`int8`, `int4`, `int2`) or after a Hadamard
//! rotation (`rotated`), and optimal levels after a random rotation (`lloydmax`).

mod codecs;
mod store;

use std::sync::Arc;

pub(super) use codecs::{PerChannel, PerToken};
pub(super) use store::{BlockCodec, CodedStore};

use super::kind::{Entry, Kind, SEED, Site};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
#[cfg(feature = "cuda")]
use super::plan::Plan;
use super::settings::Settings;
use crate::Result;
use crate::cache::Store;
use crate::side::Pair;
#[cfg(feature = "cuda")]
use crate::{Profile, model::Config};
use codecs::{LloydMax, Rotated};

/// Tokens per decoded block of per-token codes.
pub(super) const BLOCK: usize = 64;

pub(super) const UNIFORM: Entry = Entry {
    names: &["int8", "int4", "int2"],
    help: "\
  int8, int4, int2  uniform: keys per channel, values per token (as KIVI) k=BITS v=BITS group=64
",
    parse: |s| {
        let bits = match s.name {
            "int8" => 8,
            "int4" => 4,
            _ => 2,
        };
        Ok(Arc::new(Scalar {
            bits: both(s, bits)?,
            codes: Codes::Uniform { group: s.positive("group", 64)? },
        }))
    },
};

pub(super) const ROTATED: Entry = Entry {
    names: &["rotated"],
    help: "\
  rotated           Hadamard, then uniform per token                      k=4 v=4 group=32
",
    parse: |s| {
        Ok(Arc::new(Scalar {
            bits: both(s, 4)?,
            codes: Codes::Rotated { group: s.positive("group", 32.min(s.head_dim))? },
        }))
    },
};

pub(super) const LLOYD_MAX: Entry = Entry {
    names: &["lloydmax"],
    help: "\
  lloydmax          random rotation, optimal levels (as TurboQuant)       k=4 v=4
",
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
    Uniform { group: usize },
    Rotated { group: usize },
    LloydMax,
}

impl Kind for Scalar {
    /// Keys are coded per channel, in whole groups of tokens.
    fn batch(&self) -> usize {
        if let Codes::Uniform { group } = self.codes { group } else { 1 }
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        match self.codes {
            Codes::Uniform { .. } => Ok(self),
            Codes::Rotated { .. } | Codes::LloydMax => Err(Limit::without_kernels("int4")),
        }
    }

    fn stores(&self, site: &Site<'_>) -> Result<Vec<Box<dyn Store>>> {
        let head_dim = site.geometry.head_dim;
        let (codecs, block): (Pair<Arc<dyn BlockCodec>>, usize) = match self.codes {
            Codes::Uniform { group } => {
                let (keys, values) =
                    (PerChannel { bits: self.bits.keys }, PerToken { bits: self.bits.values, group });
                (Pair::new(Arc::new(keys), Arc::new(values)), group)
            }
            Codes::Rotated { group } => {
                (Pair::of(|side| Arc::new(Rotated(PerToken { bits: self.bits[side], group })) as _), BLOCK)
            }
            Codes::LloydMax => {
                (Pair::of(|side| Arc::new(LloydMax::new(self.bits[side], head_dim, SEED)) as _), BLOCK)
            }
        };
        site.layers(|l| Ok(CodedStore::new(site.geometry, site.rope(l), None, codecs.clone(), block)))
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for Scalar {
    fn limits(&self, window: pq_core::Window) -> Vec<Limit> {
        let has_group = |group| matches!(self.codes, Codes::Uniform { group: own } if own == group);
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
        ]
    }

    fn plan(&self, _: &Config, _: Option<&Profile>) -> Result<Plan> {
        Ok(Plan::Int4)
    }
}
