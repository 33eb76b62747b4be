//! ZACK: rotated keys and values truncated to each head's rank, optionally combined, as in the paper, with
//! quantized components (`bits=`) and eviction (`tokens=`).

mod fold;
mod store;

use std::fmt::Debug;
use std::sync::Arc;

use half::{bf16, f16};
use kv_attend::owner::{Pair, Side};
use kv_attend::{Element, ElementType};
#[cfg(feature = "cuda")]
use kv_device::plan::{CutHead, DeviceCuts, HeadMaps, Plan};
use kv_model::{Config, Model};
use rayon::prelude::*;
use svd_core::{
    Budget, Gram, HeadGrams, LayerCalibration, LayerRotations, Rotation, ranks_by_loss, ranks_by_removal,
};

use super::Place;
use super::evicting::EvictingStore;
use super::kind::{BuildContext, Kind, Registration};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::scalar::{BLOCK, BlockCodec, CodedStore, PerChannel, PerToken};
use super::settings::{OptionalBits, words};
use crate::cache::{Geometry, Store};
use crate::calibrate::{Calibration, LayerSamples, single};
use crate::{Error, Profile, Result};
use fold::fold_values;
use store::ZackStore;

pub(super) const ZACK: Registration = Registration {
    names: &["zack"],
    help: "\
  zack              rotated, ranks cut to fractions, values folded        k=0.75 v=0.75 basis=closed|stacked|principal
                      with evicted tokens, with codes as int4's           tokens=0.5 bits=BITS
                                                                          ranks=removal|loss|uniform multiple=1
                                                                          (on a device 8)
                      whose prompts attend to cut rows, too               prompt=cut
",
    examples: &[
        "zack:k=1:v=1:exact=f32:window=4",
        "zack:k=1:v=1:bits=8:exact=f32:window=4:batch=10",
        "zack:k=1:v=1:prompt=cut:exact=f32:window=4",
        "zack:k=1:v=1:tokens=0.3:exact=f32:window=4",
        "zack:k=1:v=1:bits=8:tokens=0.3:exact=f32:window=4",
    ],
    parse: |s| {
        let method = Zack {
            fractions: Pair::new(s.fraction("k", 0.75)?, s.fraction("v", 0.75)?),
            basis: s.own("basis", Basis::Closed)?,
            rule: s.common("ranks", RankRule::Removal)?,
            multiple: match s.place {
                Place::Cpu => s.common_count("multiple", 1)?,
                Place::Cuda => s.positive("multiple", 8)?,
            },
            bits: s.common("bits", OptionalBits(None))?.0,
            tokens: s.common_part("tokens", 1.0)?,
            prompt: s.common("prompt", Prompts::Exact)?,
        };
        if method.bits.is_some() && method.prompt == Prompts::Cut {
            return Err(Error::argument("prompt=cut is for rows without codes: leave out bits= or prompt="));
        }
        Ok(Arc::new(method))
    },
};

#[derive(Debug)]
struct Zack {
    fractions: Pair<f64>, // fractions of the dimensions to keep
    basis: Basis,
    rule: RankRule,
    multiple: usize,
    bits: Option<u32>, // of the remaining components, coded as by `int4`
    tokens: f64,       // fraction of the prompt's tokens to keep
    prompt: Prompts,
}

/// The rotation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Basis {
    Closed,
    Stacked,
    Principal,
}
words!(Basis, "closed" => Basis::Closed, "stacked" => Basis::Stacked, "principal" => Basis::Principal);

/// The rule that chooses ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RankRule {
    /// One removal rate for all heads (ZACK 5.2).
    Removal,
    /// Least loss, weighted by layer.
    Loss,
    /// One rank for all heads.
    Uniform,
}
words!(RankRule, "removal" => RankRule::Removal, "loss" => RankRule::Loss, "uniform" => RankRule::Uniform);

