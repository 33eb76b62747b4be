//! Times `pq-core` on keys and queries from a file; `benches/peers/pq.py` runs it and its peers and writes
//! the table.
//!
//! Prints a JSON line per measurement, and writes the decoded keys of each trained codebook for the caller to
//! check.

#![allow(clippy::unwrap_used)] // a measurement that cannot run should say so by panicking

use std::path::Path;

use kv_benches::{floats, median};
use pq_core::{
    Backend, CodebookBuf, CodedTokens, Codes, LutPrecision, PqShape, QuantizedLut, SoftmaxStats,
    TrainOptions, attend_into_with, attend_scratch_len, decode_into, encode_into_with, lut_into_with,
    scan_into_with, scan_quantized_into_with, top_k_into_with, train,
};

const DIM: usize = 128;

fn report(case: &str, what: &str, backend: Backend, seconds: f64) {
    println!("{{\"case\":\"{case}\",\"what\":\"{what}\",\"path\":\"{backend:?}\",\"seconds\":{seconds:e}}}");
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (folder, cases) = (Path::new(&args[1]), args[2].split(','));
    let (keys, queries) =
        (floats(&folder.join("keys.f32")).unwrap(), floats(&folder.join("queries.f32")).unwrap());
    let n = keys.len() / DIM;
    let backends: Vec<Backend> =
        [Backend::Avx512, Backend::Avx2, Backend::Neon].into_iter().filter(|b| b.is_available()).collect();

    for case in cases {
        let (m, nbits) = case.split_once('x').unwrap();
        let shape = PqShape::new(DIM, m.parse().unwrap(), nbits.parse().unwrap()).unwrap();
        let options = TrainOptions { iterations: 25, ..Default::default() };
        let mut trained = None;
        let seconds = median(1, || trained = Some(train(shape, &keys, &options).unwrap()));
        report(case, "train", Backend::detect(), seconds);
        let codebook = CodebookBuf::new(shape, &trained.unwrap().centroids).unwrap();
        let codebook = codebook.view();
        let mut bytes = vec![0; shape.codes_len(n)];
        for &backend in &backends {
            let repeats = if nbits == "12" { 3 } else { 7 };
            let seconds = median(repeats, || {
                encode_into_with(backend, &codebook, &keys, 0, &mut bytes).unwrap();
            });
            report(case, "encode", backend, seconds);
        }
        let codes = Codes::new(shape, n, &bytes).unwrap();
        let mut decoded = vec![0.0_f32; keys.len()];
        decode_into(&codebook, &codes, 0, &mut decoded).unwrap();
        let raw: Vec<u8> = decoded.iter().flat_map(|x| x.to_le_bytes()).collect();
        std::fs::write(folder.join(format!("decoded_{case}.f32")), raw).unwrap();

        let (mut table, mut scores) = (vec![0.0; shape.lut_len()], vec![0.0; n]);
        let mut indices = vec![0; n / 10];
        let mut storage = vec![0; shape.quantized_lut_len(LutPrecision::U8)];
        let queries: Vec<&[f32]> = queries.chunks_exact(DIM).take(8).collect();
        for &backend in &backends {
            for exact in [true, false] {
                if nbits == "12" && !exact {
                    continue;
                }
                let mut scan = |query: &[f32], scores: &mut [f32]| {
                    let luts = lut_into_with(backend, &codebook, query, &mut table).unwrap();
                    let lut = luts.lut(0);
                    if exact {
                        scan_into_with(backend, &lut, &codes, scores).unwrap();
                    } else {
                        let lut =
                            QuantizedLut::new_with(backend, &lut, LutPrecision::U8, &mut storage).unwrap();
                        scan_quantized_into_with(backend, &lut, &codes, scores).unwrap();
                    }
                };
                // Compares with the scores of the decoded keys, in f64.
                scan(queries[0], &mut scores);
                let lut_error = if exact { 0.0 } else { score_range(&codebook, queries[0]) * 0.52 / 255.0 };
                for (key, &score) in decoded.chunks_exact(DIM).zip(&scores) {
                    let sum: f64 =
                        key.iter().zip(queries[0]).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum();
                    assert!((sum - f64::from(score)).abs() <= 1e-3 + m.parse::<f64>().unwrap() * lut_error);
                }
                let each = queries.len() as f64;
                let name = if exact { "f32" } else { "u8" };
                let seconds = median(15, || queries.iter().for_each(|query| scan(query, &mut scores)));
                report(case, &format!("scan {name}"), backend, seconds / each);
                let seconds = median(15, || {
                    for query in &queries {
                        scan(query, &mut scores);
                        top_k_into_with(backend, &scores, n / 10, &mut indices).unwrap();
                    }
                });
                report(case, &format!("scan {name} + top n/10"), backend, seconds / each);
            }
        }
    }
    top_k(&keys, &queries, &backends);
    attention(&backends);
}

/// The widest range of a subspace's partial scores.
fn score_range(codebook: &pq_core::Codebook<'_>, query: &[f32]) -> f64 {
    let shape = codebook.shape();
    let mut table = vec![0.0; shape.lut_len()];
    pq_core::lut_into(codebook, query, &mut table).unwrap();
    let ranges = table.chunks_exact(shape.ksub()).map(|row| {
        let (min, max) = row.iter().fold((f32::MAX, f32::MIN), |(a, b), &x| (a.min(x), b.max(x)));
        f64::from(max - min)
    });
    ranges.fold(0.0, f64::max)
}

