//! Expected quality on the shipped model: near-lossless settings lose next to nothing, aggressive ones
//! degrade in the order that the papers report. Long; `caches.rs` has the quick checks of every method.

use std::sync::Arc;

use kv_llama::{Activations, Decoder, Side, logits, prefill};
use kv_methods::{Method, Prepared, calibrated};
use kv_model::Rope;
use kv_reference::compare::{Comparison, Placed, Row, Sizes, compare};
use kv_reference::eval::Divergence;

use crate::support::shipped::shipped;

fn run(methods: &[&str], sizes: Sizes) -> Comparison {
    let (model, tokens) = shipped(usize::MAX);
    let methods = Method::parse_list(&methods.join(",")).unwrap();
    let placed = Placed::new(&model.config, &methods, None).unwrap();
    compare(&model, ("sotu-heldout", &tokens), &placed, sizes, None, 1, None, &()).unwrap()
}

fn row<'a>(comparison: &'a Comparison, spec: &str) -> &'a Row {
    let method: Method = spec.parse().unwrap();
    comparison.methods.iter().find(|row| row.name == method.name && row.setting == method.setting).unwrap()
}

#[test]
#[ignore = "long: a real model under a dozen methods or more; `.ci/run` has it"]
fn near_lossless_settings_stay_within_one_percent() {
    let methods = [
        "dense",
        "dense:dtype=f16",
        "dense:dtype=bf16",
        "int8",
        "rotated",
        "q8_0",
        "lloydmax",
        "streaming:window=1280",
        "oracle:ratio=0.2",
        "pqcache:ratio=0.2",
        "million",
        "hybrid",
        "hybrid:rows=auto",
        "zack",
        "cachegen:bits=4",
    ];
    let comparison = run(&methods, Sizes { context: 1536, decode: 160, calibration: 4096 });
    let dense = row(&comparison, "dense");
    assert!(dense.kl < 1e-9 && dense.top1 == 1.0 && dense.needle == Some(1.0));
    for spec in methods {
        let row = row(&comparison, spec);
        // Of 160 tokens, perplexity may fall by chance as much as it may rise: the divergence cannot.
        let loss = row.perplexity / dense.perplexity - 1.0;
        assert!(loss < 0.01, "{spec}: perplexity {}, dense {}", row.perplexity, dense.perplexity);
        assert!(row.kl < 0.01, "{spec}: KL {}", row.kl);
    }
}

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn codebooks_of_a_short_prompt_are_trained_anew() {
    let methods = ["pqcache:tokens=64", "oracle:tokens=64"];
    let comparison = run(&methods, Sizes { context: 64, decode: 320, calibration: 1024 });
    let [pqcache, oracle] = methods.map(|spec| row(&comparison, spec).kl);
    assert!(pqcache < 3.0 * oracle, "KL {pqcache}, of the best tokens {oracle}");
}

