//! The same input gives the same bits, at any number of threads and in any process.

use std::process::Command;

use kv_llama::ops::{AttentionShape, causal_attention, matmul};
use kv_methods::{Method, Profile, calibrated};
use kv_model::{Matrix, Model, Rope};
use kv_reference::compare::{Placed, Sizes, compare};
use svd_core::SoftmaxStats;

use crate::support::kv::fixture;
use crate::support::shipped::shipped;

const THREADS: [usize; 3] = [1, 2, 7];

/// The results of `f` at every number of threads.
fn at_all_threads<T: Send>(f: impl Fn() -> T + Sync) -> Vec<T> {
    let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
    THREADS.iter().map(|&n| pool(n).install(&f)).collect()
}

fn all_equal<T: PartialEq>(values: &[T]) -> bool {
    values.windows(2).all(|pair| pair[0] == pair[1])
}

fn numbers(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 100_003) as f32 / 50_000.0 - 1.0).collect()
}

#[test]
fn products_have_the_same_bits_at_any_number_of_threads() {
    // One row and several, at sizes below and above the parallel threshold, divisible and not.
    for n_in in [1, 3, 37, 256, 688, 1031] {
        for n_out in [1, 2, 15, 17, 255, 257, 1000, 4096] {
            for n in [1, 2, 5, 33] {
                let (weight, x) = (Matrix::new(numbers(n_out * n_in, 1), n_in), numbers(n * n_in, 2));
                let products = at_all_threads(|| {
                    let mut y = vec![0.0; n * n_out];
                    matmul(&weight, &x, &mut y);
                    y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                });
                assert!(all_equal(&products), "({n}, {n_in}) by ({n_out}, {n_in})");
            }
        }
    }
}

#[test]
fn attention_has_the_same_bits_at_any_number_of_threads() {
    for n in [1, 63, 64, 65, 300] {
        let (n_heads, n_kv, d) = (4, 2, 24);
        let [q, k, v] = [n_heads, n_kv, n_kv].map(|heads| numbers(n * heads * d, heads));
        let outputs = at_all_threads(|| {
            let (mut out, mut stats) = (vec![0.0; q.len()], vec![SoftmaxStats::EMPTY; n * n_heads]);
            let shape = AttentionShape { n_heads, n_kv_heads: n_kv, head_dim: d, window: None };
            causal_attention(shape, &q, &k, &v, &mut out, &mut stats).unwrap();
            out.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(all_equal(&outputs), "{n} rows");
    }
}

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn a_comparison_does_not_depend_on_the_number_of_threads() {
    let (model, tokens) = shipped(16_000);
    let methods = "dense,pqcache:code=4x4,million:k=8x4:v=8x4,pqklt:k=8x4:v=8x4,zack,cachegen";
    let methods = Method::parse_list(methods).unwrap();
    let placed = Placed::new(&model.config, &methods, None).unwrap();
    let sizes = Sizes { context: 160, decode: 16, calibration: 256 };
    let comparisons = at_all_threads(|| {
        let mut rows =
            compare(&model, ("text", &tokens), &placed, sizes, None, 1, None, &()).unwrap().methods;
        rows.iter_mut().for_each(|row| row.ms_per_token = 0.0);
        rows.iter().map(|row| format!("{row:?}")).collect::<Vec<_>>()
    });
    for (method, spec) in methods.iter().enumerate() {
        let rows: Vec<&String> = comparisons.iter().map(|rows| &rows[method]).collect();
        assert!(all_equal(&rows), "{}: {rows:#?}", spec.spec());
    }
}

#[test]
fn a_profile_has_the_same_bytes_every_time() {
    let model = Model::load(&fixture("gqa")).unwrap();
    let rope = Rope::new(&model.config, 256);
    let tokens: Vec<u32> = (0..256_u32).map(|i| (i * i + 7 * i) % 96).collect();
    let methods = Method::parse_list("million:k=8x4:v=8x4,pqklt:k=8x4:v=8x4,zack,cachegen").unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("profile");
    let files = at_all_threads(|| {
        let profile = calibrated(&model, &rope, &tokens, &methods).unwrap();
        // Each save has its own hash seeds; a loaded profile is saved unchanged.
        let save = |profile: &Profile| {
            profile.save(&path, &model).unwrap();
            std::fs::read(&path).unwrap()
        };
        let mut files: Vec<Vec<u8>> = (0..8).map(|_| save(&profile)).collect();
        files.push(save(&Profile::load(&path, &model).unwrap()));
        files
    });
    assert!(all_equal(&files.concat()));
}

#[test]
fn calibrations_in_several_processes_are_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let files: Vec<Vec<u8>> = THREADS
        .iter()
        .map(|threads| {
            let path = folder.path().join(threads.to_string());
            let mut kv = Command::new(env!("CARGO_BIN_EXE_kv"));
            kv.args(["calibrate", "--tokens", "192", "--methods", "zack,cachegen"]).arg(&path);
            assert!(kv.env("RAYON_NUM_THREADS", threads.to_string()).output().unwrap().status.success());
            std::fs::read(path).unwrap()
        })
        .collect();
    assert!(all_equal(&files));
}
