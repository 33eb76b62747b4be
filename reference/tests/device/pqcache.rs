//! PQCache on a GPU, with exact rows in host memory, computes the same as on the CPU. Without a GPU these
//! tests are skipped, which `GPU_TESTS=require` turns into a failure.

use std::sync::Arc;

use kv_device::Timed;
use kv_gpu::Element;
use kv_llama_gpu::{Decoder, WeightLayout, Weights};
use kv_methods::{Method, Prepared, Profile};
use kv_model::Rope;
use kv_reference::Error;
use kv_reference::device::method_cache;
use kv_reference::eval::score_text;

use crate::support::{
    batches_generate_what_sequences_do, decoder, divergence, diverges_as_on_the_cpu, equals_dense, gpu,
    model, profile, prompts_in_chunks_are_whole_prompts, steps_over_hashed_rows, teacher_forced,
};

#[test]
fn it_diverges_as_on_the_cpu() {
    let Some(gpu) = gpu("pqcache logits") else { return };
    for spec in [
        "pqcache:tokens=128:codebooks=profile",
        "pqcache:ratio=0.3:codebooks=profile",
        "pqcache:ratio=0.3:codebooks=profile:offloaded=int8:sinks=3",
        "pqcache:tokens=96:code=2x6:codebooks=profile:window=32:sinks=2",
    ] {
        diverges_as_on_the_cpu(&gpu, spec);
    }
}

#[test]
fn codebooks_are_trained_on_the_prompt() {
    let Some(gpu) = gpu("pqcache training") else { return };
    let (model, tokens) = model();
    let (prompt, run) = tokens[3000..4700].split_at(1500);
    let none = Profile::default();
    let rope = Arc::new(Rope::new(&model.config, 2048));
    let on_cpu = |spec: &str| {
        let method: Method = spec.parse().unwrap();
        let Prepared { model, mut cache } = method.prepare(&model, &rope, &none).unwrap();
        let mut decoder = kv_llama::Decoder::new(model, rope.clone());
        decoder.prefill(prompt, cache.as_mut()).unwrap();
        score_text(&mut decoder, cache.as_mut(), run, None).unwrap().logits
    };
    let dense = on_cpu("dense");
    for spec in ["pqcache:tokens=64", "pqcache:tokens=160:code=2x6:iterations=4:window=32:sinks=2"] {
        let on_device = || {
            let mut decoder = decoder(&gpu, &model, spec, &none, 1, 1700);
            decoder.prefill(&[prompt.to_vec()], 2048).unwrap();
            teacher_forced(&mut decoder, &run[..run.len() - 1])
        };
        let logits = on_device();
        assert_eq!(logits, on_device(), "{spec}: two runs");
        let kl_of = |logits: &[Vec<f32>]| divergence(logits, &dense, run).kl();
        let (kl, expected) = (kl_of(&logits), kl_of(&on_cpu(spec)));
        println!("{spec}: KL {kl:.5}, and {expected:.5} on the CPU, which starts from other keys");
        assert!((kl - expected).abs() <= (0.25 * expected).max(2e-4), "{spec}: {kl} and {expected}");
    }
}

#[test]
fn fetching_every_token_equals_dense() {
    let Some(gpu) = gpu("every token") else { return };
    for spec in [
        "pqcache:tokens=4096:codebooks=profile",
        "pqcache:tokens=4096", // codebooks of the first keys in the ring
        "pqcache:ratio=1:code=2x6:codebooks=profile",
        "pqcache:tokens=400:codebooks=profile:window=2:sinks=0",
    ] {
        equals_dense(&gpu, spec, 0.9999);
    }
}

#[test]
fn rows_that_stay_are_those_that_would_be_fetched() {
    let Some(gpu) = gpu("rows that stay") else { return };
    let (model, tokens) = model();
    let run = &tokens[3000..3500];
    let spec = "pqcache:ratio=0.3:codebooks=profile";
    let profile = profile(&model, &tokens[..2048], &[spec]);
    let method: Method = spec.parse().unwrap();
    let weights = Arc::new(Weights::of(&gpu, &model, Element::F16, WeightLayout::Packed).unwrap());
    let logits = |fetch_all: bool| {
        let (config, capacity) = (&model.config, run.len());
        let mut cache =
            method_cache(&gpu, &method, config, Element::F16, Some(&profile), 1, capacity).unwrap();
        if fetch_all {
            cache.force_hits(0.0);
        }
        let mut decoder = Decoder::new(gpu.clone(), weights.clone(), cache, 1).unwrap();
        (teacher_forced(&mut decoder, run), decoder.fetched_rows().unwrap())
    };
    let ((reused, few), (fetched, all)) = (logits(false), logits(true));
    println!("{few} of {all} rows fetched");
    assert!(few > 0 && few < all, "{few} of {all}");
    assert!(reused == fetched, "other logits");
}

