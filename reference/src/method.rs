//! The methods by name: `name[:key=value]...`, for example `million:k=64x8:v=32x8:window=128`.
//!
//! One method, one file: its settings, its calibration, its store. A new one needs a line in the registry.

mod budget;
mod cachegen;
pub mod cost;
mod cut;
mod dense;
#[cfg(feature = "cuda")]
mod head_maps;
mod hybrid;
mod kind;
mod million;
mod offload;
mod pq_code;
mod pqklt;
mod retrieval;
mod retroinfer;
mod scalar;
mod settings;
mod snapkv;
mod sparq;
mod streaming;
mod zack;

use std::str::FromStr;
use std::sync::Arc;

#[cfg(feature = "cuda")]
use pq_core::CodebookBuf;
use pq_core::{PqShape, Window};

use crate::cache::{ElementType, Geometry, KvCache, WindowedCache};
use crate::calibrate::Calibration;
use crate::model::{Config, Model, Rope};
#[cfg(feature = "cuda")]
use crate::side::Pair;
use crate::{Error, Profile, Result};
#[cfg(feature = "cuda")]
pub(crate) use budget::Budget;
#[cfg(feature = "cuda")]
pub(crate) use head_maps::HeadMaps;
#[cfg(feature = "cuda")]
pub(crate) use hybrid::HybridPlan;
#[cfg(feature = "cuda")]
use kind::CutHead;
#[cfg(feature = "cuda")]
pub(crate) use kind::{Bitstream, DeviceCodes, DeviceCuts, Retrieval};
use kind::{Entry, Kind, Site};
#[cfg(feature = "cuda")]
pub(crate) use offload::RowHome;
#[cfg(feature = "cuda")]
pub(crate) use pqklt::TransformedHead;
#[cfg(feature = "cuda")]
pub(crate) use retrieval::training_step;
use settings::{Layers, Settings};

/// All methods, in the order of the help text.
const REGISTRY: &[Entry] = &[
    dense::DENSE,
    scalar::UNIFORM,
    scalar::ROTATED,
    scalar::LLOYD_MAX,
    streaming::STREAMING,
    retrieval::ORACLE,
    retrieval::PQ_CACHE,
    sparq::SPARQ,
    retroinfer::RETRO_INFER,
    million::MILLION,
    pqklt::PQ_KLT,
    hybrid::HYBRID,
    snapkv::SNAP_KV,
    zack::ZACK,
    cachegen::CACHE_GEN,
];

/// A method with its setting.
#[derive(Clone, Debug)]
pub struct Method {
    /// Its name, as on the command line.
    pub name: &'static str,
    /// Its setting in the form that parses again, without the common settings that were not given. Codes that
    /// scale with the head are those of 128 components until [`Self::fitted`] to a model.
    pub setting: String,
    given: String, // from which it was parsed
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

/// A cache that is ready to be filled, and the model that fills it: the given one, or one with folded
/// weights.
pub struct Prepared {
    /// The model to run.
    pub model: Arc<Model>,
    /// An empty cache.
    pub cache: Box<dyn KvCache>,
}

/// Every method with its settings and their defaults, for the help text.
#[must_use]
pub fn methods_help() -> String {
    // The lines of the registry lose the indentation of their first one.
    let methods: String = REGISTRY.iter().map(|entry| format!("  {}", entry.help)).collect();
    format!(
        "A method is NAME[:KEY=VALUE]...; several are separated by commas.\n\n{methods}\n\
For all but dense: sinks=4 window=64 (tokens kept exact), batch=N (tokens that leave the window at once: 64 for int,
cachegen and zack's codes, else 1), exact=f16|bf16|f32 (how), exact-layers=0+5 (layers left uncompressed).
A PQ code is SUBSPACESxBITS, or BITS/COMPONENTS for any head: 8/2 is 64x8 for 128 components, and the
default scales so."
    )
}

/// The methods of `kv compare` by default: each near-lossless and aggressive.
pub const DEFAULT_METHODS: &str = "dense,dense:dtype=f16,int8,int4,int2,rotated,rotated:k=2:v=2,\
lloydmax,lloydmax:k=2:v=2,streaming:window=1280,streaming:window=128,oracle:ratio=0.2,oracle:ratio=0.1,\
pqcache:ratio=0.2,pqcache:ratio=0.1:code=6/64,million,million:k=8/4:v=8/4,pqklt:k=6/2:v=6/2,pqklt:k=4/2:v=4/2,\
hybrid,hybrid:rows=auto,zack,zack:k=0.5:v=0.5,zack:k=0.75:v=0.75:bits=4,cachegen,cachegen:bits=2,cachegen:mode=paper";

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