/// The rows that prompt tokens attend to among themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Prompts {
    /// Exact rows, as with every other method.
    Exact,
    /// Truncated rows: prefill, too, takes time in proportion to the ranks (ZACK 5.3).
    Cut,
}
words!(Prompts, "exact" => Prompts::Exact, "cut" => Prompts::Cut);

impl Kind for Zack {
    fn batch(&self) -> usize {
        if self.bits.is_some() { BLOCK } else { 1 }
    }

    /// Whether a budget is enough depends on the numbers of components alone, not on their singular values.
    fn check(&self, config: &Config) -> Result<()> {
        let (flat, heads) = (vec![1.0; config.head_dim], config.n_layers * config.n_kv_heads);
        Side::ALL.into_iter().try_for_each(|side| {
            let fraction = self.fractions[side];
            let ranks = self.ranks(&vec![&flat[..]; heads], fraction, &vec![1.0; heads]);
            ranks.map(drop).map_err(|e| {
                let (letter, multiple) = (side.letter(), self.multiple);
                Error::Argument(format!("method zack: {letter}={fraction}, multiple={multiple}: {e}"))
            })
        })
    }

    fn needs_profile(&self) -> bool {
        true
    }

    /// Rotations of every head: of keys against queries, and of values against `W_O`; and each layer's
    /// residual stream.
    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        let basis = self.basis;
        let rotations = samples.layers.par_iter().enumerate();
        let rotations = rotations.map(|(l, layer)| rotations_of(basis, &moments(samples, l, layer)?));
        for (l, heads) in rotations.collect::<Result<Vec<_>>>()?.iter().enumerate() {
            for (head, rotations) in heads.iter().enumerate() {
                for (side, rotation) in Side::ALL.into_iter().zip(rotations) {
                    for (part, values) in
                        [("store", rotation.basis()), ("probe", rotation.dual()), ("sigma", rotation.sigma())]
                    {
                        profile.put_floats(key(basis, side, l, head, part), single(values));
                    }
                }
            }
        }
        for (l, layer) in samples.layers.iter().enumerate() {
            profile.put_floats(residual_key(l), vec![layer.residual_rms as f32]);
        }
        Ok(())
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        let Some(bits) = self.bits else {
            return match context.exact {
                ElementType::F32 => self.reduced::<f32>(context),
                ElementType::F16 => self.reduced::<f16>(context),
                ElementType::Bf16 => self.reduced::<bf16>(context),
            };
        };
        let (keys, values) = (PerChannel { bits }, PerToken { bits, group: BLOCK });
        let codecs = Pair::<Arc<dyn BlockCodec>>::new(Arc::new(keys), Arc::new(values));
        let maps = self.maps(context)?;
        context.layers(|l| {
            let store = CodedStore::new(
                context.geometry,
                context.rope(l),
                Some(maps[l].clone()),
                codecs.clone(),
                BLOCK,
            );
            Ok(EvictingStore::new(store, context.geometry, context.rope(l), self.tokens))
        })
    }

    fn folds(&self) -> bool {
        true
    }

    fn fold(&self, model: &Model, profile: &Profile) -> Result<Option<Model>> {
        Ok(Some(fold_values(model, &read_layers(&model.config, profile, self.basis)?)?))
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for Zack {
    fn limits(&self, window: pq_core::Window) -> Vec<Limit> {
        // Codes have another batch, which is not what is wrong.
        let mut limits = vec![
            Limit::new(
                self.bits.is_some(),
                "bits=4",
                "a device has no codes of rows of reduced rank",
                "no bits=",
            ),
            Limit::new(self.tokens < 1.0, "tokens=0.5", "a device evicts no tokens", "no tokens="),
            Limit::new(
                !self.multiple.is_multiple_of(DeviceCuts::MULTIPLE),
                "multiple=4",
                "ranks on a device are multiples of 8",
                "multiple=8",
            ),
        ];
        limits.extend(Limit::of_rings(window));
        limits
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let head = |([keys, values], [k, v]): (&[Rotation; 2], &[usize; 2])| {
            let maps = HeadMaps {
                keys: single(keys.basis()),
                queries: single(keys.dual()),
                values: single(values.basis()),
            };
            CutHead { maps, ranks: Pair::new(*k, *v) }
        };
        let heads = |(layer, ranks): &Ranked| layer.heads().iter().zip(ranks).map(head).collect();
        let layers = profile.map(|profile| self.ranked(config, profile)).transpose()?;
        let heads = layers.map(|layers| layers.iter().map(heads).collect());
        let cuts = DeviceCuts { fractions: self.fractions, cuts_prompts: self.prompt == Prompts::Cut };
        Ok(Plan::Cuts(cuts, heads))
    }

    fn fold(&self, model: &Model, profile: &Profile) -> Result<Option<Model>> {
        Kind::fold(self, model, profile)
    }
}

fn key(basis: Basis, side: Side, l: usize, head: usize, part: &str) -> String {
    format!("zack/{basis}/{}/{l}/{head}/{part}", side.letter())
}

fn residual_key(l: usize) -> String {
    format!("zack/residual/{l}")
}

/// The second moments of a layer's heads.
fn moments(samples: &Calibration<'_>, l: usize, layer: &LayerSamples) -> Result<LayerCalibration> {
    let config = &samples.model.config;
    let geometry = Geometry::of(config);
    let head = |head: usize| -> Result<HeadGrams> {
        let mut values = Gram::new(geometry.head_dim)?;
        values.add_rows(geometry.head(head, &layer.values)?)?;
        let (keys, queries) = (layer.key_grams[head].clone(), layer.query_grams[head].clone());
        Ok(HeadGrams { keys, queries, values, outputs: samples.output_gram(l, head)?, effective_tokens: 1.0 })
    };
    let heads = (0..geometry.n_kv_heads).map(head).collect::<Result<_>>()?;
    Ok(LayerCalibration::from_grams(heads, config.gqa_group())?)
}

/// The rotations of each head's keys, which preserve their products with queries, and values, with `W_O`.
fn rotations_of(basis: Basis, layer: &LayerCalibration) -> Result<Vec<[Rotation; 2]>> {
    let heads = layer.grams().iter();
    match basis {
        Basis::Closed => Ok(layer.rotations()?.heads().to_vec()),
        Basis::Stacked => heads
            .map(|HeadGrams { keys, queries, values, outputs, .. }| {
                Ok([Rotation::stacked(keys, queries)?, Rotation::stacked(values, outputs)?])
            })
            .collect(),
        Basis::Principal => heads
            .map(|head| Ok([Rotation::principal(&head.keys)?, Rotation::principal(&head.values)?]))
            .collect(),
    }
}

/// The rotations of all layers. An error of a score moves weight between values, so its cost is proportional
/// to the size of the values. The two sides have separate budgets and need no common scale.
fn read_layers(config: &Config, profile: &Profile, basis: Basis) -> Result<Vec<LayerRotations>> {
    let heads = |l| {
        let head = move |head| -> Result<[Rotation; 2]> {
            let [keys, values] = Side::ALL.map(|side| read_rotation(config, profile, basis, side, l, head));
            Ok([keys?, values?])
        };
        (0..config.n_kv_heads).map(head).collect::<Result<Vec<_>>>()
    };
    let layer = |l| {
        let heads = heads(l)?;
        let size = |values: &Rotation| values.sigma().iter().map(|x| x * x).sum::<f64>();
        let weights = heads.iter().map(|[_, values]| [size(values), 1.0]).collect();
        Ok(LayerRotations::new(heads, config.gqa_group(), weights)?)
    };
    (0..config.n_layers).map(layer).collect()
}

/// Every second element: those of one side.
fn of_side<T: Copy>(both: &[T], side: Side) -> Vec<T> {
    both.iter().skip(usize::from(side == Side::Values)).step_by(2).copied().collect()
}

/// The rotations of a layer, and each head's ranks of keys and values.
type Ranked = (LayerRotations, Vec<[usize; 2]>);

impl Zack {
    /// Stores of rows with elements of type `E`.
    fn reduced<E: Element>(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        let (maps, cuts_prompts) = (self.maps(context)?, self.prompt == Prompts::Cut);
        context.layers(|l| {
            let store = ZackStore::<E>::new(context.geometry, context.rope(l), &maps[l], cuts_prompts);
            Ok(EvictingStore::new(store, context.geometry, context.rope(l), self.tokens))
        })
    }

    /// The maps of all layers and heads.
    fn maps(&self, context: &BuildContext<'_>) -> Result<Vec<Vec<Arc<svd_core::HeadMaps>>>> {
        let layers = self.ranked(context.config, context.profile)?;
        layers.iter().map(|(rotations, ranks)| Ok(rotations.folded_maps(ranks)?)).collect()
    }

    /// Each layer with ranks that keep `fractions` of the dimensions of all layers.
    fn ranked(&self, config: &Config, profile: &Profile) -> Result<Vec<Ranked>> {
        let layers = read_layers(config, profile, self.basis)?;
        let weights = loss_weights(profile, &layers)?;
        let spectra: Vec<&[f64]> = layers.iter().flat_map(LayerRotations::spectra).collect();
        let ranks = Pair::try_of(|side| {
            self.ranks(&of_side(&spectra, side), self.fractions[side], &of_side(&weights, side))
        })?;
        let mut ranks = ranks.keys.into_iter().zip(ranks.values).map(|(k, v)| [k, v]);
        let layer = |layer: LayerRotations| {
            let ranks = ranks.by_ref().take(layer.heads().len()).collect();
            (layer, ranks)
        };
        Ok(layers.into_iter().map(layer).collect())
    }

    /// Ranks of all heads, layer after layer, that keep `fraction` of all dimensions.
    fn ranks(&self, spectra: &[&[f64]], fraction: f64, weights: &[f64]) -> Result<Vec<usize>> {
        let budget = Budget::Fraction(fraction);
        Ok(match self.rule {
            RankRule::Removal => ranks_by_removal(spectra, budget, self.multiple)?,
            RankRule::Loss => ranks_by_loss(spectra, weights, budget, self.multiple)?,
            RankRule::Uniform => {
                let rank = |sigma: &&[f64]| -> Result<usize> {
                    Ok(ranks_by_removal(&[&vec![1.0; sigma.len()]], budget, self.multiple)?[0])
                };
                spectra.iter().map(rank).collect::<Result<_>>()?
            }
        })
    }
}

/// The cost of a unit of squared error in each head's keys and values: the resulting relative error of the
/// residual stream.
///
/// N.B. Measured weights (the divergence of a model with a single layer truncated to half, over the dropped
/// energy) are better on the 12 M model at nine tenths of the dimensions (KL .0008 instead of .0031) and
/// worse at half (.0163 instead of .0104).
fn loss_weights(profile: &Profile, layers: &[LayerRotations]) -> Result<Vec<f64>> {
    let mut weights = vec![];
    for (l, layer) in layers.iter().enumerate() {
        let rms = profile.size(&residual_key(l))?;
        weights.extend(layer.weights(1.0).iter().map(|weight| weight * rms.powi(-2)));
    }
    Ok(weights)
}

fn read_rotation(
    config: &Config,
    profile: &Profile,
    basis: Basis,
    side: Side,
    l: usize,
    head: usize,
) -> Result<Rotation> {
    let (dim, names) =
        (config.head_dim, ["store", "probe", "sigma"].map(|part| key(basis, side, l, head, part)));
    let [store, probe] = profile.basis_and_dual([&names[0], &names[1]], dim)?;
    let parts = [store, probe, profile.spectrum(&names[2], dim)?];
    let [store, probe, sigma] = parts.map(|part| part.iter().map(|&x| x.into()).collect());
    Ok(Rotation::from_parts(store, probe, sigma)?)
}
