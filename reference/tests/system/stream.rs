//! Streams over a shaped link into real caches: faults of the link and of the bytes, and the quality of the
//! loaded caches.

use std::sync::{Arc, LazyLock};
use std::time::Instant;

use codec_core::{Encoding, Plans, StreamPolicy};
use kv_llama::{Decoder, KvCache};
use kv_methods::{Method, Prepared, Profile, calibrated};
use kv_model::{Model, Rope};
use kv_reference::eval::{Prompt, TextScores, score_text};
use kv_reference::stream::encoded::{EncodedContext, Memory, levels};
use kv_reference::stream::target::Target;
use kv_stream::{
    Bandwidth, Bytes, Choice, Error, GBPS, Link, Options, Outcome, RealClock, RequestChunk, ShapedLink,
    Trace, serve_into,
};

use crate::support::shipped::shipped;

const TEXT: Encoding = Encoding::Text;

fn given(encodings: &[Encoding]) -> Options {
    Options { choice: Choice::Given(encodings.to_vec()), batch: 8, timeout: 1.0, fall_back: true }
}

fn adaptive(slo: f64, first_level: usize, prior: Option<f64>) -> Options {
    let policy = StreamPolicy { slo, first_level, prior, plans: Plans::TextFirst };
    Options { choice: Choice::Adaptive(policy), ..given(&[TEXT]) }
}

fn gbps(rate: f64) -> Bandwidth {
    Bandwidth::Steps(vec![(0.0, rate * GBPS)])
}

/// A model, a prompt at three levels in chunks of 200 tokens, and its continuation.
struct Setup {
    model: Arc<Model>,
    rope: Arc<Rope>,
    planes: codec_core::Profile,
    prompt: Vec<u32>,
    rest: Vec<u32>,
    context: Arc<EncodedContext>,
    exact: TextScores,
}

const PROMPT: usize = 1000;

static SETUP: LazyLock<Setup> = LazyLock::new(|| {
    let (model, tokens) = shipped(40_000);
    let rope = Arc::new(Rope::new(&model.config, 2048));
    let methods = Method::parse_list("cachegen:bits=4,cachegen:bits=3,cachegen:bits=2").unwrap();
    let profile = calibrated(&model, &rope, &tokens[..2048], &methods).unwrap();
    let planes = levels(&methods, &model, &profile).unwrap();
    let (prompt, rest) = (tokens[2048..2048 + PROMPT].to_vec(), tokens[2048 + PROMPT..][..49].to_vec());
    let context = Arc::new(EncodedContext::encode(&model, &rope, &planes, &prompt, 200).unwrap());
    let Prepared { mut cache, .. } =
        "dense".parse::<Method>().unwrap().prepare(&model, &rope, &Profile::default()).unwrap();
    Prompt::run(&model, &rope, &prompt).unwrap().fill(cache.as_mut()).unwrap();
    let exact =
        score_text(&mut Decoder::new(model.clone(), rope.clone()), cache.as_mut(), &rest, None).unwrap();
    Setup { model, rope, planes, prompt, rest, context, exact }
});

impl Setup {
    fn load(&self, contexts: Vec<Arc<EncodedContext>>, options: &Options) -> (Trace, Vec<Box<dyn KvCache>>) {
        let clock = RealClock(Instant::now());
        let mut link = ShapedLink::new(clock, Memory(contexts.clone()), gbps(1.0), 0.0);
        let (trace, caches) = self.load_over(&mut link, clock, &contexts, options);
        (trace.unwrap(), caches)
    }

    fn load_over(
        &self,
        link: &mut (impl Link + Send),
        clock: RealClock,
        contexts: &[Arc<EncodedContext>],
        options: &Options,
    ) -> (kv_stream::Result<Trace>, Vec<Box<dyn KvCache>>) {
        let costs: Vec<_> = contexts.iter().map(|context| context.costs()).collect();
        let dense: Method = "dense".parse().unwrap();
        let empty = |_| dense.prepare(&self.model, &self.rope, &Profile::default()).unwrap().cache;
        let mut caches: Vec<_> = (0..contexts.len()).map(empty).collect();
        let target = Target {
            contexts: contexts.iter().map(|context| context.context().clone()).collect(),
            planes: &self.planes,
            caches: caches.iter_mut().map(|cache| &mut **cache as &mut dyn KvCache).collect(),
            decoder: &mut Decoder::new(self.model.clone(), self.rope.clone()),
        };
        let trace = serve_into(link, target.into_caches().unwrap(), clock, &costs, options);
        (trace, caches)
    }

    /// The divergence of a cache from the exact one.
    fn kl(&self, cache: &mut dyn KvCache) -> f64 {
        let mut decoder = Decoder::new(self.model.clone(), self.rope.clone());
        score_text(&mut decoder, cache, &self.rest, Some(&self.exact.logits)).unwrap().divergence.kl()
    }

    fn loaded(&self, encodings: &[Encoding]) -> f64 {
        let (trace, mut caches) = self.load(vec![self.context.clone()], &given(encodings));
        assert_eq!((caches.len(), caches[0].seq_len(), trace.events.len()), (1, PROMPT, 5));
        self.kl(caches[0].as_mut())
    }
}

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn every_level_a_mix_and_text_in_the_middle_are_loaded() {
    let [fine, medium, coarse] = [0, 1, 2].map(|level| SETUP.loaded(&[Encoding::Level(level)]));
    assert!(fine < 0.01 && fine < medium && medium < coarse && coarse < 0.1, "{fine} {medium} {coarse}");
    let mixed = SETUP.loaded(&[0, 1, 2].map(Encoding::Level));
    assert!(fine < mixed && mixed < coarse, "{fine} {mixed} {coarse}");
    let text = SETUP.loaded(&[Encoding::Level(2), Encoding::Level(2), TEXT, Encoding::Level(2), TEXT]);
    assert!(text < coarse, "{text} {coarse}");
    let exact = SETUP.loaded(&[TEXT]);
    assert!(exact < 1e-9, "{exact}");
}