    /// Its name and setting in the form that parses again.
    #[must_use]
    pub fn spec(&self) -> String {
        if self.setting.is_empty() { self.name.to_owned() } else { format!("{}:{}", self.name, self.setting) }
    }

    /// The same method for a model: codes that were not given, or by their rate, have as many bits for a
    /// component as with heads of 128 components.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model.
    pub fn fitted(&self, config: &Config) -> Result<Self> {
        let fitted = Self::parse(&self.given, config.head_dim)?;
        fitted.check(config)?;
        Ok(fitted)
    }

    /// Whether it needs a profile.
    #[must_use]
    pub fn needs_profile(&self) -> bool {
        self.kind.needs_profile()
    }

    /// Adds the method's entries to `profile`, made from samples of the model.
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
        self.fitted(&model.config)?.kind.calibrate(model, rope, samples, profile)
    }

    /// An empty cache for `model`, with positions from `rope`.
    ///
    /// # Errors
    /// [`Error::Argument`] when the setting does not fit the model, [`Error::Profile`] when the profile lacks
    /// an entry or holds a wrong one.
    pub fn prepare(&self, model: &Arc<Model>, rope: &Arc<Rope>, profile: &Profile) -> Result<Prepared> {
        let config = &model.config;
        let fitted = self.fitted(config)?;
        let stores = fitted.kind.stores(&fitted.site(config, rope, profile)).map_err(|e| self.named(e))?;
        let cache = WindowedCache::new(self.name, config, self.window, self.exact, rope, stores);
        Ok(Prepared { model: self.folded(model, profile)?, cache: Box::new(cache) })
    }

    /// The model that the method runs: one with its rotations folded into the weights, if it has any, else
    /// the same one.
    ///
    /// # Errors
    /// [`Error::Profile`] when the profile lacks an entry or holds a wrong one.
    pub fn folded(&self, model: &Arc<Model>, profile: &Profile) -> Result<Arc<Model>> {
        let folded = self.kind.fold(model, profile).map_err(|e| self.named(e))?;
        Ok(folded.map_or_else(|| model.clone(), Arc::new))
    }

    /// The model that the method runs on a device, which may have more folded into its weights.
    ///
    /// # Errors
    /// [`Error::Profile`] when the profile lacks an entry or holds a wrong one.
    #[cfg(feature = "cuda")]
    pub fn device_model(&self, model: &Arc<Model>, profile: &Profile) -> Result<Arc<Model>> {
        let method = self.fitted(&model.config)?;
        let folded = method.kind.device_fold(model, profile).map_err(|e| self.named(e))?;
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

    /// Whether it is a bitstream that is lossier than that of `other`, as far as their settings say.
    #[must_use]
    pub fn is_lossier_than(&self, other: &Self) -> bool {
        let (Some((name, own)), Some((other_name, other))) =
            (self.kind.coarseness(), other.kind.coarseness())
        else {
            return false;
        };
        name == other_name && own != other && own.keys >= other.keys && own.values >= other.values
    }

    /// The product quantizer that a method trains on the prompt.
    ///
    /// # Errors
    /// [`Error::Argument`] for another method.
    pub fn prompt_quantizer(&self, config: &Config) -> Result<PqShape> {
        let none = || Err(Error::Argument(format!("method {} trains nothing on the prompt", self.name)));
        self.fitted(config)?.kind.prompt_quantizer(Geometry::of(config)).unwrap_or_else(none)
    }

    /// Refuses a setting that has no effect on the CPU.
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

    /// Names the method in an error about an entry that a profile lacks: entries have internal names.
    fn named(&self, e: Error) -> Error {
        match e {
            Error::MissingEntry(_) => missing(&[self], std::slice::from_ref(self)),
            e => e,
        }
    }

    /// Refuses a profile that lacks entries of any of `methods`, which fit the model.
    ///
    /// # Errors
    /// [`Error::Profile`], naming all of these methods and the command that makes a profile for the whole list.
    pub fn check_profile(methods: &[Self], model: &Model, rope: &Arc<Rope>, profile: &Profile) -> Result<()> {
        let lacks = |method: &&Self| {
            let stores = method.kind.stores(&method.site(&model.config, rope, profile));
            matches!(stores, Err(Error::MissingEntry(_)))
        };
        let lacking: Vec<&Self> =
            methods.iter().filter(|method| method.needs_profile()).filter(lacks).collect();
        if lacking.is_empty() { Ok(()) } else { Err(missing(&lacking, methods)) }
    }

    /// What the stores of the method, which fits the model, are made from.
    fn site<'a>(&'a self, config: &'a Config, rope: &'a Arc<Rope>, profile: &'a Profile) -> Site<'a> {
        Site {
            config,
            geometry: Geometry::of(config),
            model_rope: rope,
            profile,
            exact: self.exact,
            reserved: self.window.sinks + self.window.recent,
            exact_layers: &self.exact_layers,
        }
    }

    /// Whether it keeps every token exact.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_dense(&self) -> bool {
        self.kind.dense().is_some()
    }

    /// The element type of the model and of exact rows on a device: that of the rows that the method keeps
    /// exact.
    ///
    /// # Errors
    /// [`Error::Argument`] for 32 bits.
    #[cfg(feature = "cuda")]
    pub fn device_element(&self) -> Result<kv_gpu::Element> {
        match self.exact {
            ElementType::F16 => Ok(kv_gpu::Element::F16),
            ElementType::Bf16 => Ok(kv_gpu::Element::Bf16),
            ElementType::F32 => Err(Error::Argument(format!(
                "{} keeps rows in 32 bits, and the device has 16: pass dtype or exact as f16 or bf16, or --device cpu",
                self.spec()
            ))),
        }
    }

    /// Whether so many tokens are all in its sinks and window, so that none of them is compressed.
    #[must_use]
    pub fn keeps_exact(&self, tokens: usize) -> bool {
        self.kind.dense().is_none() && tokens <= self.window.sinks + self.window.recent
    }

    /// The tokens that stay exact.
    #[cfg(feature = "cuda")]
    pub(crate) const fn window(&self) -> Window {
        self.window
    }

    /// The codes of a method that attends to them on a device; none for another one.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_codes(&self, config: &Config) -> Result<Option<DeviceCodes>> {
        let codes = self.kind.device_codes(Geometry::of(config)).filter(|_| self.exact_layers.is_empty());
        codes.transpose().map_err(|e| self.named(e))
    }

    /// The codebooks of every layer and head of a method with [`Self::device_codes`] of rows as they are.
    #[cfg(feature = "cuda")]
    pub(crate) fn codebooks(
        &self,
        config: &Config,
        profile: &Profile,
    ) -> Result<Vec<Vec<Pair<CodebookBuf>>>> {
        let codebooks = |l| self.kind.codebooks(Geometry::of(config), l, profile);
        (0..config.n_layers).filter_map(codebooks).collect()
    }

    /// Whether a device has it as uniform codes of 4 bits.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_device_int4(&self) -> bool {
        self.kind.is_device_int4() && self.exact_layers.is_empty()
    }

    /// What a device needs of a method whose store is a bitstream; none for another one.
    ///
    /// # Errors
    /// [`Error::Argument`] for a bitstream that a device does not encode.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_bitstream(&self) -> Result<Option<Bitstream>> {
        self.kind.device_bitstream().filter(|_| self.exact_layers.is_empty()).transpose()
    }

    /// The codec's planes of every layer of a method with [`Self::device_bitstream`].
    #[cfg(feature = "cuda")]
    pub(crate) fn layer_planes(
        &self,
        config: &Config,
        profile: &Profile,
    ) -> Result<Vec<Pair<codec_core::PlaneBuf>>> {
        let planes = self.codec_planes(config, profile)?;
        let layer = |l| Pair::try_of(|side| Ok(planes.plane(0, l, side.into())?.clone()));
        (0..config.n_layers).map(layer).collect()
    }

    /// What a device needs of a method that attends to rows of reduced rank; none for another one.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_cuts(&self) -> Option<DeviceCuts> {
        self.kind.device_cuts().filter(|_| self.exact_layers.is_empty())
    }

    /// The rotations and ranks of every layer and head of a method with [`Self::device_cuts`].
    #[cfg(feature = "cuda")]
    pub(crate) fn cut_heads(&self, config: &Config, profile: &Profile) -> Result<Vec<Vec<CutHead>>> {
        let none = || Err(Error::Argument(format!("method {} cuts no rows", self.name)));
        self.kind.cut_heads(config, profile).unwrap_or_else(none).map_err(|e| self.named(e))
    }

    /// What a device needs of hybrid attention; none for another method.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_hybrid(&self, config: &Config) -> Result<Option<HybridPlan>> {
        let plan = self.kind.device_hybrid(Geometry::of(config)).filter(|_| self.exact_layers.is_empty());
        plan.transpose().map_err(|e| self.named(e))
    }

    /// The codes of every layer and head of a method whose codes are of transformed rows.
    #[cfg(feature = "cuda")]
    pub(crate) fn transformed_heads(
        &self,
        config: &Config,
        profile: &Profile,
    ) -> Result<Vec<Vec<TransformedHead>>> {
        let none = || Err(Error::Argument(format!("method {} transforms no rows", self.name)));
        self.kind.transformed_heads(config, profile).unwrap_or_else(none).map_err(|e| self.named(e))
    }

    /// What a device needs of a method that retrieves exact rows by codes; none for another one.
    #[cfg(feature = "cuda")]
    pub(crate) fn device_retrieval(&self, config: &Config) -> Result<Option<Retrieval>> {
        let retrieval = self.kind.device_retrieval(Geometry::of(config)).transpose()?;
        Ok(retrieval.filter(|_| self.exact_layers.is_empty()))
    }

    /// The codebooks of the keys of every layer and head of a method with [`Self::device_retrieval`].
    #[cfg(feature = "cuda")]
    pub(crate) fn key_codebooks(&self, config: &Config, profile: &Profile) -> Result<Vec<Vec<CodebookBuf>>> {
        let codebooks = |l| self.kind.key_codebooks(Geometry::of(config), l, profile);
        let all: Result<_> = (0..config.n_layers).filter_map(codebooks).collect();
        all.map_err(|e| self.named(e))
    }

    fn check(&self, config: &Config) -> Result<()> {
        config.clone().validated().map_err(Error::Argument)?;
        self.kind.check(config)?;
        match self.exact_layers.iter().find(|&&l| l >= config.n_layers) {
            Some(l) => Err(Error::Argument(format!("exact-layers: layer {l} of {}", config.n_layers))),
            None => Ok(()),
        }
    }
}

