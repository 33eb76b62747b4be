//! A stored context loaded on a GPU equals the one that the CPU loads from the same frames. Without a GPU
//! these tests are skipped, which `GPU_TESTS=require` turns into a failure.

use std::ops::Range;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use codec_core::Encoding;
use kv_device::{Chunk, FRAMES, Gpu, PageLocked};
use kv_llama::KvCache;
use kv_llama_gpu::Error;
use kv_methods::{Method, Prepared, Profile, calibrated};
use kv_model::{Model, Rope};
use kv_reference::device::StreamTarget;
use kv_reference::eval::score_text;
use kv_reference::stream::encoded::{EncodedContext, Memory, SINKS, levels};
use kv_reference::stream::target::Target;
use kv_stream::{
    Bandwidth, Bytes, Caches, Choice, Options, Outcome, RealClock, ShapedLink, Trace, serve_into,
};

use crate::support::{decoder, divergence, gpu, model, teacher_forced};

/// A model, a prompt at three levels in chunks of 150 tokens, and its continuation.
struct Setup {
    model: Arc<Model>,
    rope: Arc<Rope>,
    planes: codec_core::Profile,
    profile: Profile, // of CACHES
    prompt: Vec<u32>,
    rest: Vec<u32>,
    context: Arc<EncodedContext>,
}

/// One GPU for all tests, which take turns: its kernels compile once, and no test captures a graph while
/// another frees memory in use by the device.
static GPU: LazyLock<Option<Mutex<Arc<Gpu>>>> = LazyLock::new(|| gpu("loads").map(Mutex::new));

fn gpu_in_turn() -> Option<MutexGuard<'static, Arc<Gpu>>> {
    GPU.as_ref().map(|gpu| gpu.lock().unwrap_or_else(PoisonError::into_inner))
}

const DENSE: &str = "dense:dtype=f16";

/// Caches that take frames, each with one on the CPU that has the same logits.
const CACHES: [(&str, &str); 9] = [
    (DENSE, DENSE),
    ("dense:dtype=bf16", DENSE),
    ("dense:dtype=f16:pages=32", DENSE),
    ("int4", "int4"),
    ("million", "million"),
    ("pqklt", "pqklt"),
    ("sq:block=64", "sq:block=64"),
    ("hybrid:rows=0.1", "hybrid:rows=0.1"),
    ("zack:k=1:v=1", DENSE), // all ranks
];

const PROMPT: usize = 700;
const CAPACITY: usize = 1024;

static SETUP: LazyLock<Setup> = LazyLock::new(|| {
    let (model, tokens) = model();
    let (calibration, tokens) = tokens.split_at(2048);
    let (prompt, rest) = (tokens[..PROMPT].to_vec(), tokens[PROMPT..][..100].to_vec());
    let rope = Arc::new(Rope::new(&model.config, 2048));
    // With and without a transform, and with prediction from the previous token.
    let methods = "cachegen:bits=3,cachegen:mode=channels:k=0.3:v=0.3,cachegen:bits=2:predictor=previous";
    let methods = Method::parse_list(methods).unwrap();
    let profile = calibrated(&model, &rope, calibration, &methods).unwrap();
    let planes = levels(&methods, &model, &profile).unwrap();
    let caches: Vec<&str> = CACHES.iter().map(|(method, _)| *method).collect();
    let caches = Method::parse_list(&caches.join(",")).unwrap();
    let profile = calibrated(&model, &rope, calibration, &caches).unwrap();
    let context = Arc::new(EncodedContext::encode(&model, &rope, &planes, &prompt, 150).unwrap());
    Setup { model, rope, planes, profile, prompt, rest, context }
});

impl Setup {
    /// Streams the context into caches.
    fn stream(&self, context: &Arc<EncodedContext>, given: &[Encoding], caches: impl Caches) -> Trace {
        let clock = RealClock(Instant::now());
        let link: Bandwidth = "1".parse().unwrap();
        let mut link = ShapedLink::new(clock, Memory(vec![context.clone()]), link, 0.0);
        let choice = Choice::Given(given.to_vec());
        let options = Options { choice, batch: 1, timeout: 1.0, fall_back: true };
        serve_into(&mut link, caches, clock, &[context.costs()], &options).unwrap()
    }

