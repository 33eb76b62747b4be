//! Sizes that no model of the tests has: heads of 2 to 320 components, groups of 1 to 16, one layer, a
//! vocabulary of one token; windows and sinks beyond the text, and none. A method serves them or names what
//! it cannot.

use std::path::Path;
use std::sync::Arc;

use kv_llama::{Decoder, prefill};
use kv_methods::{Error, Method, Prepared, calibrated};
use kv_model::{Linear, Matrix, Model, Rope};

/// A method of each kind, with settings that scale to any head.
const METHODS: [&str; 27] = [
    "int8",
    "int2",
    "rotated",
    "q8_0",
    "q4_0:rotate=off",
    "lloydmax",
    "streaming",
    "oracle:ratio=0.5",
    "pqcache:ratio=0.5",
    "sparq:ratio=0.5",
    "retroinfer",
    "sq",
    "sq:k=8:v=8",
    "auto",
    "million",
    "million:k=4/1:v=4/1",
    "pqklt",
    "pqklt:values=trained:keys=rope",
    "hybrid",
    "hybrid:rows=auto:values=trained",
    "snapkv",
    "zack",
    "zack:bits=4:tokens=0.5",
    "cachegen",
    "cachegen:mode=channels",
    "cachegen:mode=paper",
    "cachegen:mode=lossless:rows=bf16",
];

const TOKENS: usize = 90;

#[derive(Clone, Copy, Debug)]
struct Sizes {
    head_dim: usize,
    n_kv_heads: usize,
    group: usize,
    layers: usize,
    vocabulary: usize,
}

/// A model of random weights.
fn model(sizes: Sizes) -> Arc<Model> {
    let mut model =
        Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/gqa")).unwrap();
    let Sizes { head_dim, n_kv_heads, group, layers, vocabulary } = sizes;
    let (hidden, n_heads) = (model.config.hidden_size, n_kv_heads * group);
    let mut state = 7_u64;
    let mut linear = |n_in: usize, n_out: usize| {
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) / (n_in as f32).sqrt()
        };
        Linear { weight: Matrix::new((0..n_in * n_out).map(|_| next()).collect(), n_in), bias: None }
    };
    let config = &mut model.config;
    (config.head_dim, config.n_heads, config.n_kv_heads) = (head_dim, n_heads, n_kv_heads);
    (config.n_layers, config.vocab_size, config.max_seq_len) = (layers, vocabulary, TOKENS);
    config.attention.truncate(layers);
    model.layers.truncate(layers);
    for layer in &mut model.layers {
        let weights = Arc::make_mut(&mut layer.attention);
        weights.q = linear(hidden, n_heads * head_dim);
        weights.k = linear(hidden, n_kv_heads * head_dim);
        weights.v = linear(hidden, n_kv_heads * head_dim);
        weights.o = linear(n_heads * head_dim, hidden);
    }
    model.embedding = Arc::new(linear(hidden, vocabulary).weight);
    model.output = model.embedding.clone();
    Arc::new(model)
}

/// The logits after the last token, with a prompt of all but a few.
pub(super) fn logits(model: &Arc<Model>, method: &str, prompt: usize) -> Result<Vec<f32>, Error> {
    let rope = Arc::new(Rope::new(&model.config, TOKENS));
    let tokens: Vec<u32> = (0..TOKENS).map(|i| ((i * i + 7 * i) % model.config.vocab_size) as u32).collect();
    let method = method.parse::<Method>()?.fitted(&model.config)?;
    let profile = match method.needs_profile() {
        true => calibrated(model, &rope, &tokens, std::slice::from_ref(&method))?,
        false => Default::default(),
    };
    let Prepared { model, mut cache } = method.prepare(model, &rope, &profile)?;
    let mut decoder = Decoder::new(model, rope);
    decoder.prefill(&tokens[..prompt], cache.as_mut())?;
    let mut last = vec![];
    for &token in &tokens[prompt..] {
        last = decoder.step(token, cache.as_mut())?.to_vec();
    }
    Ok(last)
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let largest = a.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0.0_f32, |m, (x, y)| m.max((x - y).abs())) / largest
}

/// Windows and prompts: all tokens exact, none, a few, the default.
const WINDOWS: [(&str, usize); 5] = [
    (":exact=f32:window=4096", 1),
    (":exact=f32:sinks=4096", TOKENS - 8),
    (":exact=f32:sinks=0:window=0", TOKENS - 8),
    (":exact=f32:window=4", 1),
    ("", TOKENS - 8),
];

