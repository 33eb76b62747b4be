//! From a method's setting to what it needs of a profile, and to a cache.

use std::sync::Arc;

use codec_core::{PlaneProfile, Predictor};
use pq_core::{PqShape, TrainOptions, train};
use rayon::prelude::*;
use svd_core::{Gram, Rotation, rank_for_removal, removal_for_keep};

use super::fold::fold_values;
use super::{Basis, Kind, Method, PqCode, PredictorKind};
use crate::Profile;
use crate::cache::{
    BlockCodec, CacheGenStore, CodedStore, DenseStore, Geometry, HeadCodebooks, HeadRotation, KvCache,
    LloydMax, MillionStore, PerChannel, PerToken, RetrievalStore, Rotated, Scorer, Store, StreamingStore,
    WindowedCache, ZackStore,
};
use crate::calibrate::{Calibration, LayerSamples};
use crate::model::{Config, Model, Rope};
use crate::{Error, Result};

/// Everything random here starts from it.
const SEED: u64 = 0x6b76;

/// A cache that is ready to be filled, and the model that fills it: the given one, or one with folded weights.
pub struct Prepared {
    /// The model to run.
    pub model: Arc<Model>,
    /// An empty cache.
    pub cache: Box<dyn KvCache>,
}

impl Method {
    /// Whether it needs a profile.
    #[must_use]
    pub fn needs_profile(&self) -> bool {
        matches!(self.kind, Kind::Million { .. } | Kind::Zack { .. } | Kind::CacheGen { .. })
    }

    /// Adds to `profile` what the method needs, made from samples of the model.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model; errors of the cores.
    pub fn calibrate(&self, model: &Model, samples: &Calibration, profile: &mut Profile) -> Result<()> {
        self.check(&model.config)?;
        match self.kind {
            Kind::Million { k, v, iterations } => {
                calibrate_million(model, samples, k, v, iterations, profile)
            }
            Kind::Zack { basis, .. } => calibrate_zack(model, samples, basis, profile),
            Kind::CacheGen { k, v, predictor } => {
                calibrate_cachegen(model, samples, k, v, predictor, profile)
            }
            _ => Ok(()),
        }
    }

    /// An empty cache for `model`, with positions from `rope`.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model, [`Error::Profile`] when the profile lacks an entry or
    /// holds a wrong one.
    pub fn prepare(&self, model: &Arc<Model>, rope: &Arc<Rope>, profile: &Profile) -> Result<Prepared> {
        self.check(&model.config)?;
        let config = &model.config;
        let geometry = Geometry::of(config);
        let ranks = match self.kind {
            Kind::Zack { k, v, basis } => Some(ZackPlan::read(config, profile, k, v, basis)?),
            _ => None,
        };
        let mut stores = Vec::with_capacity(config.n_layers);
        for l in 0..config.n_layers {
            stores.push(if self.exact_layers.contains(&l) {
                Box::new(DenseStore::new(self.exact, geometry, rope.clone()))
            } else if let Some(plan) = &ranks {
                Box::new(ZackStore::new(geometry, rope.clone(), plan.heads[l].clone(), self.exact))
                    as Box<dyn Store>
            } else {
                self.store(geometry, rope, l, config.n_layers, profile)?
            });
        }
        let cache =
            Box::new(WindowedCache::new(self.name, geometry, self.window, self.exact, rope.clone(), stores));
        let model = match ranks {
            Some(plan) => Arc::new(fold_values(model, &plan.values)?),
            None => model.clone(),
        };
        Ok(Prepared { model, cache })
    }

