//! Every cache satisfies the contract of `KvCache`, and equals the dense one if it is lossless.

use std::sync::{Arc, LazyLock};

use kv_llama::{Decoder, HeadFit, KvCache, Side, logits, prefill};
use kv_methods::{Error, Method, Prepared, Profile, calibrated};
use kv_model::{Model, Rope, RopeScaling};
use kv_reference::eval::Prompt;

use crate::support::kv;

/// One setting of each method; small windows, so that short sequences reach the compressed part. Nine tenths
/// of the ranks: no direction of a random model's keys is small.
const METHODS: [&str; 46] = [
    "dense",
    "dense:dtype=bf16",
    "int8:window=4:group=8",
    "int4:window=4:group=8:exact-layers=1",
    "int2:window=4:group=8",
    "rotated:window=4:group=8",
    "lloydmax:k=3:v=5:window=4",
    "oracle:ratio=0.5:window=4",
    "pqcache:ratio=0.5:code=4x4:window=4",
    "sparq:ratio=0.5:r=8:window=4",
    "quest:ratio=0.5:page=4:skip=0:window=4",
    "infllm:ratio=0.9:block=4:r=2:window=4",
    "h2o:ratio=0.9",
    "h2o:ratio=0.9:window=4:sinks=2:batch=3",
    "kivi:k=4:v=4:window=4:batch=8:group=8",
    "kvquant:k=5:v=5:outliers=5:window=4",
    "fp8:scale=calibrated:window=4",
    "nvfp4:scale=calibrated:window=4",
    "retroinfer:rows=0.1:estimate=0.3:cluster=4:window=4:batch=10",
    "million:k=8x6:v=8x6:window=4",
    "million:k=8x6:v=8x6:outliers=2:window=4",
    "pqklt:k=8x6:v=8x6:window=4",
    "pqklt:k=8x6:v=8x6:keys=rope:window=4",
    "pqklt:k=8x6:v=8x6:norms=off:window=4",
    "pqklt:k=8x6:v=8x6:values=trained:window=4",
    "sq:k=4:v=4:block=32:window=4",
    "sq:k=3:v=1:block=32:window=4",
    "sq:k=8:v=8:block=64:window=4:batch=10",
    "hybrid:k=4x6:v=2x6:rows=0.1:window=4",
    "hybrid:k=4x6:v=2x6:rows=0.1:values=trained:window=4",
    "hybrid:k=4x6:v=2x6:rows=0.1:keys=rope:window=4",
    "hybrid:k=4x6:v=2x6:rows=0.1:norms=off:mean-error=off:window=4",
    "hybrid:k=4x6:v=2x6:rows=auto:window=4",
    "hybrid:k=4x6:v=2x6:rows=0.1:offloaded=int8:window=4",
    "hybrid:k=4x6:v=2x6:rows=0.1:refine=2:window=4",
    "snapkv:tokens=0.9:window=4",
    "zack:k=0.9:v=0.9:window=4",
    "zack:k=0.9:v=0.9:ranks=loss:multiple=4:window=4",
    "zack:k=0.9:v=0.9:tokens=0.9:window=4",
    "zack:k=0.9:v=0.9:bits=8:tokens=0.9:window=4:batch=10",
    "cachegen:window=4:batch=10",
    "cachegen:models=context:coder=range:window=4:batch=10",
    "cachegen:mode=channels:window=4:batch=10",
    "cachegen:mode=common:window=4:batch=10",
    "cachegen:mode=paper:window=4:batch=10",
    "cachegen:mode=lmcache:bins=32:window=4:batch=10",
];

pub struct Setup {
    pub model: Arc<Model>,
    pub rope: Arc<Rope>,
    pub tokens: Vec<u32>,
    profile: Profile,
}

/// The setup of all methods, calibrated once.
static ALL: LazyLock<Setup> = LazyLock::new(|| setup(&METHODS));

/// A tiny random model with a profile for `methods`.
fn setup(methods: &[&str]) -> Setup {
    setup_with(methods, RopeScaling::None)
}