/// What a method may say that refuses sizes.
const REFUSALS: [(&str, &str); 6] = [
    ("streaming:", "sinks=0 and window=0 leave no token to attend to"),
    ("q8_0", "blocks of 32 components do not divide heads of "),
    ("q4_0", "blocks of 32 components do not divide heads of "),
    ("auto", "bits=3: codes of this model have at least "), // in heads of a few components most is padding
    ("auto", "heads of 320 components: at most 256 have scalar codes"),
    ("sq", "heads of 320 components: at most 256 have scalar codes"),
];

/// With all tokens exact, the logits are those of the dense cache; else they are numbers.
#[test]
fn heads_groups_layers_and_vocabularies_of_any_size() {
    let mut served = 0;
    for [head_dim, n_kv_heads, group, layers, vocabulary] in [
        [2, 1, 1, 1, 1],
        [2, 2, 16, 2, 96],
        [4, 1, 16, 1, 2],
        [6, 3, 5, 1, 96],
        [48, 1, 3, 1, 96],
        [320, 1, 2, 1, 96],
    ] {
        let sizes = Sizes { head_dim, n_kv_heads, group, layers, vocabulary };
        let model = model(sizes);
        let dense = logits(&model, "dense:dtype=f32", TOKENS - 8).unwrap();
        for (method, (window, prompt)) in METHODS.iter().flat_map(|m| WINDOWS.map(|window| (m, window))) {
            let case = format!("{method}{window}, a prompt of {prompt}, {sizes:?}");
            match logits(&model, &format!("{method}{window}"), prompt) {
                Ok(logits) => {
                    assert!(logits.iter().all(|x| x.is_finite()), "{case}: {logits:?}");
                    assert!(!window.contains("4096") || distance(&dense, &logits) < 1e-4, "{case}");
                    served += 1;
                }
                Err(Error::Argument(what)) => {
                    let known = REFUSALS.iter().any(|(of, says)| case.starts_with(of) && what.contains(says));
                    assert!(known, "{case}: {what}");
                }
                Err(e) => panic!("{case}: {e}"),
            }
        }
    }
    assert!(served > 700, "{served}");
}

/// A model with values that are `2^exponent` times as long, and outputs of heads that undo it, is the same
/// function: methods lose no more of it.
#[test]
fn values_of_any_length() {
    let sizes = Sizes { head_dim: 32, n_kv_heads: 2, group: 2, layers: 2, vocabulary: 96 };
    let plain = model(sizes);
    let dense = logits(&plain, "dense:dtype=f32", TOKENS - 8).unwrap();
    let loss = |model: &Arc<Model>, method: &str| {
        distance(&dense, &logits(model, &format!("{method}:window=4"), 1).unwrap())
    };
    let before = METHODS.map(|method| loss(&plain, method));
    for exponent in [-12, 12] {
        let mut scaled = plain.as_ref().clone();
        for layer in &mut scaled.layers {
            let weights = Arc::make_mut(&mut layer.attention);
            let factor = 2.0_f32.powi(exponent);
            weights.v.weight.f32_mut().iter_mut().for_each(|x| *x *= factor);
            weights.o.weight.f32_mut().iter_mut().for_each(|x| *x /= factor);
        }
        let scaled = Arc::new(scaled);
        for (method, before) in METHODS.into_iter().zip(before) {
            let after = loss(&scaled, method);
            assert!(after <= 1.1 * before + 1e-3, "{method}, 2^{exponent}: {after}, {before}");
        }
    }
}

#[test]
fn batches_that_are_not_full_keep_all_tokens_exact() {
    // Four sinks, a window and all but one token of a batch.
    for (spec, most) in [("million", 4 + 64), ("int4", 4 + 64 + 63), ("sq:block=32:window=8", 4 + 8 + 31)] {
        let method: Method = spec.parse().unwrap();
        assert!(method.keeps_exact(most) && !method.keeps_exact(most + 1), "{spec}");
    }
    assert!(!"dense".parse::<Method>().unwrap().keeps_exact(1));
}

#[test]
fn heads_without_pairs_are_refused() {
    for head_dim in [1, 3, 15] {
        let model = model(Sizes { head_dim, n_kv_heads: 2, group: 1, layers: 1, vocabulary: 96 });
        let rope = Rope::new(&model.config, TOKENS);
        let result = prefill(&model, &rope, &[1, 2, 3], &mut |_, _| Ok(()));
        assert!(matches!(result, Err(kv_llama::Error::Argument(_))), "{head_dim}: {result:?}");
    }
}
