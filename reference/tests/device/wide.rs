//! Batches of more sequences than packed weights take, weights in rows, and prompts together. Without a GPU
//! these tests are skipped, which `GPU_TESTS=require` turns into a failure.

use std::sync::Arc;

use kv_gpu::Element;
use kv_llama::{logits, prefill};
use kv_llama_gpu::{Decoder, Error, WeightLayout, Weights};
use kv_methods::{Method, Profile};
use kv_model::{Model, Rope};
use kv_reference::device::method_cache;

use crate::support::{cosine, decoder, decoder_of_layout, gpu, model, profile};

/// Every kind of cache.
const CACHES: [&str; 11] = [
    "dense:dtype=f16",
    "dense:dtype=f16:pages=32",
    "int4",
    "million",
    "million:pages=64",
    "pqklt",
    "sq:block=64",
    "hybrid:rows=0.1",
    "pqcache:tokens=64",
    "zack:k=1:v=1",
    "cachegen:bits=4",
];

const CAPACITY: usize = 320;

/// The least cosine, and the least mean, of logits that differ by the rounding of other sums: which rows a
/// step selects, and which codebooks a prompt trains, change more by it than codes do.
fn enough(spec: &str) -> (f64, f64) {
    if ["hybrid", "pqcache"].iter().any(|name| spec.starts_with(name)) {
        (0.95, 0.995)
    } else {
        (0.98, 0.999)
    }
}

/// Prompts of 1 to 67 tokens.
fn prompts(tokens: &[u32], batch: usize) -> Vec<Vec<u32>> {
    (0..batch).map(|i| tokens[41 * i..][..1 + 29 * i % 67].to_vec()).collect()
}

/// The logits of the last `count` tokens of a sequence, on the CPU.
fn on_cpu(model: &Model, tokens: &[u32], count: usize) -> Vec<f32> {
    let rope = Rope::new(&model.config, tokens.len());
    let hidden = prefill(model, &rope, tokens, &mut |_, _| Ok(())).unwrap();
    logits(model, &hidden[(tokens.len() - count) * model.config.hidden_size..]).unwrap()
}

/// The least cosine of the logits of sequences.
fn worst(a: &[f32], b: &[f32], vocab: usize) -> f64 {
    assert_eq!(a.len(), b.len());
    a.chunks_exact(vocab).zip(b.chunks_exact(vocab)).map(|(a, b)| cosine(a, b)).fold(1.0, f64::min)
}

#[test]
fn wide_batches_have_the_logits_of_the_cpu() {
    const STEPS: usize = 4;
    let Some(gpu) = gpu("wide batches") else { return };
    let (model, tokens) = model();
    let vocab = model.config.vocab_size;
    for batch in [33, 64, 100, 256] {
        let prompts = prompts(&tokens, batch);
        let fed = |step: usize| (0..batch).map(move |i| (step * 97 + i * 31) % vocab).map(|t| t as u32);
        let mut decoder = decoder(&gpu, &model, "dense:dtype=f16", &Profile::default(), batch, 96);
        decoder.prefill(&prompts, 512).unwrap();
        let mut own = vec![decoder.logits().unwrap()];
        for step in 0..STEPS {
            decoder.feed(&fed(step).collect::<Vec<_>>()).unwrap();
            if step % 2 == 0 { decoder.step() } else { decoder.step_eagerly() }.unwrap();
            own.push(decoder.logits().unwrap());
        }
        let mut least = 1.0_f64;
        for (i, prompt) in prompts.iter().enumerate() {
            let follow = (0..STEPS).filter_map(|step| fed(step).nth(i));
            let all: Vec<u32> = prompt.iter().copied().chain(follow).collect();
            let expected = on_cpu(&model, &all, STEPS + 1);
            for (own, expected) in own.iter().zip(expected.chunks_exact(vocab)) {
                least = least.min(cosine(&own[i * vocab..][..vocab], expected));
            }
        }
        println!("{batch} sequences: cosine {least:.6}");
        assert!(least >= 0.999, "{batch} sequences: cosine {least}");
    }
}

#[test]
fn wide_batches_pick_the_tokens_of_each_sequence_alone() {
    const BATCH: usize = 33;
    const PICKED: usize = 24;
    let Some(gpu) = gpu("wide batches pick") else { return };
    let (model, tokens) = model();
    let prompts = prompts(&tokens, BATCH);
    let generate = |prompts: &[Vec<u32>], eager: bool| {
        let mut decoder = decoder(&gpu, &model, "dense:dtype=f16", &Profile::default(), prompts.len(), 96);
        decoder.prefill(prompts, 64).unwrap();
        for _ in 1..PICKED {
            if eager { decoder.step_eagerly() } else { decoder.step() }.unwrap();
        }
        (decoder.picked().unwrap(), decoder.logits().unwrap())
    };
    let together = generate(&prompts, false);
    assert_eq!(generate(&prompts, true).0, together.0, "launch by launch");
    assert_eq!(generate(&prompts, false), together, "again");
    // The products of a wide batch sum in another order: a near tie may give another token.
    let (mut same, mut all) = (0, 0);
    for (prompt, picked) in prompts.iter().zip(&together.0) {
        let alone = generate(std::slice::from_ref(prompt), false).0.remove(0);
        same += alone.iter().zip(picked).take_while(|(a, b)| a == b).count();
        all += alone.len();
    }
    println!("{same} of {all} tokens alike");
    assert!(10 * same >= 9 * all, "{same} of {all} tokens alike");
}