fn setup_with(methods: &[&str], scaling: RopeScaling) -> Setup {
    setup_of("gqa", methods, scaling)
}

pub fn setup_of(fixture: &str, methods: &[&str], scaling: RopeScaling) -> Setup {
    let mut model = Model::load(&kv::fixture(fixture)).unwrap();
    (model.config.max_seq_len, model.config.rope_scaling) = (256, scaling);
    let rope = Rope::new(&model.config, 256);
    let tokens: Vec<u32> = (0..256_u32).map(|i| (i * i + 7 * i) % 96).collect();
    let methods: Vec<Method> = methods.iter().map(|method| method.parse().unwrap()).collect();
    let profile = calibrated(&model, &rope, &tokens, &methods).unwrap();
    Setup { model: Arc::new(model), rope: Arc::new(rope), tokens, profile }
}

impl Setup {
    pub fn prepare(&self, method: &str) -> Prepared {
        method.parse::<Method>().unwrap().prepare(&self.model, &self.rope, &self.profile).unwrap()
    }

    /// A cache prefilled with the first `n` tokens.
    fn prefilled(&self, method: &str, n: usize) -> Prepared {
        let Prepared { model, mut cache } = self.prepare(method);
        Prompt::run(&model, &self.rope, &self.tokens[..n]).unwrap().fill(cache.as_mut()).unwrap();
        assert_eq!(cache.seq_len(), n);
        Prepared { model, cache }
    }

    /// Decodes tokens `from..to` and returns the last logits.
    fn decode(&self, model: &Arc<Model>, cache: &mut dyn KvCache, from: usize, to: usize) -> Vec<f32> {
        let mut decoder = Decoder::new(model.clone(), self.rope.clone());
        let mut last = vec![];
        for &token in &self.tokens[from..to] {
            last = decoder.step(token, cache).unwrap().to_vec();
        }
        last
    }
}

/// A cache that holds the first tokens, for which it may have been prefilled with up to 60.
struct Filled {
    model: Arc<Model>,
    cache: Box<dyn KvCache>,
}

impl Setup {
    fn filled(&self, method: &str, len: usize) -> Filled {
        let prompt = len.min(60);
        let Prepared { model, mut cache } =
            if len == 0 { self.prepare(method) } else { self.prefilled(method, prompt) };
        self.decode(&model, cache.as_mut(), prompt, len);
        Filled { model, cache }
    }
}

impl Filled {
    /// The logits of token 110 after these.
    fn continued(mut self, s: &Setup, len: usize) -> Vec<f32> {
        s.decode(&self.model, self.cache.as_mut(), len, 110)
    }

    /// Goes back to `len` tokens, at odd ones in two steps, and returns the logits of token 110. None if this
    /// is refused; the cache then is the same as before.
    fn back_to(mut self, s: &Setup, len: usize) -> Option<Vec<f32>> {
        let steps =
            if len.is_multiple_of(2) { vec![len] } else { vec![(len + self.cache.seq_len()) / 2, len] };
        for len in steps {
            let mut before = self.cache.clone_box();
            match self.cache.truncate(len) {
                Ok(()) => {}
                Err(kv_llama::Error::Cache { .. }) => {
                    let held = before.seq_len();
                    assert_eq!(self.cache.seq_len(), held);
                    let expected = s.decode(&self.model, before.as_mut(), held, 110);
                    assert_eq!(self.continued(s, held), expected, "changed by a refused truncation to {len}");
                    return None;
                }
                Err(e) => panic!("to {len}: {e}"),
            }
        }
        Some(self.continued(s, len))
    }
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let largest = a.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0.0_f32, |m, (x, y)| m.max((x - y).abs())) / largest
}