    /// The logits after the prompt, loaded on the CPU.
    fn on_cpu(&self, method: &str, context: &Arc<EncodedContext>, given: &[Encoding]) -> Vec<Vec<f32>> {
        let method: Method = method.parse().unwrap();
        let Prepared { mut cache, .. } = method.prepare(&self.model, &self.rope, &self.profile).unwrap();
        let mut decoder = kv_llama::Decoder::new(self.model.clone(), self.rope.clone());
        let target = Target {
            contexts: vec![context.context().clone()],
            planes: &self.planes,
            caches: vec![&mut *cache as &mut dyn KvCache],
            decoder: &mut decoder,
        };
        self.stream(context, given, target.into_caches().unwrap());
        score_text(&mut decoder, cache.as_mut(), &self.rest, None).unwrap().logits
    }

    /// A decoder with an empty cache, on the device.
    fn decoder(&self, gpu: &Arc<Gpu>, method: &str) -> kv_llama_gpu::Decoder {
        decoder(gpu, &self.model, method, &self.profile, 1, CAPACITY)
    }

    /// The logits after the prompt, loaded on the device, and the trace.
    fn on_device(
        &self,
        gpu: &Arc<Gpu>,
        method: &str,
        context: &Arc<EncodedContext>,
        given: &[Encoding],
    ) -> (Vec<Vec<f32>>, Trace) {
        let mut decoder = self.decoder(gpu, method);
        let mut loader = decoder.loader(&self.planes).unwrap();
        let target = StreamTarget::new(&mut decoder, &mut loader, context.context().clone());
        let trace = self.stream(context, given, target);
        (teacher_forced(&mut decoder, &self.rest[..self.rest.len() - 1]), trace)
    }

    /// The tokens of a chunk that its frames hold.
    fn coded(&self, index: usize) -> Chunk {
        let Range { start, end } = self.context.context().chunks[index];
        chunk(0, start.max(SINKS)..end)
    }

    fn frame(&self, index: usize, level: usize) -> Bytes {
        self.context.frame(index, level).unwrap().clone()
    }
}

fn chunk(sequence: usize, tokens: Range<usize>) -> Chunk {
    Chunk { sequence, position: tokens.start, count: tokens.len() }
}

#[test]
fn loaded_contexts_are_those_of_the_cpu() {
    let Some(gpu) = gpu_in_turn() else { return };
    let mixed = [Encoding::Level(2), Encoding::Text, Encoding::Level(0), Encoding::Level(1)];
    for given in [&[Encoding::Level(0)][..], &[Encoding::Level(1)], &[Encoding::Level(2)], &mixed] {
        for (method, on_cpu) in CACHES {
            let expected = SETUP.on_cpu(on_cpu, &SETUP.context, given);
            let (logits, trace) = SETUP.on_device(&gpu, method, &SETUP.context, given);
            let apart = divergence(&logits, &expected, &SETUP.rest);
            println!("{method} {given:?}: KL {:.1e}, top-1 {:.4}", apart.kl(), apart.top1());
            assert!(apart.kl() <= 5e-4 && apart.top1() >= 0.97, "{method} {given:?}: KL {}", apart.kl());
            let outcomes = trace.events.iter().map(|event| &event.outcome);
            assert!(
                outcomes.into_iter().all(|outcome| matches!(outcome, Outcome::Loaded | Outcome::Recomputed))
            );
        }
    }
}

