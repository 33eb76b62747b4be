//! Scalar codes: keys in their query-weighted KLT, rotated relative to blocks of positions, values in a
//! Hadamard basis. Calibration needs means and second moments only.

#[cfg(feature = "cuda")]
mod device;

use std::fmt::Display;
use std::str::FromStr;
use std::sync::Arc;

use kv_llama::Footprint;
use kv_model::{Config, Model, Rope};
use pq_core::sq::{HeadCodes, HeadTransform, MAX_BLOCK, Shape, TILE, TransformParts, allot, rotate_by};
use pq_core::{Backend, SoftmaxStats};
use rayon::prelude::*;
use svd_core::{Gram, Hadamard, PreRope, Rotation, Rows};

use super::kind::{Entry, Kind, Site};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::settings::Switch;
use crate::cache::{Geometry, Store, merge_part};
use crate::calibrate::{Calibration, LayerSamples, mean_row, single};
use crate::{Error, Profile, Result};

pub(super) const SQ: Entry = Entry {
    names: &["sq"],
    help: "\
  sq                attention on scalar codes: no codebooks               k=3 v=3 block=64
                                                                          mean-error=on|off (on for v=1, v=2)
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
        Ok(Arc::new(Sq { keys, values, block, mean_error }))
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
}

/// What all sequences share of one head.
struct HeadPlan {
    transform: Arc<HeadTransform>,
    value_mean: Vec<f32>, // (head_dim,)
}

/// One head of a profile.
struct SqHead {
    /// The codes of its keys.
    keys: Shape,
    /// Mean of the keys before RoPE, (head_dim,).
    mean: Vec<f32>,
    /// Multiplies keys, (head_dim, head_dim): columns in the order of the codes.
    basis: Vec<f32>,
    /// Multiplies queries, the same.
    dual: Vec<f32>,
    /// Mean of the values, (head_dim,).
    value_mean: Vec<f32>,
}

impl Sq {
    /// The name of a profile's entry. Entries serve any bits.
    fn key(&self, l: usize, head: usize, part: &str) -> String {
        format!("sq/{}/{l}/{head}/{part}", self.block)
    }

    /// Slots of the keys' codes: each is a bit for every sixteenth component.
    fn slots(&self, head_dim: usize) -> usize {
        ((self.keys.0 * head_dim.div_ceil(16) as f32) as usize).max(1)
    }

    /// The transform of a head's keys.
    fn fit(&self, rope: &Rope, layer: &LayerSamples, geometry: Geometry, head: usize) -> Result<Fitted> {
        let dim = geometry.head_dim;
        let mut keys = geometry.head_rows(head, &layer.keys);
        let mean = mean_row(&keys, dim);
        for (i, key) in keys.chunks_exact_mut(dim).enumerate() {
            key.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
            // Where the key would be in its block, relative to the middle.
            let position = (i % self.block) as i64 - (self.block / 2) as i64;
            rotate_by(rope.frequencies(), position, key)?;
        }
        let mut covariance: Gram<PreRope> = Gram::new(dim)?;
        covariance.add_rows(Rows::contiguous(&keys, dim)?)?;
        let rotation = Rotation::query_metric(&covariance, &layer.plain_query_grams[head])?;
        let value_mean = mean_row(&geometry.head_rows(head, &layer.values), dim);
        Ok(Fitted { mean, rotation, value_mean })
    }

    /// The heads of layer `l` in the profile.
    fn heads(&self, config: &Config, profile: &Profile, l: usize) -> Result<Vec<SqHead>> {
        let dim = config.head_dim;
        let head = |head: usize| -> Result<SqHead> {
            let part = |part, len: usize| -> Result<&[f32]> {
                let entry = self.key(l, head, part);
                let values = profile.floats(&entry)?;
                let wrong = || Error::Profile(format!("`{entry}` has {} elements, not {len}", values.len()));
                if values.len() == len { Ok(values) } else { Err(wrong()) }
            };
            let mut order = vec![0; dim];
            let sigma = part("sigma", dim)?;
            let keys =
                allot(sigma, self.slots(dim), &mut order).map_err(|e| Error::Profile(e.to_string()))?;
            let columns = |map: &[f32]| -> Vec<f32> {
                map.chunks_exact(dim).flat_map(|row| order.iter().map(move |&c| row[c])).collect()
            };
            Ok(SqHead {
                keys,
                mean: part("mean", dim)?.to_vec(),
                basis: columns(part("basis", dim * dim)?),
                dual: columns(part("dual", dim * dim)?),
                value_mean: part("value-mean", dim)?.to_vec(),
            })
        };
        (0..config.n_kv_heads).map(head).collect()
    }