#[test]
fn decoding_over_a_dense_cache_equals_prefill() {
    let s = setup(&[]);
    let hidden = prefill(&s.model, &s.rope, &s.tokens[..50], &mut |_, _| Ok(())).unwrap();
    let expected = logits(&s.model, &hidden[49 * s.model.config.hidden_size..]).unwrap();
    for start in [0, 1, 30] {
        let Prepared { model, mut cache } =
            if start == 0 { s.prepare("dense") } else { s.prefilled("dense", start) };
        assert!(distance(&expected, &s.decode(&model, cache.as_mut(), start, 50)) < 1e-4);
    }
}

#[test]
fn what_loses_nothing_equals_dense() {
    // Codebooks of 2^8 centroids on fewer calibration tokens than that hold every vector; ranks and ratios
    // are full.
    let lossless = [
        "oracle:ratio=1:exact=f32:window=4",
        "oracle:ratio=1:exact=f32:window=0:sinks=0",
        "quest:ratio=1:exact=f32:window=4",
        "infllm:ratio=1:exact=f32:window=4",
        "h2o:ratio=1:exact=f32",
        "pqcache:ratio=1:code=4x2:exact=f32:window=4",
        "sparq:ratio=1:exact=f32:window=4",
        "retroinfer:rows=1:exact=f32:window=4",
        "retroinfer:rows=0.01:estimate=1:cluster=1:exact=f32:window=4:batch=1",
        "zack:k=1:v=1:exact=f32:window=4",
        "zack:k=1:v=1:basis=stacked:exact=f32:window=4",
        "zack:k=1:v=1:basis=principal:exact=f32:window=4",
        "zack:k=1:v=1:ranks=uniform:exact=f32:window=4",
        "zack:k=1:v=1:ranks=loss:exact=f32:window=4",
        "snapkv:tokens=1:exact=f32:window=4",
        "pqklt:k=1x8:v=1x8:norms=off:values=trained:keys=rope:exact=f32:window=4",
        "hybrid:k=4x1:v=1x1:rows=1:exact=f32:window=4",
        "hybrid:k=1x8:v=1x8:values=trained:rows=0.3:keys=rope:exact=f32:window=4",
        "cachegen:bits=13:exact=f32:window=4:batch=10",
        "cachegen:mode=channels:k=0.00005:v=0.00005:exact=f32:window=4:batch=10", // bins beyond 16 bits
        "streaming:window=200:exact=f32",
        "int2:exact-layers=0+1:exact=f32:window=4",
    ];
    // Codebooks of keys after RoPE are trained at positions all over the context. They hold every vector
    // where positions do not turn keys.
    let after_rope = [
        "million:k=1x8:v=1x8:exact=f32:window=4",
        "pqklt:k=1x8:v=1x8:norms=off:values=trained:exact=f32:window=4",
        "pqklt:k=1x8:v=1x8:values=trained:exact=f32:window=4",
        "hybrid:k=1x8:v=1x8:values=trained:rows=0:exact=f32:window=4",
        "hybrid:k=1x8:v=1x8:values=trained:rows=auto:exact=f32:window=4",
    ];
    // Where they do, codes of single components of keys lose little.
    let of_components = [
        "million:k=16x8:v=1x8:exact=f32:window=4",
        "pqklt:k=16x8:v=1x8:norms=off:values=trained:exact=f32:window=4",
        "pqklt:k=16x8:v=1x8:values=trained:exact=f32:window=4",
        "hybrid:k=16x8:v=1x8:values=trained:rows=0:exact=f32:window=4",
        "hybrid:k=16x8:v=1x8:values=trained:rows=auto:exact=f32:window=4",
    ];
    let all = [&lossless[..], &after_rope].concat();
    for (methods, scaling, most) in [
        (&lossless[..], RopeScaling::None, 2e-3),
        (&all, RopeScaling::Linear { factor: 1e9 }, 2e-3),
        (&of_components, RopeScaling::None, 2e-2),
    ] {
        let s = setup_with(methods, scaling);
        let Prepared { model, mut cache } = s.prefilled("dense", 100);
        let expected = s.decode(&model, cache.as_mut(), 100, 130);
        for method in methods {
            let Prepared { model, mut cache } = s.prefilled(method, 100);
            // The decoded tokens are those of the calibration, so every vector is a centroid.
            let error = distance(&expected, &s.decode(&model, cache.as_mut(), 100, 130));
            assert!(error < most, "{method}: {error}");
        }
    }
}

