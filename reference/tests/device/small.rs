//! Every cache on a GPU with a model of two layers: prompts in chunks, steps past the ring, prompts again,
//! for the whole batch and for one of its slots. Short enough for `compute-sanitizer` (`.ci/gpu`). Without a
//! GPU it is skipped, which `GPU_TESTS=require` turns into a failure.

use std::path::Path;
use std::sync::Arc;

use kv_device::{Gpu, hashed};
use kv_llama_gpu::{Decoder, WeightLayout, Weights};
use kv_methods::Method;
use kv_model::{AttentionWeights, FeedForwardWeights, Layer, Linear, Matrix, Model};
use kv_reference::device::method_cache;

use crate::support::{cosine, gpu};

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
        Linear { weight: Matrix::new(weight, n_in), bias: None }
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

/// Every cache, with a batch.
const CACHES: [(usize, &str); 34] = [
    (2, "dense:dtype=bf16"),
    (2, "dense:dtype=f16:pages=16:pool=240"),
    (2, "int4:window=4:sinks=2"),
    (2, "million:window=8:sinks=2"),
    (2, "hybrid:rows=0.3:v=8x8:window=8:sinks=2"),
    (2, "hybrid:keys=rotated:v=8x8:values=trained:rows=0.3:window=8:sinks=2"),
    (3, "hybrid:keys=rotated:v=8x8:rows=0.3:window=8:sinks=0:exact=bf16:rows-on=device"),
    (2, "hybrid:keys=rotated:v=8x8:rows=0.3:window=8:sinks=2:exact=bf16:offloaded=int8"),
    (2, "hybrid:keys=rotated:v=8x8:rows=0.1:window=8:sinks=2:held=14"),
    (2, "hybrid:v=8x8:rows=0.1:norms=off:mean-error=off:window=8:sinks=2"),
    (3, "hybrid:v=8x8:rows=auto:norms=off:bound=0.3:window=8:sinks=2:rows-on=device:exact=bf16"),
    (
        2,
        "hybrid:keys=rotated:v=8x8:values=trained:rows=auto:bound=0.3:most=0.5:window=8:sinks=2:rows-on=device",
    ),
    (2, "hybrid:v=8x8:rows=auto:bound=0.3:most=0.5:window=8:sinks=2:rows-on=device"),
    (3, "hybrid:keys=rotated:v=8x8:rows=auto:bound=0.1:window=8:exact=bf16:rows-on=device"),
    (3, "hybrid:keys=rotated:v=8x8:rows=auto:bound=0.1:window=8:sinks=2:held=0:exact=bf16"),
    (2, "hybrid:keys=rotated:v=8x8:rows=auto:bound=0.3:most=0.1:window=8:held=0:offloaded=int8"),
    (3, "million:k=8/4:v=8/4:window=8:sinks=0:exact=bf16"),
    (2, "million:window=8:sinks=2:pages=32:pool=256"),
    (2, "pqklt:window=8:sinks=2"),
    (2, "pqklt:window=8:sinks=2:pages=32:pool=256"),
    (3, "pqklt:k=8/2:v=8/4:norms=off:values=trained:window=8:sinks=0:exact=bf16"),
    (3, "pqklt:k=8/2:v=8/4:keys=rotated:norms=off:values=trained:window=8:sinks=2"),
    (2, "sq:block=32:window=8:sinks=2"),
    (3, "sq:k=2:v=2:block=32:window=1:sinks=0:exact=bf16"),
    (2, "sq:k=8:v=1:block=64:window=33:sinks=3"),
    (2, "zack:window=8:sinks=2:multiple=8"),
    (2, "zack:k=0.25:v=0.5:window=16:multiple=8:exact=bf16"),
    (2, "zack:k=0.25:v=0.5:window=8:sinks=2:multiple=8:prompt=cut"),
    (2, "pqcache:tokens=8:window=8:sinks=2"),
    (2, "pqcache:tokens=8:window=8:sinks=2:held=12"),
    (2, "pqcache:tokens=8:window=8:sinks=2:held=12:offloaded=int8"),
    (2, "pqcache:tokens=8:window=8:sinks=2:held=0"),
    (2, "cachegen:window=8:sinks=2:batch=8"),
    (3, "cachegen:mode=channels:window=4:sinks=0:batch=3:exact=bf16"),
];

/// Makes decoders of empty caches of a method.
fn decoders<'a>(gpu: &'a Arc<Gpu>, model: &'a Model, batch: usize, spec: &str) -> impl Fn() -> Decoder + 'a {
    let method: Method = spec.parse().unwrap();
    let element = method.device_element().unwrap();
    let weights = Arc::new(Weights::of(gpu, model, element, WeightLayout::of_batch(batch)).unwrap());
    move || {
        let cache = method_cache(gpu, &method, &model.config, element, None, batch, 160).unwrap();
        Decoder::new(gpu.clone(), weights.clone(), cache, batch).unwrap()
    }
}

