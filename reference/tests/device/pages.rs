//! Caches in pages on a GPU. Without a GPU these tests are skipped, which `GPU_TESTS=require` turns into a
//! failure.

use std::sync::Arc;

use kv_device::Gpu;
use kv_llama_gpu::{Decoder, Error, Result, WeightLayout, Weights};
use kv_methods::{Method, Profile};
use kv_reference::device::method_cache;

use crate::support::{self, gpu, model, profile, skip};

/// Prompts of a batch, steps, prompts again and steps: tokens and logits after each part.
fn run(decoder: &mut Decoder, tokens: &[u32]) -> Vec<(Vec<Vec<u32>>, Vec<f32>)> {
    let prompts = |of: [(usize, usize); 3]| of.map(|(at, len)| tokens[at..][..len].to_vec()).to_vec();
    let mut all = vec![];
    for (first, chunk, steps) in
        [([(3000, 300), (4000, 7), (5000, 129)], 64, 70), ([(200, 1), (300, 150), (900, 40)], 100, 40)]
    {
        decoder.prefill(&prompts(first), chunk).unwrap();
        for _ in 0..steps {
            decoder.step().unwrap();
        }
        all.push((decoder.picked().unwrap(), decoder.logits().unwrap()));
    }
    all
}

#[test]
fn pages_have_the_logits_of_one_piece() {
    let Some(gpu) = gpu("pages") else { return };
    let (model, tokens) = model();
    let profile = profile(&model, &tokens[..2048], &["million", "pqklt"]);
    for (whole, pages) in [
        ("dense:dtype=f16", ["pages=16", "pages=48:pool=1200"]),
        ("dense:dtype=bf16", ["pages=16:pool=976", "pages=512"]),
        ("million", ["pages=32:pool=992", "pages=96"]),
        ("million:exact=bf16:sinks=2:window=32", ["pages=32", "pages=64:pool=1200"]),
        ("pqklt", ["pages=32:pool=992", "pages=96"]),
    ] {
        let run_with = |spec: &str| {
            let mut decoder = support::decoder(&gpu, &model, spec, &profile, 3, 512);
            let first = run(&mut decoder, &tokens);
            decoder.clear().unwrap();
            assert!(run(&mut decoder, &tokens) == first, "{spec}: again");
            first
        };
        let expected = run_with(whole);
        for pages in pages {
            assert!(run_with(&format!("{whole}:{pages}")) == expected, "{whole}:{pages}");
        }
    }
}

#[test]
fn a_pool_that_is_full_refuses_and_loses_nothing() {
    let Some(gpu) = gpu("full pools") else { return };
    let (model, tokens) = model();
    let run = &tokens[3000..3100];
    // One page of 32 tokens for each of two sequences, and one more.
    let spec = "dense:dtype=f16:pages=32:pool=96";
    let mut decoder = support::decoder(&gpu, &model, spec, &Profile::default(), 2, 512);
    let prompts = |len: usize| vec![run[..len].to_vec(), run[..5].to_vec()];
    let refused = |result: Result<()>, needed: usize, free: usize| {
        let Err(Error::Device(kv_device::Error::Pages { needed: n, free: f, pages: 3, page: 32 })) = result
        else {
            panic!("{result:?}")
        };
        assert_eq!((n, f), (needed, free));
    };
    refused(decoder.prefill(&prompts(65), 32), 4, 3);
    decoder.prefill(&prompts(60), 32).unwrap();
    // Steps until the first sequence, or the second one, needs a third page or a second one.
    for &token in &run[60..64] {
        decoder.feed(&[token, token]).unwrap();
        decoder.step().unwrap();
    }
    let before = decoder.logits().unwrap();
    refused(decoder.step(), 1, 0);
    refused(decoder.step(), 1, 0);
    assert_eq!(decoder.logits().unwrap(), before);
    assert!(matches!(decoder.end(2), Err(Error::Argument(_))));
    decoder.end(1).unwrap();
    let vocab = model.config.vocab_size;
    let rest: Vec<Vec<f32>> = run[64..96]
        .iter()
        .map(|&token| {
            decoder.feed(&[token, 1]).unwrap();
            decoder.step().unwrap();
            decoder.logits().unwrap()[..vocab].to_vec()
        })
        .collect();
    refused(decoder.step(), 1, 0);
    // The same tokens without a neighbour that ends.
    let mut whole = support::decoder(&gpu, &model, "dense:dtype=f16", &Profile::default(), 2, 512);
    whole.prefill(&prompts(60), 32).unwrap();
    let both: Vec<Vec<f32>> = run[60..96]
        .iter()
        .map(|&token| {
            whole.feed(&[token, token]).unwrap();
            whole.step().unwrap();
            whole.logits().unwrap()[..vocab].to_vec()
        })
        .collect();
    for (i, (own, expected)) in rest.iter().zip(&both[4..]).enumerate() {
        let cosine = support::cosine(own, expected);
        assert!(cosine > 0.9999, "step {i} after the neighbour's end: cosine {cosine}");
    }
    // Its pages are reused.
    decoder.prefill(&[run[..1].to_vec(), run[..1].to_vec()], 32).unwrap_err();
    decoder.clear().unwrap();
    decoder.prefill(&prompts(33), 32).unwrap();
}