#[test]
fn every_method_stays_near_dense() {
    let s = &ALL;
    let Prepared { model, mut cache } = s.prefilled("dense", 100);
    let expected = s.decode(&model, cache.as_mut(), 100, 130);
    for method in METHODS {
        let Prepared { model, mut cache } = s.prefilled(method, 100);
        let error = distance(&expected, &s.decode(&model, cache.as_mut(), 100, 130));
        assert!(error < 0.6, "{method}: {error}");
    }
}

/// llama.cpp's blocks of 32 need heads of that many components; the other models here have smaller ones.
#[test]
fn llama_cpps_types_code_whole_blocks() {
    let s = setup_of("mqa-wide-heads", &[], RopeScaling::None);
    let values = s.model.config.kv_values_per_token();
    let Prepared { model, mut cache } = s.prefilled("dense", 100);
    let expected = s.decode(&model, cache.as_mut(), 100, 130);
    for (method, most, block) in [("q8_0:window=4", 1e-2, 34), ("q4_0:window=4", 0.3, 18)] {
        let Prepared { model, mut cache } = s.prefilled(method, 100);
        // 92 tokens in blocks of 32 elements, and 8 exact ones in 16 bits.
        assert_eq!(cache.footprint().kept, 92 * values / 32 * block + 8 * values * 2, "{method}");
        cache.truncate(60).unwrap();
        s.decode(&model, cache.as_mut(), 60, 100);
        let error = distance(&expected, &s.decode(&model, cache.as_mut(), 100, 130));
        assert!(error < most, "{method}: {error}");
    }
    let s = setup(&[]);
    let refused = "q8_0:v=4".parse::<Method>().unwrap().prepare(&s.model, &s.rope, &s.profile);
    assert!(
        matches!(refused, Err(Error::Argument(what)) if what.contains("32 components do not divide heads of 16"))
    );
}

fn drops(method: &str) -> bool {
    method.contains("tokens=0.9") || method.starts_with("h2o")
}

/// Methods that drop tokens go back only as far as they hold all that is then attended to.
#[test]
fn truncation_goes_back_to_any_length() {
    let s = &ALL;
    for method in METHODS {
        let Prepared { model, cache: full } = s.prefilled(method, 100);
        let straight = s.decode(&model, full.clone_box().as_mut(), 100, 110);
        for len in [0, 3, 17, 60, 97, 100] {
            let mut cache = full.clone_box();
            match cache.truncate(len) {
                Err(kv_llama::Error::Cache { .. }) if drops(method) && len < 100 => continue,
                truncated => truncated.unwrap(),
            }
            assert_eq!(cache.seq_len(), len, "{method}");
            let again = s.decode(&model, cache.as_mut(), len, 110);
            assert_eq!(cache.seq_len(), 110);
            // Different tokens are exact, so the results are only close; at the full length nothing has
            // changed.
            let error = distance(&straight, &again);
            assert!(error < if len == 100 { 1e-6 } else { 0.6 }, "{method} at {len}: {error}");
        }
    }
}

/// A cache that has dropped tokens goes back as far as it holds all that is then attended to.
#[test]
fn what_has_dropped_tokens_goes_back_as_far_as_it_holds_them() {
    let all = [0, 2, 5, 30, 55, 59, 60, 61, 80, 93, 97, 99, 100];
    let methods: [(&str, &[usize]); 7] = [
        ("streaming:window=10:exact=f32", &[5, 30, 55, 59, 60, 61, 80, 93, 97, 99]),
        ("streaming:window=0:exact=f32", &[]),
        ("streaming:window=200:exact=f32", &[]),
        ("snapkv:tokens=0.3:exact=f32:window=4", &[2, 5, 30, 55, 59]),
        ("snapkv:tokens=1:exact=f32:window=4", &[]),
        ("h2o:ratio=0.3:exact=f32", &[2, 5, 30, 55, 59, 60, 61, 80, 93, 97, 99]),
        ("h2o:ratio=1:exact=f32", &[]),
    ];
    let s = setup(&methods.map(|(method, _)| method));
    for (method, refused) in methods {
        for len in all {
            let again = s.filled(method, 100).back_to(&s, len);
            assert_eq!(again.is_none(), refused.contains(&len), "{method} at {len}");
            if let Some(again) = again {
                let error = distance(&s.filled(method, len).continued(&s, len), &again);
                assert!(error < 4e-3, "{method} at {len}: {error}");
            }
        }
    }
}

