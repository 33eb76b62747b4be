//! The registry of methods, and the parser of `name[:key=value]...`.

use std::str::FromStr;

use kv_attend::ElementType;
use pq_core::Window;

use super::kind::Registration;
#[cfg(feature = "cuda")]
use super::on_device::Limit;
use super::settings::{Layers, Settings};
use super::spelling::similar;
use super::{
    Method, Place, auto, cachegen, dense, floats, h2o, hybrid, infllm, kvquant, million, pqcache, pqklt,
    quest, retrieval, retroinfer, scalar, snapkv, sparq, sq, streaming, zack,
};
use crate::{Error, Result};

/// All methods, in the order of the help text.
const REGISTRY: &[Registration] = &[
    dense::DENSE,
    scalar::UNIFORM,
    scalar::ROTATED,
    scalar::LLAMA_CPP,
    scalar::LLOYD_MAX,
    floats::FLOATS,
    kvquant::KV_QUANT,
    streaming::STREAMING,
    retrieval::ORACLE,
    pqcache::PQ_CACHE,
    sparq::SPARQ,
    quest::QUEST,
    infllm::INF_LLM,
    retroinfer::RETRO_INFER,
    h2o::H2O,
    sq::SQ,
    auto::AUTO,
    million::MILLION,
    pqklt::PQ_KLT,
    hybrid::HYBRID,
    snapkv::SNAP_KV,
    zack::ZACK,
    cachegen::CACHE_GEN,
];

/// Every method with its settings and their defaults, for the help text.
#[must_use]
pub fn methods_help() -> String {
    // Lines in the registry omit the indentation of the first line.
    let methods: String = REGISTRY.iter().map(|registration| format!("  {}", registration.help)).collect();
    format!(
        "A method is NAME[:KEY=VALUE]...; several are separated by commas.\n\n{methods}\n\
For all but dense: sinks=4 window=64 (tokens kept exact; h2o, snapkv and kivi have others), batch=N (tokens that
leave the window at once: 64 for int, cachegen and zack's codes, a block for sq, a group for kivi, else 1),
exact=f16|bf16|f32 (how), exact-layers=0+5 (layers left uncompressed). ratio= includes sinks and window, rows= does not. refine=N
trains codebooks for N iterations more on the prompt.
A PQ code is SUBSPACESxBITS, or BITS/COMPONENTS for any head: 8/2 is 64x8 for 128 components, and the
default scales so."
    )
}

/// Every method with a setting for each kind of store that it makes, for tests of caches. In a context of a
/// hundred tokens each has codes and exact rows, and loses next to nothing, unless the method drops tokens.
pub fn method_examples() -> impl Iterator<Item = &'static str> {
    REGISTRY.iter().flat_map(|registration| registration.examples).copied()
}

/// What runs on a device: every method, with the settings that no device supports, or why it does not run
/// there, and what to pass instead.
///
/// # Errors
/// None: every method has defaults.
#[cfg(feature = "cuda")]
pub fn device_help() -> Result<String> {
    let mut text = "On a GPU; the CPU (--device cpu) has none of these limits:\n\n".to_owned();
    let mut of_windowed = vec![];
    for name in REGISTRY.iter().flat_map(|registration| registration.names) {
        let method = Method::parse(name, HEAD_DIM, Place::Cuda)?;
        let limits = method.own_limits();
        let refused = limits.iter().find(|limit| limit.found);
        text += &match refused {
            Some(limit) => format!("  {name:<18}no: {limit}\n"),
            None => format!("  {name:<18}yes\n"),
        };
        let settings = limits.iter().filter(|_| refused.is_none());
        settings.for_each(|limit| text += &format!("    not {}: {limit}\n", limit.setting));
        if method.kind.dense().is_none() {
            of_windowed = Limit::of_windowed(&method);
        }
    }
    text += "  all but dense\n";
    of_windowed.iter().for_each(|limit| text += &format!("    not {}: {limit}\n", limit.setting));
    Ok(text)
}

/// The methods of `kv compare` by default: every method with a near-lossless and an aggressive setting.
pub const DEFAULT_METHODS: &str = "dense,dense:dtype=f16,int8,int4,int2,rotated,rotated:k=2:v=2,\
lloydmax,lloydmax:k=2:v=2,streaming:window=1280,streaming:window=128,oracle:ratio=0.2,oracle:ratio=0.1,\
pqcache:ratio=0.2,pqcache:ratio=0.1:code=6/64,million,million:k=8/4:v=8/4,pqklt:k=6/2:v=6/2,pqklt:k=4/2:v=4/2,\
sq:k=4:v=4,sq,sq:k=2:v=2,hybrid,hybrid:rows=auto,zack,zack:k=0.5:v=0.5,zack:k=0.75:v=0.75:bits=4,\
cachegen,cachegen:bits=2,cachegen:mode=paper";