/// A chunk of text attends to the earlier chunks as loaded, and is itself exact.
#[test]
fn text_on_top_of_loaded_chunks_is_a_prefill_over_them() {
    let first = [Encoding::Level(2), Encoding::Level(1), TEXT];
    let (_, mut caches) = SETUP.load(vec![SETUP.context.clone()], &given(&[&first[..], &[TEXT; 2]].concat()));
    let (_, mut loaded) = SETUP.load(vec![SETUP.context.clone()], &given(&first[..2]));
    loaded[0].truncate(400).unwrap();
    let mut decoder = Decoder::new(SETUP.model.clone(), SETUP.rope.clone());
    decoder.prefill(&SETUP.prompt[400..], loaded[0].as_mut()).unwrap();
    let expected = decoder.step(SETUP.rest[0], loaded[0].as_mut()).unwrap().to_vec();
    let logits = decoder.step(SETUP.rest[0], caches[0].as_mut()).unwrap();
    let largest = expected.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    let error = expected.iter().zip(logits).fold(0.0_f32, |m, (a, b)| m.max((a - b).abs())) / largest;
    assert!(error < 1e-4, "{error}");
}

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn an_adaptive_stream_of_two_requests_fills_both_caches() {
    let options = Options { batch: 1, ..adaptive(0.0, 2, None) };
    let (trace, caches) = SETUP.load(vec![SETUP.context.clone(); 2], &options);
    assert!(caches.iter().all(|cache| cache.seq_len() == PROMPT));
    assert!(trace.loaded.iter().all(|seconds| *seconds > 0.0 && *seconds < 60.0));
    for event in trace.events.iter().filter(|event| event.computed_at.is_some()) {
        assert!(event.arrived <= event.computing_from.unwrap() + 1e-9);
    }
    let json = serde_json::to_value(&trace).unwrap();
    assert_eq!(json["events"].as_array().unwrap().len(), trace.events.len());
}

#[test]
fn damaged_and_swapped_chunks_are_recomputed() {
    let mut context =
        EncodedContext::encode(&SETUP.model, &SETUP.rope, &SETUP.planes, &SETUP.prompt, 200).unwrap();
    let other = context.chunk_mut(1, 0).unwrap().clone();
    let level = context.chunk_mut(3, 1).unwrap().clone();
    let mut flipped = other.to_vec();
    flipped[other.len() / 2] ^= 1;
    *context.chunk_mut(1, 0).unwrap() = flipped.into();
    *context.chunk_mut(2, 0).unwrap() = other; // of another place
    *context.chunk_mut(3, 0).unwrap() = level; // of another level
    let cut = context.chunk_mut(4, 0).unwrap();
    cut.truncate(cut.len() - 1);
    let (trace, mut caches) = SETUP.load(vec![Arc::new(context)], &given(&[Encoding::Level(0)]));
    assert_eq!(trace.events[0].outcome, Outcome::Loaded);
    for event in &trace.events[1..] {
        assert!(matches!(&event.outcome, Outcome::Damaged(what) if !what.is_empty()), "{event:?}");
    }
    // All but the first chunk are exact.
    assert!(SETUP.kl(caches[0].as_mut()) <= SETUP.loaded(&[Encoding::Level(0)]));
}

/// A link that breaks during a transfer, in one of several ways.
struct Breaks {
    inner: ShapedLink<RealClock, Memory>,
    transfers: usize,
    at: usize,
    way: usize,
}

impl Link for Breaks {
    fn now(&self) -> f64 {
        self.inner.now()
    }

    fn start(&mut self, chunk: RequestChunk, level: usize) -> kv_stream::Result<()> {
        self.transfers += 1;
        if (self.transfers, self.way) == (self.at, 0) {
            Err(broken())
        } else {
            self.inner.start(chunk, level)
        }
    }

    fn wait(&mut self, until: f64) -> kv_stream::Result<u64> {
        if (self.transfers, self.way) == (self.at, 1) { Err(broken()) } else { self.inner.wait(until) }
    }

    fn cancel(&mut self) {
        self.inner.cancel();
    }

    fn take(&mut self) -> kv_stream::Result<Bytes> {
        if (self.transfers, self.way) == (self.at, 2) { Err(broken()) } else { self.inner.take() }
    }
}

fn broken() -> Error {
    Error::Link("connection reset".into())
}

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn a_link_that_breaks_leaves_the_rest_to_the_text() {
    for way in 0..3 {
        for at in [1, 3, 5] {
            for fall_back in [true, false] {
                let (clock, contexts) = (RealClock(Instant::now()), vec![SETUP.context.clone()]);
                let inner = ShapedLink::new(clock, Memory(contexts.clone()), gbps(1.0), 0.0);
                let mut link = Breaks { inner, transfers: 0, at, way };
                let options = Options { fall_back, ..given(&[Encoding::Level(0)]) };
                let (result, caches) = SETUP.load_over(&mut link, clock, &contexts, &options);
                if !fall_back {
                    assert!(matches!(result, Err(Error::Link(_))));
                    continue;
                }
                let events = result.unwrap().events;
                assert_eq!(events.len(), 6);
                assert!(matches!(&events[at - 1].outcome, Outcome::Failed(what) if what.contains("reset")));
                assert!(events[at..].iter().all(|event| event.outcome == Outcome::Recomputed));
                assert_eq!(caches[0].seq_len(), PROMPT);
            }
        }
    }
}
