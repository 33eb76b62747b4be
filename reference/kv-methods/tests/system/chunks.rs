//! Prompts in chunks over a cache that is already filled, and sliding windows and layers without RoPE in
//! every cache.

use std::path::Path;
use std::sync::Arc;

use kv_llama::{Decoder, KvCache, logits, prefill};
use kv_methods::{Method, Prepared, Profile, calibrated};
use kv_model::{Model, Rope, RopeScaling};

/// One setting of each method, with which short sequences reach the store.
const METHODS: [&str; 17] = [
    "dense",
    "dense:dtype=f16",
    "int8:window=4:group=8",
    "int4:window=4:group=8",
    "int2:window=4:group=8",
    "rotated:window=4:group=8",
    "lloydmax:window=4",
    "streaming:window=200",
    "oracle:ratio=0.9:window=4",
    "pqcache:ratio=0.9:code=4x4:window=4",
    "sparq:ratio=0.9:window=4",
    "million:k=4x8:v=4x8:window=4",
    "million:k=4x8:v=4x8:outliers=2:window=4",
    "pqklt:k=4x8:v=4x8:window=4",
    "snapkv:tokens=0.9:window=4",
    "zack:k=0.9:v=0.9:window=4",
    "cachegen:window=4:batch=10",
];

/// Lossless settings: ratios and ranks are full, and a codebook has a centroid for every vector of its
/// training text, which is the test text.
const EXACT: [&str; 10] = [
    "dense",
    "oracle:ratio=1:exact=f32:window=4",
    "pqcache:ratio=1:code=4x2:exact=f32:window=4",
    "sparq:ratio=1:exact=f32:window=4",
    "retroinfer:rows=1:exact=f32:window=4",
    "zack:k=1:v=1:exact=f32:window=4",
    "zack:k=1:v=1:prompt=cut:exact=f32:window=4",
    "snapkv:tokens=1:exact=f32:window=4",
    "pqklt:k=1x8:v=1x8:norms=off:values=trained:keys=rope:exact=f32:window=4",
    "streaming:window=200:exact=f32",
];

/// Lossless where positions do not turn keys: codebooks of keys after RoPE are trained at positions all over the
/// context, not at those of the text.
const EXACT_AFTER_ROPE: [&str; 3] = [
    "million:k=1x8:v=1x8:exact=f32:window=4",
    "pqklt:k=1x8:v=1x8:norms=off:values=trained:exact=f32:window=4",
    "pqklt:k=1x8:v=1x8:norms=off:values=trained:keys=rope:exact=f32:window=4",
];

const TOKENS: usize = 130;

struct Setup {
    model: Arc<Model>,
    rope: Arc<Rope>,
    tokens: Vec<u32>,
    profile: Profile,
}

fn load(fixture: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures").join(fixture);
    let mut model = Model::load(&folder).unwrap();
    model.config.max_seq_len = 256;
    model
}

fn setup(fixture: &str, methods: &[&str]) -> Setup {
    setup_of(load(fixture), methods)
}

fn setup_of(model: Model, methods: &[&str]) -> Setup {
    let rope = Rope::new(&model.config, 256);
    let tokens: Vec<u32> = (0..256_u32).map(|i| (i * i + 7 * i) % 96).collect();
    let methods: Vec<Method> = methods.iter().map(|method| method.parse().unwrap()).collect();
    let profile = calibrated(&model, &rope, &tokens, &methods).unwrap();
    Setup { model: Arc::new(model), rope: Arc::new(rope), tokens, profile }
}

impl Setup {
    fn prepare(&self, method: &str) -> Prepared {
        method.parse::<Method>().unwrap().prepare(&self.model, &self.rope, &self.profile).unwrap()
    }

    /// The logits after the first `TOKENS` tokens with exact attention.
    fn exact(&self) -> Vec<f32> {
        let hidden = prefill(&self.model, &self.rope, &self.tokens[..TOKENS], &mut |_, _| Ok(())).unwrap();
        logits(&self.model, &hidden[(TOKENS - 1) * self.model.config.hidden_size..]).unwrap()
    }

