//! Settings at the ends of their ranges: what a method refuses, it refuses when it is fitted to the shape of
//! a model, by the setting's name, before any weights are read or anything is calibrated.

use std::path::Path;
use std::sync::Arc;

use kv_methods::Method;
use kv_model::Model;

use super::sizes::logits;

/// Settings of every method that does not take any number, and the largest and the smallest of the others.
const EXTREMES: [&str; 65] = [
    "int4:k=1:v=8",
    "int4:group=1",
    "int4:group=4096",
    "rotated:k=1:v=8",
    "rotated:group=1",
    "rotated:group=4096",
    "lloydmax:k=1:v=8",
    "streaming:sinks=0:window=1",
    "streaming:sinks=16777216:window=16777216",
    "oracle:ratio=1e-9",
    "oracle:tokens=16777216",
    "pqcache:ratio=1e-9",
    "pqcache:tokens=16777216",
    "pqcache:code=1x1",
    "pqcache:code=1x12",
    "pqcache:code=3x8",
    "pqcache:code=8x17",
    "pqcache:codebooks=profile:code=1x12",
    "pqcache:offload=no-such-folder",
    "sparq:ratio=1e-9",
    "sparq:r=4096",
    "sparq:r=1",
    "retroinfer:rows=1e-9:estimate=1e-9",
    "retroinfer:cluster=4096",
    "retroinfer:cluster=1",
    "sq:k=0.125:v=1",
    "sq:k=8:v=8",
    "sq:block=32",
    "sq:block=256",
    "sq:block=256:batch=1",
    "auto:bits=0.1",
    "auto:bits=8",
    "auto:loss=1",
    "auto:bytes=1",
    "auto:bytes=1073741824",
    "million:k=1x12:v=1x1",
    "million:k=3x8",
    "million:v=8x17",
    "million:iterations=1",
    "million:outliers=1:window=0",
    "million:outliers=100",
    "pqklt:k=1x1:v=1x12",
    "pqklt:k=3x8",
    "pqklt:v=8x17:values=trained",
    "pqklt:keys=rope:refine=1",
    "hybrid:rows=0",
    "hybrid:rows=1",
    "hybrid:rows=auto:bound=1e-30:most=1e-9",
    "hybrid:k=3x8",
    "hybrid:offload=no-such-folder",
    "snapkv:tokens=1e-9",
    "zack:multiple=128",
    "zack:multiple=128:k=1",
    "zack:multiple=4096:k=1:v=1",
    "zack:k=0.0001",
    "zack:v=0.01:ranks=uniform",
    "zack:v=0.01:ranks=loss",
    "zack:bits=1:multiple=3:tokens=1e-9",
    "cachegen:bits=0.001",
    "cachegen:bits=100:offset=-8",
    "cachegen:bits=1:offset=8",
    "cachegen:over=3",
    "cachegen:mode=channels:k=1e-3:v=100",
    "cachegen:mode=lmcache:bins=4",
    "cachegen:exact-layers=7",
];

/// The keys of a spec's settings.
fn keys(spec: &str) -> impl Iterator<Item = &str> {
    spec.split(':').skip(1).filter_map(|setting| setting.split('=').next())
}

#[test]
fn what_is_refused_is_refused_before_the_work() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/gqa");
    let model = Arc::new(Model::load(&model).unwrap());
    let mut refused = vec![];
    for spec in EXTREMES {
        if let Err(e) = spec.parse::<Method>().and_then(|method| method.fitted(&model.config)) {
            let what = e.to_string();
            assert!(keys(spec).any(|key| what.contains(&format!("{key}="))), "{spec}: {what}");
            refused.push(spec);
            continue;
        }
        let logits = logits(&model, spec, 80).unwrap_or_else(|e| panic!("{spec}: {e}"));
        assert!(logits.iter().all(|x| x.is_finite()), "{spec}");
    }
    for spec in ["zack:multiple=128", "zack:k=0.0001", "sparq:r=4096", "million:k=3x8", "cachegen:over=3"] {
        assert!(refused.contains(&spec), "{spec} of {refused:?}");
    }
}