    /// Layer `l` from the profile.
    fn plan(&self, site: &Site<'_>, l: usize) -> Result<Vec<HeadPlan>> {
        let rope = site.rope(l);
        let plan = |head: SqHead| -> Result<HeadPlan> {
            let transform = HeadTransform::new(&TransformParts {
                frequencies: rope.frequencies(),
                mean: &head.mean,
                basis: &head.basis,
                dual: &head.dual,
                keys: head.keys,
                values: Shape::uniform(site.config.head_dim, self.values)?,
                block: self.block,
                mean_error: self.mean_error,
            });
            let transform = Arc::new(transform.map_err(|e| Error::Profile(e.to_string()))?);
            Ok(HeadPlan { transform, value_mean: head.value_mean })
        };
        self.heads(site.config, site.profile, l)?.into_iter().map(plan).collect()
    }
}

/// One head's keys, fitted.
struct Fitted {
    mean: Vec<f32>,
    rotation: Rotation,
    value_mean: Vec<f32>,
}

impl Kind for Sq {
    fn batch(&self) -> usize {
        self.block
    }

    fn check(&self, config: &Config) -> Result<()> {
        let dim = config.head_dim;
        let wrong = |e: &dyn Display| Error::Argument(format!("method sq: heads of {dim} components: {e}"));
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
        let fitted = heads.par_iter().map(fit).collect::<Result<Vec<_>>>()?;
        for ((l, head), Fitted { mean, rotation, value_mean }) in heads.into_iter().zip(fitted) {
            let parts = [
                ("mean", mean),
                ("basis", single(rotation.basis())),
                ("dual", single(rotation.dual())),
                ("sigma", single(rotation.sigma())),
                ("value-mean", value_mean),
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

    fn stores(&self, site: &Site<'_>) -> Result<Vec<Box<dyn Store>>> {
        let hadamard = Hadamard::new(site.config.head_dim)?;
        site.layers(|l| {
            let plans = Arc::new(self.plan(site, l)?);
            let heads = plans.iter().map(|plan| HeadCodes::new(plan.transform.clone())).collect();
            Ok(SqStore { geometry: site.geometry, rope: site.rope(l), hadamard, plans, heads })
        })
    }
}

#[derive(Clone)]
struct SqStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    hadamard: Hadamard,
    plans: Arc<Vec<HeadPlan>>,
    heads: Vec<HeadCodes>,
}

impl Store for SqStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (dim, kv_dim) = (self.geometry.head_dim, self.geometry.kv_dim());
        let rotated = self.rope.rotated(k, kv_dim, pos);
        for (head, (plan, codes)) in self.plans.iter().zip(&mut self.heads).enumerate() {
            let keys = self.geometry.head_rows(head, &rotated);
            let mut values = self.geometry.head_rows(head, v);
            for row in values.chunks_exact_mut(dim) {
                row.iter_mut().zip(&plan.value_mean).for_each(|(x, mean)| *x -= mean);
            }
            self.hadamard.forward(&mut values)?;
            codes.append(Backend::detect(), pos, &keys, &values)?;
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.heads[0].len()
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
        let (plan, codes) = (&self.plans[head], &self.heads[head]);
        let mut scratch = vec![0.0; codes.scratch_len(stats.len())];
        let (mut part, mut part_stats) = (vec![0.0; out.len()], vec![SoftmaxStats::EMPTY; stats.len()]);
        let range = first..codes.len();
        codes.attend_into(Backend::detect(), q, range, None, &mut scratch, &mut part, &mut part_stats)?;
        merge_part((&part, &part_stats), out, stats, |part, weight, row| {
            row.copy_from_slice(part);
            self.hadamard.inverse(row)?;
            row.iter_mut().zip(&plan.value_mean).for_each(|(x, mean)| *x += weight * mean);
            Ok(())
        })
    }

    fn footprint(&self) -> Footprint {
        let mean = 4 * self.geometry.head_dim;
        Footprint {
            kept: self.heads.iter().map(HeadCodes::size).sum(),
            shared: self.plans.iter().map(|plan| plan.transform.size() + mean).sum(),
            ..Footprint::default()
        }
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