/// Sequences of a batch load concurrently, each with the result of loading it alone.
#[test]
fn sequences_of_a_batch_load_their_own_contexts() {
    let Some(gpu) = gpu_in_turn() else { return };
    for method in [DENSE, "dense:dtype=f16:pages=16", "million"] {
        let alone = |chunks: usize| {
            let mut decoder = SETUP.decoder(&gpu, method);
            let mut loader = decoder.loader(&SETUP.planes).unwrap();
            decoder.prefill(&[SETUP.prompt[..SINKS].to_vec()], 64).unwrap();
            for index in 0..chunks {
                let frame = SETUP.frame(index, 0);
                decoder.begin_load(&mut loader, SETUP.coded(index), 0, frame).unwrap();
                decoder.end_load(&mut loader).unwrap();
            }
            let next = 150 * chunks;
            teacher_forced(&mut decoder, &SETUP.prompt[next..next + 20])
        };
        let expected = [alone(2), alone(1)];
        let mut both = decoder(&gpu, &SETUP.model, method, &SETUP.profile, 2, CAPACITY);
        let mut loader = both.loader(&SETUP.planes).unwrap();
        let sinks = SETUP.prompt[..SINKS].to_vec();
        both.prefill(&[sinks.clone(), sinks], 64).unwrap();
        for (sequence, index) in [(0, 0), (1, 0), (0, 1)] {
            let coded = Chunk { sequence, ..SETUP.coded(index) };
            both.begin_load(&mut loader, coded, 0, SETUP.frame(index, 0)).unwrap();
        }
        (0..3).for_each(|_| both.end_load(&mut loader).unwrap());
        let third = Chunk { sequence: 2, ..SETUP.coded(2) };
        let error = both.begin_load(&mut loader, third, 0, SETUP.frame(2, 0)).unwrap_err();
        assert!(matches!(error, Error::Argument(_)), "{error}");
        let mut logits = [vec![], vec![]];
        for i in 0..20 {
            both.feed(&[SETUP.prompt[300 + i], SETUP.prompt[150 + i]]).unwrap();
            both.step().unwrap();
            let rows = both.logits().unwrap();
            let rows = rows.chunks_exact(SETUP.model.config.vocab_size);
            logits.iter_mut().zip(rows).for_each(|(logits, row)| logits.push(row.to_vec()));
        }
        let next = Chunk { sequence: 1, position: 170, count: 150 };
        let refused = both.begin_load(&mut loader, next, 0, SETUP.frame(1, 0)).unwrap_err();
        // Not a frame of these tokens; a cache whose earlier tokens are not stored yet does not look at it.
        assert!(matches!((method, refused), ("million", Error::Argument(_)) | (_, Error::Stream(_))));
        for ((logits, expected), next) in logits.iter().zip(&expected).zip([300, 150]) {
            let kl = divergence(logits, expected, &SETUP.prompt[next..][..21]).kl();
            assert!(kl <= 1e-4, "{method} from {next} on: KL {kl}");
        }
    }
}

/// A cache that takes frames when they end is not given those of a sequence that was emptied, or has
/// advanced, since.
#[test]
fn frames_of_another_sequence_are_not_taken() {
    let Some(gpu) = gpu_in_turn() else { return };
    let mut decoder = SETUP.decoder(&gpu, "million");
    let mut loader = decoder.loader(&SETUP.planes).unwrap();
    let sinks = [SETUP.prompt[..SINKS].to_vec()];
    let mut run = |begins: bool| {
        decoder.clear().unwrap();
        decoder.prefill(&sinks, 64).unwrap();
        if begins {
            decoder.begin_load(&mut loader, SETUP.coded(0), 0, SETUP.frame(0, 0)).unwrap();
            decoder.clear().unwrap();
            decoder.prefill(&sinks, 64).unwrap();
            decoder.end_load(&mut loader).unwrap();
            decoder.begin_load(&mut loader, SETUP.coded(0), 0, SETUP.frame(0, 0)).unwrap();
            decoder.prefill(&[SETUP.prompt[200..201].to_vec()], 64).unwrap();
            assert!(matches!(decoder.end_load(&mut loader).unwrap_err(), Error::Argument(_)));
        } else {
            decoder.prefill(&[SETUP.prompt[200..201].to_vec()], 64).unwrap();
        }
        teacher_forced(&mut decoder, &SETUP.prompt[201..220])
    };
    assert_eq!(run(true), run(false));
}

#[test]
fn damaged_chunks_are_recomputed() {
    let Some(gpu) = gpu_in_turn() else { return };
    let mut context = EncodedContext::clone(&SETUP.context);
    let other = SETUP.frame(1, 0);
    let mut flipped = other.to_vec();
    flipped[other.len() / 2] ^= 1;
    *context.chunk_mut(1, 0).unwrap() = flipped.into();
    *context.chunk_mut(2, 0).unwrap() = other; // of another place
    *context.chunk_mut(3, 0).unwrap() = SETUP.frame(3, 1); // of another level
    let context = Arc::new(context);
    let given = [Encoding::Level(0)];
    for method in [DENSE, "int4"] {
        let expected = SETUP.on_cpu(method, &context, &given);
        let (logits, trace) = SETUP.on_device(&gpu, method, &context, &given);
        for (i, event) in trace.events.iter().enumerate() {
            assert_eq!(matches!(&event.outcome, Outcome::Damaged(_)), (1..4).contains(&i), "{event:?}");
        }
        let kl = divergence(&logits, &expected, &SETUP.rest).kl();
        assert!(kl <= 5e-4, "{method}: KL {kl}");
    }
}