#[test]
#[ignore = "long: a real model under a dozen methods or more; `.ci/run` has it"]
fn aggressive_settings_degrade_in_the_papers_order() {
    // Better first, at growing compression or at the same number of attended tokens.
    let orders: [&[&str]; 21] = [
        // PQCache, 4.2: near the oracle, far above dropping tokens, at a tenth of the tokens.
        &["oracle:ratio=0.1", "pqcache:ratio=0.1:code=2x6", "streaming:window=96"],
        &["pqcache:ratio=0.2", "pqcache:ratio=0.1", "pqcache:ratio=0.1:code=1x4"],
        // MILLION: 4 bits near fp16, then growing loss; codes take outliers better than a uniform grid does.
        &["million", "million:k=32x8:v=32x8", "million:k=16x8:v=16x8"],
        &["million:k=32x8:v=32x8", "int2"],
        // The query-metric transform more than halves the error of plain codes, at 2 and at 3 bits.
        &["pqklt:k=64x6:v=64x6", "million:k=64x6:v=64x6"],
        &["pqklt:k=64x4:v=64x4", "million:k=64x4:v=64x4"],
        &["pqklt:k=64x4:v=64x4:keys=rope", "million:k=64x4:v=64x4"],
        // Scalar codes: every bit counts, and 2 bits are better than the 3.3 of uniform codes with their
        // scales.
        &["sq:k=4:v=4", "sq:k=3:v=3", "sq:k=2:v=2", "int2"],
        &["sq:k=2:v=2", "sq:k=1.5:v=2", "sq:k=1:v=1"],
        // Bits by what errors cost the model lose less than the same bits everywhere: 2.1 and 3.05 with scales.
        &["auto:bits=2.08", "sq:k=2:v=2"],
        &["auto:bits=3.05", "sq:k=3:v=3"],
        &["sq:k=3:v=2", "sq:k=3:v=2:mean-error=off"],
        // Hybrid attention over codes of one bit: more rows are better, and 1 % of the rows over codes is
        // better than a tenth of the rows alone.
        &["hybrid:rows=0.02", "hybrid:rows=0.01", "hybrid:rows=0"],
        &["hybrid:rows=0.01", "oracle:ratio=0.1", "pqcache:ratio=0.1"],
        &["hybrid:rows=0.02", "int2"],
        &["int8", "int4", "int2"],
        &["q8_0", "q4_0", "int2"],
        // ZACK, 6.3: the accuracy falls with the part removed.
        &["zack", "zack:k=0.5:v=0.5", "zack:k=0.25:v=0.25"],
        // CacheGen, 5.3: the levels trade quality for size.
        &["cachegen:bits=4", "cachegen", "cachegen:bits=2", "cachegen:bits=1"],
        // The paper's own setting, 2-bit codes, in fewer bytes than the methods of this list.
        &["cachegen:bits=2", "cachegen:mode=paper"],
        &["cachegen:bits=2", "int2"],
    ];
    let mut methods = orders.concat();
    methods.sort_unstable();
    methods.dedup();
    let comparison = run(&methods, Sizes { context: 1024, decode: 160, calibration: 2048 });
    for order in orders {
        for pair in order.windows(2) {
            let [better, worse] = [0, 1].map(|i| row(&comparison, pair[i]).kl);
            assert!(better < worse, "{} has KL {better}, {} has {worse}", pair[0], pair[1]);
        }
    }
    // CacheGen's evaluation: 3.5 to 4.3 times smaller than 8-bit codes at no more than 2 % loss; of so short
    // a context the exact window is a part that neither shrinks.
    let (cachegen, int8) = (row(&comparison, "cachegen:bits=2"), row(&comparison, "int8"));
    assert!(cachegen.perplexity < 1.02 * int8.perplexity, "{} {}", cachegen.perplexity, int8.perplexity);
    assert!(cachegen.kv_bytes_per_token * 2.5 < int8.kv_bytes_per_token);
}

/// Outliers that are kept exact take nothing from the codes of the rest: these lose no more than without, and
/// fit a text of the calibration's kind.
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn outliers_kept_exact_lose_nothing() {
    let methods = ["million", "million:outliers=1"];
    let comparison = run(&methods, Sizes { context: 320, decode: 32, calibration: 2048 });
    let [plain, outliers] = methods.map(|spec| row(&comparison, spec));
    assert!(outliers.kl < 1.1 * plain.kl, "KL {}, {} without outliers", outliers.kl, plain.kl);
    for row in [plain, outliers] {
        assert!(!row.fits.is_empty() && row.misfits().is_none(), "{}: {:?}", row.setting, row.misfits());
    }
}

/// A log of a service: a text of another kind than the shipped one, and always the same.
fn log() -> String {
    const EVENTS: [&str; 8] = [
        "INFO opened a connection from",
        "INFO read the table of customers for",
        "WARN the queue is nearly full, waiting for",
        "DEBUG parsed a message with an empty body from",
        "ERROR could not write the file, retrying for",
        "INFO closed the connection of",
        "DEBUG found a newer version of the index on",
        "WARN dropped a request without a key from",
    ];
    const HOSTS: [&str; 5] = ["north", "harbor", "archive", "the gateway", "node seven"];
    let mut state = 1_u64;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let line = |i: usize| {
        let (event, host) = (EVENTS[below(EVENTS.len())], HOSTS[below(HOSTS.len())]);
        let (part, rows, time) = (below(16), below(1000), below(500));
        format!("[{i:05}] worker-{part}: {event} {host} ({rows} rows, {time} ms)\n")
    };
    (0..1000).map(line).collect()
}