/// The number of missed rows, over all layers and heads, equals that of the CPU's cache with blocks of one
/// token.
#[test]
fn rows_stay_that_have_been_chosen_last() {
    let Some(gpu) = gpu("rows chosen last") else { return };
    let (model, tokens) = model();
    let run = &tokens[3000..3500];
    let spec = "pqcache:tokens=64:codebooks=profile";
    let profile = profile(&model, &tokens[..2048], &[spec]);
    let folder = tempfile::tempdir().unwrap();
    let on_cpu = |held: usize| {
        let blocks = format!("block=1:cache={held}:k-cache={held}:evict=lru");
        let method: Method = format!("{spec}:offload={}:{blocks}", folder.path().display()).parse().unwrap();
        let rope = Arc::new(Rope::new(&model.config, run.len()));
        let Prepared { model, mut cache } = method.prepare(&model, &rope, &profile).unwrap();
        score_text(&mut kv_llama::Decoder::new(model, rope), cache.as_mut(), run, None).unwrap();
        let fetched = cache.fetched();
        fetched.rows - fetched.hits
    };
    let on_device = |held: usize| {
        let spec = format!("{spec}:held={held}");
        let mut decoder = decoder(&gpu, &model, &spec, &profile, 1, run.len());
        let logits = teacher_forced(&mut decoder, run);
        (logits, decoder.fetched_rows().unwrap())
    };
    let last_step = on_device(0);
    for held in [64, 96, 128, 256] {
        let ((logits, fetched), expected) = (on_device(held), on_cpu(held));
        println!("{held} rows stay: {fetched} fetched, {expected} on the CPU");
        assert!((fetched as f64 / expected as f64 - 1.0).abs() < 0.05, "{held}: {fetched} and {expected}");
        assert!(held == 64 || fetched < last_step.1, "{held}: {fetched} of {}", last_step.1);
        // Attention takes rows in the order of their tokens, whatever their source.
        assert!(logits == last_step.0, "{held}: other logits");
    }
}

/// Sequences whose tokens are looked up in several spans, with more slots than threads process at once.
#[test]
fn rows_of_long_sequences_stay() {
    let Some(gpu) = gpu("rows of long sequences") else { return };
    let (model, _) = model();
    let (tokens, steps) = (300_000, 6);
    let weights = Arc::new(Weights::of(&gpu, &model, Element::F16, WeightLayout::Packed).unwrap());
    let run = |spec: &str, hits: Option<f32>| {
        let method: Method = spec.parse().unwrap();
        let mut cache =
            method_cache(&gpu, &method, &model.config, Element::F16, None, 1, tokens + steps).unwrap();
        hits.into_iter().for_each(|share| cache.force_hits(share));
        let mut decoder = Decoder::new(gpu.clone(), weights.clone(), cache, 1).unwrap();
        decoder.fill_random(tokens).unwrap();
        let mut logits = vec![];
        for _ in 0..steps {
            decoder.step().unwrap();
            logits.extend(decoder.logits().unwrap());
        }
        (logits, decoder.fetched_rows().unwrap())
    };
    for spec in ["pqcache:tokens=2048:codebooks=profile", "pqcache:tokens=8192:codebooks=profile:held=20000"]
    {
        let ((kept, few), (read, all)) = (run(spec, None), run(spec, Some(0.0)));
        println!("{spec}: {few} of {all} rows fetched");
        assert!(kept == read, "{spec}: other logits");
        assert!(few < all, "{spec}: {few} of {all}");
        assert_eq!(run(spec, Some(0.25)).1, all / 4 * 3, "{spec}");
    }
}

#[test]
fn prompts_in_chunks_fill_the_cache_as_whole_ones_do() {
    let Some(gpu) = gpu("pqcache prompts") else { return };
    prompts_in_chunks_are_whole_prompts(&gpu, "pqcache:tokens=64:codebooks=profile");
    prompts_in_chunks_are_whole_prompts(&gpu, "pqcache:ratio=0.3:code=2x6:codebooks=profile:sinks=0");
}

#[test]
fn a_batch_of_different_lengths_generates_what_each_sequence_does() {
    let Some(gpu) = gpu("pqcache batches") else { return };
    let (model, tokens) = model();
    // If few tokens are chosen, the choice may differ.
    for (spec, same) in [
        ("pqcache:tokens=32:codebooks=profile:exact=bf16", 8),
        ("pqcache:tokens=4096:codebooks=profile:exact=bf16", 40),
        ("pqcache:tokens=4096:exact=bf16", 40), // codebooks of each sequence's prompt
    ] {
        let profile = profile(&model, &tokens[..2048], &[spec]);
        batches_generate_what_sequences_do(&gpu, &model, &tokens, &profile, (spec, same));
    }
}

#[test]
fn what_does_not_fit_is_an_error_with_numbers() {
    let Some(gpu) = gpu("pqcache errors") else { return };
    let (model, tokens) = model();
    let cache = |spec: &str, profile: Option<&Profile>, capacity| {
        let method: Method = spec.parse().unwrap();
        method_cache(&gpu, &method, &model.config, Element::F16, profile, 1, capacity).map(drop)
    };
    let error = cache("pqcache", None, 1 << 31).unwrap_err();
    let bytes = 2 * 6 * 2 * ((1_usize << 31) - 4) * 256;
    assert!(
        matches!(error, Error::Device(kv_device::Error::HostMemory { bytes: asked, .. }) if asked == bytes),
        "{error}"
    );
    assert!(matches!(cache("pqcache", None, usize::MAX), Err(Error::Argument(_))));
    let missing = cache("pqcache:codebooks=profile", Some(&Profile::default()), 100);
    assert!(matches!(missing, Err(Error::Methods(kv_methods::Error::Profile(_)))), "{missing:?}");

    let spec = "pqcache:tokens=8:codebooks=profile";
    let profile = profile(&model, &tokens[..512], &[spec]);
    let mut decoder = decoder(&gpu, &model, spec, &profile, 1, 100);
    decoder.prefill(&[tokens[..100].to_vec()], 64).unwrap();
    assert!(
        matches!(decoder.step(), Err(kv_llama_gpu::Error::Argument(_))),
        "the cache of 100 tokens is full"
    );
}

#[test]
fn hashed_rows_at_full_width() {
    let Some(gpu) = gpu("pqcache hashed weights") else { return };
    let (fetched, rows) = steps_over_hashed_rows(&gpu, "pqcache:tokens=512:exact=bf16");
    assert!((512 * rows..=96 * 512 * rows).contains(&fetched), "{fetched} rows fetched");
}