    fn check(&self, config: &Config) -> Result<()> {
        let shape_error = |e: pq_core::Error| Error::Argument(format!("method {}: {e}", self.name));
        match self.kind {
            Kind::PqCache { code, .. } => drop(code.shape(config.head_dim).map_err(shape_error)?),
            Kind::Million { k, v, .. } => {
                k.shape(config.head_dim).and(v.shape(config.head_dim)).map_err(shape_error)?;
            }
            _ => {}
        }
        match self.exact_layers.iter().find(|&&l| l >= config.n_layers) {
            Some(l) => Err(Error::Argument(format!("exact-layers: layer {l} of {}", config.n_layers))),
            None => Ok(()),
        }
    }

    fn store(
        &self,
        geometry: Geometry,
        rope: &Arc<Rope>,
        l: usize,
        n_layers: usize,
        profile: &Profile,
    ) -> Result<Box<dyn Store>> {
        let head_dim = geometry.head_dim;
        let coded = |k: Arc<dyn BlockCodec>, v: Arc<dyn BlockCodec>, block: usize| -> Box<dyn Store> {
            Box::new(CodedStore::new(geometry, rope.clone(), [k, v], block))
        };
        let retrieval = |scorer: Scorer, ratio: f64| -> Box<dyn Store> {
            let reserved = self.window.sinks + self.window.recent;
            Box::new(RetrievalStore::new(geometry, self.exact, rope.clone(), scorer, ratio, reserved))
        };
        const BLOCK: usize = 64; // tokens that per-token codes decode at once
        Ok(match self.kind {
            Kind::Dense => Box::new(DenseStore::new(self.exact, geometry, rope.clone())),
            Kind::Uniform { k, v, group } => {
                coded(Arc::new(PerChannel { bits: k }), Arc::new(PerToken { bits: v, group }), group)
            }
            Kind::Rotated { k, v, group } => {
                let codec = |bits| Arc::new(Rotated(PerToken { bits, group }));
                coded(codec(k), codec(v), BLOCK)
            }
            Kind::LloydMax { k, v } => {
                let codec = |bits| Arc::new(LloydMax::new(bits, head_dim, SEED));
                coded(codec(k), codec(v), BLOCK)
            }
            Kind::Streaming => Box::new(StreamingStore::new(geometry)),
            Kind::Oracle { ratio } => retrieval(Scorer::Oracle, ratio),
            Kind::PqCache { ratio, code, iterations } => {
                let options = TrainOptions { iterations, seed: SEED };
                retrieval(Scorer::Pq { shape: code.shape(head_dim)?, options, heads: vec![] }, ratio)
            }
            Kind::Million { k, v, .. } => {
                let codebook = |code: PqCode, which, head| -> Result<_> {
                    let shape = code.shape(head_dim)?;
                    let centroids = profile.floats(&million_key(which, code, l, head))?;
                    pq_core::Codebook::new(shape, centroids).map_err(|e| Error::Profile(e.to_string()))?;
                    Ok((shape, centroids.to_vec()))
                };
                let heads = (0..geometry.n_kv_heads)
                    .map(|head| {
                        Ok(HeadCodebooks { keys: codebook(k, 'k', head)?, values: codebook(v, 'v', head)? })
                    })
                    .collect::<Result<Vec<_>>>()?;
                Box::new(MillionStore::new(geometry, rope.clone(), Arc::new(heads)))
            }
            Kind::CacheGen { k, v, predictor } => {
                let plane = |which, bin: f32| -> Result<PlaneProfile> {
                    let key = cachegen_key(which, predictor.bin(bin, l, n_layers), predictor, l);
                    let plane = PlaneProfile::from_bytes(profile.bytes(&key)?)
                        .map_err(|e| Error::Profile(e.to_string()))?;
                    if plane.channels() != geometry.kv_dim() {
                        let what =
                            format!("`{key}` has {} channels, not {}", plane.channels(), geometry.kv_dim());
                        return Err(Error::Profile(what));
                    }
                    Ok(plane)
                };
                let profiles = Arc::new([plane('k', k)?, plane('v', v)?]);
                Box::new(CacheGenStore::new(geometry, rope.clone(), profiles, self.exact))
            }
            Kind::Zack { .. } => {
                return Err(Error::Profile("ranks are planned over all layers at once".into()));
            }
        })
    }
}

