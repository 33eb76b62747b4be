//! Error of scores and outputs by rotation and rank on a real model, and error of codes of rotated and plain
//! rows; `peers/svd.py` makes the tables.
//!
//! Calibrates on the first tokens of a text and tests on the next ones. Prints one JSON object, and writes
//! the keys and queries of some heads to a folder, with the test keys decoded from both kinds of codes.

#![allow(clippy::unwrap_used)] // a measurement that cannot run should say so by panicking

use std::path::{Path, PathBuf};
use std::time::Instant;

use kv_llama::prefill;
use kv_model::{Model, Rope};
use pq_core::{CodebookBuf, Codes, PqShape, TrainOptions, decode_into, encode_into, train};
use rayon::prelude::*;
use serde_json::{Value, json};
use svd_core::{Gram, NoRope, PostRope, RopeSide, Rotation, RowsMut, balanced_order};

/// Leading tokens, which every method keeps exact.
const SINKS: usize = 4;

/// Heads whose codes are compared.
const CODED: usize = 6;

/// Bits per code.
const NBITS: u32 = 8;

/// Queries written per head.
const QUERIES: usize = 256;

/// Activations of one layer after RoPE, (n, heads * head_dim) each.
struct Rows {
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [model, text, calibration, length, folder] = &arguments[..] else {
        eprintln!("usage: svd_quality MODEL TEXT CALIBRATION_TOKENS TEST_TOKENS FOLDER");
        return;
    };
    let model = Model::load(&PathBuf::from(model)).unwrap();
    let tokens = model.tokenizer().unwrap().encode(&std::fs::read_to_string(text).unwrap()).unwrap();
    let (calibration, length): (usize, usize) = (calibration.parse().unwrap(), length.parse().unwrap());
    let seen = rows(&model, &tokens[..calibration]);
    let unseen = rows(&model, &tokens[calibration..][..length]);
    let result = json!({
        "model": model.name,
        "head_dim": model.config.head_dim,
        "errors": errors(&model, &seen, &unseen),
        "codes": codes(&model, &seen, &unseen, Path::new(folder)),
    });
    println!("{result}");
}

fn rows(model: &Model, tokens: &[u32]) -> Vec<Rows> {
    let rope = Rope::new(&model.config, tokens.len());
    let (q_dim, kv_dim) = (model.config.q_dim(), model.config.kv_dim());
    let mut layers = vec![];
    prefill(model, &rope, tokens, &mut |_, activations| {
        layers.push(Rows {
            queries: rope.rotated(&activations.q[SINKS * q_dim..], q_dim, SINKS),
            keys: rope.rotated(&activations.k[SINKS * kv_dim..], kv_dim, SINKS),
            values: activations.v[SINKS * kv_dim..].to_vec(),
        });
        Ok(())
    })
    .unwrap();
    layers
}

/// The second moment of the columns of some heads, summed over `heads`.
fn gram<S: RopeSide>(rows: &[f32], row_len: usize, dim: usize, heads: std::ops::Range<usize>) -> Gram<S> {
    let mut gram = Gram::new(dim).unwrap();
    let rows = svd_core::Rows::contiguous(rows, row_len).unwrap();
    heads.for_each(|head| gram.add_rows(rows.columns(head * dim, dim).unwrap()).unwrap());
    gram
}

/// Relative errors of scores (keys) and of the output of `W_O` (values), at fractions of the dimension.
fn errors(model: &Model, seen: &[Rows], unseen: &[Rows]) -> Value {
    let config = &model.config;
    let (dim, group) = (config.head_dim, config.gqa_group());
    let heads: Vec<(usize, usize)> =
        (0..config.n_layers).flat_map(|l| (0..config.n_kv_heads).map(move |head| (l, head))).collect();
    let ranks: Vec<usize> = [2, 3, 4, 5, 6, 7].iter().map(|eighths| dim * eighths / 8).collect();
    let table: Vec<[Vec<[f64; 3]>; 2]> = heads
        .par_iter()
        .map(|&(l, head)| {
            let query_heads = head * group..(head + 1) * group;
            let of = |rows: &Rows| -> (Gram<PostRope>, Gram<PostRope>, Gram<NoRope>) {
                (
                    gram(&rows.keys, config.kv_dim(), dim, head..head + 1),
                    gram(&rows.queries, config.q_dim(), dim, query_heads.clone()),
                    gram(&rows.values, config.kv_dim(), dim, head..head + 1),
                )
            };
            let (keys, queries, values) = of(&seen[l]);
            let (test_keys, test_queries, test_values) = of(&unseen[l]);
            let outputs =
                gram(&model.layers[l].attention.o.weight.to_f32(), config.q_dim(), dim, query_heads);
            [
                compare((&keys, &queries), (&test_keys, &test_queries), &ranks),
                compare((&values, &outputs), (&test_values, &outputs), &ranks),
            ]
        })
        .collect();
    let side = |which: usize| -> Value {
        let at = |i: usize| {
            let all: Vec<[f64; 3]> = table.iter().map(|sides| sides[which][i]).collect();
            let mean = |basis: usize| all.iter().map(|errors| errors[basis]).sum::<f64>() / all.len() as f64;
            let worse = all
                .iter()
                .filter(|[principal, stacked, closed]| closed > principal || closed > stacked)
                .count();
            json!({ "rank": ranks[i], "principal": mean(0), "stacked": mean(1), "closed": mean(2), "worse": worse, "heads": all.len() })
        };
        (0..ranks.len()).map(at).collect()
    };
    json!({ "keys": side(0), "values": side(1) })
}

