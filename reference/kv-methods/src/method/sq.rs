//! Scalar codes: keys in their query-weighted KLT, rotated relative to blocks of positions, values in a
//! Hadamard basis. Calibration needs means and second moments only.
//!
//! The transform of the keys is all that is fitted, with the mean and the scale of the values, so that the
//! keys of a text of another kind may lose more than those of the calibration: mostly those of a few heads.
//! If the keys of a head on a prompt lose more than 1.5 times what the profile expects, they are coded again
//! with as many more bits as bring the error back.

#[cfg(feature = "cuda")]
mod device;

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use kv_attend::Backend;
use kv_llama::{Footprint, HeadFit};
use kv_model::{Config, Model, Rope};
use kv_owners::sq::{Basis, Bits, Codes, Head};
use pq_core::SoftmaxStats;
use pq_core::sq::{MAX_BLOCK, MAX_DIM, Shape, TILE};
use rayon::prelude::*;
use svd_core::{Hadamard, Rows};

use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::settings::Switch;
use crate::cache::{Geometry, Store, head_fits};
use crate::calibrate::{Calibration, LayerSamples};
use crate::{Error, Profile, Result};

pub(super) const SQ: Registration = Registration {
    names: &["sq"],
    help: "\
  sq                attention on scalar codes: no codebooks               k=3 v=3 block=64
                                                                          mean-error=on|off (on for v=1, v=2)
                      more bits for heads whose keys do not fit the       widen=on|off
                      profile (not on a GPU)
",
    examples: &[
        "sq:k=8:v=8:block=32:exact=f32:window=4",
        "sq:k=8:v=8:block=32:mean-error=on:exact=f32:window=4:batch=10",
    ],
    parse: |s| {
        let (keys, values) = (s.own("k", KeyBits(3.0))?, s.bits("v", 3)?);
        let block = s.positive("block", 64)?;
        if !block.is_multiple_of(TILE) || block > MAX_BLOCK {
            return Err(Error::Argument(format!(
                "method sq: block={block}: must be a multiple of {TILE} tokens, at most {MAX_BLOCK}"
            )));
        }
        let default = if values <= 2 { Switch::On } else { Switch::Off };
        let mean_error = s.common("mean-error", default)? == Switch::On;
        Ok(Arc::new(Sq { keys, values, block, mean_error, widen: s.given("widen")? }))
    },
};

/// Mean bits per component of keys.
#[derive(Clone, Copy, Debug)]
struct KeyBits(f32);

impl FromStr for KeyBits {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let bits = text.parse().ok().filter(|x: &f32| (0.125..=8.0).contains(x) && (8.0 * x).fract() == 0.0);
        bits.map(Self).ok_or_else(|| "must be a number of bits from 0.125 to 8, in eighths".into())
    }
}

impl Display for KeyBits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

#[derive(Debug)]
struct Sq {
    keys: KeyBits,
    values: u32,
    block: usize,
    mean_error: bool,
    /// Whether heads whose keys do not fit have more bits: if not given, on the CPU alone.
    widen: Option<Switch>,
}

impl Sq {
    /// The name of a profile's entry. Entries serve any bits.
    fn key(&self, l: usize, head: usize, part: &str) -> String {
        format!("sq/{}/{l}/{head}/{part}", self.block)
    }

    /// Bits of the codes of a head.
    fn bits(&self) -> Bits {
        let widen = self.widen != Some(Switch::Off);
        Bits { keys: self.keys.0, values: self.values, mean_error: self.mean_error, widen }
    }

    /// The basis of a head.
    fn fit(&self, rope: &Rope, layer: &LayerSamples, geometry: Geometry, head: usize) -> Result<Basis> {
        let (dim, kv_dim) = (geometry.head_dim, geometry.kv_dim());
        let of_head = |rows| Rows::contiguous(rows, kv_dim)?.columns(head * dim, dim);
        let (keys, values) = (of_head(&layer.keys)?, of_head(&layer.values)?);
        Ok(Basis::fit(keys, &layer.plain_query_grams[head], values, rope.frequencies(), self.block)?)
    }

