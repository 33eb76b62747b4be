//! Times `pq-core` on keys and queries from a file; `benches/peers/pq.py` runs it and its peers and writes
//! the table.
//!
//! Prints a JSON line per measurement, and writes the decoded keys of each trained codebook for the caller to
//! check.

#![allow(clippy::unwrap_used)] // a measurement that cannot run should say so by panicking

use std::path::Path;

use kv_benches::{floats, median};
use pq_core::{
    Attention, Backend, CodebookBuf, CodedTokens, Codes, ExactTokens, Hybrid, HybridScratch, LutPrecision,
    PqShape, QuantizedLut, RowBudget, Rows, SoftmaxStats, TrainOptions, attend_exact_into_with,
    attend_into_with, attend_scratch_len, decode_into, encode_into_with, hybrid_attend_into_with,
    hybrid_select_into_with, lut_into_with, normalize_all, scan_into_with, scan_quantized_into_with,
    top_k_into_with, train,
};

const DIM: usize = 128;

fn report(case: &str, what: &str, backend: Backend, seconds: f64) {
    println!("{{\"case\":\"{case}\",\"what\":\"{what}\",\"path\":\"{backend:?}\",\"seconds\":{seconds:e}}}");
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let (folder, cases) = (Path::new(&args[1]), args[2].split(',').filter(|case| !case.is_empty()));
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
    hybrid(&backends);
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

/// Selection alone, on the exact scores of several queries in turn, since the branch predictor would learn a
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

/// KV heads, and tokens of each, in the attention measurements.
const HEADS: usize = 8;
const N: usize = 32_768;

/// Random codebooks, codes and queries of one shape.
struct Coded {
    shape: PqShape,
    keys: CodebookBuf,
    values: CodebookBuf,
    bytes: Vec<u8>, // (HEADS, 2): keys, values
}

impl Coded {
    fn random(m: usize, mut byte: impl FnMut() -> u8) -> Self {
        let shape = PqShape::new(DIM, m, 8).unwrap();
        let mut book = || {
            let centroids: Vec<f32> =
                (0..shape.codebook_len()).map(|_| f32::from(byte()) / 128.0 - 1.0).collect();
            CodebookBuf::new(shape, &centroids).unwrap()
        };
        let (keys, values) = (book(), book());
        let bytes = (0..2 * HEADS * shape.codes_len(N)).map(|_| byte()).collect();
        Self { shape, keys, values, bytes }
    }

    fn codes(&self, i: usize) -> Codes<'_> {
        let len = self.shape.codes_len(N);
        Codes::new(self.shape, N, &self.bytes[i * len..][..len]).unwrap()
    }

    fn tokens(&self, head: usize) -> CodedTokens<'_> {
        CodedTokens::new(self.codes(2 * head), self.codes(2 * head + 1), self.values.view()).unwrap()
    }

    /// Decoded keys and values of a head (N, DIM).
    fn decoded(&self, head: usize) -> [Vec<f32>; 2] {
        let mut rows = [vec![0.0_f32; N * DIM], vec![0.0_f32; N * DIM]];
        for (i, (rows, book)) in rows.iter_mut().zip([&self.keys, &self.values]).enumerate() {
            decode_into(&book.view(), &self.codes(2 * head + i), 0, rows).unwrap();
        }
        rows
    }
}

/// Random bytes.
fn bytes() -> impl FnMut() -> u8 {
    let mut state = 1_u64;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    }
}

fn random_queries(group: usize, mut byte: impl FnMut() -> u8) -> Vec<f32> {
    (0..group * DIM).map(|_| f32::from(byte()) / 1024.0 - 0.125).collect()
}