/// Errors on the pair `unseen` of the principal, stacked and closed-form rotations fitted to the pair `seen`.
fn compare<S: RopeSide>(
    seen: (&Gram<S>, &Gram<S>),
    unseen: (&Gram<S>, &Gram<S>),
    ranks: &[usize],
) -> Vec<[f64; 3]> {
    let rotations = [
        Rotation::principal(seen.0).unwrap(),
        Rotation::stacked(seen.0, seen.1).unwrap(),
        Rotation::score_optimal(seen.0, seen.1).unwrap(),
    ];
    ranks
        .iter()
        .map(|&rank| {
            rotations.each_ref().map(|rotation| rotation.score_error(unseen.0, unseen.1, rank).unwrap())
        })
        .collect()
}

/// Encodes and decodes keys of some heads with plain and rotated codes of 4 bits per component, trained on
/// `seen`.
fn codes(model: &Model, seen: &[Rows], unseen: &[Rows], folder: &Path) -> Value {
    let config = &model.config;
    let (dim, group) = (config.head_dim, config.gqa_group());
    let heads = (0..CODED).map(|i| ((2 * i + 1) * config.n_layers / (2 * CODED), i % config.n_kv_heads));
    let shape = PqShape::new(dim, dim / 2, NBITS).unwrap();
    let cases = heads.enumerate().map(|(i, (l, head))| {
        let columns = |rows: &[f32], row_len: usize, head: usize| -> Vec<f32> {
            rows.chunks_exact(row_len).flat_map(|row| &row[head * dim..][..dim]).copied().collect()
        };
        let keys = columns(&seen[l].keys, config.kv_dim(), head);
        let test = columns(&unseen[l].keys, config.kv_dim(), head);
        let queries = columns(&unseen[l].queries, config.q_dim(), head * group);
        let queries = &queries[queries.len() - QUERIES * dim..];
        let write = |name: &str, rows: &[f32]| {
            let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
            std::fs::write(folder.join(format!("{name}_{i}.f32")), bytes).unwrap();
        };
        for (name, rows) in [("train", &keys[..]), ("test", &test), ("queries", queries)] {
            write(name, rows);
        }

        let start = Instant::now();
        let plain = through_codes(shape, &keys, &test);
        let plain_seconds = start.elapsed().as_secs_f64();
        write("plain", &plain);

        let start = Instant::now();
        let mut moment = Gram::<PostRope>::new(dim).unwrap();
        moment.add_rows(svd_core::Rows::contiguous(&keys, dim).unwrap()).unwrap();
        let mean: Vec<f32> = moment.mean().iter().map(|&x| x as f32).collect();
        let metric = gram(&seen[l].queries, config.q_dim(), dim, head * group..(head + 1) * group);
        let rotation = Rotation::query_metric(&moment.centred(), &metric).unwrap();
        let rotation = rotation.reordered(&balanced_order(rotation.sigma(), shape.m()).unwrap()).unwrap();
        let rotate_seconds = start.elapsed().as_secs_f64();
        let (key_map, query_map) = (rotation.basis_map(dim).unwrap(), rotation.dual_map(dim).unwrap());
        let rotated = |rows: &[f32]| -> Vec<f32> {
            let centred: Vec<f32> =
                rows.chunks_exact(dim).flat_map(|row| row.iter().zip(&mean).map(|(x, m)| x - m)).collect();
            let mut out = vec![0.0; centred.len()];
            let (rows, projected) =
                (svd_core::Rows::contiguous(&centred, dim), RowsMut::contiguous(&mut out, dim));
            key_map.view().project_into(rows.unwrap(), projected.unwrap()).unwrap();
            out
        };
        let coded = through_codes(shape, &rotated(&keys), &rotated(&test));
        let mut back = vec![0.0; coded.len()];
        query_map.view().reconstruct_into(&coded, &mut back).unwrap();
        back.chunks_exact_mut(dim).for_each(|row| row.iter_mut().zip(&mean).for_each(|(x, m)| *x += m));
        write("rotated", &back);
        json!({ "layer": l, "head": head, "plain_seconds": plain_seconds, "rotate_seconds": rotate_seconds })
    });
    cases.collect()
}

/// Encodes and decodes test rows with a codebook trained on `rows`.
fn through_codes(shape: PqShape, rows: &[f32], test: &[f32]) -> Vec<f32> {
    let options = TrainOptions { iterations: 25, ..Default::default() };
    let codebook = CodebookBuf::new(shape, &train(shape, rows, &options).unwrap().centroids).unwrap();
    let n = test.len() / shape.dim();
    let mut bytes = vec![0; shape.codes_len(n)];
    encode_into(&codebook.view(), test, 0, &mut bytes).unwrap();
    let mut decoded = vec![0.0; test.len()];
    decode_into(&codebook.view(), &Codes::new(shape, n, &bytes).unwrap(), 0, &mut decoded).unwrap();
    decoded
}