    /// The bases of layer `l` in the profile.
    fn bases(&self, config: &Config, profile: &Profile, l: usize) -> Result<Vec<Basis>> {
        let dim = config.head_dim;
        let basis = |head: usize| -> Result<Basis> {
            let key = |part| self.key(l, head, part);
            let [basis, dual] = profile.basis_and_dual([&key("basis"), &key("dual")], dim)?;
            Ok(Basis {
                block: self.block,
                mean: profile.factors(&key("mean"), dim)?.to_vec(),
                basis: basis.to_vec(),
                dual: dual.to_vec(),
                sigma: profile.deviations(&key("sigma"), dim)?.to_vec(),
                value_mean: profile.factors(&key("value-mean"), dim)?.to_vec(),
                value_scale: profile.unit_of_norms(&key("value-scale"))?,
            })
        };
        (0..config.n_kv_heads).map(basis).collect()
    }
}

impl Kind for Sq {
    fn batch(&self) -> usize {
        self.block
    }

    fn check(&self, config: &Config) -> Result<()> {
        let dim = config.head_dim;
        let wrong = |e: &dyn Display| Error::Argument(format!("method sq: heads of {dim} components: {e}"));
        if dim > MAX_DIM {
            return Err(wrong(&format!("at most {MAX_DIM} have scalar codes")));
        }
        Shape::uniform(dim, self.values).map_err(|e| wrong(&e))?;
        Hadamard::new(dim).map_err(|e| wrong(&e))?;
        Ok(())
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn calibrate(
        &self,
        model: &Model,
        rope: &Rope,
        samples: &Calibration,
        profile: &mut Profile,
    ) -> Result<()> {
        let geometry = Geometry::of(&model.config);
        let heads: Vec<(usize, usize)> = (0..samples.layers.len())
            .flat_map(|l| (0..geometry.n_kv_heads).map(move |head| (l, head)))
            .collect();
        let fit = |&(l, head): &(usize, usize)| self.fit(rope.layer(l), &samples.layers[l], geometry, head);
        let bases = heads.par_iter().map(fit).collect::<Result<Vec<_>>>()?;
        for ((l, head), basis) in heads.into_iter().zip(bases) {
            let parts = [
                ("mean", basis.mean),
                ("basis", basis.basis),
                ("dual", basis.dual),
                ("sigma", basis.sigma),
                ("value-mean", basis.value_mean),
                ("value-scale", vec![basis.value_scale]),
            ];
            for (part, values) in parts {
                profile.put_floats(self.key(l, head, part), values);
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| {
            let rope = context.rope(l);
            let bases = self.bases(context.config, context.profile, l)?;
            let head = |basis: &Basis| Ok(basis.head(rope.frequencies(), &self.bits())?);
            let shared = bases.iter().map(head).collect::<Result<Vec<_>>>()?;
            let heads = shared.iter().cloned().map(Codes::new).collect();
            Ok(SqStore { geometry: context.geometry, rope, shared, heads })
        })
    }
}

#[derive(Clone)]
struct SqStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    shared: Vec<Arc<Head>>,
    heads: Vec<Codes>,
}

impl Store for SqStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let rotated = self.rope.rotated(k, self.geometry.kv_dim(), pos);
        for (head, codes) in self.heads.iter_mut().enumerate() {
            let [keys, values] = [&rotated[..], v].map(|rows| self.geometry.head_rows(head, rows));
            codes.append(Backend::detect(), pos, &keys, values)?;
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.heads[0].codes().len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        self.heads.iter_mut().for_each(|codes| codes.truncate(len));
        Ok(())
    }

    fn attend(
        &self,
        head: usize,
        first: usize,
        q: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<()> {
        let codes = &self.heads[head];
        let mut scratch = vec![0.0; codes.scratch_len(stats.len())];
        Ok(codes.attend_into(Backend::detect(), q, first..self.len(), None, &mut scratch, out, stats)?)
    }

    fn footprint(&self) -> Footprint {
        Footprint {
            kept: self.heads.iter().map(|codes| codes.codes().size()).sum(),
            shared: self.shared.iter().map(|head| head.size()).sum(),
            ..Footprint::default()
        }
    }

    fn fits(&self, layer: usize) -> Vec<HeadFit> {
        head_fits(layer, self.heads.iter().map(Codes::fits))
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