#[test]
fn both_layouts_of_weights_compute_the_same() {
    let Some(gpu) = gpu("layouts") else { return };
    let (model, tokens) = model();
    let vocab = model.config.vocab_size;
    for method in ["dense:dtype=f16", "dense:dtype=bf16", "million", "sq:block=64"] {
        let profile = profile(&model, &tokens[..2048], &[method]);
        for batch in [1, 5, 32] {
            let compute = |layout| {
                let of = (method, layout);
                let mut decoder = decoder_of_layout(&gpu, &model, of, &profile, batch, CAPACITY);
                decoder.prefill(&prompts(&tokens, batch), 64).unwrap();
                let mut all = decoder.logits().unwrap();
                for step in 0..6 {
                    decoder.feed(&tokens[9 * step..][..batch]).unwrap();
                    decoder.step().unwrap();
                    all.extend(decoder.logits().unwrap());
                }
                all
            };
            let least = worst(&compute(WeightLayout::Packed), &compute(WeightLayout::Rows), vocab);
            println!("{method}, {batch} sequences: cosine {least:.6}");
            let enough = if method == "dense:dtype=f16" { 0.9999 } else { 0.998 };
            assert!(least >= enough, "{method}, {batch} sequences: cosine {least}");
        }
    }
}

/// Every cache takes a wide batch, whose logits are those of smaller ones.
#[test]
fn every_cache_takes_a_wide_batch() {
    const BATCH: usize = 40;
    let Some(gpu) = gpu("caches of wide batches") else { return };
    let (model, tokens) = model();
    let vocab = model.config.vocab_size;
    for spec in CACHES {
        let profile = profile(&model, &tokens[..2048], &[spec]);
        // So long that each kind of row is used.
        let prompts: Vec<Vec<u32>> =
            (0..BATCH).map(|i| tokens[61 * i..][..100 + 29 * i % 107].to_vec()).collect();
        let compute = |sequences: std::ops::Range<usize>| {
            let mut decoder = decoder(&gpu, &model, spec, &profile, sequences.len(), CAPACITY);
            decoder.prefill(&prompts[sequences.clone()], 128).unwrap();
            let mut all = decoder.logits().unwrap();
            for step in 0..80 {
                decoder.feed(&tokens[9 * step..][..BATCH][sequences.clone()]).unwrap();
                decoder.step().unwrap();
            }
            all.extend(decoder.logits().unwrap());
            all
        };
        let together = compute(0..BATCH);
        let (after_prompts, after_steps) = together.split_at(BATCH * vocab);
        let mut cosines = vec![];
        for first in (0..BATCH).step_by(8) {
            let few = compute(first..first + 8);
            let rows = first * vocab..(first + 8) * vocab;
            let own = [&after_prompts[rows.clone()], &after_steps[rows]].concat();
            cosines.extend(own.chunks_exact(vocab).zip(few.chunks_exact(vocab)).map(|(a, b)| cosine(a, b)));
        }
        let least = cosines.iter().copied().fold(1.0, f64::min);
        let mean = cosines.iter().sum::<f64>() / cosines.len() as f64;
        println!("{spec}: cosine at least {least:.6}, mean {mean:.6}");
        let enough = enough(spec);
        assert!(least >= enough.0 && mean >= enough.1, "{spec}: cosine {least}, mean {mean}");
    }
}

/// A batch's prompts run together; one after the other they give the same logits.
#[test]
fn prompts_together_are_prompts_in_turn() {
    const LENGTHS: [usize; 6] = [91, 1, 200, 7, 64, 130];
    let Some(gpu) = gpu("prompts together") else { return };
    let (model, tokens) = model();
    let vocab = model.config.vocab_size;
    let prompts: Vec<Vec<u32>> =
        LENGTHS.iter().enumerate().map(|(i, &len)| tokens[3000 + 300 * i..][..len].to_vec()).collect();
    for spec in CACHES {
        let profile = profile(&model, &tokens[..2048], &[spec]);
        for layout in [WeightLayout::Packed, WeightLayout::Rows] {
            for chunk in [64, 8192] {
                let new =
                    || decoder_of_layout(&gpu, &model, (spec, layout), &profile, prompts.len(), CAPACITY);
                let step = |decoder: &mut Decoder| {
                    let mut all = decoder.logits().unwrap();
                    for fed in tokens.chunks_exact(prompts.len()).take(3) {
                        decoder.feed(fed).unwrap();
                        decoder.step().unwrap();
                        all.extend(decoder.logits().unwrap());
                    }
                    all
                };
                let mut together = new();
                together.prefill(&prompts, chunk).unwrap();
                let mut in_turn = new();
                for (i, prompt) in prompts.iter().enumerate() {
                    in_turn.prefill_one(i, prompt, chunk).unwrap();
                }
                let least = worst(&step(&mut together), &step(&mut in_turn), vocab);
                println!("{spec}, {layout:?}, chunks of {chunk}: cosine {least:.6}");
                assert!(least >= enough(spec).0, "{spec}, {layout:?}, chunks of {chunk}: cosine {least}");
            }
        }
    }
}

