//! From a method's setting to what it needs of a profile, and to a cache.

use std::sync::Arc;

use codec_core::PlaneBuf;
use pq_core::PqShape;

use super::fold::fold_values;
use super::zack::ZackPlan;
use super::{Kind, Method, PqCode, Zack, zack};
use crate::cache::{
    BlockCodec, CacheGenStore, CodedStore, DenseStore, EvictingStore, Geometry, HeadCut, KvCache, LloydMax,
    MillionStore, PerChannel, PerToken, RetrievalStore, Rotated, RotatedStore, Scorer, Store, StreamingStore,
    TransformedStore, WindowedCache, ZackStore,
};
use crate::calibrate::Calibration;
use crate::model::{Config, Model, Rope};
use crate::{Error, Profile, Result};

/// Everything random here starts from it.
pub(super) const SEED: u64 = 0x6b76;

/// Tokens that per-token codes decode at once.
const BLOCK: usize = 64;

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
        matches!(self.kind, Kind::Million(_) | Kind::PqKlt(_) | Kind::Zack(_) | Kind::CacheGen(_))
    }

    /// Adds to `profile` what the method needs, made from samples of the model.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model; errors of the cores.
    pub fn calibrate(
        &self,
        model: &Model,
        rope: &Rope,
        samples: &Calibration,
        profile: &mut Profile,
    ) -> Result<()> {
        self.check(&model.config)?;
        match self.kind {
            Kind::Million(ref setting) => setting.calibrate(model, samples, profile),
            Kind::PqKlt(ref setting) => setting.calibrate(model, rope, samples, profile),
            Kind::Zack(ref setting) => zack::calibrate(model, samples, setting.basis, profile),
            Kind::CacheGen(ref setting) => setting.calibrate(model, samples, profile),
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
        let zack = match self.kind {
            Kind::Zack(ref setting) => Some(ZackPlan::read(config, profile, setting)?),
            _ => None,
        };
        let site = Site { config, geometry: Geometry::of(config), rope, profile, zack: zack.as_ref() };
        let stores = (0..config.n_layers).map(|l| self.store(&site, l)).collect::<Result<_>>()?;
        let cache =
            WindowedCache::new(self.name, site.geometry, self.window, self.exact, rope.clone(), stores);
        let model = match &zack {
            Some(plan) => Arc::new(fold_values(model, &plan.values)?),
            None => model.clone(),
        };
        Ok(Prepared { model, cache: Box::new(cache) })
    }

    /// The codec's planes of a `cachegen` method: keys, then values, of every layer.
    ///
    /// # Errors
    /// [`Error::Argument`] for another method; [`Error::Profile`] when the profile lacks a plane or holds a wrong one.
    pub fn codec_planes(&self, config: &Config, profile: &Profile) -> Result<Vec<PlaneBuf>> {
        let Kind::CacheGen(ref setting) = self.kind else {
            return Err(Error::Argument(format!("method {} has no bitstream", self.name)));
        };
        let geometry = Geometry::of(config);
        let layers = (0..config.n_layers).map(|l| setting.planes(profile, geometry, l));
        Ok(layers.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    fn check(&self, config: &Config) -> Result<()> {
        config.clone().validated().map_err(Error::Argument)?;
        let shape = |code: PqCode| {
            let checked = code.shape(config.head_dim);
            checked.map_err(|e| Error::Argument(format!("method {}: {e}", self.name)))
        };
        match self.kind {
            Kind::PqCache { code, .. } => drop(shape(code)?),
            Kind::Million(ref setting) => drop((shape(setting.k)?, shape(setting.v)?)),
            Kind::PqKlt(ref setting) => drop((shape(setting.k)?, shape(setting.v)?)),
            _ => {}
        }
        match self.exact_layers.iter().find(|&&l| l >= config.n_layers) {
            Some(l) => Err(Error::Argument(format!("exact-layers: layer {l} of {}", config.n_layers))),
            None => Ok(()),
        }
    }

    /// What layer `l` keeps between sinks and window.
    fn store(&self, site: &Site<'_>, l: usize) -> Result<Box<dyn Store>> {
        let &Site { config, geometry, rope, profile, zack } = site;
        let head_dim = geometry.head_dim;
        let dense = || Box::new(DenseStore::new(self.exact, geometry, rope.clone()));
        let coded = |k: Arc<dyn BlockCodec>, v: Arc<dyn BlockCodec>, block: usize| {
            Box::new(CodedStore::new(geometry, rope.clone(), None, [k, v], block))
        };
        let retrieval = |scorer: Scorer, ratio: f64| {
            let reserved = self.window.sinks + self.window.recent;
            Box::new(RetrievalStore::new(geometry, self.exact, rope.clone(), scorer, ratio, reserved))
        };
        if self.exact_layers.contains(&l) {
            return Ok(dense());
        }
        Ok(match self.kind {
            Kind::Dense => dense(),
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
                let shape = code.shape(head_dim)?;
                retrieval(Scorer::Pq { shape, iterations, seed: SEED, heads: vec![] }, ratio)
            }
            Kind::Million(ref setting) => {
                let codebooks = Arc::new(setting.codebooks(profile, geometry, l)?);
                Box::new(MillionStore::new(geometry, rope.clone(), codebooks, setting.outliers))
            }
            Kind::PqKlt(ref setting) => {
                let plan = setting.plan(config, profile, l)?;
                Box::new(TransformedStore::new(geometry, rope.clone(), Arc::new(plan)))
            }
            Kind::SnapKv { tokens } => {
                boxed(site, DenseStore::new(self.exact, geometry, rope.clone()), tokens)
            }
            Kind::Zack(ref setting) => match zack {
                Some(plan) => self.zack_store(site, setting, plan.heads[l].clone()),
                None => dense(),
            },
            Kind::CacheGen(ref setting) => {
                let planes = setting.planes(profile, geometry, l)?;
                Box::new(CacheGenStore::new(geometry, rope.clone(), Arc::new(planes), self.exact))
            }
        })
    }

    /// ZACK's rows or codes of a layer, behind the eviction if tokens are evicted.
    fn zack_store(&self, site: &Site<'_>, setting: &Zack, heads: Arc<Vec<HeadCut>>) -> Box<dyn Store> {
        let &Site { geometry, rope, .. } = site;
        match setting.bits {
            Some(bits) => {
                let codecs: [Arc<dyn BlockCodec>; 2] =
                    [Arc::new(PerChannel { bits }), Arc::new(PerToken { bits, group: BLOCK })];
                let store = CodedStore::new(geometry, rope.clone(), Some(heads), codecs, BLOCK);
                boxed(site, store, setting.tokens)
            }
            None => {
                let store = ZackStore::new(geometry, rope.clone(), heads, self.exact);
                boxed(site, store, setting.tokens)
            }
        }
    }
}

/// A store, behind the eviction of all but this part of the prompt's tokens.
fn boxed<S: RotatedStore + Clone + 'static>(site: &Site<'_>, store: S, tokens: f64) -> Box<dyn Store> {
    if tokens < 1.0 {
        Box::new(EvictingStore::new(store, site.geometry, site.rope.clone(), tokens))
    } else {
        Box::new(store)
    }
}

/// Where stores are built.
struct Site<'a> {
    config: &'a Config,
    geometry: Geometry,
    rope: &'a Arc<Rope>,
    profile: &'a Profile,
    zack: Option<&'a ZackPlan>, // ranks are planned over all layers at once
}

impl PqCode {
    /// The quantizer of heads of `head_dim` components.
    pub(super) fn shape(self, head_dim: usize) -> std::result::Result<PqShape, pq_core::Error> {
        PqShape::new(head_dim, self.m, self.nbits)
    }
}