#[test]
fn sequences_that_have_ended_take_no_more_pages() {
    let Some(gpu) = gpu("ended sequences") else { return };
    let (model, tokens) = model();
    // The second sequence ends with its first pick, whatever it is: the first one gets the page that the host
    // would have given to both.
    let mut model = (*model).clone();
    let prompts = vec![tokens[3000..3003].to_vec(), tokens[4000..4007].to_vec()];
    let first = {
        let model = Arc::new(model.clone());
        let mut decoder = support::decoder(&gpu, &model, "dense:dtype=f16", &Profile::default(), 2, 256);
        decoder.prefill(&prompts, 32).unwrap();
        decoder.picked().unwrap()
    };
    if first[0] == first[1] {
        return; // both would end
    }
    model.config.eos_tokens = vec![first[1][0]];
    let model = Arc::new(model);
    let spec = "dense:dtype=f16:pages=32:pool=96";
    let mut decoder = support::decoder(&gpu, &model, spec, &Profile::default(), 2, 256);
    decoder.prefill(&prompts, 32).unwrap();
    let steps = (0..256).take_while(|_| decoder.step().is_ok()).count();
    let picked = decoder.picked().unwrap();
    assert_eq!(picked[1], first[1]);
    // Unless the first one has also ended, it has the other two pages.
    if picked[0].last() == Some(&first[1][0]) {
        assert_eq!(steps, 256, "sequences that stand still fill nothing");
    } else {
        assert!(matches!(decoder.step(), Err(Error::Device(kv_device::Error::Pages { .. }))));
        assert_eq!(steps, 64 - 3, "{picked:?}");
    }
}

#[test]
fn lengths_that_do_not_fit_in_one_piece_run_in_pages() {
    let gpu = match Gpu::open_within(0, 200 << 20) {
        Ok(gpu) => Arc::new(gpu),
        Err(error) => return skip("device memory", &error),
    };
    let (model, tokens) = model();
    let capacity = 16_384;
    let decode = |spec: &str| {
        let method: Method = spec.parse().unwrap();
        let element = method.device_element().unwrap();
        let cache = method_cache(&gpu, &method, &model.config, element, None, 8, capacity)?;
        let weights = Arc::new(Weights::of(&gpu, &model, element, WeightLayout::Packed)?);
        kv_reference::Result::Ok(Decoder::new(gpu.clone(), weights, cache, 8)?)
    };
    let error = decode("dense:dtype=f16").map(drop).unwrap_err();
    assert!(
        matches!(
            error,
            kv_reference::Error::Device(kv_device::Error::DeviceMemory { purpose: "caches", .. })
        ),
        "{error}"
    );
    let mut decoder = decode("dense:dtype=f16:pages=64:pool=8192").unwrap();
    let prompts: Vec<Vec<u32>> = (0..8).map(|i| tokens[500 * i..][..10 + 150 * i].to_vec()).collect();
    decoder.prefill(&prompts, 512).unwrap();
    for _ in 0..100 {
        decoder.step().unwrap();
    }
    assert!(decoder.logits().unwrap().iter().all(|x| x.is_finite()));
}
