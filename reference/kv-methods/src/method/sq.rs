//! Scalar codes: keys in their query-weighted KLT, rotated relative to blocks of positions, values in a
//! Hadamard basis. Calibration needs means and second moments only.
//!
//! The transform of the keys is all that is fitted, so that the keys of a text of another kind may lose more
//! than those of the calibration: mostly those of a few heads. If the keys of a head on a prompt lose more than
//! 1.5 times what the profile expects, they are coded again with as many more bits as bring the error back.

#[cfg(feature = "cuda")]
mod device;

use std::fmt::Display;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};

use kv_attend::owner::Side;
use kv_llama::{Fit, Footprint};
use kv_model::{Config, Model, Rope};
use pq_core::sq::{HeadCodes, HeadTransform, MAX_BLOCK, Shape, TILE, TransformParts, allot, rotate_by};
use pq_core::{Backend, Evicted, SoftmaxStats};
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

/// What all sequences share of one head.
struct HeadPlan {
    transform: Arc<HeadTransform>,
    /// Standard deviations of the components of the keys' code on the calibration text, (head_dim,).
    sigma: Vec<f32>,
    /// Mean squared error of a score to expect of the codes of a key.
    error: f64,
    /// The transform with more bits for keys, each made when a prompt first needs it.
    wider: Mutex<Vec<Arc<HeadTransform>>>,
    value_mean: Vec<f32>, // (head_dim,)
}

impl HeadPlan {
    /// The transform with the fewest bits for keys that bring an error of `ratio` times the expected one back
    /// to that, or with 8 bits a component.
    fn wider(&self, ratio: f64) -> Result<Arc<HeadTransform>> {
        let dim = self.sigma.len();
        let (mut order, slots) = (vec![0; dim], self.transform.keys().slots());
        let most = 8 * dim.div_ceil(16);
        for slots in slots + 1..=most {
            let keys = allot(&self.sigma, slots, &mut order)?;
            let sigma: Vec<f32> = order.iter().map(|&i| self.sigma[i]).collect();
            if slots < most && ratio * keys.distortion(&sigma)? > self.error {
                continue;
            }
            let mut made = self.wider.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(transform) = made.iter().find(|made| made.keys().slots() == slots) {
                return Ok(transform.clone());
            }
            let transform = Arc::new(self.transform.recoded(keys, &order)?);
            made.push(transform.clone());
            return Ok(transform);
        }
        Ok(self.transform.clone()) // has 8 bits a component
    }
}

/// One head of a profile.
struct SqHead {
    /// The codes of its keys.
    keys: Shape,
    /// Standard deviations of the transformed keys' components, (head_dim,), in the order of the codes.
    sigma: Vec<f32>,
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
                sigma: order.iter().map(|&c| sigma[c]).collect(),
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
            let (sigma, value_mean) = (head.sigma, head.value_mean);
            Ok(HeadPlan {
                error: head.keys.distortion(&sigma)?,
                transform,
                sigma,
                wider: Mutex::default(),
                value_mean,
            })
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
            let heads = plans.iter().map(|plan| CodedHead::new(plan.transform.clone())).collect();
            let (geometry, widen) = (site.geometry, self.widen != Some(Switch::Off));
            Ok(SqStore { geometry, rope: site.rope(l), hadamard, widen, plans, heads })
        })
    }
}

/// The codes of one head, and what they have lost of its keys.
#[derive(Clone)]
struct CodedHead {
    codes: HeadCodes,
    key_error: f64, // squared, of all tokens coded since the first one
    tokens: usize,  // the same
}

impl CodedHead {
    fn new(transform: Arc<HeadTransform>) -> Self {
        Self { codes: HeadCodes::new(transform), key_error: 0.0, tokens: 0 }
    }

    /// See [`HeadCodes::append`].
    fn append(&mut self, pos: usize, keys: &[f32], values: &[f32]) -> Result<()> {
        let Evicted { tokens, key_error, .. } = self.codes.append(Backend::detect(), pos, keys, values)?;
        self.key_error += key_error;
        self.tokens += tokens;
        Ok(())
    }

    /// How well the keys' codes fit.
    fn fit(&self, layer: usize, head: usize, plan: &HeadPlan) -> Fit {
        let (dim, slots) = (plan.sigma.len(), self.codes.transform().keys().slots());
        let added = slots - plan.transform.keys().slots();
        Fit {
            layer,
            head,
            side: Side::Keys,
            expected: plan.error,
            found: self.key_error / self.tokens.max(1) as f64,
            tokens: self.tokens,
            added_bits: added as f64 / dim.div_ceil(16) as f64,
        }
    }
}

#[derive(Clone)]
struct SqStore {
    geometry: Geometry,
    rope: Arc<Rope>,
    hadamard: Hadamard,
    widen: bool,
    plans: Arc<Vec<HeadPlan>>,
    heads: Vec<CodedHead>,
}

impl Store for SqStore {
    fn push(&mut self, pos: usize, k: &[f32], v: &[f32]) -> Result<()> {
        let (dim, kv_dim) = (self.geometry.head_dim, self.geometry.kv_dim());
        let rotated = self.rope.rotated(k, kv_dim, pos);
        for (head, (plan, coded)) in self.plans.iter().zip(&mut self.heads).enumerate() {
            let keys = self.geometry.head_rows(head, &rotated);
            let mut values = self.geometry.head_rows(head, v);
            for row in values.chunks_exact_mut(dim) {
                row.iter_mut().zip(&plan.value_mean).for_each(|(x, mean)| *x -= mean);
            }
            self.hadamard.forward(&mut values)?;
            let is_first = coded.tokens == 0;
            coded.append(pos, &keys, &values)?;
            let fit = coded.fit(0, head, plan);
            if self.widen && is_first && fit.is_misfit() {
                *coded = CodedHead::new(plan.wider(fit.ratio())?);
                coded.append(pos, &keys, &values)?;
            }
        }
        Ok(())
    }

    fn len(&self) -> usize {
        self.heads[0].codes.len()
    }

    fn truncate(&mut self, len: usize) -> Result<()> {
        if len == 0 {
            self.heads = self.plans.iter().map(|plan| CodedHead::new(plan.transform.clone())).collect();
        }
        self.heads.iter_mut().for_each(|head| head.codes.truncate(len));
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
        let (plan, codes) = (&self.plans[head], &self.heads[head].codes);
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
        let vectors = 2 * 4 * self.geometry.head_dim; // deviations of keys, mean of values
        let of_head = |(plan, head): (&HeadPlan, &CodedHead)| {
            let (own, wider) = (&plan.transform, head.codes.transform());
            let widened = if Arc::ptr_eq(own, wider) { 0 } else { wider.size() };
            own.size() + widened + vectors
        };
        Footprint {
            kept: self.heads.iter().map(|head| head.codes.size()).sum(),
            shared: self.plans.iter().zip(&self.heads).map(of_head).sum(),
            ..Footprint::default()
        }
    }

    fn fits(&self, layer: usize) -> Vec<Fit> {
        let heads = self.plans.iter().zip(&self.heads).enumerate();
        heads.map(|(head, (plan, coded))| coded.fit(layer, head, plan)).collect()
    }

    fn clone_box(&self) -> Box<dyn Store> {
        Box::new(self.clone())
    }
}