#[test]
fn bad_frames_are_refused_and_change_nothing() {
    let Some(gpu) = gpu_in_turn() else { return };
    let run = |method: &str, bad: bool| {
        let mut decoder = SETUP.decoder(&gpu, method);
        let mut loader = decoder.loader(&SETUP.planes).unwrap();
        decoder.prefill(&[SETUP.prompt[..SINKS].to_vec()], 64).unwrap();
        decoder.begin_load(&mut loader, SETUP.coded(0), 0, SETUP.frame(0, 0)).unwrap();
        if bad {
            let (coded, frame) = (SETUP.coded(1), SETUP.frame(1, 0));
            let tokens = coded.position..coded.end();
            let mut refused = |tokens: Range<usize>, level, frame: Bytes| {
                decoder.begin_load(&mut loader, chunk(0, tokens), level, frame).unwrap_err()
            };
            for tokens in [tokens.start + 1..tokens.end, tokens.start..tokens.start, 0..tokens.end] {
                assert!(matches!(refused(tokens, 0, frame.clone()), Error::Argument(_)));
            }
            assert!(matches!(refused(tokens.start..CAPACITY + 1, 0, frame.clone()), Error::Argument(_)));
            assert!(matches!(refused(tokens.clone(), 1, frame.clone()), Error::Stream(_)));
            assert!(matches!(refused(tokens.clone(), 9, frame.clone()), Error::Stream(_)));
            assert!(matches!(refused(tokens.clone(), 0, SETUP.frame(0, 0)), Error::Stream(_)));
            // Truncated anywhere, or with any byte of its header and index changed.
            for at in (0..frame.len()).step_by(frame.len() / 23) {
                assert!(matches!(refused(tokens.clone(), 0, frame.slice(..at)), Error::Codec(_)));
            }
            let head = codec_core::Frame::parse(&frame, usize::MAX).unwrap().info().head_len();
            for at in (0..head).step_by(head / 23) {
                let error = refused(tokens.clone(), 0, flipped(&frame, at));
                assert!(matches!(error, Error::Codec(_) | Error::Stream(_)), "{at}: {error}");
            }
        }
        for index in 1..3 {
            decoder.begin_load(&mut loader, SETUP.coded(index), 0, SETUP.frame(index, 0)).unwrap();
        }
        if bad {
            let error = decoder.begin_load(&mut loader, SETUP.coded(3), 0, SETUP.frame(3, 0)).unwrap_err();
            assert!(matches!(error, Error::Argument(_)), "{FRAMES} frames are on their way");
        }
        (0..3).for_each(|_| decoder.end_load(&mut loader).unwrap());
        assert!(matches!(decoder.end_load(&mut loader).unwrap_err(), Error::Argument(_)));
        teacher_forced(&mut decoder, &SETUP.prompt[450..500])
    };
    for method in [DENSE, "int4"] {
        assert_eq!(run(method, true), run(method, false), "{method}");
    }
}

/// The frame with a bit of a byte changed.
fn flipped(frame: &Bytes, at: usize) -> Bytes {
    let mut bytes = frame.to_vec();
    bytes[at] ^= 0x10;
    bytes.into()
}

#[test]
fn wrong_checksums_and_malformed_tiles_are_found_at_the_end() {
    let Some(gpu) = gpu_in_turn() else { return };
    let run = |method: &str, bad: Option<Bytes>| {
        let mut decoder = SETUP.decoder(&gpu, method);
        let mut loader = decoder.loader(&SETUP.planes).unwrap();
        decoder.prefill(&[SETUP.prompt[..SINKS].to_vec()], 64).unwrap();
        decoder.begin_load(&mut loader, SETUP.coded(0), 0, SETUP.frame(0, 0)).unwrap();
        let is_bad = bad.is_some();
        if let Some(frame) = bad {
            decoder.begin_load(&mut loader, SETUP.coded(1), 0, frame).unwrap();
            decoder.begin_load(&mut loader, SETUP.coded(2), 0, SETUP.frame(2, 0)).unwrap();
        }
        decoder.end_load(&mut loader).unwrap();
        if is_bad {
            use codec_core::Error::{BadChecksum, Corrupt};
            let error = decoder.end_load(&mut loader).unwrap_err();
            assert!(matches!(error, Error::Codec(Corrupt | BadChecksum)), "{error}");
        }
        assert!(matches!(decoder.end_load(&mut loader).unwrap_err(), Error::Argument(_)));
        teacher_forced(&mut decoder, &SETUP.prompt[150..200])
    };
    for method in [DENSE, "int4"] {
        let (good, frame) = (run(method, None), SETUP.frame(1, 0));
        assert_eq!(run(method, Some(malform(&frame))), good, "{method}");
        for at in [frame.len() / 2, frame.len() - 1] {
            assert_eq!(run(method, Some(flipped(&frame, at))), good, "{method}, {at}");
        }
    }
}

