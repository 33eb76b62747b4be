//! Times attention on scalar codes beside attention on PQ codes, one thread; `benches/peers/sq.py` runs it
//! and writes the table.
//!
//! Prints a JSON line per measurement. All start from queries after RoPE. PQ codes need their tables, and
//! with `mean` the scores of the keys' mean and a norm a token, as `pqklt` has it; scalar codes need those
//! scores and the products of the queries with the dual basis in every block. Every case is compared with
//! attention over decoded rows in `f64` before it is timed.

#![allow(clippy::unwrap_used)] // a measurement that cannot run should say so by panicking

use std::hint::black_box;

use half::f16;
use kv_benches::median;
use pq_core::sq::{self, HeadCodes, HeadTransform, Shape, TransformParts};
use pq_core::{
    Backend, CodebookBuf, CodedTokens, Codes, PqShape, RopeMeanBuf, SoftmaxStats, attend_into_with,
    attend_scratch_len, decode_into, lut_into_with, normalize_all,
};

/// Tokens of a sequence; the shorter ones are the beginnings of the longest.
const TOKENS: [usize; 3] = [4_096, 32_768, 131_072];
const GROUPS: [usize; 3] = [1, 4, 8];
/// Tokens that are compared with `f64`.
const CHECKED: usize = 2_048;

fn main() {
    let only: Option<usize> = std::env::args().nth(1).map(|dim| dim.parse().unwrap());
    for dim in [64, 128].into_iter().filter(|dim| only.is_none_or(|only| only == *dim)) {
        let head = Head::new(dim);
        for mean in [false, true] {
            let pq = Pq::new(&head, mean);
            measure(&head, if mean { "pq, mean" } else { "pq" }, [4, 0], pq.bytes(), &pq);
        }
        for block in [64, 256] {
            for bits in [4, 3, 2] {
                let sq = Sq::new(&head, bits, block);
                let bytes = sq.codes.size() as f64 / sq.codes.len() as f64;
                read(dim, [bits, block], bytes);
                measure(&head, "sq", [bits, block], bytes, &sq);
            }
        }
    }
}

/// Attention on one form of codes.
trait Attend {
    /// Adds the attention of queries (group, dim), over the first `n` tokens.
    fn attend(
        &self,
        backend: Backend,
        n: usize,
        queries: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    );

    /// Keys after RoPE and values of the first [`CHECKED`] tokens, decoded: (n, dim) each.
    fn decoded(&self) -> [Vec<f64>; 2];
}

/// Checks and times one form of codes: `[bits, block]`, bytes a token.
fn measure(head: &Head, codes: &str, [bits, block]: [usize; 2], bytes: f64, attend: &impl Attend) {
    let dim = head.dim;
    let backends = [Backend::Avx512, Backend::Avx2, Backend::Neon].into_iter();
    let [keys, values] = attend.decoded();
    for backend in backends.filter(|backend| backend.is_available()) {
        for group in GROUPS {
            let queries = &head.queries[..group * dim];
            let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
            let mut run = |n: usize| {
                out.fill(0.0);
                stats.fill(SoftmaxStats::EMPTY);
                attend.attend(backend, n, queries, &mut out, &mut stats);
                normalize_all(&stats, &mut out).unwrap();
                out.clone()
            };
            let out = run(CHECKED);
            for (query, out) in queries.chunks_exact(dim).zip(out.chunks_exact(dim)) {
                for (x, y) in out.iter().zip(attention_in_f64(query, &keys, &values)) {
                    assert!((f64::from(*x) - y).abs() < 1e-3, "{codes} {bits} {block} {backend:?}: {x} {y}");
                }
            }
            for n in TOKENS {
                let seconds = median(if n > 100_000 { 9 } else { 25 }, || drop(run(n)));
                let path = format!("{backend:?}");
                report(codes, [bits, block, dim, n, group], &path, bytes, seconds);
            }
        }
    }
}