/// Attention on codes at (64, 8), one and four query heads per KV head.
fn attention(backends: &[Backend]) {
    let mut byte = bytes();
    let coded = Coded::random(64, &mut byte);
    for group in [1, 4] {
        let queries = random_queries(group, &mut byte);
        let mut luts = vec![0.0; group * coded.shape.lut_len()];
        let mut scratch = vec![0.0; attend_scratch_len(coded.shape, group)];
        let (mut out, mut stats) = (vec![0.0; group * DIM], vec![SoftmaxStats::EMPTY; group]);
        for &backend in backends {
            let mut attend = |head: usize| {
                let tokens = coded.tokens(head);
                out.fill(0.0);
                stats.fill(SoftmaxStats::EMPTY);
                let luts = lut_into_with(backend, &coded.keys.view(), &queries, &mut luts).unwrap();
                attend_into_with(backend, &luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
                normalize_all(&stats, &mut out).unwrap();
                out.clone()
            };
            assert_close(&attend(0), &attention_in_f64(&queries, &coded.decoded(0)));
            let seconds = median(7, || (0..HEADS).for_each(|head| drop(attend(head))));
            report("attention 64x8", &format!("8 kv heads, {group} queries each"), backend, seconds);
        }
    }
}

/// A step of hybrid attention at (16, 8) with the exact rows of 1 % of the tokens. All scores have one
/// magnitude, so that no token's weight vanishes.
fn hybrid(backends: &[Backend]) {
    const GROUP: usize = 4;
    let mut byte = bytes();
    let coded = Coded::random(16, &mut byte);
    let queries = random_queries(GROUP, &mut byte);
    // Exact rows differ from the decoded ones by up to 0.5 per component.
    let mut exact: Vec<[Vec<f32>; 2]> = (0..HEADS).map(|head| coded.decoded(head)).collect();
    for x in exact.iter_mut().flatten().flatten() {
        *x += f32::from(byte()) / 256.0 - 0.5;
    }
    let parameters = Hybrid { rows: RowBudget::Share(0.01), ..Hybrid::default() };
    let mut luts = vec![0.0; GROUP * coded.shape.lut_len()];
    let mut floats = vec![0.0; HybridScratch::len(coded.shape, GROUP, N)];
    let mut coded_stats = [SoftmaxStats::EMPTY; GROUP];
    let mut scratch = HybridScratch::new(coded.shape, N, &mut floats, &mut coded_stats).unwrap();
    let mut exact_scratch = vec![0.0; queries.len()];
    let mut selected = vec![0; parameters.rows.most(N)];
    let (mut out, mut stats) = (vec![0.0; GROUP * DIM], [SoftmaxStats::EMPTY; GROUP]);
    for &backend in backends {
        let mut attend = |head: usize, selected: &mut [u32]| {
            let (tokens, [keys, values]) = (coded.tokens(head), &exact[head]);
            out.fill(0.0);
            stats.fill(SoftmaxStats::EMPTY);
            let luts = lut_into_with(backend, &coded.keys.view(), &queries, &mut luts).unwrap();
            let found = hybrid_select_into_with(backend, &luts, &tokens, &parameters, &mut scratch, selected)
                .unwrap();
            assert_eq!(found, selected.len());
            hybrid_attend_into_with(backend, &tokens, selected, &mut scratch, &mut out, &mut stats).unwrap();
            let rows = ExactTokens::contiguous(keys, DIM, values, DIM).unwrap().chosen(selected).unwrap();
            let (attention, queries) = (Attention::default(), Rows::from(&queries[..]));
            attend_exact_into_with(
                backend,
                &attention,
                queries,
                &rows,
                &mut exact_scratch,
                &mut out,
                &mut stats,
            )
            .unwrap();
            normalize_all(&stats, &mut out).unwrap();
            out.clone()
        };
        let out = attend(0, &mut selected);
        let mut mixed = coded.decoded(0);
        assert_heaviest(&queries, &mixed[0], &selected);
        for (mixed, exact) in mixed.iter_mut().zip(&exact[0]) {
            for row in selected.iter().map(|&t| t as usize * DIM..(t as usize + 1) * DIM) {
                mixed[row.clone()].copy_from_slice(&exact[row]);
            }
        }
        assert_close(&out, &attention_in_f64(&queries, &mixed));
        let seconds = median(7, || (0..HEADS).for_each(|head| drop(attend(head, &mut selected))));
        report("hybrid 16x8", "8 kv heads, 4 queries each", backend, seconds);
    }
}

/// Checks that no unselected token has a larger sum of softmax weights than a selected one.
fn assert_heaviest(queries: &[f32], keys: &[f32], selected: &[u32]) {
    let mut weights = vec![0.0; N];
    for query in queries.chunks_exact(DIM) {
        weights.iter_mut().zip(softmax_in_f64(query, keys)).for_each(|(sum, weight)| *sum += weight);
    }
    let least = selected.iter().map(|&t| weights[t as usize]).fold(f64::MAX, f64::min);
    selected.iter().for_each(|&t| weights[t as usize] = 0.0);
    let most_of_others = weights.into_iter().fold(0.0, f64::max);
    assert!(least >= most_of_others * (1.0 - 1e-4), "{least} {most_of_others}");
}

fn assert_close(out: &[f32], expected: &[f64]) {
    for (x, y) in out.iter().zip(expected) {
        assert!((f64::from(*x) - y).abs() < 1e-4, "{x} {y}");
    }
}

/// The softmax of a query's scores.
fn softmax_in_f64(query: &[f32], keys: &[f32]) -> Vec<f64> {
    let score = |key: &[f32]| key.iter().zip(query).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum::<f64>();
    let scores: Vec<f64> = keys.chunks_exact(DIM).map(score).collect();
    let max = scores.iter().copied().fold(f64::MIN, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
    scores.into_iter().map(|s| (s - max).exp() / sum).collect()
}

/// Attention on keys and values (N, DIM).
fn attention_in_f64(queries: &[f32], [keys, values]: &[Vec<f32>; 2]) -> Vec<f64> {
    let mut out = vec![];
    for query in queries.chunks_exact(DIM) {
        let mut row = vec![0.0; DIM];
        for (weight, value) in softmax_in_f64(query, keys).into_iter().zip(values.chunks_exact(DIM)) {
            row.iter_mut().zip(value).for_each(|(x, &v)| *x += weight * f64::from(v));
        }
        out.extend(row);
    }
    out
}