impl PqCode {
    fn shape(self, head_dim: usize) -> std::result::Result<PqShape, pq_core::Error> {
        PqShape::new(head_dim, self.m, self.nbits)
    }
}

impl PredictorKind {
    /// The bins of layer `l`: with anchors 1, 2, 3 times by layer third (CacheGen, 5.1).
    fn bin(self, base: f32, l: usize, n_layers: usize) -> f32 {
        match self {
            Self::Mean => base,
            Self::Anchor => base * (1 + 3 * l / n_layers) as f32,
        }
    }

    fn predictor(self) -> Predictor {
        match self {
            Self::Mean => Predictor::Mean,
            Self::Anchor => Predictor::Anchor { group: 10 },
        }
    }
}

fn million_key(which: char, code: PqCode, l: usize, head: usize) -> String {
    format!("million/{code}/{which}/{l}/{head}/centroids")
}

fn calibrate_million(
    model: &Model,
    samples: &Calibration,
    k: PqCode,
    v: PqCode,
    iterations: usize,
    profile: &mut Profile,
) -> Result<()> {
    let geometry = Geometry::of(&model.config);
    let options = TrainOptions { iterations, seed: SEED };
    for (l, layer) in samples.layers.iter().enumerate() {
        for head in 0..geometry.n_kv_heads {
            for (which, code, rows) in [('k', k, &layer.rotated_keys), ('v', v, &layer.values)] {
                let trained =
                    train(code.shape(geometry.head_dim)?, &geometry.head_rows(head, rows), &options)?;
                profile.put_floats(million_key(which, code, l, head), trained.centroids);
            }
        }
    }
    Ok(())
}

fn cachegen_key(which: char, bin: f32, predictor: PredictorKind, l: usize) -> String {
    format!("cachegen/{predictor}-{bin}/{which}/{l}/plane")
}

fn calibrate_cachegen(
    model: &Model,
    samples: &Calibration,
    k: f32,
    v: f32,
    predictor: PredictorKind,
    profile: &mut Profile,
) -> Result<()> {
    let n_layers = samples.layers.len();
    let fit = |(l, layer): (usize, &LayerSamples)| {
        [('k', k, &layer.keys), ('v', v, &layer.values)].map(|(which, bin, rows)| -> Result<_> {
            let bin = predictor.bin(bin, l, n_layers);
            let plane = PlaneProfile::fit(rows, model.config.kv_dim(), predictor.predictor(), bin)?;
            Ok((cachegen_key(which, bin, predictor, l), plane.to_bytes()))
        })
    };
    let planes: Vec<_> = samples.layers.par_iter().enumerate().flat_map_iter(fit).collect::<Result<_>>()?;
    planes.into_iter().for_each(|(key, bytes)| profile.put_bytes(key, bytes));
    Ok(())
}

fn zack_key(basis: Basis, which: char, l: usize, head: usize, part: &str) -> String {
    format!("zack/{basis}/{which}/{l}/{head}/{part}")
}

fn calibrate_zack(model: &Model, samples: &Calibration, basis: Basis, profile: &mut Profile) -> Result<()> {
    let geometry = Geometry::of(&model.config);
    let rotate = |stored: &Gram, probes: &Gram| match basis {
        Basis::Closed => Rotation::score_optimal(stored, probes),
        Basis::Stacked => Rotation::stacked(stored, probes),
    };
    let heads: Vec<(usize, usize)> =
        (0..samples.layers.len()).flat_map(|l| (0..geometry.n_kv_heads).map(move |head| (l, head))).collect();
    let rotations = heads.par_iter().map(|&(l, head)| -> Result<_> {
        let layer = &samples.layers[l];
        let keys = rotate(&layer.key_grams[head], &layer.query_grams[head])?;
        let mut values = Gram::new(geometry.head_dim)?;
        values.add_rows(&geometry.head_rows(head, &layer.values))?;
        Ok([keys, rotate(&values, &output_gram(model, l, head)?)?])
    });
    for ((l, head), rotations) in heads.iter().zip(rotations.collect::<Result<Vec<_>>>()?) {
        for (which, rotation) in ['k', 'v'].into_iter().zip(rotations) {
            let sigma = rotation.sigma().iter().map(|&x| x as f32).collect();
            let parts = [
                ("store", rotation.store().to_vec()),
                ("probe", rotation.probe().to_vec()),
                ("sigma", sigma),
            ];
            for (part, values) in parts {
                profile.put_floats(zack_key(basis, which, *l, *head, part), values);
            }
        }
    }
    Ok(())
}