#[test]
fn clones_go_their_own_way() {
    let s = &ALL;
    for method in METHODS {
        let Prepared { model, mut cache } = s.prefilled(method, 60);
        let mut copy = cache.clone_box();
        s.decode(&model, copy.as_mut(), 60, 90);
        assert_eq!((cache.seq_len(), copy.seq_len()), (60, 90));
        let a = s.decode(&model, cache.as_mut(), 60, 70);
        let Prepared { mut cache, .. } = s.prefilled(method, 60);
        assert_eq!(a, s.decode(&model, cache.as_mut(), 60, 70), "{method}");
    }
}

#[test]
fn bytes_are_counted_exactly() {
    let s = setup(&[
        "million:k=8x6:v=8x6:window=4",
        "pqklt:k=8x6:v=8x6:window=4",
        "sq:k=3:v=2:block=32:window=4",
        "hybrid:k=4x6:v=2x6:rows=0.1:window=4",
        "hybrid:k=4x6:v=2x6:rows=0.1:offloaded=int8:window=4",
        "zack:k=0.5:v=0.5:window=4",
        "zack:k=0.5:v=0.25:ranks=uniform:window=4",
        "cachegen:window=4:batch=10",
    ]);
    let n = 100;
    let values = s.model.config.kv_values_per_token(); // 2 layers x 2 x 2 heads x 16
    let kept = |method: &str| s.prefilled(method, n).cache.footprint();
    assert_eq!(kept("dense").kept, 4 * n * values);
    assert_eq!(kept("dense:dtype=bf16").kept, 2 * n * values);
    assert_eq!(kept("streaming:window=10").kept, 2 * 14 * values);
    // 92 tokens in codes, kept in blocks of 64: 8 subspaces of 6 bits are 6 bytes a head for keys and for
    // values; 8 exact.
    assert_eq!(kept("million:k=8x6:v=8x6:window=4").kept, 128 * 6 * (values / 16) + 8 * values * 2);
    assert_eq!(kept("million:k=8x6:v=8x6:window=4").shared, 4 * 64 * values);
    // The same, and a byte per token and head for each norm.
    let norms = 92 * (values / 16);
    assert_eq!(kept("pqklt:k=8x6:v=8x6:window=4").kept, 128 * 6 * (values / 16) + norms + 8 * values * 2);
    // Two blocks of 32 tokens: 3 and 2 bits; 16 steps and 16 errors of 16 bits a block, a byte for each norm.
    let blocks = 64 * (6 + 4) + 2 * (16 + 32) + 64;
    assert_eq!(kept("sq:k=3:v=2:block=32:window=4").kept, blocks * (values / 32) + 36 * values * 2);
    // Codes of 3 and 1.5 bytes a head, norms of both, and 16 sums of errors of values that are in no whole
    // block; all rows elsewhere, in 16 bits or in 8.
    let hybrid = kept("hybrid:k=4x6:v=2x6:rows=0.1:window=4");
    let codes = 128 * (3 + 3) * (values / 32) - 128 * 3 * (values / 64);
    assert_eq!(hybrid.kept, codes + norms + 4 * values / 2 + 8 * values * 2);
    assert_eq!(hybrid.offloaded, 92 * values * 2);
    let bytes = kept("hybrid:k=4x6:v=2x6:rows=0.1:offloaded=int8:window=4");
    assert_eq!((bytes.kept, bytes.offloaded), (hybrid.kept, 92 * values));
    // 88 tokens in groups of 8: 4 bits a number and 4 bytes a group of 8 numbers; 12 exact.
    assert_eq!(kept("int4:window=4:group=8").kept, 88 * values / 2 + 88 * values / 8 * 4 + 12 * values * 2);
    // Codes of 4 subspaces of 4 bits and a codebook of 16 x 16 numbers per head; all exact rows elsewhere.
    let pq = kept("pqcache:ratio=0.5:code=4x4:window=4");
    assert_eq!(pq.kept, 4 * (128 * 2 + 4 * 16 * 16) + 8 * values * 2);
    assert_eq!(pq.offloaded, 92 * values * 2);
    // 12 pages of 8 tokens: two bounds of 16 numbers each.
    let pages = 4 * 12 * 2 * 16 * 2;
    assert_eq!(kept("quest:ratio=0.5:page=8:window=4").kept, pages + 100 * values * 2);
    // Two keys of each of 12 blocks; 4 bytes for the score of each token, elsewhere.
    let blocks = kept("infllm:ratio=0.5:block=8:r=2:window=4");
    assert_eq!(blocks.kept, 4 * 12 * 2 * 16 * 2 + 8 * values * 2);
    assert_eq!(blocks.offloaded, 92 * (values * 2 + 4 * 4));
    // Half of the tokens, with 4 bytes each for their attention.
    assert_eq!(kept("h2o:ratio=0.5").kept, 50 * (values * 2 + 4 * 4));
    assert_eq!(kept("fp8:window=4").kept, 92 * values + 8 * values * 2);
    assert_eq!(kept("nvfp4:window=4").kept, 92 * (values / 2 + values / 16) + 8 * values * 2);
    // 64 tokens in groups of 32: 2 bits a number; 4 bytes for each channel of a group of keys, and for the 16
    // numbers of a token's values.
    let groups = 64 * values / 4 + 64 * values / 64 * 4 + 64 * values / 32 * 4;
    assert_eq!(kept("kivi:window=16").kept, groups + 36 * values * 2);
    let half = kept("zack:k=0.5:v=0.5:window=4").kept;
    assert!(half <= 92 * values + 8 * values * 2 && half > 92 * values / 2, "{half}");
    // Half of the keys' components, a quarter of the values'; of 92 tokens all, or half with 4 bits a number,
    // 4 bytes for each key component of a block, and 4 for each token's values.
    let uniform = "zack:k=0.5:v=0.25:ranks=uniform:window=4";
    assert_eq!(kept(uniform).kept, 92 * values / 8 * 3 * 2 + 8 * values * 2);
    let heads = values / 32;
    let coded = heads * (46 * 4 + 8 * 4) + heads * 46 * (2 + 4);
    assert_eq!(kept(&format!("{uniform}:tokens=0.5:bits=4:batch=92")).kept, coded + 8 * values * 2);
    assert_eq!(kept("snapkv:tokens=0.5:window=4").kept, 48 * values * 2 + 4 * values * 2);
    let coded = kept("cachegen:window=4:batch=10");
    assert_eq!(coded.working, 90 * values * 2);
    assert!(coded.kept < 90 * values + 10 * values * 2);
}