fn report(codes: &str, [bits, block, dim, tokens, group]: [usize; 5], path: &str, bytes: f64, seconds: f64) {
    println!(
        "{{\"codes\":\"{codes}\",\"bits\":{bits},\"block\":{block},\"dim\":{dim},\"tokens\":{tokens},\
         \"group\":{group},\"path\":\"{path}\",\"bytes\":{bytes:.1},\"seconds\":{seconds:e}}}"
    );
}

/// Times the reading of as many bytes, with enough independent sums to saturate the loads.
fn read(dim: usize, [bits, block]: [usize; 2], bytes: f64) {
    let words = vec![1_u64; (bytes * TOKENS[2] as f64 / 8.0) as usize];
    for n in TOKENS {
        let words = &words[..(bytes * n as f64 / 8.0) as usize];
        let seconds = median(25, || {
            let mut sums = [0_u64; 32];
            for chunk in words.as_chunks::<32>().0 {
                sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            }
            black_box(sums);
        });
        report("sq", [bits, block, dim, n, 1], "read", bytes, seconds);
    }
}

fn attention_in_f64(query: &[f32], keys: &[f64], values: &[f64]) -> Vec<f64> {
    let dim = query.len();
    let (mut out, mut total) = (vec![0.0; dim], 0.0);
    for (key, value) in keys.chunks_exact(dim).zip(values.chunks_exact(dim)) {
        let weight = key.iter().zip(query).map(|(k, &q)| k * f64::from(q)).sum::<f64>().exp();
        total += weight;
        out.iter_mut().zip(value).for_each(|(out, value)| *out += weight * value);
    }
    out.iter().map(|x| x / total).collect()
}