/// Tokens that depend on a seed.
fn tokens(len: usize, seed: usize) -> Vec<u32> {
    (0..len).map(|i| ((7 * i + seed) % VOCAB) as u32).collect()
}

#[test]
fn every_cache_runs_twice_alike() {
    let Some(gpu) = gpu("small models") else { return };
    for head_dim in [64, 128] {
        let model = model(head_dim);
        for (batch, spec) in CACHES {
            let new = decoders(&gpu, &model, batch, spec);
            let run = || {
                let mut decoder = new();
                let prompts = |len: usize| (0..batch).map(|s| tokens(len / (s + 1), s)).collect::<Vec<_>>();
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

/// A freed slot of a batch is refilled while the other sequences continue.
#[test]
fn every_cache_refills_a_place() {
    const LENGTHS: [usize; 3] = [41, 30, 19]; // of the first prompts
    const STEPS: [usize; 2] = [25, 5]; // before the second sequence ends, and before its slot is refilled
    const NEXT: usize = 33; // tokens of the prompt that fills it
    let Some(gpu) = gpu("small models, refilled") else { return };
    let model = model(64);
    for (batch, spec) in CACHES {
        let new = decoders(&gpu, &model, batch, spec);
        let rows = |logits: &[f32]| logits.chunks_exact(VOCAB).map(<[f32]>::to_vec).collect::<Vec<_>>();
        let feeds = |i: usize| (0..batch).map(|s| ((11 * i + 5 * s) % VOCAB) as u32).collect::<Vec<_>>();
        // Steps that are fed given tokens: the logits of every sequence.
        let steps = |decoder: &mut Decoder, count: usize| -> Vec<Vec<Vec<f32>>> {
            let step = |i| {
                decoder.feed(&feeds(i)).unwrap();
                decoder.step().unwrap();
                rows(&decoder.logits().unwrap())
            };
            (0..count).map(step).collect()
        };
        let refilled = |seed: usize| {
            let mut decoder = new();
            let prompts = (0..batch).map(|s| tokens(LENGTHS[s], s)).collect::<Vec<_>>();
            decoder.prefill(&prompts, 40).unwrap();
            steps(&mut decoder, STEPS[0]);
            decoder.end(1).unwrap();
            steps(&mut decoder, STEPS[1]);
            let (before, picked) = (rows(&decoder.logits().unwrap()), decoder.picked().unwrap());
            let fed = decoder.next_tokens().unwrap();
            decoder.prefill_one(1, &tokens(NEXT, seed), 20).unwrap();
            let after = rows(&decoder.logits().unwrap());
            for s in (0..batch).filter(|&s| s != 1) {
                assert_eq!(after[s], before[s], "{spec}: logits of sequence {s}");
                assert_eq!(decoder.picked().unwrap()[s], picked[s], "{spec}: picks of sequence {s}");
                assert_eq!(decoder.next_tokens().unwrap()[s], fed[s], "{spec}: token of sequence {s}");
            }
            assert_eq!(decoder.picked().unwrap()[1], [decoder.next_tokens().unwrap()[1]], "{spec}");
            let mut all = vec![after];
            all.extend(steps(&mut decoder, 30));
            all
        };
        let first = refilled(50);
        assert!(first.iter().flatten().flatten().all(|x| x.is_finite()), "{spec}");
        // The others do not depend on the new prompt of the slot.
        let other = refilled(51);
        for (i, (a, b)) in first.iter().zip(&other).enumerate() {
            assert!((0..batch).all(|s| (a[s] == b[s]) == (s != 1)), "{spec}: step {i}");
        }
        // The slot does not depend on its earlier sequence: it has the logits of a batch of these lengths
        // that never had another sequence.
        let mut fresh = new();
        let all = STEPS[0] + STEPS[1];
        let prompts = (0..batch).map(|s| match s {
            1 => tokens(NEXT, 50),
            _ => tokens(LENGTHS[s] + all, s),
        });
        fresh.prefill(&prompts.collect::<Vec<_>>(), 20).unwrap();
        let mut expected = vec![rows(&fresh.logits().unwrap())];
        expected.extend(steps(&mut fresh, 30));
        let own = |all: &[Vec<Vec<f32>>]| all.iter().map(|rows| rows[1].clone()).collect::<Vec<_>>();
        for (i, (a, b)) in own(&first).iter().zip(&own(&expected)).enumerate() {
            let cosine = cosine(a, b);
            assert!(a == b || spec.contains("auto") && cosine > 0.999, "{spec}: step {i}: cosine {cosine}");
        }
    }
}