/// Codebooks of some tokens do not fit others; the codebook of Gaussians fits all.
#[test]
fn codes_that_do_not_fit_a_text_are_noticed() {
    let methods = [
        "million:k=8x5:v=8x5:window=4",
        "pqklt:k=8x5:v=8x5:values=trained:window=4",
        "pqklt:k=8x5:v=8x5:window=4",
        "hybrid:k=8x5:v=8x5:rows=0.1:window=4",
        "hybrid:k=8x5:v=8x5:rows=0.1:values=trained:window=4",
    ];
    let s = setup(&methods);
    let others: Vec<u32> = (0..96).filter(|token| !s.tokens.contains(token)).cycle().take(100).collect();
    for method in methods {
        let filled = |tokens: &[u32]| {
            let Prepared { model, mut cache } = s.prepare(method);
            Prompt::run(&model, &s.rope, tokens).unwrap().fill(cache.as_mut()).unwrap();
            cache
        };
        let fits = filled(&s.tokens[..100]).fits();
        assert_eq!(fits.len(), 2 * 2 * 2, "layers, heads and sides of {method}");
        assert_eq!(HeadFit::warning(method, &fits), None, "{fits:?}");
        let mut cache = filled(&others);
        let fits = cache.fits();
        assert!(fits.iter().all(|head| head.fit.tokens == 92), "all but sinks and window");
        assert!(
            fits.iter().any(|head| head.side == Side::Keys && head.fit.is_misfit()),
            "{method}: {fits:?}"
        );
        let misfit = fits.iter().any(|head| head.side == Side::Values && head.fit.is_misfit());
        let has_own = method.starts_with("million") || method.contains("values=trained");
        assert_eq!(misfit, has_own, "{method}: {fits:?}");
        assert!(HeadFit::warning(method, &fits).is_some());
        cache.truncate(0).unwrap();
        assert!(cache.fits().iter().all(|head| head.fit.tokens == 0 && !head.fit.is_misfit()));
    }
    assert!(s.prefilled("int4:window=4:group=8", 100).cache.fits().is_empty(), "nothing of it is fitted");
}

