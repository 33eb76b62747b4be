//! The methods by name: `name[:key=value]...`, for example `million:k=64x8:v=32x8:window=128`.
//!
//! One method, one file: its settings, its calibration, its store. A new one needs a line in `registry.rs`.

mod auto;
mod budget;
mod cachegen;
mod dense;
mod evicting;
mod floats;
#[cfg(feature = "cuda")]
mod fold_values;
mod h2o;
mod hybrid;
mod infllm;
mod kind;
mod kvquant;
mod million;
mod offload;
#[cfg(feature = "cuda")]
mod on_device;
mod paged;
mod pq_code;
mod pqcache;
mod pqklt;
mod quest;
mod registry;
mod retrieval;
mod retroinfer;
mod scalar;
mod settings;
mod snapkv;
mod sparq;
mod spelling;
mod sq;
mod streaming;
mod zack;

use std::sync::Arc;

use half::{bf16, f16};
use kv_attend::{Element, ElementType};
use kv_llama::KvCache;
use kv_model::{Config, Model, Rope};
use pq_core::Window;

use crate::cache::{Geometry, Store, WindowedCache};
use crate::calibrate::Calibration;
use crate::{Error, Profile, Result};
use kind::{BuildContext, Kind, LOSSLESS};
#[cfg(feature = "cuda")]
pub use registry::device_help;
pub use registry::{DEFAULT_METHODS, method_examples, methods_help};
use serde::Serialize;
use settings::Layers;

/// Where a method runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The CPU.
    Cpu,
    /// A GPU.
    Cuda,
}

/// A method with its setting.
#[derive(Clone, Debug)]
pub struct Method {
    /// Its name, as on the command line.
    pub name: &'static str,
    /// Its setting in a form that parses again, without common settings that were not given. Codes that scale
    /// with the head are those of 128 components until [`Self::fitted`] to a model.
    pub setting: String,
    given: String, // the parsed text
    place: Place,  // which the defaults are for
    kind: Arc<dyn Kind>,
    window: Window,
    exact: ElementType,
    exact_layers: Vec<usize>,
}

/// The setting determines the method.
impl PartialEq for Method {
    fn eq(&self, other: &Self) -> bool {
        (self.name, &self.setting) == (other.name, &other.setting)
    }
}

/// An empty cache, and the model to fill it with: the given one, or one with folded weights.
pub struct Prepared {
    /// The model to run.
    pub model: Arc<Model>,
    /// An empty cache.
    pub cache: Box<dyn KvCache>,
}

impl Method {
    /// Parses methods separated by commas.
    ///
    /// # Errors
    /// [`Error::Argument`] naming the method and what is wrong with it.
    pub fn parse_list(list: &str) -> Result<Vec<Self>> {
        if list.trim().is_empty() {
            return Err(Error::argument("no method is named: `kv methods` lists them"));
        }
        list.split(',').map(|spec| spec.trim().parse()).collect()
    }

    /// Its name and setting in a form that parses again.
    #[must_use]
    pub fn spec(&self) -> String {
        if self.setting.is_empty() { self.name.to_owned() } else { format!("{}:{}", self.name, self.setting) }
    }

    /// The same method for a model: codes that were left at their default, or given by rate, keep the bits
    /// per component of 128-component heads.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model.
    pub fn fitted(&self, config: &Config) -> Result<Self> {
        let fitted = Self::parse(&self.given, config.head_dim, self.place)?;
        fitted.check(config)?;
        Ok(fitted)
    }

    /// Where it runs: on the CPU, unless it has been fitted to a device.
    #[must_use]
    pub const fn place(&self) -> Place {
        self.place
    }

    /// Whether it needs a profile.
    #[must_use]
    pub fn needs_profile(&self) -> bool {
        self.kind.needs_profile()
    }

