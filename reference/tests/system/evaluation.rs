//! Metrics of logits, prompts that methods share, and the labels of charts.

use std::sync::Arc;

use kv_llama::Decoder;
use kv_llama::ops::log_softmax;
use kv_methods::{Method, Prepared, calibrated};
use kv_model::{Model, Rope};
use kv_reference::eval::{Divergence, SharedPrompt, kl_divergence};
use kv_reference::report::labels::Labels;

use crate::support::kv::fixture;

#[test]
fn a_fair_coin_has_perplexity_two() {
    let mut divergence = Divergence::default();
    for next in [0, 1, 1, 0] {
        divergence.add(&[3.0, 3.0], &[3.0, 3.0], next);
    }
    assert!((divergence.perplexity() - 2.0).abs() < 1e-12);
    assert_eq!((divergence.kl(), divergence.top1()), (0.0, 1.0));
}

#[test]
fn divergence_of_two_coins() {
    // p = (1/2, 1/2), q = (3/4, 1/4): KL = ln 2 - (ln 3) / 2.
    let q = [3.0_f32.ln(), 0.0];
    let mut divergence = Divergence::default();
    divergence.add(&q, &[1.0, 1.0], 1);
    divergence.add(&[0.0, 1.0], &[1.0, 0.0], 0);
    assert!((divergence.kl_by_position()[0] - (2.0_f64.ln() - 3.0_f64.ln() / 2.0)).abs() < 1e-7);
    // Ties go to the first, so (1, 1) agrees with q and (0, 1) does not.
    assert_eq!(divergence.top1(), 0.5);
    assert!(
        (kl_divergence(&log_softmax(&[f32::NEG_INFINITY, 0.0]), &log_softmax(&[0.0, 0.0])) - 2.0_f64.ln())
            .abs()
            < 1e-12
    );
}

#[test]
fn nan_is_no_agreement() {
    for (logits, reference) in
        [([f32::NAN; 2], [0.0; 2]), ([0.0; 2], [f32::NAN; 2]), ([f32::NAN; 2], [f32::NAN; 2])]
    {
        let mut divergence = Divergence::default();
        divergence.add(&logits, &reference, 0);
        assert!(divergence.kl().is_nan() && divergence.top1() == 0.0, "{logits:?}, {reference:?}");
    }
}

#[test]
fn large_logits_do_not_overflow() {
    let log_p = log_softmax(&[1e30, 1e30, -1e30]);
    assert!((log_p[0] + 2.0_f64.ln()).abs() < 1e-12 && log_p[2] < -1e20);
}

#[test]
fn a_shared_prompt_fills_caches_as_their_own_models_do() {
    let model = Arc::new(Model::load(&fixture("gqa")).unwrap());
    let tokens: Vec<u32> = (0..200_u32).map(|i| (i * i + 7 * i) % 96).collect();
    let rope = Arc::new(Rope::new(&model.config, tokens.len()));
    for spec in ["zack:exact=f32", "zack:prompt=cut:exact=f32"] {
        let method = spec.parse::<Method>().unwrap().fitted(&model.config).unwrap();
        assert!(method.changes_weights(), "{spec}");
        let profile = calibrated(&model, &rope, &tokens, std::slice::from_ref(&method)).unwrap();
        let (prompt, next) = (&tokens[..150], tokens[150]);
        let shared = SharedPrompt::run(&model, &rope, prompt, [&method]).unwrap();
        let alone = SharedPrompt::run(&model, &rope, prompt, []).unwrap();
        let [one, other] = [shared, alone].map(|run| {
            let Prepared { model, mut cache } = run.fill(&method, &model, &rope, &profile).unwrap();
            Decoder::new(model, rope.clone()).step(next, cache.as_mut()).unwrap().to_vec()
        });
        let largest = one.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
        let differences = one.iter().zip(&other).map(|(a, b)| (a - b).abs());
        let difference = differences.fold(0.0_f32, f32::max);
        assert!(difference <= 1e-3 * largest, "{spec}: {difference} of {largest}");
    }
}

#[test]
fn labels_of_crowded_points_do_not_overlap() {
    let points: Vec<(i32, i32)> = (0..25).map(|i| (500 + 3 * (i % 5), 300 + 4 * (i / 5))).collect();
    let mut labels = Labels::new(points.iter().copied());
    for &at in &points {
        labels.place(at, 20);
    }
    let overlap =
        |a: &(i32, i32, i32, i32), b: &(i32, i32, i32, i32)| a.0 < b.2 && b.0 < a.2 && a.1 < b.3 && b.1 < a.3;
    let placed = &labels.0[points.len()..];
    for (i, a) in placed.iter().enumerate() {
        assert!(placed[..i].iter().all(|b| !overlap(a, b)), "label {i}");
    }
}