/// Random numbers from -1 to 1.
fn noise(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed;
    move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// What both sides share: keys are a mean plus noise before RoPE, of deviations that fall to a hundredth, the
/// same in both components of a pair.
struct Head {
    dim: usize,
    frequencies: Vec<f32>, // Llama's, base 10,000
    sigma: Vec<f32>,
    mean: Vec<f32>,
    queries: Vec<f32>, // of the largest group
}

impl Head {
    fn new(dim: usize) -> Self {
        let (half, mut next) = (dim / 2, noise(dim as u64));
        let frequencies = (0..half).map(|i| 10_000_f32.powf(-(i as f32) / half as f32)).collect();
        let sigma = (0..dim).map(|i| 0.01_f32.powf((i % half) as f32 / half as f32)).collect();
        let mean = (0..dim).map(|_| next()).collect();
        let queries = (0..GROUPS[2] * dim).map(|_| 0.4 * next()).collect();
        Self { dim, frequencies, sigma, mean, queries }
    }

    /// Adds the mean, rotated to its position, to the key of token `t`.
    fn add_mean(&self, t: usize, key: &mut [f64]) {
        let mut mean = self.mean.iter().map(|&x| f64::from(x)).collect::<Vec<_>>();
        rotate(&self.frequencies, t as f64, &mut mean);
        key.iter_mut().zip(mean).for_each(|(x, mean)| *x += mean);
    }
}

fn rotate(frequencies: &[f32], positions: f64, row: &mut [f64]) {
    let (x, y) = row.split_at_mut(frequencies.len());
    for ((x, y), &frequency) in x.iter_mut().zip(y).zip(frequencies) {
        let (sin, cos) = (positions * f64::from(frequency)).sin_cos();
        (*x, *y) = (cos * *x - sin * *y, sin * *x + cos * *y);
    }
}

/// Adds the keys' mean at a position to a key.
type AddMean = Box<dyn Fn(usize, &mut [f64])>;

/// Product quantization of two components by 8 bits, with random codebooks and codes: times do not depend on
/// them.
struct Pq {
    dim: usize,
    keys: CodebookBuf,
    values: CodebookBuf,
    codes: [Vec<u8>; 2],
    mean: Option<(RopeMeanBuf, [Vec<f32>; 2])>, // and norms of keys and values
    add_mean: AddMean,
}

impl Pq {
    fn new(head: &Head, with_mean: bool) -> Self {
        let (shape, mut next) = (Self::shape(head.dim), noise(1));
        let mut book = || {
            let centroids: Vec<f32> = (0..shape.codebook_len()).map(|_| 0.5 * next()).collect();
            CodebookBuf::new(shape, &centroids).unwrap()
        };
        let (keys, values) = (book(), book());
        let mut bytes = || (0..shape.codes_len(TOKENS[2])).map(|_| (next() * 128.0 + 128.0) as u8).collect();
        let codes = [bytes(), bytes()];
        let mut norms = || (0..TOKENS[2]).map(|_| 1.0 + 0.5 * next()).collect();
        let mean = RopeMeanBuf::new(&head.mean, &head.frequencies).unwrap();
        let mean = with_mean.then(|| (mean, [norms(), norms()]));
        let copy = Head::new(head.dim);
        let add_mean: AddMean = match with_mean {
            true => Box::new(move |t, key| copy.add_mean(t, key)),
            false => Box::new(|_, _| {}),
        };
        Self { dim: head.dim, keys, values, codes, mean, add_mean }
    }

    fn shape(dim: usize) -> PqShape {
        PqShape::new(dim, dim / 2, 8).unwrap()
    }

    /// Bytes a token.
    fn bytes(&self) -> f64 {
        self.dim as f64 + if self.mean.is_some() { 2.0 } else { 0.0 }
    }

    fn codes(&self, n: usize) -> [Codes<'_>; 2] {
        let shape = Self::shape(self.dim);
        [0, 1].map(|side| Codes::new(shape, n, &self.codes[side][..shape.codes_len(n)]).unwrap())
    }
}

impl Attend for Pq {
    fn attend(
        &self,
        backend: Backend,
        n: usize,
        queries: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) {
        let (shape, [keys, values]) = (Self::shape(self.dim), self.codes(n));
        let mut luts = vec![0.0; stats.len() * shape.lut_len()];
        let luts = lut_into_with(backend, &self.keys.view(), queries, &mut luts).unwrap();
        let mut tokens = CodedTokens::new(keys, values, self.values.view()).unwrap();
        let mut bias = vec![];
        if let Some((mean, [key_norms, value_norms])) = &self.mean {
            bias.resize(stats.len() * n, 0.0);
            for (query, bias) in queries.chunks_exact(self.dim).zip(bias.chunks_exact_mut(n)) {
                mean.view().scores_into_with(backend, query, 0, bias).unwrap();
            }
            tokens = tokens.with_key_scales(&key_norms[..n]).unwrap().with_bias(&bias[..]);
            tokens = tokens.with_value_scales(&value_norms[..n]).unwrap();
        }
        let mut scratch = vec![0.0; attend_scratch_len(shape, stats.len())];
        attend_into_with(backend, &luts, &tokens, &mut scratch, out, stats).unwrap();
    }

    fn decoded(&self) -> [Vec<f64>; 2] {
        let books = [&self.keys, &self.values];
        let mut sides = [0, 1].map(|side| {
            let mut rows = vec![0.0_f32; CHECKED * self.dim];
            decode_into(&books[side].view(), &self.codes(CHECKED)[side], 0, &mut rows).unwrap();
            let norm = |i: usize| self.mean.as_ref().map_or(1.0, |(_, norms)| norms[side][i / self.dim]);
            rows.iter().enumerate().map(|(i, &x)| f64::from(x) * f64::from(norm(i))).collect::<Vec<_>>()
        });
        sides[0].chunks_exact_mut(self.dim).enumerate().for_each(|(t, key)| (self.add_mean)(t, key));
        sides
    }
}

/// Scalar codes.
struct Sq {
    codes: HeadCodes,
    decoded: [Vec<f64>; 2],
}

impl Sq {
    fn new(head: &Head, bits: usize, block: usize) -> Self {
        let dim = head.dim;
        let mut order = vec![0; dim];
        let keys = sq::allot(&head.sigma, bits * dim / 16, &mut order).unwrap();
        let values = Shape::uniform(dim, bits as u32).unwrap();
        let permutation: Vec<f32> =
            (0..dim * dim).map(|i| f32::from(u8::from(order[i % dim] == i / dim))).collect();
        let parts = TransformParts {
            frequencies: &head.frequencies,
            mean: &head.mean,
            basis: &permutation,
            dual: &permutation,
            keys,
            values,
            block,
            mean_error: bits <= 2,
        };
        let mut codes = HeadCodes::new(HeadTransform::new(&parts).unwrap().into());
        let (mut decoded, mut next) = ([vec![], vec![]], noise(2));
        for first in (0..TOKENS[2]).step_by(block) {
            // In the order of the code, relative to the middle of the block.
            let rows: Vec<f32> =
                (0..block * dim).map(|i| 2.0 * head.sigma[order[i % dim]] * next()).collect();
            let value_rows: Vec<f32> = (0..block * dim).map(|_| next()).collect();
            let middle = first + block / 2;
            let after_rope = |rows: &[f32]| -> Vec<f64> {
                let mut keys = vec![0.0; rows.len()];
                for (t, (row, key)) in rows.chunks_exact(dim).zip(keys.chunks_exact_mut(dim)).enumerate() {
                    row.iter().zip(&order).for_each(|(&x, &i)| key[i] = f64::from(x));
                    rotate(&head.frequencies, middle as f64, key);
                    head.add_mean(first + t, key);
                }
                keys
            };
            let key_rows: Vec<f32> = after_rope(&rows).iter().map(|&x| x as f32).collect();
            codes.append(Backend::detect(), first, &key_rows, &value_rows).unwrap();
            if first < CHECKED {
                let [keys, values] = decode([keys, values], [&rows, &value_rows], bits <= 2);
                decoded[0].extend(after_rope(&keys));
                decoded[1].extend(values.into_iter().map(f64::from));
            }
        }
        Self { codes, decoded }
    }
}

/// Codes and decodes a block.
fn decode(shapes: [Shape; 2], [keys, values]: [&[f32]; 2], mean_error: bool) -> [Vec<f32>; 2] {
    let (dim, n) = (shapes[0].dim(), keys.len() / shapes[0].dim());
    let mut words = shapes.map(|shape| vec![0; shape.words_len(n)]);
    let (mut steps, mut norms) = (vec![0; dim], vec![0; n]);
    let [key_words, value_words] = &mut words;
    sq::encode_keys_into(&shapes[0], keys, &mut steps, key_words).unwrap();
    sq::encode_values_into(&shapes[1], values, &mut norms, value_words).unwrap();
    let mut decoded = [vec![0.0; n * dim], vec![0.0; n * dim]];
    sq::decode_keys_into(&sq::Keys::new(shapes[0], n, &steps, key_words).unwrap(), &mut decoded[0]).unwrap();
    let coded = sq::Values::new(shapes[1], &norms, value_words).unwrap();
    sq::decode_values_into(&coded, &mut decoded[1]).unwrap();
    if mean_error {
        let mut error = vec![f16::ZERO; dim];
        sq::mean_error_into(&coded, values, &mut error).unwrap();
        for row in decoded[1].chunks_exact_mut(dim) {
            row.iter_mut().zip(&error).for_each(|(x, error)| *x += error.to_f32());
        }
    }
    decoded
}

impl Attend for Sq {
    fn attend(
        &self,
        backend: Backend,
        n: usize,
        queries: &[f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) {
        let mut scratch = vec![0.0; self.codes.scratch_len(stats.len())];
        self.codes.attend_into(backend, queries, 0..n, None, &mut scratch, out, stats).unwrap();
    }

    fn decoded(&self) -> [Vec<f64>; 2] {
        self.decoded.clone()
    }
}