/// A frame begins while it arrives, in pieces of any size, and another one may replace it.
#[test]
fn frames_begin_while_they_arrive() {
    let Some(gpu) = gpu_in_turn() else { return };
    let run = |method: &str, pieces: usize| {
        let mut decoder = SETUP.decoder(&gpu, method);
        let mut loader = decoder.loader(&SETUP.planes).unwrap();
        decoder.prefill(&[SETUP.prompt[..SINKS].to_vec()], 64).unwrap();
        for index in 0..3 {
            let (coded, frame, other) = (SETUP.coded(index), SETUP.frame(index, 0), SETUP.frame(index, 1));
            let mut start = |level, frame: &Bytes, len| {
                decoder.begin_load_start(&mut loader, coded, level, frame.slice(..len))
            };
            if pieces > 0 {
                assert!(matches!(start(0, &frame, 63), Err(Error::Codec(_))));
                start(1, &other, other.len() - 1).unwrap(); // which never ends
            }
            for piece in 1..pieces {
                let len = frame.len() * piece / pieces;
                if len >= codec_core::Frame::parse(&frame, usize::MAX).unwrap().info().head_len() {
                    start(0, &frame, len).unwrap();
                }
            }
            decoder.begin_load(&mut loader, coded, 0, frame).unwrap();
        }
        (0..3).for_each(|_| decoder.end_load(&mut loader).unwrap());
        teacher_forced(&mut decoder, &SETUP.prompt[450..500])
    };
    for method in [DENSE, "int4"] {
        let whole = run(method, 0);
        for pieces in [1, 2, 3, 17] {
            assert_eq!(run(method, pieces), whole, "{method}, {pieces} pieces");
        }
    }
}

/// Changes the first tile's kind, and the checksums with it.
fn malform(frame: &Bytes) -> Bytes {
    use codec_core::{BlockIndex, Frame, Side};
    let parsed = Frame::parse(frame, usize::MAX).unwrap();
    let info = *parsed.info();
    let block = parsed.block_range(BlockIndex { layer: 0, side: Side::Keys, block: 0 }).unwrap();
    let mut bytes = frame.to_vec();
    bytes[block.start] = 0xee;
    // FORMAT.md, "Frame": header, plane ids, an entry a block (its checksum after 8 bytes), their checksum.
    let (ids, index) = (64, 64 + 8 * info.layers);
    let checksum = crc32(&bytes[block.clone()]);
    bytes[index + 8..][..4].copy_from_slice(&checksum.to_le_bytes());
    let first = parsed.block_range(BlockIndex { layer: 0, side: Side::Keys, block: 0 }).unwrap().start;
    let checksum = crc32(&bytes[ids..first - 4]);
    bytes[first - 4..first].copy_from_slice(&checksum.to_le_bytes());
    bytes.into()
}

fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| crc >> 1 ^ if crc & 1 == 1 { 0xedb8_8320 } else { 0 })
    })
}

#[test]
fn what_cannot_load_is_refused() {
    let Some(gpu) = gpu_in_turn() else { return };
    let mut loader = SETUP.decoder(&gpu, "dense:dtype=bf16").loader(&SETUP.planes).unwrap();
    let mut other = SETUP.decoder(&gpu, "dense:dtype=f16");
    let error = other.begin_load(&mut loader, chunk(0, 0..150), 0, SETUP.frame(0, 0)).unwrap_err();
    assert!(matches!(error, Error::Argument(_)), "{error}");
    let ranges: Method = "cachegen:mode=paper".parse().unwrap();
    let profile =
        calibrated(&SETUP.model, &SETUP.rope, &SETUP.prompt, std::slice::from_ref(&ranges)).unwrap();
    let planes = levels(&[ranges], &SETUP.model, &profile).unwrap();
    let dense = SETUP.decoder(&gpu, "dense:dtype=f16");
    assert!(matches!(dense.loader(&planes), Err(Error::Device(_))));
}