impl FromStr for Method {
    type Err = Error;

    fn from_str(spec: &str) -> Result<Self> {
        Self::parse(spec, HEAD_DIM, Place::Cpu)
    }
}

/// Head dimension for which defaults are shown without a model.
const HEAD_DIM: usize = 128;

impl Method {
    pub(super) fn parse(spec: &str, head_dim: usize, place: Place) -> Result<Self> {
        let mut s = Settings::new(spec, head_dim, place)?;
        let names = || {
            REGISTRY
                .iter()
                .flat_map(|registration| registration.names.iter().map(move |name| (*name, registration)))
        };
        let Some((name, registration)) = names().find(|(name, _)| *name == s.name) else {
            let all: Vec<&str> = names().map(|(name, _)| name).collect();
            let meant = similar(s.name, &all).map_or_else(String::new, |name| format!(" (`{name}` is one)"));
            let what = format!("unknown method `{}`{meant}; known: {}", s.name, all.join(", "));
            return Err(Error::Argument(what));
        };
        let kind = (registration.parse)(&mut s)?;
        let mut exact_layers = vec![];
        let (window, exact) = match kind.dense() {
            // Rows pass from the window to the store, so both must have the same element type.
            Some(element) => (Window { sinks: 0, recent: 0, batch: 1 }, element),
            None => {
                let [sinks, recent] = kind.sinks_and_window();
                let window = Window {
                    sinks: s.tokens("sinks", sinks)?,
                    recent: s.tokens("window", recent)?,
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
        let (setting, given) = (s.shown(), spec.to_owned());
        Ok(Self { name, setting, given, place, kind, window, exact, exact_layers })
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
        assert!(Method::parse_list(" ").unwrap_err().to_string().contains("no method"));
    }

    #[test]
    fn every_name_has_an_example() {
        let examples: Vec<Method> = method_examples().map(|spec| spec.parse().unwrap()).collect();
        for name in REGISTRY.iter().flat_map(|registration| registration.names) {
            assert!(examples.iter().any(|method| method.name == *name), "{name}");
        }
    }

    #[test]
    fn an_error_of_a_setting_says_what_is_accepted() {
        for (spec, says) in [
            ("fp8:scale=head", "scale=head: must be one of one, calibrated"),
            ("quest:page=0", "page=0: must be a whole number from 1 to 4096"),
            ("h2o:ratio=0.1:tokens=8", "give `tokens` or `ratio`, not both"),
            ("int4:group=-1", "group=-1: must be a whole number from 1 to 4096"),
            ("int4:group=99999999999999999999", "must be a whole number from 1 to 4096"),
            ("int4:batch=0", "batch=0: must be a whole number from 1 to 16777216"),
            ("int4:bits=4", "unknown setting `bits`; known: k, v, group, sinks, window, batch"),
            ("oracle:ratio=nan", "ratio=nan: must be a number above 0 and at most 1"),
            ("oracle:tokens=0", "tokens=0: must be a whole number from 1 to 16777216"),
            ("oracle:ratio=0.1:ratio=0.2", "`ratio` is given twice"),
            ("oracle:ratio=0.1:tokens=8", "give `tokens` or `ratio`, not both"),
            ("oracle:x=1", "unknown setting `x`; known: tokens, ratio, sinks"),
            ("q4_0:v=5", "v=5: must be 4 or 8"),
            ("pqklt:refine=4097", "refine=4097: must be a whole number from 0 to 4096"),
            ("hybrid:bound=0.1", "`bound` has no effect without rows=auto"),
            ("hybrid:most=0.1", "`most` has no effect without rows=auto"),
            ("pqcache:k-cache=8", "`k-cache` has no effect without offload=FOLDER"),
            ("pqcache:codebooks=both", "codebooks=both: must be one of prompt, profile"),
            ("dense:pool=4096", "`pool` has no effect without pages=N"),
            ("dense:pages=24", "pages=24: must be a multiple of 16 tokens"),
            ("million:pages=48", "pages=48: must be a multiple of 32 tokens"),
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