/// Selection alone, on the exact scores of different queries in turn: the branch predictor would learn a
/// single input.
fn top_k(keys: &[f32], queries: &[f32], backends: &[Backend]) {
    let n = keys.len() / DIM;
    let scores: Vec<Vec<f32>> = queries
        .chunks_exact(DIM)
        .map(|q| keys.chunks_exact(DIM).map(|k| k.iter().zip(q).map(|(k, q)| k * q).sum()).collect())
        .collect();
    let each = scores.len() as f64;
    let k = n / 10;
    let mut indices = vec![0; k];
    for &backend in backends {
        let run = || {
            for scores in &scores {
                top_k_into_with(backend, scores, k, &mut indices).unwrap();
            }
        };
        report("top-k", "n/10", backend, median(9, run) / each);
    }
    let mut pairs: Vec<(f32, u32)> = Vec::with_capacity(n);
    let run = || {
        for scores in &scores {
            pairs.clear();
            pairs.extend(scores.iter().copied().zip(0..));
            pairs.select_nth_unstable_by(k - 1, |a, b| b.0.total_cmp(&a.0));
        }
    };
    report("top-k", "select_nth_unstable", Backend::Scalar, median(9, run) / each);
    let last = scores.last().unwrap();
    let mut chosen: Vec<u32> = pairs[..k].iter().map(|pair| pair.1).collect();
    chosen.sort_unstable();
    top_k_into_with(backends[0], last, k, &mut indices).unwrap();
    assert_eq!(chosen, indices);
}

/// Attention on codes: 8 key/value heads of 32,768 tokens at (64, 8), one and four query heads each.
fn attention(backends: &[Backend]) {
    const HEADS: usize = 8;
    const N: usize = 32_768;
    let shape = PqShape::new(DIM, 64, 8).unwrap();
    let mut state = 1_u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let centroids: Vec<f32> =
        (0..2 * shape.codebook_len()).map(|_| f32::from(byte()) / 128.0 - 1.0).collect();
    let keys = CodebookBuf::new(shape, &centroids[..shape.codebook_len()]).unwrap();
    let values = CodebookBuf::new(shape, &centroids[shape.codebook_len()..]).unwrap();
    let codes: Vec<u8> = (0..2 * HEADS * shape.codes_len(N)).map(|_| byte()).collect();
    let codes: Vec<Codes<'_>> =
        codes.chunks_exact(shape.codes_len(N)).map(|bytes| Codes::new(shape, N, bytes).unwrap()).collect();
    for group in [1, 4] {
        let queries: Vec<f32> = (0..group * DIM).map(|_| f32::from(byte()) / 1024.0 - 0.125).collect();
        let mut luts = vec![0.0; group * shape.lut_len()];
        let mut scratch = vec![0.0; attend_scratch_len(shape, group)];
        let (mut out, mut stats) = (vec![0.0; group * DIM], vec![SoftmaxStats::EMPTY; group]);
        for &backend in backends {
            let mut attend = |head: usize| {
                let tokens = CodedTokens::new(codes[2 * head], codes[2 * head + 1], values.view()).unwrap();
                out.fill(0.0);
                stats.fill(SoftmaxStats::EMPTY);
                let luts = lut_into_with(backend, &keys.view(), &queries, &mut luts).unwrap();
                attend_into_with(backend, &luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
                out.iter()
                    .zip(stats.iter().flat_map(|stats| [stats.sum; DIM]))
                    .map(|(x, sum)| x / sum)
                    .collect::<Vec<f32>>()
            };
            let expected = attention_of_decoded(&queries, &keys, &codes[0], &values, &codes[1]);
            for (x, y) in attend(0).iter().zip(&expected) {
                assert!((f64::from(*x) - y).abs() < 1e-4, "{x} {y}");
            }
            let seconds = median(7, || (0..HEADS).for_each(|head| drop(attend(head))));
            report("attention 64x8", &format!("8 kv heads, {group} queries each"), backend, seconds);
        }
    }
}

/// The same attention in f64 on decoded keys and values.
fn attention_of_decoded(
    queries: &[f32],
    keys: &CodebookBuf,
    key_codes: &Codes<'_>,
    values: &CodebookBuf,
    value_codes: &Codes<'_>,
) -> Vec<f64> {
    let n = key_codes.n();
    let (mut k, mut v) = (vec![0.0_f32; n * DIM], vec![0.0_f32; n * DIM]);
    decode_into(&keys.view(), key_codes, 0, &mut k).unwrap();
    decode_into(&values.view(), value_codes, 0, &mut v).unwrap();
    let mut out = vec![];
    for query in queries.chunks_exact(DIM) {
        let score =
            |key: &[f32]| key.iter().zip(query).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum::<f64>();
        let scores: Vec<f64> = k.chunks_exact(DIM).map(score).collect();
        let max = scores.iter().copied().fold(f64::MIN, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        let mut row = vec![0.0; DIM];
        for (score, value) in scores.iter().zip(v.chunks_exact(DIM)) {
            for (x, &v) in row.iter_mut().zip(value) {
                *x += (score - max).exp() / sum * f64::from(v);
            }
        }
        out.extend(row);
    }
    out
}
