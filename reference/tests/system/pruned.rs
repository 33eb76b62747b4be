//! Every method runs on checkpoints with pruned heads: rows of a projection, or columns of the last one, that
//! are zero.

use std::sync::Arc;

use kv_llama::Decoder;
use kv_methods::{DEFAULT_METHODS, Method, Prepared, calibrated};
use kv_model::{Model, Rope};
use kv_reference::eval::Prompt;

use crate::support::kv::fixture;
use crate::support::shipped::shipped;

const CALIBRATION: usize = 320;
const CONTEXT: usize = 160;
const DECODE: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Projection {
    Q,
    K,
    V,
    O,
}

/// Scales the projection of one head of layer `l` (the last one, or all if `all`) by `factor`.
fn prune(model: &mut Model, l: usize, projection: Projection, all: bool, factor: f32) {
    let config = &model.config;
    let (hidden, dim, q_dim) = (config.hidden_size, config.head_dim, config.q_dim());
    let weights = Arc::make_mut(&mut model.layers[l].attention);
    let scale = |x: &mut f32| *x *= factor;
    match projection {
        Projection::Q | Projection::K | Projection::V => {
            let (linear, heads) = match projection {
                Projection::Q => (&mut weights.q, config.gqa_group()), // a whole group of query heads
                Projection::K => (&mut weights.k, 1),
                _ => (&mut weights.v, 1),
            };
            let rows = if all { linear.n_out() } else { heads * dim };
            linear.weight.f32_mut().rchunks_exact_mut(hidden).take(rows).flatten().for_each(scale);
        }
        Projection::O => {
            let columns = if all { q_dim } else { config.gqa_group() * dim };
            let rows = weights.o.weight.f32_mut().chunks_exact_mut(q_dim);
            rows.flat_map(|row| &mut row[q_dim - columns..]).for_each(scale);
        }
    }
}

/// Runs all methods of `kv compare` over the start of the shipped text.
fn run_all(model: Model, tokens: &[u32], case: &str) {
    let more =
        "zack:ranks=loss,pqklt:keys=rope,cachegen:mode=channels,cachegen:mode=common,cachegen:mode=lmcache";
    let methods = Method::parse_list(&format!("{DEFAULT_METHODS},{more}")).unwrap();
    let rope = Arc::new(Rope::new(&model.config, 512));
    let model = Arc::new(model);
    let profile = calibrated(&model, &rope, &tokens[..CALIBRATION], &methods)
        .unwrap_or_else(|error| panic!("{case}: calibration: {error}"));
    let (prompt, next) = tokens[CALIBRATION..][..CONTEXT + DECODE].split_at(CONTEXT);
    let plain = Prompt::run(&model, &rope, prompt).unwrap_or_else(|error| panic!("{case}: {error}"));
    for method in &methods {
        let run = || -> kv_reference::Result<bool> {
            let Prepared { model: own, mut cache } = method.prepare(&model, &rope, &profile)?;
            match Arc::ptr_eq(&own, &model) {
                true => plain.fill(cache.as_mut())?,
                false => Prompt::run(&own, &rope, prompt)?.fill(cache.as_mut())?,
            }
            let mut decoder = Decoder::new(own, rope.clone());
            let mut finite = true;
            for &token in next {
                finite &= decoder.step(token, cache.as_mut())?.iter().all(|x| x.is_finite());
            }
            Ok(finite)
        };
        match run() {
            Ok(finite) => assert!(finite, "{case}: {}: logits are not finite", method.spec()),
            Err(error) => panic!("{case}: {}: {error}", method.spec()),
        }
    }
}

#[test]
fn every_method_runs_on_a_residual_stream_of_zeros() {
    let mut model = Model::load(&fixture("gqa")).unwrap();
    model.config.max_seq_len = 512;
    let tokens: Vec<u32> = (0..512_u32).map(|i| (i * i + 7 * i) % 96).collect();
    for (case, value) in [("zero", 0.0), ("next to zero", 1e-36)] {
        let mut still = model.clone();
        Arc::make_mut(&mut still.embedding).f32_mut().fill(value);
        for layer in &mut still.layers {
            Arc::make_mut(&mut layer.attention).o.weight.f32_mut().fill(0.0);
            Arc::make_mut(&mut layer.feed_forward).down.weight.f32_mut().fill(0.0);
        }
        run_all(still, &tokens, case);
    }
}

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn every_method_runs_on_a_model_with_pruned_heads() {
    let (model, tokens) = shipped(8000);
    // Zero, and nearly zero in single precision; each projection in a different layer.
    for (all, factor) in [(false, 0.0), (true, 0.0), (false, 1e-36)] {
        let mut pruned = Model::clone(&model);
        for (l, projection) in
            [Projection::Q, Projection::K, Projection::V, Projection::O].into_iter().enumerate()
        {
            prune(&mut pruned, l, projection, all, factor);
        }
        run_all(pruned, &tokens, &format!("{} times {factor}", if all { "layers" } else { "heads" }));
    }
}