impl FromStr for Method {
    type Err = Error;

    fn from_str(spec: &str) -> Result<Self> {
        Self::parse(spec, HEAD_DIM)
    }
}

/// The error about a profile that lacks entries of some of a run's methods.
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

/// The name that is within two edits of what was written, if any is, whatever its case.
fn similar<'a>(written: &str, names: &[&'a str]) -> Option<&'a str> {
    const EDITS: usize = 2;
    let written: Vec<char> = written.chars().take(32).flat_map(char::to_lowercase).collect();
    let distances = names.iter().map(|name| (edit_distance(&written, name), *name));
    distances.min().filter(|&(distance, name)| distance <= EDITS.min(name.len() / 2)).map(|(_, name)| name)
}

/// Insertions, deletions and replacements that make one name of the other (Levenshtein).
fn edit_distance(a: &[char], b: &str) -> usize {
    let mut row: Vec<usize> = (0..=a.len()).collect(); // distances of the prefixes of `a` to that of `b`
    for (j, b) in b.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], j + 1);
        for (i, &a) in a.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[i + 1];
            row[i + 1] = replaced.min(diagonal + 1).min(row[i] + 1);
        }
    }
    row[a.len()]
}

/// Components of the heads that defaults are shown for, where no model says how many it has.
const HEAD_DIM: usize = 128;