/// A head whose keys lose more than the profile expects gets more bits, on prompts of 64 coded tokens and
/// more.
#[test]
fn keys_that_do_not_fit_get_more_bits() {
    let [kept, widened] = ["sq:k=2:v=4:block=32:window=4:widen=off", "sq:k=2:v=4:block=32:window=4"];
    let s = setup(&[kept]);
    let mut others = s.model.as_ref().clone();
    for layer in &mut others.layers {
        let keys = Arc::make_mut(&mut layer.attention).k.weight.f32_mut();
        let half = keys.len() / 2;
        keys[..half].iter_mut().for_each(|x| *x *= 2.0); // those of the first head
    }
    let filled = |model: Model, method: &str| {
        let Prepared { mut cache, .. } = s.prepare(method);
        Prompt::run(&Arc::new(model), &s.rope, &s.tokens[..200]).unwrap().fill(cache.as_mut()).unwrap();
        cache
    };
    for method in [kept, widened] {
        let cache = filled(s.model.as_ref().clone(), method);
        let fits = cache.fits();
        assert_eq!(fits.len(), 2 * 2 * 2, "layers, heads and sides");
        assert!(fits.iter().all(|head| head.fit.added_bits == 0.0), "{fits:?}");
        assert_eq!(HeadFit::warning(method, &fits), None, "{fits:?}");
    }
    let [few, mut more] = [kept, widened].map(|method| filled(others.clone(), method));
    let (before, after) = (few.fits(), more.fits());
    for (before, after) in before.iter().zip(&after) {
        let changed = (before.head, before.side) == (0, Side::Keys);
        let (before, after) = (before.fit, after.fit);
        assert_eq!((before.is_misfit(), before.added_bits), (changed, 0.0), "{before:?}");
        assert_eq!(before.is_misfit(), after.added_bits > 0.0, "{before:?} {after:?}");
        assert!(after.found <= before.found && !after.is_misfit(), "{before:?} {after:?}");
    }
    assert!(HeadFit::warning(widened, &after).unwrap().contains("have more bits"));
    assert!(more.footprint().kept > few.footprint().kept);
    more.truncate(4).unwrap();
    assert!(more.fits().iter().all(|head| head.fit.tokens == 0 && head.fit.added_bits == 0.0));
}