/// Codes of keys after RoPE lose no more at positions that the calibration text, of another kind, does not
/// reach.
#[test]
#[ignore = "long: a prompt of 16,000 tokens of a real model"]
fn codebooks_of_another_text_hold_at_length() {
    const CONTEXTS: [usize; 2] = [2048, 16_000];
    const DECODED: usize = 192;
    let (model, speech) = shipped(usize::MAX);
    let tokens = |text: &str| model.tokenizer().unwrap().encode(text).unwrap();
    let methods =
        Method::parse_list("million,pqklt:k=64x8:v=64x8:keys=rotated,pqklt:k=64x8:v=64x8:keys=mean").unwrap();
    let rope = Arc::new(Rope::new(&model.config, model.config.max_seq_len));
    let profile = calibrated(&model, &rope, &speech[..4096], &methods).unwrap();
    // Attention is causal: one run of the longest text has the rows of every context, and a dense cache's
    // logits.
    let log = &tokens(&log())[..CONTEXTS[1] + DECODED + 1];
    let mut rows = vec![];
    let hidden = prefill(&model, &rope, &log[..log.len() - 1], &mut |_, Activations { k, v, .. }| {
        rows.push((k.to_vec(), v.to_vec()));
        Ok(())
    });
    let (hidden, row, kv_dim) = (hidden.unwrap(), model.config.hidden_size, model.config.kv_dim());
    for method in methods {
        let Prepared { model: own, mut cache } = method.prepare(&model, &rope, &profile).unwrap();
        assert!(Arc::ptr_eq(&own, &model), "these are the rows of another model");
        let kls = CONTEXTS.map(|context| {
            let held = cache.seq_len();
            for (l, rows) in rows.iter().enumerate() {
                let [k, v] = [&rows.0, &rows.1].map(|rows| &rows[held * kv_dim..context * kv_dim]);
                cache.prefill(l, held, k, v).unwrap();
            }
            let mut cache = cache.clone_box();
            let dense = logits(&model, &hidden[context * row..][..DECODED * row]).unwrap();
            let mut decoder = Decoder::new(own.clone(), rope.clone());
            let mut divergence = Divergence::default();
            for (pair, dense) in log[context..].windows(2).zip(dense.chunks_exact(model.config.vocab_size)) {
                divergence.add(decoder.step(pair[0], cache.as_mut()).unwrap(), dense, pair[1]);
            }
            divergence.kl()
        });
        println!("{}: KL {kls:.5?}", method.spec());
        let [short, long] = kls;
        assert!(long < 1.5 * short, "{}: KL {kls:?} after {CONTEXTS:?} tokens", method.spec());
    }
}

/// The values' codebooks of one kind of text do not fit another, and this is noticed. The codebook of
/// Gaussians fits, and loses less of the attention. So do scalar codes of keys with more bits in heads that
/// do not fit.
#[test]
#[ignore = "long: calibrates and runs a real model"]
fn codebooks_that_do_not_fit_are_noticed() {
    let (model, speech) = shipped(usize::MAX);
    let tokens = |text: &str| model.tokenizer().unwrap().encode(text).unwrap();
    let specs =
        ["pqklt:k=64x8:v=16x8", "pqklt:k=64x8:v=16x8:values=trained", "sq:k=2:v=4", "sq:k=2:v=4:widen=off"];
    let methods = Method::parse_list(&specs.join(",")).unwrap();
    let rope = Rope::new(&model.config, 4096);
    let profile = calibrated(&model, &rope, &speech[..2048], &methods).unwrap();
    let sizes = Sizes { context: 1024, decode: 64, calibration: 0 };
    let run = |text: &[u32]| {
        let placed = Placed::new(&model.config, &methods, None).unwrap();
        compare(&model, ("text", text), &placed, sizes, Some(profile.clone()), 1, None, &()).unwrap()
    };
    let other = run(&tokens(&log()));
    let [gaussian, trained, widened, kept] = specs.map(|spec| row(&other, spec));
    let misfits =
        |row: &Row| row.fits.iter().filter(|head| head.side == Side::Values && head.fit.is_misfit()).count();
    assert!(trained.misfits().is_some() && misfits(trained) > 0, "{:?}", trained.fits);
    assert_eq!(misfits(gaussian), 0, "{:?}", gaussian.fits);
    assert!(gaussian.kl < trained.kl, "KL {}, {} by codebooks of speeches", gaussian.kl, trained.kl);
    assert!(kept.fits.iter().any(|head| head.fit.is_misfit()), "{:?}", kept.fits);
    assert!(widened.fits.iter().all(|head| !head.fit.is_misfit()), "{:?}", widened.fits);
    assert!(widened.kl < kept.kl, "KL {}, {} with more bits", kept.kl, widened.kl);
    let same = run(&speech[2048..]);
    specs
        .iter()
        .for_each(|spec| assert!(row(&same, spec).misfits().is_none(), "{:?}", row(&same, spec).fits));
}
