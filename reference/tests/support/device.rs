//! Shared by the tests of the model on a GPU.

#![allow(clippy::unwrap_used, dead_code)] // not every test uses all helpers

use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use kv_device::Gpu;
use kv_gpu::Element;
use kv_llama_gpu::{Decoder, WeightLayout, Weights};
use kv_methods::{Method, Prepared, Profile, calibrated};
use kv_model::{Model, Rope};
use kv_reference::device::method_cache;
use kv_reference::eval::{Divergence, score_text};

/// Reports that a test did not run.
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

/// Codebooks for methods, trained on the first tokens of the shipped text.
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
    let mut decoder = kv_llama::Decoder::new(model, rope);
    score_text(&mut decoder, cache.as_mut(), run, None).unwrap().logits
}

/// Greedy texts after a prompt are the same up to a near tie of the exact logits: sums in another order round
/// otherwise, and what follows another token is another text.
pub fn assert_same_but_for_a_near_tie(model: &Arc<Model>, prompt: &[u32], [a, b]: [&[u32]; 2], what: &str) {
    const NEAR: f32 = 0.1;
    let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) else { return };
    let run = [prompt, &a[..=at]].concat();
    let logits = &on_cpu(model, "dense", &Profile::default(), &run)[run.len() - 2];
    let [of_a, of_b] = [a[at], b[at]].map(|token| logits[token as usize]);
    assert!((of_a - of_b).abs() <= NEAR, "{what}, token {at}: {of_a} and {of_b}; {a:?} and {b:?}");
}

pub fn decoder(
    gpu: &Arc<Gpu>,
    model: &Arc<Model>,
    method: &str,
    profile: &Profile,
    batch: usize,
    capacity: usize,
) -> Decoder {
    let layout = WeightLayout::of_batch(batch);
    decoder_of_layout(gpu, model, (method, layout), profile, batch, capacity)
}

pub fn decoder_of_layout(
    gpu: &Arc<Gpu>,
    model: &Arc<Model>,
    (method, layout): (&str, WeightLayout),
    profile: &Profile,
    batch: usize,
    capacity: usize,
) -> Decoder {
    let method: Method = method.parse().unwrap();
    let element = method.device_element().unwrap();
    let cache = method_cache(gpu, &method, &model.config, element, Some(profile), batch, capacity).unwrap();
    let model = method.device_model(model, profile).unwrap();
    let weights = Arc::new(Weights::of(gpu, &model, element, layout).unwrap());
    Decoder::new(gpu.clone(), weights, cache, batch).unwrap()
}

/// Logits of every position of one sequence, fed token by token.
pub fn teacher_forced(decoder: &mut Decoder, tokens: &[u32]) -> Vec<Vec<f32>> {
    let step = |&token| {
        decoder.feed(&[token]).unwrap();
        decoder.step().unwrap();
        decoder.logits().unwrap()
    };
    tokens.iter().map(step).collect()
}

/// The method diverges from the dense cache as on the CPU, and hardly from its CPU version.
pub fn diverges_as_on_the_cpu(gpu: &Arc<Gpu>, spec: &str) {
    let (model, tokens) = model();
    let (calibration, rest) = tokens.split_at(2048);
    let run = &rest[..600];
    let profile = profile(&model, calibration, &[spec]);
    let on_cpu = |spec: &str| on_cpu(&model, spec, &profile, run);
    let (dense, cpu) = (on_cpu("dense"), on_cpu(spec));
    let logits = teacher_forced(&mut decoder(gpu, &model, spec, &profile, 1, run.len()), run);
    let kl_of = |logits: &[Vec<f32>]| divergence(logits, &dense, run).kl();
    let (kl, expected) = (kl_of(&logits), kl_of(&cpu));
    let between = divergence(&logits, &cpu, run);
    println!(
        "{spec}: KL {kl:.5} and on the CPU {expected:.5}; between them {:.1e}, top-1 {:.4}",
        between.kl(),
        between.top1()
    );
    assert!((kl - expected).abs() <= (0.1 * expected).max(2e-4), "{spec}: {kl} and {expected}");
    assert!(between.top1() >= 0.98, "{spec}: top-1 {}", between.top1());
    assert!(between.kl() <= (0.3 * expected).max(5e-4), "{spec}: KL {}", between.kl());
}

/// The method, which reads every token's exact rows, has the logits of the dense cache.
pub fn equals_dense(gpu: &Arc<Gpu>, spec: &str, cosine_at_least: f64) {
    let (model, tokens) = model();
    let run = &tokens[3000..3400];
    let logits = |spec: &str, profile: &Profile| {
        teacher_forced(&mut decoder(gpu, &model, spec, profile, 1, run.len()), run)
    };
    let dense = logits("dense:dtype=f16", &Profile::default());
    let own = logits(spec, &profile(&model, &tokens[..1024], &[spec]));
    let worst = own.iter().zip(&dense).map(|(a, b)| cosine(a, b)).fold(1.0, f64::min);
    let top1 = divergence(&own, &dense, run).top1();
    println!("{spec}: cosine {worst:.7}, top-1 {top1:.4}");
    assert!(worst >= cosine_at_least && top1 >= 0.98, "{spec}: cosine {worst}, top-1 {top1}");
}

