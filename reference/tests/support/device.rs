//! Shared by the tests of the model on a GPU.

#![allow(clippy::unwrap_used, dead_code)] // not every test uses all helpers

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use kv_reference::compare::calibrated;
use kv_reference::device::{Decoder, Gpu, Weights, method_cache};
use kv_reference::eval::{Divergence, score_text};
use kv_reference::method::{Method, Prepared};
use kv_reference::model::{Model, Rope};
use kv_reference::{Profile, forward};

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

/// Codebooks for methods, of the first tokens of the shipped text.
pub fn profile(model: &Arc<Model>, calibration: &[u32], specs: &[&str]) -> Profile {
    let rope = Rope::new(&model.config, calibration.len());
    let methods: Vec<Method> = specs.iter().map(|spec| spec.parse().unwrap()).collect();
    calibrated(model, &rope, calibration, &methods).unwrap()
}

pub fn divergence(logits: &[Vec<f32>], reference: &[Vec<f32>], tokens: &[u32]) -> Divergence {
    let mut divergence = Divergence::default();
    for ((row, reference), next) in logits.iter().zip(reference).zip(&tokens[1..]) {
        divergence.add(row, reference, *next);
    }
    divergence
}

/// Logits of every position on the CPU.
pub fn on_cpu(model: &Arc<Model>, spec: &str, profile: &Profile, run: &[u32]) -> Vec<Vec<f32>> {
    let method: Method = spec.parse().unwrap();
    let rope = Arc::new(Rope::new(&model.config, 2048));
    let Prepared { model, mut cache } = method.prepare(model, &rope, profile).unwrap();
    let mut decoder = forward::Decoder::new(model, rope);
    score_text(&mut decoder, cache.as_mut(), run, None).unwrap().logits
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
    let model = method.device_model(model, profile).unwrap();
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

/// Steps after prompts of two lengths have the same logits whether the prompts ran whole or in chunks.
pub fn prompts_in_chunks_are_whole_prompts(gpu: &Arc<Gpu>, spec: &str) {
    let (model, tokens) = model();
    let profile = profile(&model, &tokens[..2048], &[spec]);
    let run = &tokens[3000..3700];
    let (prompt, rest) = run.split_at(600);
    let after = |chunk: usize| {
        let mut decoder = decoder(gpu, &model, spec, &profile, 2, run.len());
        decoder.prefill(&[prompt[..77].to_vec(), prompt.to_vec()], chunk).unwrap();
        let step = |&token| {
            decoder.feed(&[token, token]).unwrap();
            decoder.step().unwrap();
            decoder.logits().unwrap().split_off(model.config.vocab_size) // of the second sequence
        };
        rest.iter().map(step).collect::<Vec<_>>()
    };
    let whole = after(1024);
    for chunk in [64, 333] {
        let parts = divergence(&after(chunk), &whole, rest);
        println!("{spec} in chunks of {chunk}: KL {:.1e}, top-1 {:.4}", parts.kl(), parts.top1());
        assert!(parts.kl() <= 5e-4 && parts.top1() >= 0.98, "{spec}: {} {}", parts.kl(), parts.top1());
    }
}

pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
