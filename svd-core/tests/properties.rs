//! Rotations lose nothing at full rank, lose least in the closed form, and fold exactly.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

use proptest::prelude::*;
use svd_core::{Error, Gram, Rotation, attend_into, balanced_order, fold_input, fold_output, project_into};

const DIM: usize = 6;

/// Correlated rows: (n, DIM) with shrinking scale per component, mixed by a fixed matrix.
fn rows(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    let noise = |i: usize| {
        let mut z = (i as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ seed;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        ((z >> 40) as f32 / (1 << 23) as f32) - 1.0
    };
    (0..n)
        .flat_map(|i| {
            let x: [f32; DIM] = core::array::from_fn(|d| noise(i * DIM + d) * scale / (1 << d) as f32);
            core::array::from_fn::<f32, DIM, _>(|d| x[d] + 0.5 * x[(d + 1) % DIM])
        })
        .collect()
}

fn gram(rows: &[f32]) -> Gram {
    let mut gram = Gram::new(DIM).unwrap();
    gram.add_rows(rows).unwrap();
    gram
}

/// Mean squared score error over all pairs at `rank`.
fn score_error(rotation: &Rotation, queries: &[f32], keys: &[f32], rank: usize) -> f64 {
    let project = |map: &[f32], x: &[f32]| {
        let mut out = vec![0.0; rank];
        project_into(map, x, &mut out).unwrap();
        out
    };
    let ip = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let mut total = 0.0;
    for q in queries.chunks(DIM) {
        let projected = project(rotation.probe(), q);
        for k in keys.chunks(DIM) {
            total += (ip(q, k) - ip(&projected, &project(rotation.store(), k))).powi(2);
        }
    }
    total / (queries.len() / DIM * (keys.len() / DIM)) as f64
}

/// Rows less their mean.
fn centred(rows: &[f32]) -> Vec<f32> {
    let n = (rows.len() / DIM) as f32;
    let mean: [f32; DIM] = core::array::from_fn(|d| rows.chunks(DIM).map(|row| row[d]).sum::<f32>() / n);
    rows.chunks(DIM).flat_map(|row| core::array::from_fn::<f32, DIM, _>(|d| row[d] - mean[d])).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn the_query_metric_makes_equal_errors_cost_equally(seed in any::<u64>(), scale in 0.1_f32..10.0) {
        let (queries, keys) = (rows(60, seed, scale), centred(&rows(80, seed ^ 1, 1.0)));
        let rotation = Rotation::query_metric(&gram(&keys), &gram(&queries)).unwrap();
        let order = balanced_order(rotation.sigma(), 3).unwrap();
        let rotation = rotation.reordered(&order).unwrap();
        prop_assert!(score_error(&rotation, &queries, &keys, DIM) < 1e-6 * f64::from(scale * scale).max(1.0));
        // Components are uncorrelated, with the deviations that sigma says.
        let coded: Vec<f32> = keys.chunks(DIM).flat_map(|key| {
            let mut y = vec![0.0; DIM];
            project_into(rotation.store(), key, &mut y).unwrap();
            y
        }).collect();
        let covariance = gram(&coded).matrix();
        let largest = rotation.sigma().iter().copied().fold(0.0, f64::max).powi(2);
        for r in 0..DIM {
            for c in 0..DIM {
                let expected = if r == c { rotation.sigma()[r].powi(2) } else { 0.0 };
                prop_assert!((covariance[r * DIM + c] / 80.0 - expected).abs() < 1e-4 * largest);
            }
        }
        // An error of 1 in any component costs the same, averaged over the queries: `dim` squared.
        for c in 0..DIM {
            let cost: f64 = queries.chunks(DIM).map(|q| {
                let mut probe = vec![0.0; DIM];
                project_into(rotation.probe(), q, &mut probe).unwrap();
                f64::from(probe[c]).powi(2)
            }).sum::<f64>() / 60.0;
            prop_assert!((cost - DIM as f64).abs() < 1e-2 * DIM as f64, "{cost}");
        }
    }

    #[test]
    fn closed_form_is_never_worse(seed in any::<u64>(), scale in 0.1_f32..10.0, rank in 1_usize..DIM) {
        let (queries, keys) = (rows(20, seed, scale), rows(40, seed ^ 1, 1.0));
        let (g_q, g_k) = (gram(&queries), gram(&keys));
        let best = Rotation::score_optimal(&g_k, &g_q).unwrap();
        let stacked = Rotation::stacked(&g_k, &g_q).unwrap();
        let (a, b) = (score_error(&best, &queries, &keys, rank), score_error(&stacked, &queries, &keys, rank));
        prop_assert!(a <= b * 1.001 + 1e-9, "{a} against {b}");
        prop_assert!(score_error(&best, &queries, &keys, DIM) < 1e-7 * f64::from(scale * scale).max(1.0));
    }

    #[test]
    fn folded_weights_equal_projected_vectors(seed in any::<u64>()) {
        let rotation = Rotation::score_optimal(&gram(&rows(30, seed, 1.0)), &gram(&rows(30, seed ^ 9, 2.0))).unwrap();
        let (w_v, w_o) = (rows(4, seed ^ 2, 1.0), rows(3, seed ^ 3, 1.0)); // (DIM, 4) and (3, DIM)
        let folded_v = fold_input(rotation.store(), &w_v, DIM).unwrap();
        let folded_o = fold_output(rotation.probe(), &w_o, DIM).unwrap();
        let x = [0.3, -1.0, 0.7, 2.0];
        let apply = |w: &[f32], x: &[f32]| -> Vec<f32> {
            w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
        };
        let plain = apply(&w_o, &apply(&w_v, &x));
        let folded = apply(&folded_o, &apply(&folded_v, &x));
        for (a, b) in plain.iter().zip(&folded) {
            prop_assert!((a - b).abs() < 1e-3 * (1.0 + a.abs()), "{a} {b}");
        }
    }

    #[test]
    fn attention_equals_the_formula(n in 1_usize..40, rank_k in 1_usize..40, rank_v in 1_usize..10, seed in any::<u64>()) {
        let value = |i: usize| ((i as u64 ^ seed) % 1000) as f32 / 500.0 - 1.0;
        let q: Vec<f32> = (0..rank_k).map(value).collect();
        let keys: Vec<f32> = (0..n * rank_k).map(|i| value(i + 77)).collect();
        let values: Vec<f32> = (0..n * rank_v).map(|i| value(i + 991)).collect();
        let (mut scores, mut out) = (vec![0.0; n], vec![0.0; rank_v]);
        let stats = attend_into(&q, &keys, &values, &mut scores, &mut out).unwrap();
        let exact: Vec<f64> =
            keys.chunks(rank_k).map(|k| k.iter().zip(&q).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()).collect();
        let max = exact.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = exact.iter().map(|s| (s - max).exp()).sum();
        for d in 0..rank_v {
            let mean: f64 = exact.iter().zip(values.chunks(rank_v)).map(|(s, v)| (s - max).exp() / sum * f64::from(v[d])).sum();
            prop_assert!((mean - f64::from(out[d] / stats.sum)).abs() < 1e-4);
        }
    }
}

#[test]
fn bad_input_is_an_error() {
    assert!(Gram::new(0).is_err());
    let mut gram = Gram::new(3).unwrap();
    assert!(gram.add_rows(&[1.0; 4]).is_err());
    assert!(gram.add_rows(&[f32::NAN; 3]).is_err());
    assert_eq!(gram.rows(), 0);
    assert!(Rotation::score_optimal(&gram, &Gram::new(2).unwrap()).is_err());
    assert!(Rotation::from_parts(vec![0.0; 4], vec![0.0; 3], vec![1.0; 2]).is_err());
    assert!(project_into(&[0.0; 4], &[0.0; 2], &mut [0.0; 3]).is_err());
    assert!(attend_into(&[1.0], &[1.0; 3], &[1.0; 2], &mut [0.0; 2], &mut [0.0]).is_err());
}

#[test]
fn orders_that_are_no_permutation_are_errors() {
    let rotation = Rotation::stacked(&gram(&rows(9, 1, 1.0)), &gram(&rows(9, 2, 1.0))).unwrap();
    assert_eq!(rotation.reordered(&[0, 1, 2, 3, 4, 4]), Err(Error::Order { component: 4 }));
    assert_eq!(rotation.reordered(&[0, 1, 2, 3, 4, 6]), Err(Error::Order { component: 6 }));
    assert!(matches!(rotation.reordered(&[0]), Err(Error::Length { .. })));
    assert!(balanced_order(&[1.0; 6], 4).is_err() && balanced_order(&[1.0; 6], 0).is_err());
    assert_eq!(balanced_order(&[0.0; 4], 2).unwrap().len(), 4);
}
