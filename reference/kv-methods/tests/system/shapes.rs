//! No safe call accesses memory outside its slices, whatever sizes it is given.

use std::path::Path;
use std::sync::Arc;

use kv_llama::ops::{AttentionShape, causal_attention};
use kv_llama::{Decoder, Error, prefill};
use kv_methods::Method;
use kv_model::{Config, Linear, Matrix, Model, Rope};
use svd_core::SoftmaxStats;

/// Numbers below `end`, of a fixed sequence for `seed`.
fn sequence(seed: u64) -> impl FnMut(usize) -> usize {
    let mut rng = fastrand::Rng::with_seed(seed);
    move |end| rng.usize(..end)
}

/// The definition of attention in `f64`: one row of one head.
fn naive(q: &[f32], k: &[Vec<f32>], v: &[Vec<f32>]) -> Vec<f64> {
    let ip =
        |a: &[f32], b: &[f32]| -> f64 { a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum() };
    let scores: Vec<f64> = k.iter().map(|k| ip(q, k) / (q.len() as f64).sqrt()).collect();
    let max = scores.iter().copied().fold(f64::MIN, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let sum: f64 = weights.iter().sum();
    (0..q.len()).map(|c| weights.iter().zip(v).map(|(w, v)| w / sum * f64::from(v[c])).sum()).collect()
}

#[test]
fn attention_touches_nothing_outside_its_slices() {
    const AROUND: usize = 64;
    let mut next = sequence(1);
    let mut attended = 0;
    for _ in 0..3000 {
        let (n, n_heads, n_kv, d) = (next(4), next(7), next(5), next(6));
        // Mostly the right lengths, sometimes one more or less.
        let mut len =
            |right: usize| (right + usize::from(next(20) == 0)).saturating_sub(usize::from(next(20) == 0));
        let lens = [len(n * n_heads * d), len(n * n_kv * d), len(n * n_kv * d), len(n * n_heads * d)];
        // NaN surrounds the inputs; the elements around the output must not change.
        let [q, k, v, mut out] = lens.map(|len| {
            let mut padded = vec![f32::NAN; len + 2 * AROUND];
            padded[AROUND..][..len].iter_mut().for_each(|x| *x = next(1000) as f32 / 500.0 - 1.0);
            padded
        });
        out.fill(7.0);
        let inner = |padded: usize| AROUND..padded - AROUND;
        let (q, k, v) = (&q[inner(q.len())], &k[inner(k.len())], &v[inner(v.len())]);
        let range = inner(out.len());
        let window = [None, Some(2)][next(2)];
        let shape = AttentionShape { n_heads, n_kv_heads: n_kv, head_dim: d, window };
        let rows = lens[0].checked_div(n_heads * d).unwrap_or(0);
        let mut stats = vec![SoftmaxStats::EMPTY; rows * n_heads];
        let result = causal_attention(shape, q, k, v, &mut out[range.clone()], &mut stats);
        let (around, written) = ([&out[..range.start], &out[range.end..]].concat(), &out[range]);
        assert!(around.iter().all(|&x| x == 7.0));
        let case = format!("{n} rows, {n_heads} heads on {n_kv} of {d}, lengths {lens:?}");
        let sizes = n_heads > 0 && n_kv > 0 && d > 0 && n_heads % n_kv.max(1) == 0;
        let right = [rows * n_heads * d, rows * n_kv * d, rows * n_kv * d, rows * n_heads * d];
        if !sizes || lens != right {
            assert!(matches!(result, Err(Error::Argument(_))), "{case}: {result:?}");
            assert!(written.iter().all(|&x| x == 7.0), "{case}");
            continue;
        }
        result.unwrap();
        attended += usize::from(rows > 0);
        for t in 0..rows {
            for h in 0..n_heads {
                let head =
                    |x: &[f32], t: usize, heads: usize, h: usize| x[(t * heads + h) * d..][..d].to_vec();
                let rows = |x: &[f32]| -> Vec<Vec<f32>> {
                    let first = window.map_or(0, |window| (t + 1).saturating_sub(window));
                    (first..=t).map(|s| head(x, s, n_kv, h / (n_heads / n_kv))).collect()
                };
                let (keys, values) = (rows(k), rows(v));
                let expected = naive(&head(q, t, n_heads, h), &keys, &values);
                for (a, b) in head(written, t, n_heads, h).iter().zip(expected) {
                    assert!((f64::from(*a) - b).abs() < 1e-4, "{case}: {a} for {b}");
                }
            }
        }
    }
    assert!(attended > 300, "{attended}");
}

#[test]
fn attention_refuses_sizes_whose_products_wrap() {
    let wraps = usize::MAX / 4 + 2; // times 4 it is 4
    for (n_heads, n_kv, d) in [
        (wraps, wraps, 4),
        (wraps, 1, 4),
        (4, 4, wraps),
        (usize::MAX, usize::MAX, usize::MAX),
        (1 << 62, 1 << 62, 4),
        (1 << 63, 1, 2),
    ] {
        for len in [0, 4, 8, 16] {
            let (x, mut out) = (vec![1.0; len], vec![7.0; len + 64]);
            let shape = AttentionShape { n_heads, n_kv_heads: n_kv, head_dim: d, window: None };
            let result = causal_attention(shape, &x, &x, &x, &mut out[..len], &mut []);
            assert!(matches!(result, Err(Error::Argument(_))), "{n_heads} {n_kv} {d} {len}");
            assert!(out.iter().all(|&x| x == 7.0));
        }
    }
    // A row that is huge but representable, of which there are none.
    let shape = AttentionShape { n_heads: 1, n_kv_heads: 1, head_dim: usize::MAX / 2, window: None };
    causal_attention(shape, &[], &[], &[], &mut [], &mut []).unwrap();
}

fn model() -> Model {
    Model::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/gqa")).unwrap()
}

/// A size of a configuration.
type Field = fn(&mut Config) -> &mut usize;

#[test]
fn a_model_whose_configuration_was_changed_is_refused() {
    let fields: [(&str, Field); 7] = [
        ("vocab_size", |c| &mut c.vocab_size),
        ("hidden_size", |c| &mut c.hidden_size),
        ("intermediate_size", |c| &mut c.intermediate_size),
        ("n_layers", |c| &mut c.n_layers),
        ("n_heads", |c| &mut c.n_heads),
        ("n_kv_heads", |c| &mut c.n_kv_heads),
        ("head_dim", |c| &mut c.head_dim),
    ];
    let original = model();
    let rope = Arc::new(Rope::new(&original.config, 32));
    let dense: Method = "dense".parse().unwrap();
    let mut cache = dense.prepare(&Arc::new(original.clone()), &rope, &Default::default()).unwrap().cache;
    let tokens = [1, 2, 3, 4];
    prefill(&original, &rope, &tokens, &mut |_, _| Ok(())).unwrap();
    for (name, field) in fields {
        let mut changed = original.clone();
        let old = *field(&mut changed.config);
        for value in [0, 1, old - 1, old + 1, 2 * old, 3 * old, usize::MAX / 4 + 2, usize::MAX] {
            if value == old {
                continue;
            }
            *field(&mut changed.config) = value;
            let result = prefill(&changed, &rope, &tokens, &mut |_, _| Ok(()));
            assert!(matches!(result, Err(Error::Argument(_))), "{name} = {value}: {result:?}");
            let mut decoder = Decoder::new(Arc::new(changed.clone()), rope.clone());
            for tokens in [&tokens[..1], &tokens[..]] {
                let result = match tokens {
                    &[token] => decoder.step(token, cache.as_mut()),
                    _ => decoder.prefill(tokens, cache.as_mut()),
                };
                assert!(matches!(result, Err(Error::Argument(_))), "{name} = {value}: {result:?}");
            }
        }
    }
    let other = Rope::new(&Config { head_dim: 2 * original.config.head_dim, ..original.config.clone() }, 32);
    assert!(prefill(&original, &other, &tokens, &mut |_, _| Ok(())).is_err(), "positions of other heads");
}

#[test]
fn heads_that_do_not_share_evenly_are_refused() {
    // Weights and configuration agree with each other; only the groups of heads are uneven.
    for (n_heads, n_kv_heads) in [(3, 2), (2, 3), (5, 4), (7, 3)] {
        let mut model = model();
        (model.config.n_heads, model.config.n_kv_heads) = (n_heads, n_kv_heads);
        let (hidden, dim) = (model.config.hidden_size, model.config.head_dim);
        for layer in &mut model.layers {
            let weights = Arc::make_mut(&mut layer.attention);
            let linear = |n_in: usize, n_out: usize| Linear {
                weight: Matrix::new(vec![0.01; n_in * n_out], n_in),
                bias: None,
            };
            weights.q = linear(hidden, n_heads * dim);
            weights.k = linear(hidden, n_kv_heads * dim);
            weights.v = linear(hidden, n_kv_heads * dim);
            weights.o = linear(n_heads * dim, hidden);
        }
        let rope = Arc::new(Rope::new(&model.config, 32));
        let result = prefill(&model, &rope, &[1, 2, 3], &mut |_, _| Ok(()));
        assert!(matches!(result, Err(Error::Argument(_))), "{n_heads} on {n_kv_heads}: {result:?}");
        let prepared =
            "dense".parse::<Method>().unwrap().prepare(&Arc::new(model), &rope, &Default::default());
        assert!(matches!(prepared, Err(kv_methods::Error::Argument(_))), "{n_heads} on {n_kv_heads}");
    }
}
