//! Shared by the tests of the model on a GPU.

#![allow(clippy::unwrap_used, dead_code)] // not every test uses all helpers

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use kv_reference::Profile;
use kv_reference::device::{Decoder, Gpu, Weights, method_cache};
use kv_reference::method::Method;
use kv_reference::model::Model;

/// Says that a test did not run.
pub fn skip(what: &str, error: &dyn std::fmt::Display) {
    assert!(std::env::var("GPU_TESTS").as_deref() != Ok("require"), "{what}: {error}");
    // Not println!, which the test harness would swallow.
    let _ = writeln!(std::io::stderr(), "SKIPPED {what}: {error}");
}

pub fn gpu(test: &str) -> Option<Arc<Gpu>> {
    Gpu::open(0).map(Arc::new).map_err(|error| skip(test, &error)).ok()
}

/// The shipped model and the tokens of the shipped text.
pub fn model() -> (Arc<Model>, Vec<u32>) {
    let assets = std::env::var("KV_ASSETS").unwrap_or(concat!(env!("CARGO_MANIFEST_DIR"), "/assets").into());
    let model = Model::load(&Path::new(&assets).join("tiny-llama-12m")).unwrap();
    let text = std::fs::read_to_string(Path::new(&assets).join("sotu-heldout.txt")).unwrap();
    let tokens = model.tokenizer().unwrap().encode(&text).unwrap();
    (Arc::new(model), tokens)
}

pub fn decoder(
    gpu: &Arc<Gpu>,
    model: &Arc<Model>,
    method: &str,
    profile: &Profile,
    batch: usize,
    capacity: usize,
) -> Decoder {
    let method: Method = method.parse().unwrap();
    let element = method.device_element().unwrap();
    let cache = method_cache(gpu, &method, &model.config, element, Some(profile), batch, capacity).unwrap();
    let model = method.folded(model, profile).unwrap();
    let weights = Arc::new(Weights::of(gpu, &model, element).unwrap());
    Decoder::new(gpu.clone(), weights, cache, batch).unwrap()
}

/// Logits of every position of one sequence that is fed token by token.
pub fn teacher_forced(decoder: &mut Decoder, tokens: &[u32]) -> Vec<Vec<f32>> {
    let step = |&token| {
        decoder.feed(&[token]).unwrap();
        decoder.step().unwrap();
        decoder.logits().unwrap()
    };
    tokens.iter().map(step).collect()
}

pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
