//! Prompts and the command over a real S3 server, which is killed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use codec_core::{Encoding, Plans, StreamPolicy};
use kv_llama::Decoder;
use kv_llama::ops::log_softmax;
use kv_methods::{Method, calibrated};
use kv_model::Rope;
use kv_reference::eval::kl_divergence;
use kv_reference::stream::encoded::{EncodedContext, levels};
use kv_reference::stream::prompt::{FillOptions, Filled, PromptStore};
use kv_reference::stream::target::{Context, Target};
use kv_store::object_store::path::Path;
use kv_store::{AsyncStore, Check, Grid, KvStore, Options, Space, StoreLink};
use kv_stream::{Bytes, Choice, Link, Outcome, RealClock, RequestChunk, Speeds, serve_into};

use crate::support::kv::run;
use crate::support::s3::{bucket_is_missing, s3};
use crate::support::shipped::shipped;
use crate::support::weed::{BUCKET, Server, weed};

#[test]
fn a_missing_bucket_is_not_an_empty_store() {
    let Some(weed) = weed() else { return };
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&weed, folder.path());
    bucket_is_missing(&server.endpoint(), "nowhere", "404 Not Found (NoSuchBucket: ");
    let empty = run("ls", s3(&["store", "ls", &format!("s3://{BUCKET}/eu")], &server.endpoint()));
    assert!(empty.status.success() && empty.stdout == b"nothing is stored there\n", "{empty:?}");
}

/// A server that dies before the third transfer: the missing chunks are recomputed over the loaded ones.
#[test]
fn a_stream_goes_on_as_text_when_its_server_dies() {
    let Some(weed) = weed() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (model, tokens) = shipped(20_000);
    let rope = Arc::new(Rope::new(&model.config, 2048));
    let methods = Method::parse_list("cachegen:bits=8,cachegen:bits=3").unwrap();
    let calibrated = calibrated(&model, &rope, &tokens[..1024], &methods).unwrap();
    let profile = levels(&methods, &model, &calibrated).unwrap();
    let space = Space::new(&model.hash, &profile, Grid { chunk: 60, tail: 20 }).unwrap();
    let prompt = &tokens[1024..1345];
    let server = Server::start(&weed, folder.path());
    let quick =
        Options { retry: Duration::from_secs(3), timeout: Duration::from_secs(2), ..Options::default() };
    let store = KvStore::new(AsyncStore::new(server.store(), Path::from("a"), quick)).unwrap();
    let prompts = PromptStore { store: &store, space: &space, profile: &profile };
    assert_eq!(prompts.calculate(&model, &rope, prompt, Check::Length, |_| ()).unwrap().stored, 6);
    // The command sees the same, through the settings of the environment.
    let output = run("ls", s3(&["store", "ls", &format!("s3://{BUCKET}/a")], &server.endpoint()));
    let text = String::from_utf8_lossy(&output.stdout);
    let is_listed = |row: &str| row.split_whitespace().skip(1).take(3).eq(["1", "6", "320"]);
    assert!(output.status.success() && text.lines().nth(1).is_some_and(is_listed), "{output:?}");

    let dense: Method = "dense".parse().unwrap();
    let fill = |options: &FillOptions| {
        let mut cache = dense.prepare(&model, &rope, &Default::default()).unwrap().cache;
        let mut decoder = Decoder::new(model.clone(), rope.clone());
        let filled = prompts.fill(&mut decoder, cache.as_mut(), prompt, options).unwrap();
        assert_eq!(cache.seq_len(), prompt.len());
        filled
    };
    let given = |encodings: Vec<Encoding>| {
        let choice = Choice::Given(encodings);
        let stream = kv_stream::Options { choice, batch: 1, timeout: 10.0, fall_back: true };
        FillOptions { stream, speeds: Speeds::UNKNOWN, chunk: 64, keep: false }
    };
    let text = fill(&given(vec![Encoding::Text]));
    let fine = fill(&given(vec![Encoding::Level(0)]));
    let kl = |filled: &Filled| kl_divergence(&log_softmax(&text.logits), &log_softmax(&filled.logits));
    let trace = fine.trace.as_ref().unwrap();
    assert!(fine.prefix == 320 && trace.bytes > 0 && kl(&fine) < 1e-3, "{}", kl(&fine));
    assert!(trace.events.iter().all(|event| event.outcome == Outcome::Loaded));

    // An adaptive stream without a deadline. Its choices depend on the machine.
    let sample = EncodedContext::encode(&model, &rope, &profile, &prompt[..256], 256).unwrap();
    let policy = StreamPolicy { slo: 0.0, first_level: 1, prior: None, plans: Plans::TextFirst };
    let mut adaptive = FillOptions { speeds: sample.speeds(), ..given(vec![]) };
    adaptive.stream.choice = Choice::Adaptive(policy);
    let adapted = fill(&adaptive);
    let events = &adapted.trace.as_ref().unwrap().events;
    let made = |event: &&kv_stream::Event| event.computed_at.is_some();
    assert_eq!(events.iter().filter(made).map(|event| event.tokens).sum::<usize>(), 320);
    assert!(kl(&adapted) < 0.1, "{}", kl(&adapted));

    // `find` is answered before the server dies.
    let found = store.find(&space, &prompt[..320]).unwrap();
    let clock = RealClock(Instant::now());
    let inner = StoreLink::new(&store, &space, &found, clock);
    let costs = [inner.costs(&Speeds::UNKNOWN)];
    let mut link = Dying { inner, server: Some(server), transfers: 0 };
    let chunks = found.iter().map(|chunk| chunk.key().tokens.clone()).collect();
    let context = Context { tokens: prompt.to_vec(), chunks, exact: 0 };
    let mut cache = dense.prepare(&model, &rope, &Default::default()).unwrap().cache;
    let mut decoder = Decoder::new(model.clone(), rope.clone());
    let target = Target {
        contexts: vec![context],
        planes: &profile,
        caches: vec![cache.as_mut()],
        decoder: &mut decoder,
    };
    let options = given(vec![Encoding::Level(0)]).stream;
    let trace = serve_into(&mut link, target.into_caches().unwrap(), clock, &costs, &options).unwrap();
    let outcomes: Vec<_> = trace.events.iter().map(|event| event.outcome.clone()).collect();
    assert_eq!(outcomes[..2], [const { Outcome::Loaded }; 2]);
    assert!(matches!(outcomes[2], Outcome::Failed(_)), "{outcomes:?}");
    assert_eq!(outcomes[3..], [const { Outcome::Recomputed }; 4]);
    assert!(trace.seconds() < 15.0 && cache.seq_len() == 320);
    let logits = decoder.prefill(&prompt[320..], cache.as_mut()).unwrap();
    assert!(kl_divergence(&log_softmax(&text.logits), &log_softmax(logits)) < 1e-3);
}

/// A link whose server is killed before the third transfer.
struct Dying<'a> {
    inner: StoreLink<'a>,
    server: Option<Server>,
    transfers: usize,
}

impl Link for Dying<'_> {
    fn now(&self) -> f64 {
        self.inner.now()
    }

    fn start(&mut self, chunk: RequestChunk, level: usize) -> kv_stream::Result<()> {
        self.transfers += 1;
        if self.transfers == 3
            && let Some(server) = self.server.take()
        {
            server.kill();
        }
        self.inner.start(chunk, level)
    }

    fn wait(&mut self, until: f64) -> kv_stream::Result<u64> {
        self.inner.wait(until)
    }

    fn cancel(&mut self) {
        self.inner.cancel();
    }

    fn take(&mut self) -> kv_stream::Result<Bytes> {
        self.inner.take()
    }
}