#[test]
fn fetched_rows_are_counted() {
    let methods = ["hybrid:k=4x6:v=2x6:rows=0.1:window=4", "hybrid:k=4x6:v=2x6:rows=0:window=4"];
    let s = setup(&methods);
    let fetched = |method: &str| {
        let Prepared { model, mut cache } = s.prefilled(method, 100);
        assert_eq!(cache.fetched().attentions, 0);
        s.decode(&model, cache.as_mut(), 100, 101);
        let fetched = cache.fetched();
        assert_eq!(cache.clone_box().fetched().attentions, 0);
        (fetched.attentions, fetched.rows, fetched.bytes)
    };
    // 2 layers of 2 heads; a tenth of the 93 tokens that are neither sinks nor window; 16 numbers a side in
    // 16 bits.
    assert_eq!(fetched(methods[0]), (4, 4 * 10, 4 * 10 * 64));
    assert_eq!(fetched(methods[1]), (4, 0, 0));
    assert_eq!(fetched("oracle:ratio=0.2:window=4"), (4, 4 * 13, 4 * 13 * 64));
    assert_eq!(fetched("dense"), (0, 0, 0));
}

#[test]
fn what_a_cache_cannot_do_is_an_error() {
    let s = setup(&[]);
    let error = |result: kv_llama::Result<()>| matches!(result, Err(kv_llama::Error::Cache { .. }));
    let kv_dim = s.model.config.kv_dim();
    let row = vec![0.5; kv_dim];
    let Prepared { mut cache, .. } = s.prefilled("streaming:window=10", 100);
    assert!(error(cache.truncate(50)));
    assert!(error(cache.truncate(101)));
    assert!(error(cache.append(0, 99, &row, &row)), "a position that does not follow");
    assert!(error(cache.append(2, 100, &row, &row)), "a layer that does not exist");
    assert!(error(cache.append(0, 100, &row[1..], &row[1..])), "a short row");
    assert!(error(cache.append(0, 100, &row, &[row.clone(), row.clone()].concat())), "more values than keys");
    assert!(error(cache.append(0, 100, &vec![f32::NAN; kv_dim], &row)), "not a number");
    let mut out = vec![0.0; s.model.config.q_dim()];
    assert!(error(cache.attend(0, &vec![0.0; out.len() - 1], &mut out)), "a short query");
    let Prepared { cache, .. } = s.prepare("dense");
    assert!(error(cache.attend(0, &out.clone(), &mut out)), "attention over nothing");
    let Prepared { mut cache, .. } = s.prefilled("dense", 256);
    assert!(error(cache.append(0, 256, &row, &row)), "more tokens than positions");
}

#[test]
fn a_profile_that_does_not_serve_is_an_error() {
    let s = setup(&["million:k=8x6:v=8x6"]);
    for method in ["million:k=8x5:v=8x6", "pqklt:k=8x6:v=8x6", "zack", "cachegen"] {
        let prepared = method.parse::<Method>().unwrap().prepare(&s.model, &s.rope, &s.profile);
        assert!(matches!(prepared, Err(Error::Profile(_))), "{method}");
    }
    for method in ["million:k=7x6:v=8x6", "pqcache:code=5x4", "int4:exact-layers=2"] {
        let prepared = method.parse::<Method>().unwrap().prepare(&s.model, &s.rope, &s.profile);
        assert!(matches!(prepared, Err(Error::Argument(_))), "{method}");
    }
}

#[test]
fn profiles_survive_the_disk_and_name_their_model() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile");
    let methods = [
        "million:k=8x6:v=8x6:window=4",
        "pqklt:k=8x4:v=8x4:window=4",
        "zack:window=4",
        "cachegen:window=4:batch=10",
    ];
    let mut s = setup(&methods);
    let before: Vec<_> = methods.iter().map(|m| s.prefilled(m, 60).cache.footprint()).collect();
    s.profile.save(&path, &s.model).unwrap();
    s.profile = Profile::load(&path, &s.model).unwrap();
    let after: Vec<_> = methods.iter().map(|m| s.prefilled(m, 60).cache.footprint()).collect();
    assert_eq!(before, after);

    let other = kv::fixture("mha");
    let refused = Profile::load(&path, &Model::load(&other).unwrap()).unwrap_err().to_string();
    assert!(refused.contains("made for gqa") && refused.contains("not for mha"), "{refused}");
}
