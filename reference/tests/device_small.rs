//! Every cache on a GPU with a model of two layers: prompts in chunks, steps past the ring, prompts again.
//! Short enough for `compute-sanitizer` (`.ci/gpu`). Without a GPU it is skipped, which `GPU_TESTS=require`
//! turns into a failure.

#![cfg(feature = "cuda")]
#![allow(clippy::unwrap_used)]

#[path = "support/device.rs"]
mod support;

use std::path::Path;
use std::sync::Arc;

use kv_reference::device::{Decoder, Weights, hashed, method_cache};
use kv_reference::method::Method;
use kv_reference::model::{AttentionWeights, FeedForwardWeights, Layer, Linear, Model};
use support::gpu;

const HIDDEN: usize = 64;
const INNER: usize = 96;
const VOCAB: usize = 96;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;

/// A model of hashed weights with heads of `head_dim` components.
fn model(head_dim: usize) -> Model {
    let assets = std::env::var("KV_FIXTURES")
        .unwrap_or(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/parity/fixtures").into());
    let mut model = Model::load(&Path::new(&assets).join("gqa")).unwrap();
    let mut tensor = 0;
    let mut linear = |n_in: usize, n_out: usize| {
        tensor += 1;
        let weight = (0..(n_in * n_out) as u64).map(|i| hashed(tensor, i, 0.3)).collect();
        Linear { weight, bias: None, n_in, n_out }
    };
    let norm = vec![1.0; HIDDEN];
    let config = &mut model.config;
    (config.head_dim, config.n_heads, config.n_kv_heads) = (head_dim, HEADS, KV_HEADS);
    config.eos_tokens.clear();
    assert_eq!((config.hidden_size, config.intermediate_size, config.vocab_size), (HIDDEN, INNER, VOCAB));
    for layer in &mut model.layers {
        let (q_dim, kv_dim) = (HEADS * head_dim, KV_HEADS * head_dim);
        *layer = Layer {
            attention: Arc::new(AttentionWeights {
                norm: norm.clone(),
                q: linear(HIDDEN, q_dim),
                k: linear(HIDDEN, kv_dim),
                v: linear(HIDDEN, kv_dim),
                o: linear(q_dim, HIDDEN),
                q_norm: None,
                k_norm: None,
            }),
            feed_forward: Arc::new(FeedForwardWeights {
                norm: norm.clone(),
                gate: linear(HIDDEN, INNER),
                up: linear(HIDDEN, INNER),
                down: linear(INNER, HIDDEN),
            }),
        };
    }
    model.embedding = Arc::new(linear(HIDDEN, VOCAB).weight);
    model.output = Arc::new(linear(HIDDEN, VOCAB).weight);
    model
}

#[test]
fn every_cache_runs_twice_alike() {
    let Some(gpu) = gpu("small models") else { return };
    for head_dim in [64, 128] {
        let model = model(head_dim);
        for (batch, spec) in [
            (2, "dense:dtype=bf16"),
            (2, "dense:dtype=f16:pages=16:pool=240"),
            (2, "int4:window=4:sinks=2"),
            (2, "million:window=8:sinks=2"),
            (2, "hybrid:keys=rotated:v=8x8:rows=0.3:window=8:sinks=2"),
            (3, "hybrid:keys=rotated:v=8x8:rows=0.3:window=8:sinks=0:exact=bf16:rows-on=device"),
            (2, "hybrid:keys=rotated:v=8x8:rows=0.3:window=8:sinks=2:exact=bf16:offloaded=int8"),
            (2, "hybrid:keys=rotated:v=8x8:rows=0.1:window=8:sinks=2:held=14"),
            (2, "hybrid:keys=rotated:v=8x8:rows=auto:bound=0.3:most=0.5:window=8:sinks=2:rows-on=device"),
            (3, "hybrid:keys=rotated:v=8x8:rows=auto:bound=0.1:window=8:exact=bf16:rows-on=device"),
            (3, "hybrid:keys=rotated:v=8x8:rows=auto:bound=0.1:window=8:sinks=2:held=0:exact=bf16"),
            (2, "hybrid:keys=rotated:v=8x8:rows=auto:bound=0.3:most=0.1:window=8:held=0:offloaded=int8"),
            (3, "million:k=8/4:v=8/4:window=8:sinks=0:exact=bf16"),
            (2, "million:window=8:sinks=2:pages=32:pool=256"),
            (3, "pqklt:k=8/2:v=8/4:keys=rotated:norms=off:window=8:sinks=2"),
            (2, "zack:window=8:sinks=2:multiple=8"),
            (2, "zack:k=0.25:v=0.5:window=16:multiple=8:exact=bf16"),
            (2, "zack:k=0.25:v=0.5:window=8:sinks=2:multiple=8:prompt=cut"),
            (2, "pqcache:tokens=8:window=8:sinks=2"),
            (2, "pqcache:tokens=8:window=8:sinks=2:held=12"),
            (2, "pqcache:tokens=8:window=8:sinks=2:held=12:offloaded=int8"),
            (2, "pqcache:tokens=8:window=8:sinks=2:held=0"),
            (2, "cachegen:window=8:sinks=2:batch=8"),
            (3, "cachegen:mode=channels:window=4:sinks=0:batch=3:exact=bf16"),
        ] {
            let method: Method = spec.parse().unwrap();
            let element = method.device_element().unwrap();
            let weights = Arc::new(Weights::of(&gpu, &model, element).unwrap());
            let run = || {
                let cache = method_cache(&gpu, &method, &model.config, element, None, batch, 160).unwrap();
                let mut decoder = Decoder::new(gpu.clone(), weights.clone(), cache, batch).unwrap();
                let prompts = |len: usize| -> Vec<Vec<u32>> {
                    let prompt =
                        |s: usize| (0..len / (s + 1)).map(|i| ((7 * i + s) % VOCAB) as u32).collect();
                    (0..batch).map(prompt).collect()
                };
                decoder.prefill(&prompts(61), 40).unwrap();
                (0..30).for_each(|_| decoder.step().unwrap());
                decoder.prefill(&prompts(33), 20).unwrap();
                (0..12).for_each(|_| decoder.step_eagerly().unwrap());
                (decoder.picked().unwrap(), decoder.logits().unwrap())
            };
            let (picked, logits) = run();
            assert!(logits.iter().all(|x| x.is_finite()), "{spec}: {head_dim}");
            assert_eq!(run(), (picked, logits), "{spec}: {head_dim}: again");
        }
    }
}