/// Prompts of few tokens in all run with packed weights as they are.
#[test]
fn short_prompts_have_the_logits_of_the_cpu() {
    let Some(gpu) = gpu("short prompts") else { return };
    let (model, tokens) = model();
    let vocab = model.config.vocab_size;
    let mut least = 1.0_f64;
    for method in ["dense:dtype=f16", "million"] {
        let profile = profile(&model, &tokens[..2048], &[method]);
        let mut check = |decoder: &mut Decoder, lengths: &[usize], chunk: usize| {
            let prompts: Vec<Vec<u32>> =
                lengths.iter().enumerate().map(|(i, &len)| tokens[200 * i + len..][..len].to_vec()).collect();
            decoder.clear().unwrap();
            decoder.prefill(&prompts, chunk).unwrap();
            let own = decoder.logits().unwrap();
            for (i, prompt) in prompts.iter().enumerate() {
                let cosine = cosine(&own[i * vocab..][..vocab], &on_cpu(&model, prompt, 1));
                least = least.min(cosine);
                assert!(cosine >= 0.998, "{method}, {lengths:?} in chunks of {chunk}: cosine {cosine}");
            }
        };
        let mut one = decoder(&gpu, &model, method, &profile, 1, 64);
        (1..=34).for_each(|len| check(&mut one, &[len], 8192));
        // A chunk attends to earlier ones as the cache stores them, which the window holds exactly.
        [1, 5, 32].into_iter().for_each(|chunk| check(&mut one, &[29], chunk));
        let mut four = decoder(&gpu, &model, method, &profile, 4, 64);
        for lengths in [[1, 1, 1, 1], [3, 1, 2, 1], [5, 11, 1, 8], [8, 8, 8, 8], [20, 2, 9, 1], [9, 8, 8, 8]]
        {
            [3, 8192].into_iter().for_each(|chunk| check(&mut four, &lengths, chunk));
        }
    }
    println!("cosine {least:.6}");
}

/// Sequences of a wide batch end, are idle, and begin again, while the others go on.
#[test]
fn places_of_a_wide_batch_are_refilled() {
    const BATCH: usize = 40;
    let Some(gpu) = gpu("refilled places of a wide batch") else { return };
    let (model, tokens) = model();
    let vocab = model.config.vocab_size;
    for spec in ["dense:dtype=f16", "dense:dtype=f16:pages=16:pool=3200"] {
        let mut decoder = decoder(&gpu, &model, spec, &Profile::default(), BATCH, 96);
        let mut texts = prompts(&tokens, BATCH);
        decoder.prefill(&texts, 64).unwrap();
        let step = |decoder: &mut Decoder, texts: &mut [Vec<u32>], at: usize| {
            let fed = &tokens[at..][..BATCH];
            decoder.feed(fed).unwrap();
            decoder.step().unwrap();
            texts.iter_mut().zip(fed).for_each(|(text, &token)| text.push(token));
        };
        step(&mut decoder, &mut texts, 10);
        let idle: Vec<usize> = (0..BATCH).step_by(3).collect();
        idle.iter().for_each(|&place| decoder.end(place).unwrap());
        step(&mut decoder, &mut texts, 20);
        for &place in &idle {
            texts[place] = tokens[7000 + 50 * place..][..1 + place].to_vec();
            decoder.prefill_one(place, &texts[place], 64).unwrap();
        }
        step(&mut decoder, &mut texts, 30);
        let own = decoder.logits().unwrap();
        let expected: Vec<f32> = texts.iter().flat_map(|text| on_cpu(&model, text, 1)).collect();
        let least = worst(&own, &expected, vocab);
        println!("{spec}: cosine {least:.6}");
        assert!(least >= 0.999, "{spec}: cosine {least}");
    }
}

#[test]
fn batches_of_another_layout_are_refused_by_name() {
    let Some(gpu) = gpu("refused batches") else { return };
    let (model, _) = model();
    let method: Method = "dense:dtype=f16".parse().unwrap();
    for (layout, batch, most) in [(WeightLayout::Packed, 33, 32), (WeightLayout::Rows, 513, 512)] {
        let cache = method_cache(&gpu, &method, &model.config, Element::F16, None, batch, 64).unwrap();
        let weights = Arc::new(Weights::of(&gpu, &model, Element::F16, layout).unwrap());
        let error = Decoder::new(gpu.clone(), weights, cache, batch).err().unwrap();
        assert!(matches!(error, Error::Argument(_)), "{error}");
        assert_eq!(error.to_string(), format!("a batch of {batch}: {layout:?} weights take 1 to {most}"));
    }
}