impl Method {
    fn parse(spec: &str, head_dim: usize) -> Result<Self> {
        let mut s = Settings::new(spec, head_dim)?;
        let names = || REGISTRY.iter().flat_map(|entry| entry.names.iter().map(move |name| (*name, entry)));
        let Some((name, entry)) = names().find(|(name, _)| *name == s.name) else {
            let all: Vec<&str> = names().map(|(name, _)| name).collect();
            let meant = similar(s.name, &all).map_or_else(String::new, |name| format!(" (`{name}` is one)"));
            let what = format!("unknown method `{}`{meant}; known: {}", s.name, all.join(", "));
            return Err(Error::Argument(what));
        };
        let kind = (entry.parse)(&mut s)?;
        let mut exact_layers = vec![];
        let (window, exact) = match kind.dense() {
            // Rows pass through the window on their way to the store: both must hold them in the same type.
            Some(element) => (Window { sinks: 0, recent: 0, batch: 1 }, element),
            None => {
                let window = Window {
                    sinks: s.tokens("sinks", 4)?,
                    recent: s.tokens("window", 64)?,
                    batch: s.some_tokens("batch", kind.batch())?,
                };
                if kind.drops() && window.sinks + window.recent == 0 {
                    let what = "sinks=0 and window=0 leave no token to attend to";
                    return Err(Error::Argument(format!("method {name}: {what}")));
                }
                let exact = s.common("exact", ElementType::F16)?;
                exact_layers = s.common("exact-layers", Layers(vec![]))?.0;
                (window, exact)
            }
        };
        s.finish()?;
        Ok(Self { name, setting: s.shown(), given: spec.to_owned(), kind, window, exact, exact_layers })
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
    fn names_that_are_nearly_right_are_suggested() {
        let names = ["dense", "int4", "int8", "million", "zack"];
        for (written, meant) in [
            ("densee", Some("dense")),
            ("MILLION", Some("million")),
            ("milion", Some("million")),
            ("zak", Some("zack")),
            ("int", Some("int4")),
            ("zipcache", None),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(similar(written, &names), meant, "{written}");
        }
        let distance = |a: &str, b| edit_distance(&a.chars().collect::<Vec<_>>(), b);
        assert_eq!((distance("kitten", "sitting"), distance("", "abc"), distance("abc", "")), (3, 3, 3));
        assert!(Method::parse_list(" ").unwrap_err().to_string().contains("no method"));
    }

    #[test]
    fn an_error_of_a_setting_says_what_is_accepted() {
        for (spec, says) in [
            ("int4:group=-1", "group=-1: must be a whole number from 1 to 4096"),
            ("int4:group=99999999999999999999", "must be a whole number from 1 to 4096"),
            ("int4:batch=0", "batch=0: must be a whole number from 1 to 16777216"),
            ("int4:bits=4", "unknown setting `bits`; known: k, v, group, sinks, window, batch"),
            ("oracle:ratio=nan", "ratio=nan: must be a number above 0 and at most 1"),
            ("oracle:tokens=0", "tokens=0: must be a whole number from 1 to 16777216"),
            ("oracle:ratio=0.1:ratio=0.2", "`ratio` is given twice"),
            ("oracle:ratio=0.1:tokens=8", "give `tokens` or `ratio`, not both"),
            ("oracle:x=1", "unknown setting `x`; known: tokens, ratio, sinks"),
            ("hybrid:bound=0.1", "`bound` has no effect without rows=auto"),
            ("pqcache:k-cache=8", "`k-cache` has no effect without offload=FOLDER"),
            ("pqcache:codebooks=both", "codebooks=both: must be one of prompt, profile"),
        ] {
            let error = spec.parse::<Method>().unwrap_err().to_string();
            let name = spec.split(':').next().unwrap();
            assert!(error.starts_with(&format!("method {name}: ")) && error.contains(says), "{error}");
        }
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
            "million:k=8/0",
            "million:k=8/",
            "pqcache:ratio=-1",
            "pqcache:iterations=0",
            "pqcache:tokens=-1",
            "pqcache:tokens=8:ratio=0.1",
            "pqcache:codebooks=both",
            "hybrid:rows=2",
            "hybrid:rows=most",
            "hybrid:offloaded=int4",
            "hybrid:cache=4096",
            "hybrid:offload=",
            "pqcache:offload=.:block=0",
            "oracle:offload=.",
            "cachegen:bits=0",
            "cachegen:mode=paper:bits=2",
            "cachegen:mode=lmcache:bins=3",
            "cachegen:predictor=x",
            "streaming:window=-3",
            "streaming:window=0:sinks=0",
            "oracle:sinks=4:sinks=5",
            "int2:exact-layers=a",
        ] {
            assert!(spec.parse::<Method>().is_err(), "{spec}");
        }
    }
}
