//! The loop over exact rows: the logits of a prefill, whatever the chunks, and refusals.

use std::path::Path;
use std::sync::Arc;

use kv_llama::{Decoder, Error, ExactCache, KvCache, logits, prefill};
use kv_model::{Model, Rope};

fn load(fixture: &str) -> Model {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures").join(fixture);
    Model::load(&folder).unwrap()
}

#[test]
fn steps_and_chunks_have_the_logits_of_a_prefill() {
    // Groups of query heads, a sliding window, layers without RoPE.
    for fixture in ["gqa", "mistral-window", "smollm3-window"] {
        let model = Arc::new(load(fixture));
        let rope = Arc::new(Rope::new(&model.config, 24));
        let tokens: Vec<u32> = (0..24).map(|i| i * 7 % model.config.vocab_size as u32).collect();
        let hidden = prefill(&model, &rope, &tokens, &mut |_, _| Ok(())).unwrap();
        let right = logits(&model, &hidden).unwrap();
        let row = |t: usize| &right[t * model.config.vocab_size..][..model.config.vocab_size];
        let same = |t: usize, logits: &[f32]| {
            let error = row(t).iter().zip(logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(error < 1e-3, "{fixture}: token {t} by {error}");
        };
        let mut cache = ExactCache::new(&model.config, &rope);
        let mut decoder = Decoder::new(model.clone(), rope);
        same(8, decoder.prefill(&tokens[..9], &mut cache).unwrap());
        same(15, decoder.prefill(&tokens[9..16], &mut cache).unwrap());
        (16..20).for_each(|t| same(t, decoder.step(tokens[t], &mut cache).unwrap()));
        cache.truncate(10).unwrap();
        (10..24).for_each(|t| same(t, decoder.step(tokens[t], &mut cache).unwrap()));
        assert!(matches!(decoder.step(0, &mut cache), Err(Error::Argument(_))), "no position is left");
        let bytes = 24 * model.config.kv_values_per_token() * size_of::<f32>();
        assert_eq!((cache.seq_len(), cache.footprint().kept), (24, bytes));
    }
}

#[test]
fn a_cache_refuses_what_does_not_continue_it() {
    let model = load("gqa");
    let mut cache = ExactCache::new(&model.config, &Arc::new(Rope::new(&model.config, 2)));
    let row = vec![0.5; model.config.kv_dim()];
    let (q, mut out) = (vec![0.5; model.config.q_dim()], vec![0.0; model.config.q_dim()]);
    let refused = |result: kv_llama::Result<()>| {
        assert!(matches!(result, Err(Error::Cache { method: "exact", .. })), "{result:?}");
    };
    refused(cache.attend(0, &q, &mut out));
    refused(cache.prefill(0, 1, &row, &row));
    refused(cache.prefill(0, 0, &row, &row[1..]));
    refused(cache.prefill(model.config.n_layers, 0, &row, &row));
    refused(cache.prefill(0, 0, &row.repeat(3), &row.repeat(3)));
    refused(cache.truncate(1));
    cache.prefill(0, 0, &row, &row).unwrap();
    cache.attend(0, &q, &mut out).unwrap();
    assert_eq!(out[0], 0.5, "the only value");
}

#[test]
fn logits_that_overflow_are_refused() {
    let mut model = load("gqa");
    // Weights, keys and values are finite.
    let last = model.layers.last_mut().unwrap();
    Arc::make_mut(&mut last.feed_forward).down.weight.f32_mut().fill(3e38);
    let rope = Arc::new(Rope::new(&model.config, 8));
    let model = Arc::new(model);
    let refused = |error: Option<Error>| {
        assert!(matches!(error, Some(Error::Logits { model: name }) if name == model.name));
    };
    let hidden = prefill(&model, &rope, &[1, 2], &mut |_, _| Ok(())).unwrap();
    refused(logits(&model, &hidden).err());
    let mut cache = ExactCache::new(&model.config, &rope);
    let mut decoder = Decoder::new(model.clone(), rope);
    refused(decoder.prefill(&[1, 2], &mut cache).err());
    refused(decoder.step(3, &mut cache).err());
    assert_eq!(cache.seq_len(), 3);
}