/// A batch generates the same as its launches one by one, every time, and up to `same` tokens the same as
/// each sequence alone: attention of a batch sums in another order. Prompts run in turn, since those that run
/// together round otherwise than each alone (`wide`).
pub fn batches_generate_what_sequences_do(
    gpu: &Arc<Gpu>,
    model: &Arc<Model>,
    tokens: &[u32],
    profile: &Profile,
    (spec, same): (&str, usize),
) {
    let prompts: Vec<Vec<u32>> =
        [(3000, 7), (4000, 200), (5000, 91), (100, 1)].map(|(at, len)| tokens[at..][..len].to_vec()).to_vec();
    let generate = |prompts: &[Vec<u32>], eager: bool| {
        let mut decoder = decoder(gpu, model, spec, profile, prompts.len(), 300);
        (0..prompts.len()).for_each(|i| decoder.end(i).unwrap());
        prompts.iter().enumerate().for_each(|(i, prompt)| decoder.prefill_one(i, prompt, 64).unwrap());
        for _ in 1..40 {
            if eager { decoder.step_eagerly() } else { decoder.step() }.unwrap();
        }
        (decoder.picked().unwrap(), decoder.logits().unwrap())
    };
    let together = generate(&prompts, false);
    assert_eq!(generate(&prompts, true).0, together.0, "{spec}: launch by launch");
    assert_eq!(generate(&prompts, false), together, "{spec}: again");
    for (prompt, picked) in prompts.iter().zip(&together.0) {
        let ends = |&token: &u32| model.config.eos_tokens.contains(&token);
        assert!(picked.len() == 40 || picked.last().is_some_and(ends), "{spec}: {picked:?}");
        let alone = generate(std::slice::from_ref(prompt), false).0.remove(0);
        let same = same.min(picked.len());
        assert_eq!(alone[..same], picked[..same], "{spec}: a prompt of {} tokens", prompt.len());
    }
}

/// What the method loses on the CPU: its divergence from the dense cache on the tokens after a prompt.
fn loss_on_cpu(model: &Arc<Model>, spec: &str, profile: &Profile, (prompt, rest): (&[u32], &[u32])) -> f64 {
    let logits = |spec: &str| {
        let rope = Arc::new(Rope::new(&model.config, 2048));
        let Prepared { model, mut cache } =
            spec.parse::<Method>().unwrap().prepare(model, &rope, profile).unwrap();
        let mut decoder = kv_llama::Decoder::new(model, rope);
        decoder.prefill(prompt, cache.as_mut()).unwrap();
        score_text(&mut decoder, cache.as_mut(), rest, None).unwrap().logits
    };
    divergence(&logits(spec), &logits("dense"), rest).kl()
}

/// Steps after prompts of two lengths have the same logits, whether the prompts ran whole or in chunks.
/// Rounding decides which of two rows at the threshold a step chooses, and later chunks attend to earlier
/// rows as they are stored: so the runs diverge by a part of what the method loses, as device and CPU do.
/// Picks do not count: where the divergence is small, those that differ are near ties.
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
    let (whole, loss) = (after(1024), loss_on_cpu(&model, spec, &profile, (prompt, rest)));
    for chunk in [64, 333] {
        let parts = divergence(&after(chunk), &whole, rest);
        let (kl, top1) = (parts.kl(), parts.top1());
        println!("{spec} in chunks of {chunk}: KL {kl:.1e}, top-1 {top1:.4}; loss on the CPU {loss:.1e}");
        assert!(kl <= 1e-4 || kl <= 0.3 * loss, "{spec}: KL {kl}, loss on the CPU {loss}");
    }
}

/// 96 steps of the method, with rows on the host, over 20,000 hashed tokens of a wide model: the rows that they
/// fetched, and the KV heads of all layers and both sequences.
pub fn steps_over_hashed_rows(gpu: &Arc<Gpu>, spec: &str) -> (u64, u64) {
    let weights =
        Arc::new(Weights::random(gpu, "llama-3.1-70b/8", Element::Bf16, WeightLayout::Packed).unwrap());
    let (config, method): (_, Method) = (&weights.config, spec.parse().unwrap());
    let cache = method_cache(gpu, &method, config, Element::Bf16, None, 2, 20_096).unwrap();
    let heads = config.n_layers * 2 * config.n_kv_heads;
    assert_eq!(cache.host_bytes(), 4 * heads * (20_096 - 4) * config.head_dim);
    let mut decoder = Decoder::new(gpu.clone(), weights.clone(), cache, 2).unwrap();
    decoder.fill_random(20_000).unwrap();
    for _ in 0..96 {
        decoder.step().unwrap();
    }
    assert!(decoder.logits().unwrap().iter().all(|x| x.is_finite()));
    assert!(decoder.step().is_err(), "the cache is full");
    (decoder.fetched_rows().unwrap(), heads as u64)
}

pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
}