/// Second moment of the rows of `W_O` that read a head's values, over its group of query heads.
fn output_gram(model: &Model, l: usize, head: usize) -> Result<Gram> {
    let config = &model.config;
    let group = config.gqa_group() * config.head_dim;
    let mut gram = Gram::new(config.head_dim)?;
    for row in model.layers[l].attention.o.weight.chunks_exact(config.q_dim()) {
        gram.add_rows(&row[head * group..][..group])?;
    }
    Ok(gram)
}

/// Rotations and ranks of all heads.
struct ZackPlan {
    heads: Vec<Arc<Vec<HeadRotation>>>, // per layer
    values: Vec<Vec<Rotation>>,         // (n_layers, n_kv_heads)
}

impl ZackPlan {
    /// Reads the rotations and cuts them so that the parts `keep_k` and `keep_v` of all dimensions stay; one removal rate
    /// for all heads (ZACK 5.2).
    fn read(config: &Config, profile: &Profile, keep_k: f64, keep_v: f64, basis: Basis) -> Result<Self> {
        let read = |which: char| -> Result<Vec<Vec<Rotation>>> {
            (0..config.n_layers)
                .map(|l| {
                    (0..config.n_kv_heads)
                        .map(|head| read_rotation(config, profile, basis, which, l, head))
                        .collect()
                })
                .collect()
        };
        let (keys, values) = (read('k')?, read('v')?);
        let (key_removal, value_removal) = (removal(&keys, keep_k)?, removal(&values, keep_v)?);
        let heads = keys
            .into_iter()
            .zip(&values)
            .map(|(keys, values)| {
                let heads = keys.into_iter().zip(values).map(|(keys, values)| {
                    let key_rank = rank_for_removal(keys.sigma(), key_removal)?;
                    let value_rank = rank_for_removal(values.sigma(), value_removal)?;
                    Ok(HeadRotation { keys, key_rank, value_rank })
                });
                Ok(Arc::new(heads.collect::<Result<_>>()?))
            })
            .collect::<Result<_>>()?;
        Ok(Self { heads, values })
    }
}

fn removal(rotations: &[Vec<Rotation>], keep: f64) -> Result<f64> {
    let sigmas: Vec<&[f64]> = rotations.iter().flatten().map(Rotation::sigma).collect();
    Ok(removal_for_keep(&sigmas, keep)?)
}

fn read_rotation(
    config: &Config,
    profile: &Profile,
    basis: Basis,
    which: char,
    l: usize,
    head: usize,
) -> Result<Rotation> {
    let part = |part| profile.floats(&zack_key(basis, which, l, head, part)).map(<[f32]>::to_vec);
    let sigma: Vec<f64> = part("sigma")?.into_iter().map(f64::from).collect();
    let rotation = Rotation::from_parts(part("store")?, part("probe")?, sigma)
        .map_err(|e| Error::Profile(e.to_string()))?;
    if rotation.dim() != config.head_dim {
        return Err(Error::Profile(format!(
            "a rotation of {} dimensions for heads of {}",
            rotation.dim(),
            config.head_dim
        )));
    }
    Ok(rotation)
}