    /// Adds the method's entries to `profile`, computed from samples of the model, unless it holds them:
    /// those of settings that differ in a run alone, such as the window, are the same.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model; errors of the cores.
    pub fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        let config = &samples.model.config;
        let fitted = self.fitted(config)?;
        if !fitted.needs_profile() || fitted.read(config, profile, &[]).is_ok() {
            return Ok(());
        }
        fitted.kind.calibrate(samples, profile)
    }

    /// Reads the entries of all but the exact layers, for a method that fits the model.
    fn read(&self, config: &Config, profile: &Profile, exact_layers: &[usize]) -> Result<()> {
        let rope = Arc::new(Rope::new(config, 1)); // entries do not depend on its length
        let context = self.context(config, &rope, profile);
        self.kind.stores(&BuildContext { exact_layers, ..context }).map(drop)
    }

    /// An empty cache for `model`, with positions from `rope`.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model, [`Error::Profile`] when the profile lacks
    /// an entry or has an invalid one.
    pub fn prepare(&self, model: &Arc<Model>, rope: &Arc<Rope>, profile: &Profile) -> Result<Prepared> {
        let config = &model.config;
        let fitted = self.fitted(config)?;
        let stores = fitted.kind.stores(&fitted.context(config, rope, profile)).map_err(|e| self.named(e))?;
        let model = self.folded(model, profile)?;
        let cache: Box<dyn KvCache> = match self.exact {
            ElementType::F32 => Box::new(self.windowed::<f32>(config, rope, stores)),
            ElementType::F16 => Box::new(self.windowed::<f16>(config, rope, stores)),
            ElementType::Bf16 => Box::new(self.windowed::<bf16>(config, rope, stores)),
        };
        Ok(Prepared { model, cache })
    }

    fn windowed<E: Element>(
        &self,
        config: &Config,
        rope: &Arc<Rope>,
        stores: Vec<Box<dyn Store>>,
    ) -> WindowedCache<E> {
        WindowedCache::new(self.name, config, self.window, rope, stores)
    }

    /// Whether it runs on the CPU with other weights than the model's ([`Self::folded`]).
    #[must_use]
    pub fn changes_weights(&self) -> bool {
        self.kind.folds()
    }

    /// Whether its cache watches all queries ([`KvCache::watches_all`]).
    #[must_use]
    pub fn watches_all(&self) -> bool {
        self.kind.watches_all()
    }

    /// The model for the method: with its rotations folded into the weights, if it has any, else unchanged.
    ///
    /// # Errors
    /// [`Error::Profile`] when the profile lacks an entry or has an invalid one.
    pub fn folded(&self, model: &Arc<Model>, profile: &Profile) -> Result<Arc<Model>> {
        let folded = self.kind.fold(model, profile).map_err(|e| self.named(e))?;
        Ok(folded.map_or_else(|| model.clone(), Arc::new))
    }

    /// The codec's planes of a `cachegen` method.
    ///
    /// # Errors
    /// [`Error::Argument`] for another method; [`Error::Profile`] when the profile lacks the planes or holds
    /// wrong ones.
    pub fn codec_planes(&self, config: &Config, profile: &Profile) -> Result<codec_core::Profile> {
        let none = || Err(Error::Argument(format!("method {} has no bitstream", self.name)));
        self.kind.planes(config, profile).unwrap_or_else(none).map_err(|e| self.named(e))
    }

    /// Whether its store is a bitstream.
    #[must_use]
    pub fn has_bitstream(&self) -> bool {
        self.kind.coarseness().is_some()
    }

    /// Whether it is a bitstream whose settings make it lossier than `other`.
    #[must_use]
    pub fn is_lossier_than(&self, other: &Self) -> bool {
        let (Some((name, own)), Some((other_name, other))) =
            (self.kind.coarseness(), other.kind.coarseness())
        else {
            return false;
        };
        if name != other_name {
            return other_name == LOSSLESS;
        }
        own != other && own.keys >= other.keys && own.values >= other.values
    }

    /// Rejects settings without effect on the CPU.
    ///
    /// # Errors
    /// [`Error::Argument`].
    pub fn check_on_cpu(&self) -> Result<()> {
        match self.kind.device_setting() {
            Some(setting) => Err(Error::Argument(format!(
                "method {}: `{setting}` has no effect on the CPU, where it runs here",
                self.name
            ))),
            None => Ok(()),
        }
    }

    /// Names the method in an error about a missing profile entry, since entries have internal names.
    fn named(&self, e: Error) -> Error {
        match e {
            Error::MissingEntry(_) => missing(&[self], std::slice::from_ref(self)),
            e => e,
        }
    }

    /// [`Self::codec_planes`] of several methods.
    ///
    /// # Errors
    /// As there; [`Error::Profile`] names all methods of which the profile lacks the planes, and the command
    /// that makes a profile for the whole list.
    pub fn planes_of(
        methods: &[Self],
        config: &Config,
        profile: &Profile,
    ) -> Result<Vec<codec_core::Profile>> {
        let planes = |method: &Self| method.kind.planes(config, profile);
        let lacks = |method: &&Self| matches!(planes(method), Some(Err(Error::MissingEntry(_))));
        let lacking: Vec<&Self> = methods.iter().filter(lacks).collect();
        match lacking.is_empty() {
            true => methods.iter().map(|method| method.codec_planes(config, profile)).collect(),
            false => Err(missing(&lacking, methods)),
        }
    }

    /// Rejects a profile that lacks entries of any of `methods`, which fit the model. Whether entries are
    /// right is seen when a method is prepared: those of another model, which only its weights tell, may be
    /// wrong.
    ///
    /// # Errors
    /// [`Error::Profile`], naming all of these methods and the command that makes a profile for the whole
    /// list.
    pub fn check_profile(methods: &[Self], config: &Config, profile: &Profile) -> Result<()> {
        let read = |method: &Self| method.read(config, profile, &method.exact_layers);
        let lacks = |method: &&Self| matches!(read(method), Err(Error::MissingEntry(_)));
        let lacking: Vec<&Self> =
            methods.iter().filter(|method| method.needs_profile()).filter(lacks).collect();
        if lacking.is_empty() { Ok(()) } else { Err(missing(&lacking, methods)) }
    }

    /// The context for building the method's stores; the method fits the model.
    fn context<'a>(
        &'a self,
        config: &'a Config,
        rope: &'a Arc<Rope>,
        profile: &'a Profile,
    ) -> BuildContext<'a> {
        BuildContext {
            config,
            geometry: Geometry::of(config),
            model_rope: rope,
            profile,
            exact: self.exact,
            recent: self.window.recent,
            reserved: self.window.sinks + self.window.recent,
            exact_layers: &self.exact_layers,
        }
    }

    /// Whether this many tokens all stay in its sinks and window, so that none is compressed.
    #[must_use]
    pub fn keeps_exact(&self, tokens: usize) -> bool {
        let Window { sinks, .. } = self.window;
        self.kind.dense().is_none() && self.window.to_evict(tokens.saturating_sub(sinks)) == 0
    }

    fn check(&self, config: &Config) -> Result<()> {
        config.clone().validated().map_err(Error::Argument)?;
        self.kind.check(config)?;
        match self.exact_layers.iter().find(|&&l| l >= config.n_layers) {
            Some(l) => Err(Error::Argument(format!(
                "method {}: exact-layers={}: layer {l} is none of the model's, 0 to {}",
                self.name,
                Layers(self.exact_layers.clone()),
                config.n_layers - 1
            ))),
            None => Ok(()),
        }
    }
}

/// The error for a profile that lacks entries of some of a run's methods.
fn missing(lacking: &[&Method], methods: &[Method]) -> Error {
    let specs = |methods: &mut dyn Iterator<Item = &Method>, separator: &str, quote: &str| {
        let specs: Vec<String> = methods.map(|method| format!("{quote}{}{quote}", method.spec())).collect();
        specs.join(separator)
    };
    let lacking = specs(&mut lacking.iter().copied(), ", ", "`");
    let all = specs(&mut methods.iter().filter(|method| method.needs_profile()), ",", "");
    Error::Profile(format!(
        "holds nothing for {lacking}: run `kv calibrate NEW-FILE --methods {all}`, with the same --model, and \
         pass --profile NEW-FILE"
    ))
}