#[test]
fn a_sequence_that_begins_again_waits_for_its_frames() {
    let Some(gpu) = gpu_in_turn() else { return };
    let mut decoder = SETUP.decoder(&gpu, "dense:dtype=f16");
    let mut loader = decoder.loader(&SETUP.planes).unwrap();
    let begin = |decoder: &mut kv_llama_gpu::Decoder, loader: &mut kv_device::Loader| {
        decoder.clear().unwrap();
        decoder.prefill(&[SETUP.prompt[..SINKS].to_vec()], 64).unwrap();
        decoder.begin_load(loader, SETUP.coded(0), 0, SETUP.frame(0, 0))
    };
    begin(&mut decoder, &mut loader).unwrap();
    assert!(matches!(begin(&mut decoder, &mut loader).unwrap_err(), Error::Argument(_)));
    decoder.end_load(&mut loader).unwrap();
    begin(&mut decoder, &mut loader).unwrap();
    decoder.end_load(&mut loader).unwrap();
}

#[test]
fn page_locked_bytes_are_the_bytes() {
    let Some(gpu) = gpu_in_turn() else { return };
    let frame = SETUP.frame(0, 0);
    let locked = Bytes::from_owner(PageLocked::of(&gpu, &frame).unwrap());
    assert_eq!(locked, frame);
    let run = |frame: Bytes| {
        let mut decoder = SETUP.decoder(&gpu, "dense:dtype=f16");
        let mut loader = decoder.loader(&SETUP.planes).unwrap();
        decoder.prefill(&[SETUP.prompt[..SINKS].to_vec()], 64).unwrap();
        decoder.begin_load(&mut loader, SETUP.coded(0), 0, frame).unwrap();
        decoder.end_load(&mut loader).unwrap();
        teacher_forced(&mut decoder, &SETUP.prompt[150..170])
    };
    assert_eq!(run(locked), run(frame));
}

/// A prompt over a store has the logits of the CPU: from the stored prefix, from text in between, and with
/// nothing stored.
#[cfg(feature = "store")]
#[test]
fn prompts_over_a_store_have_the_logits_of_the_cpu() {
    use kv_reference::stream::prompt::{FillOptions, PromptStore};
    use kv_store::{Check, Grid, KvStore, Space};
    use kv_stream::Speeds;

    let Some(gpu) = gpu_in_turn() else { return };
    let Setup { model, rope, planes, prompt, .. } = &*SETUP;
    let store = KvStore::open("memory:///", Default::default()).unwrap();
    let space = Space::new(&model.hash, planes, Grid { chunk: 120, tail: 20 }).unwrap();
    let prompts = PromptStore { store: &store, space: &space, profile: planes };
    let mut decoder = SETUP.decoder(&gpu, "dense:dtype=f16");
    let mut loader = decoder.loader(planes).unwrap();
    let mut compare = |given: &[Encoding], prefix: usize| {
        let choice = Choice::Given(given.to_vec());
        let stream = Options { choice, batch: 1, timeout: 10.0, fall_back: true };
        let mut options = FillOptions { stream, speeds: Speeds::UNKNOWN, chunk: 64, keep: false };
        let dense: Method = "dense:dtype=f16".parse().unwrap();
        let Prepared { mut cache, .. } = dense.prepare(model, rope, &Profile::default()).unwrap();
        let mut on_cpu = kv_llama::Decoder::new(model.clone(), rope.clone());
        let expected = prompts.fill(&mut on_cpu, cache.as_mut(), prompt, &options).unwrap();
        decoder.clear().unwrap();
        let filled = prompts.fill_device(&mut decoder, &mut loader, prompt, &options).unwrap();
        assert_eq!((filled.prefix, expected.prefix), (prefix, prefix));
        let kl = divergence(&[filled.logits], &[expected.logits], &prompt[..2]).kl();
        assert!(kl <= 5e-4, "{given:?}: KL {kl}");
        options.keep = true;
        let kept = prompts.fill_device(&mut decoder, &mut loader, prompt, &options);
        assert!(matches!(kept, Err(kv_reference::Error::Argument(_))));
    };
    compare(&[Encoding::Level(0)], 0);
    prompts.calculate(model, rope, prompt, Check::Length, |_| ()).unwrap();
    compare(&[Encoding::Level(0)], 600);
    compare(&[Encoding::Level(1), Encoding::Text, Encoding::Level(2)], 600);
}