    /// The logits after the same tokens in chunks that end at these positions; a chunk of one token is a
    /// step.
    fn in_chunks(&self, method: &str, ends: &[usize]) -> (Vec<f32>, Box<dyn KvCache>) {
        let Prepared { model, mut cache } = self.prepare(method);
        let mut decoder = Decoder::new(model, self.rope.clone());
        let mut last = vec![];
        for &end in ends {
            let chunk = &self.tokens[cache.seq_len()..end];
            last = match chunk {
                &[token] => decoder.step(token, cache.as_mut()).unwrap().to_vec(),
                _ => decoder.prefill(chunk, cache.as_mut()).unwrap().to_vec(),
            };
            assert_eq!(cache.seq_len(), end);
        }
        (last, cache)
    }
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let largest = a.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0.0_f32, |m, (x, y)| m.max((x - y).abs())) / largest
}

/// Plain, with windows in some layers, in all, and with layers without RoPE.
const FIXTURES: [&str; 5] = ["gqa", "qwen2-window", "mistral-window", "smollm3", "smollm3-window"];

#[test]
fn chunks_of_any_length_equal_a_prompt_at_once_where_nothing_is_lost() {
    for fixture in FIXTURES {
        let mut unturned = load(fixture);
        unturned.config.rope_scaling = RopeScaling::Linear { factor: 1e9 };
        for (model, methods) in [(load(fixture), &EXACT[..]), (unturned, &EXACT_AFTER_ROPE)] {
            let s = setup_of(model, methods);
            let expected = s.exact();
            let steps: Vec<usize> = (1..=TOKENS).collect();
            for method in methods {
                for ends in [&[TOKENS][..], &[100, TOKENS], &[3, 70, 71, 72, 128, 129, TOKENS], &steps] {
                    let error = distance(&expected, &s.in_chunks(method, ends).0);
                    assert!(error < 2e-3, "{fixture}, {method}, {} chunks: {error}", ends.len());
                }
            }
        }
    }
}

#[test]
fn chunks_stay_near_a_prompt_at_once_in_every_method() {
    for fixture in FIXTURES {
        let s = setup(fixture, &METHODS);
        let expected = s.exact();
        for method in METHODS {
            // A whole prompt has exact attention, whatever the cache keeps of it.
            let (at_once, cache) = s.in_chunks(method, &[TOKENS]);
            assert!(distance(&expected, &at_once) < 1e-5, "{fixture}, {method}");
            let (chunked, in_chunks) = s.in_chunks(method, &[64, 100, TOKENS]);
            let error = distance(&expected, &chunked);
            assert!(error < 0.7, "{fixture}, {method}: {error}");
            // Frames and the shares of kept tokens and of outliers are rounded up in every chunk.
            if !["cachegen", "snapkv", "outliers"].iter().any(|x| method.contains(x)) {
                assert_eq!(cache.footprint().kept, in_chunks.footprint().kept, "{fixture}, {method}");
            }
        }
    }
}

/// Without exact tokens, each step attends to truncated rows only, including its own.
#[test]
fn prompts_of_cut_rows_are_steps_over_cut_rows() {
    for fixture in FIXTURES {
        let method = "zack:k=0.6:v=0.4:prompt=cut:exact=f32:window=0:sinks=0";
        let s = setup(fixture, &[method]);
        let steps = s.in_chunks(method, &(1..=TOKENS).collect::<Vec<_>>()).0;
        assert!(distance(&s.exact(), &steps) > 0.02, "{fixture}: nothing is cut");
        for ends in [&[TOKENS][..], &[64, 100, TOKENS]] {
            let error = distance(&steps, &s.in_chunks(method, ends).0);
            assert!(error < 1e-3, "{fixture}, {} chunks: {error}", ends.len());
        }
    }
}

#[test]
fn what_a_chunk_cannot_be_is_an_error() {
    let s = setup("gqa", &[]);
    let Prepared { model, mut cache } = s.prepare("dense");
    let mut decoder = Decoder::new(model, s.rope.clone());
    let argument = |result: kv_llama::Result<&[f32]>| matches!(result, Err(kv_llama::Error::Argument(_)));
    assert!(argument(decoder.prefill(&[], cache.as_mut())));
    assert!(argument(decoder.prefill(&[96], cache.as_mut())));
    assert!(argument(decoder.prefill(&[1; 257], cache.as_mut())));
    decoder.prefill(&[1; 200], cache.as_mut()).unwrap();
    assert!(argument(decoder.prefill(&[1; 57], cache.as_mut())));
    assert_eq!(cache.seq_len(), 200);
    decoder.prefill(&[1; 56], cache.as_mut()).unwrap();
    assert!(argument(decoder.step(1, cache.as_mut())));
}
