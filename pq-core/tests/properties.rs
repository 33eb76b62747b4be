//! Compares the definitions with plain formulas in f64, and every backend with the scalar one, on random
//! shapes and values.

#![allow(clippy::unwrap_used, clippy::panic)]

use half::{bf16, f16};
use pq_core::*;
use proptest::prelude::*;

fn backends() -> impl Iterator<Item = Backend> {
    Backend::ALL.into_iter().filter(|backend| backend.is_available())
}

/// Random values from a seed, which proptest generates and shrinks faster than vectors.
fn random(seed: u64, len: usize, scale: f32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    };
    (0..len).map(|_| next()).collect()
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    random(seed, len, 1.0).iter().map(|x| (x * 1e6) as i64 as u8).collect()
}

fn shapes() -> impl Strategy<Value = PqShape> {
    let dsub = prop_oneof![4 => 1_usize..10, 1 => Just(64), 1 => Just(70)];
    (dsub, 1_usize..8, 1_u32..=12).prop_map(|(dsub, m, nbits)| PqShape::new(dsub * m, m, nbits).unwrap())
}

/// Lengths at the edges of a block, and others.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), Just(63), Just(64), Just(65), Just(1024), Just(1025), 2_usize..400]
}

fn codebook(shape: PqShape, seed: u64) -> CodebookBuf {
    CodebookBuf::new(shape, &random(seed, shape.codebook_len(), 1.0)).unwrap()
}

fn ip(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

fn decoded(codebook: &Codebook<'_>, codes: &Codes<'_>) -> Vec<f32> {
    let mut rows = vec![0.0; codes.n() * codes.shape().dim()];
    decode_into(codebook, codes, 0, &mut rows).unwrap();
    rows
}

/// Every code's centroid is as near as any, by f64 distances, up to the rounding of the f32 sums.
fn assert_nearest(codebook: &Codebook<'_>, rows: &[f32], codes: &Codes<'_>, first: usize) {
    let shape = codebook.shape();
    for (i, row) in rows.chunks_exact(shape.dim()).enumerate() {
        for ((j, x), c) in row.chunks_exact(shape.dsub()).enumerate().zip(codes.iter_vector(first + i)) {
            let distance = |c: usize| -> f64 {
                codebook.centroid(j, c).zip(x).map(|(y, &x)| (f64::from(x) - f64::from(y)).powi(2)).sum()
            };
            let best = (0..shape.ksub()).map(distance).fold(f64::INFINITY, f64::min);
            let size: f64 = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() + 1.0;
            assert!(
                distance(c) <= best + 1e-5 * size * shape.dsub() as f64,
                "{} against {best}",
                distance(c)
            );
        }
    }
}

fn check_encode<E: Element>(shape: PqShape, seed: u64, n: usize, first: usize) {
    let book = codebook(shape, seed);
    let rows: Vec<E> = random(seed ^ 1, n * shape.dim(), 2.0).into_iter().map(E::from_f32).collect();
    let exact: Vec<f32> = rows.iter().map(|x| x.to_f32()).collect();
    for backend in backends() {
        let before = bytes(seed ^ 2, shape.codes_len(first + n));
        let mut packed = before.clone();
        let error = encode_into_with(backend, &book.view(), &rows, first, &mut packed).unwrap();
        let codes = Codes::new(shape, first + n, &packed).unwrap();
        assert_nearest(&book.view(), &exact, &codes, first);
        // Other vectors keep their codes.
        let before = Codes::new(shape, first + n, &before).unwrap();
        for i in 0..first {
            assert!(codes.iter_vector(i).eq(before.iter_vector(i)));
        }
        let rows = decoded(&book.view(), &codes);
        let expected: f64 = rows[first * shape.dim()..]
            .iter()
            .zip(&exact)
            .map(|(&y, &x)| (f64::from(x) - f64::from(y)).powi(2))
            .sum();
        assert!((error - expected).abs() <= 1e-3 * (1.0 + expected), "{backend:?}: {error} {expected}");
    }
}

/// What attention should give, in f64, for decoded keys and values.
struct Reference<'a> {
    keys: &'a [f32],
    values: &'a [f32],
    key_scales: &'a [f32],
    value_scales: &'a [f32],
}

impl Reference<'_> {
    fn attend(&self, query: &[f32], bias: &[f32], dim_v: usize) -> (Vec<f64>, f64) {
        let keys = self.keys.chunks_exact(query.len()).zip(self.key_scales).zip(bias);
        let scores: Vec<f64> =
            keys.map(|((key, &scale), &bias)| ip(query, key) * f64::from(scale) + f64::from(bias)).collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0.0; dim_v];
        let sum: f64 = scores.iter().map(|s| (s - max).exp()).sum();
        for ((score, value), &scale) in
            scores.iter().zip(self.values.chunks_exact(dim_v)).zip(self.value_scales)
        {
            for (out, &x) in out.iter_mut().zip(value) {
                *out += (score - max).exp() / sum * f64::from(scale) * f64::from(x);
            }
        }
        (out, max + sum.ln())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn codes_are_the_nearest_centroids(shape in shapes(), seed: u64, n in 0_usize..150, first in 0_usize..130) {
        if shape.ksub() * n <= 1 << 15 {
            check_encode::<f32>(shape, seed, n, first);
            check_encode::<f16>(shape, seed, n, first);
            check_encode::<bf16>(shape, seed, n, first);
        }
    }

    #[test]
    fn tables_and_scores_have_the_same_bits_everywhere(shape in shapes(), seed: u64, n in lengths(), group in 1_usize..4) {
        let book = codebook(shape, seed);
        let queries = random(seed ^ 1, group * shape.dim(), 3.0);
        let packed = bytes(seed ^ 2, shape.codes_len(n));
        let codes = Codes::new(shape, n, &packed).unwrap();
        let keys = decoded(&book.view(), &codes);
        let mut expected: Option<(Vec<f32>, Vec<f32>)> = None;
        for backend in backends() {
            let mut tables = vec![0.0; group * shape.lut_len()];
            let luts = lut_into_with(backend, &book.view(), &queries, &mut tables).unwrap();
            prop_assert_eq!((luts.shape(), luts.group()), (shape, group));
            let mut scores = vec![0.0; n];
            scan_into_with(backend, &luts.lut(group - 1), &codes, &mut scores).unwrap();
            let query = &queries[(group - 1) * shape.dim()..];
            for (key, &score) in keys.chunks_exact(shape.dim()).zip(&scores) {
                prop_assert!((ip(query, key) - f64::from(score)).abs() < 1e-3);
            }
            match &expected {
                None => expected = Some((tables, scores)),
                Some((luts, all)) => {
                    prop_assert!(same_bits(&tables, luts), "{:?}", backend);
                    prop_assert!(same_bits(&scores, all), "{:?}", backend);
                }
            }
        }
    }

    #[test]
    fn integer_tables_keep_their_bound_and_their_bits(shape in shapes(), seed: u64, n in lengths(), wide: bool) {
        let precision = if wide { LutPrecision::U16 } else { LutPrecision::U8 };
        let table = random(seed, shape.lut_len(), 5.0);
        let lut = Lut::new(shape, &table).unwrap();
        let packed = bytes(seed ^ 2, shape.codes_len(n));
        let codes = Codes::new(shape, n, &packed).unwrap();
        let mut exact = vec![0.0; n];
        scan_into(&lut, &codes, &mut exact).unwrap();
        let mut expected: Option<Vec<f32>> = None;
        for backend in backends() {
            let mut storage = vec![7; shape.quantized_lut_len(precision)];
            let lut = QuantizedLut::new_with(backend, &lut, precision, &mut storage).unwrap();
            let mut scores = vec![0.0; n];
            scan_quantized_into_with(backend, &lut, &codes, &mut scores).unwrap();
            let rounding = 1e-5 * (1.0 + shape.m() as f32);
            for (a, b) in scores.iter().zip(&exact) {
                prop_assert!((a - b).abs() <= lut.error_bound() + rounding, "{} {} {}", a, b, lut.error_bound());
            }
            match &expected {
                None => expected = Some(scores),
                Some(all) => prop_assert!(same_bits(&scores, all), "{:?}", backend),
            }
        }
    }

    #[test]
    fn attention_on_codes_is_attention_on_decoded_rows(
        (keys, values) in (shapes(), shapes()), seed: u64, n in lengths(), group in 1_usize..7, masked in 0_usize..3,
    ) {
        if keys.nbits() > 10 || values.nbits() > 10 {
            return Ok(());
        }
        let (key_book, value_book) = (codebook(keys, seed), codebook(values, seed ^ 1));
        let (key_bytes, value_bytes) = (bytes(seed ^ 2, keys.codes_len(n)), bytes(seed ^ 3, values.codes_len(n)));
        let (key_codes, value_codes) =
            (Codes::new(keys, n, &key_bytes).unwrap(), Codes::new(values, n, &value_bytes).unwrap());
        let (rows, value_rows) = (decoded(&key_book.view(), &key_codes), decoded(&value_book.view(), &value_codes));
        let queries = random(seed ^ 4, group * keys.dim(), 1.0);
        let key_scales: Vec<f32> = random(seed ^ 5, n, 0.5).iter().map(|x| x + 1.0).collect();
        let value_scales: Vec<f32> = random(seed ^ 6, n, 0.5).iter().map(|x| x + 1.0).collect();
        let mut bias = random(seed ^ 7, group * n, 2.0);
        if masked > 0 {
            // Some tokens, or a whole chunk of them, are hidden; the last stays.
            for (i, bias) in bias.iter_mut().enumerate() {
                let t = i % n;
                if t + 1 < n && (t % 3 == 0 || (masked == 2 && t < 1030)) {
                    *bias = f32::NEG_INFINITY;
                }
            }
        }
        let tokens = CodedTokens::new(key_codes, value_codes, value_book.view()).unwrap();
        let tokens = tokens.with_key_scales(key_scales.as_slice()).unwrap();
        let tokens = tokens.with_value_scales(value_scales.as_slice()).unwrap().with_bias(bias.as_slice());
        let reference =
            Reference { keys: &rows, values: &value_rows, key_scales: &key_scales, value_scales: &value_scales };
        let mut tables = vec![0.0; group * keys.lut_len()];
        let luts = lut_into(&key_book.view(), &queries, &mut tables).unwrap();
        for backend in backends() {
            let mut scratch = vec![f32::NAN; attend_scratch_len(values, group)];
            let mut out = vec![0.0; group * values.dim()];
            let mut stats = vec![SoftmaxStats::EMPTY; group];
            attend_into_with(backend, &luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
            for g in 0..group {
                let out = &mut out[g * values.dim()..][..values.dim()];
                stats[g].normalize(out);
                if n == 0 {
                    prop_assert!(stats[g] == SoftmaxStats::EMPTY && out.iter().all(|&x| x == 0.0));
                    continue;
                }
                let query = &queries[g * keys.dim()..][..keys.dim()];
                let (expected, lse) = reference.attend(query, &bias[g * n..][..n], values.dim());
                prop_assert!((lse - f64::from(stats[g].log_sum_exp())).abs() < 1e-4 * (1.0 + lse.abs()));
                for (x, y) in out.iter().zip(&expected) {
                    prop_assert!((f64::from(*x) - y).abs() < 2e-4, "{:?}: {} {}", backend, x, y);
                }
            }
        }
    }

    #[test]
    fn parts_merge_into_the_whole(seed: u64, n in 1_usize..300, cut in 0_usize..300, group in 1_usize..4) {
        let cut = cut.min(n);
        let (keys, values) = (random(seed, n * 24, 1.0), random(seed ^ 1, n * 16, 1.0));
        let queries = random(seed ^ 2, group * 24, 2.0);
        let attend = |range: core::ops::Range<usize>, out: &mut [f32], stats: &mut [SoftmaxStats]| {
            let mut scores = vec![0.0; range.len()];
            let (k, v) = (&keys[range.start * 24..range.end * 24], &values[range.start * 16..range.end * 16]);
            attend_exact_into(&queries, k, v, &mut scores, out, stats).unwrap();
        };
        let (mut whole, mut whole_stats) = (vec![0.0; group * 16], vec![SoftmaxStats::EMPTY; group]);
        attend(0..n, &mut whole, &mut whole_stats);
        // One after the other into the same sums, and apart with a merge.
        let (mut out, mut stats) = (vec![0.0; group * 16], vec![SoftmaxStats::EMPTY; group]);
        attend(0..cut, &mut out, &mut stats);
        let (mut rest, mut rest_stats) = (vec![0.0; group * 16], vec![SoftmaxStats::EMPTY; group]);
        attend(cut..n, &mut rest, &mut rest_stats);
        let (mut merged, mut merged_stats) = (out.clone(), stats.clone());
        for g in 0..group {
            let at = g * 16..g * 16 + 16;
            merged_stats[g].merge(&mut merged[at.clone()], rest_stats[g], &rest[at]).unwrap();
        }
        attend(cut..n, &mut out, &mut stats);
        let reference =
            Reference { keys: &keys, values: &values, key_scales: &vec![1.0; n], value_scales: &vec![1.0; n] };
        for g in 0..group {
            let at = g * 16..g * 16 + 16;
            let (expected, _) = reference.attend(&queries[g * 24..][..24], &vec![0.0; n], 16);
            for (out, stats) in [(&mut whole, &whole_stats), (&mut out, &stats), (&mut merged, &merged_stats)] {
                stats[g].normalize(&mut out[at.clone()]);
                for (x, y) in out[at.clone()].iter().zip(&expected) {
                    prop_assert!((f64::from(*x) - y).abs() < 1e-4);
                }
            }
        }
    }

    #[test]
    fn top_k_equals_a_full_sort(seed: u64, n in prop_oneof![0_usize..300, 4000_usize..9000], k in 0_usize..9000, kind in 0..5) {
        let k = k % (n + 20);
        let scores: Vec<f32> = random(seed, n, 1.0)
            .into_iter()
            .enumerate()
            .map(|(i, x)| match kind {
                0 => x,
                1 => (x * 10.0).round(), // many ties, and both zeros
                2 => 1.0 + x * 1e-6,     // a narrow range
                3 => [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, x][i % 5],
                _ => x.powi(9) * 1e30,
            })
            .collect();
        let rank = |i: u32| if scores[i as usize].is_nan() { f32::NEG_INFINITY } else { scores[i as usize] };
        let mut expected: Vec<u32> = (0..n as u32).collect();
        expected.sort_by(|&a, &b| rank(b).partial_cmp(&rank(a)).unwrap().then(a.cmp(&b)));
        expected.truncate(k);
        expected.sort_unstable();
        for backend in backends() {
            for slack in [0, 40] {
                let mut indices = vec![0; k.min(n) + slack];
                let found = top_k_into_with(backend, &scores, k, &mut indices).unwrap();
                prop_assert_eq!(&indices[..found], &expected[..], "{:?}", backend);
            }
        }
    }

    #[test]
    fn a_search_finds_what_a_plain_one_does(
        seed: u64, n in 1_usize..400, k in 0_usize..60, sinks in 0_usize..20, recent in 0_usize..20, group in 1_usize..4, max: bool,
    ) {
        let shape = PqShape::new(8, 4, 6).unwrap();
        let rule = if max { GroupRule::MaxOfSoftmax } else { GroupRule::SumOfSoftmax };
        let tables = random(seed, group * shape.lut_len(), 2.0);
        let luts = Luts::new(shape, &tables).unwrap();
        let packed = bytes(seed ^ 1, shape.codes_len(n));
        let codes = Codes::new(shape, n, &packed).unwrap();
        let search = Search { k, sinks, recent, rule };
        let mut floats = vec![0.0; SearchScratch::len(group, n)];
        let (mut stats, mut tokens) = (vec![SoftmaxStats::EMPTY; group], vec![0; search.found(n)]);
        let mut scratch = SearchScratch::new(n, &mut floats, &mut stats).unwrap();
        let found = search_into(&luts, &codes, &search, &mut scratch, &mut tokens).unwrap();
        prop_assert_eq!(found, (k + sinks + recent).min(n));
        prop_assert!(tokens.is_sorted() && tokens.windows(2).all(|w| w[0] != w[1]));
        let always = |t: usize| t < sinks || t + recent >= n;
        prop_assert!((0..n).filter(|&t| always(t)).all(|t| tokens.contains(&(t as u32))));
        // No token left out has a clearly higher share than one that competed and is in.
        let mut share = vec![0.0_f64; n];
        for scores in scratch.scores().chunks_exact(n) {
            let total: f64 = scores.iter().map(|&s| f64::from(s).exp()).sum();
            for (share, &s) in share.iter_mut().zip(scores) {
                let p = f64::from(s).exp() / total;
                *share = if max { share.max(p) } else { *share + p };
            }
        }
        let chosen = |t: usize| tokens.contains(&(t as u32));
        let worst_in = (0..n).filter(|&t| chosen(t) && !always(t)).map(|t| share[t]).fold(f64::INFINITY, f64::min);
        let best_out = (0..n).filter(|&t| !chosen(t)).map(|t| share[t]).fold(0.0, f64::max);
        prop_assert!(best_out <= worst_in * (1.0 + 1e-4) || worst_in == f64::INFINITY);
    }

    #[test]
    fn outliers_come_back(seed: u64, n in 1_usize..40, count in 0_usize..30) {
        let rows = random(seed, n * 6, 3.0);
        let count = count.min(rows.len());
        let centre = random(seed ^ 1, 6, 1.0);
        let (mut left, mut list) = (rows.clone(), vec![Outlier::default(); count]);
        let (mut distances, mut indices) = (vec![0.0; rows.len()], vec![0; count]);
        extract_outliers(&mut left, &centre, &mut distances, &mut indices, &mut list).unwrap();
        let farthest_left = left.iter().enumerate().map(|(i, x)| (x - centre[i % 6]).abs()).fold(0.0, f32::max);
        for outlier in &list {
            prop_assert!((outlier.value - centre[outlier.index as usize % 6]).abs() >= farthest_left);
        }
        restore_outliers(&mut left, &list).unwrap();
        prop_assert!(same_bits(&left, &rows));
    }

    #[test]
    fn the_rotated_mean_is_taken_out_of_keys_and_put_back_into_scores(seed: u64, n in 1_usize..200, first in 0_usize..100_000) {
        let dim = 16;
        let mean = random(seed, dim, 2.0);
        let frequencies: Vec<f32> = (0..dim / 2).map(|i| 10_000_f32.powf(-(i as f32) / 8.0)).collect();
        let mut storage = vec![0.0; RopeMean::storage_len(dim)];
        let rope_mean = RopeMean::new(&mean, &frequencies, &mut storage).unwrap();
        let (keys, query) = (random(seed ^ 1, n * dim, 1.0), random(seed ^ 2, dim, 1.0));
        let mut left = keys.clone();
        rope_mean.subtract(first, &mut left).unwrap();
        let owned = RopeMeanBuf::new(&mean, &frequencies).unwrap();
        for backend in backends() {
            let (mut scores, mut again) = (vec![0.0; n], vec![0.0; n]);
            rope_mean.scores_into_with(backend, &query, first, &mut scores).unwrap();
            owned.view().scores_into_with(backend, &query, first, &mut again).unwrap();
            prop_assert!(same_bits(&scores, &again));
            for (i, (key, left)) in keys.chunks_exact(dim).zip(left.chunks_exact(dim)).enumerate() {
                let whole = ip(&query, left) + f64::from(scores[i]);
                prop_assert!((whole - ip(&query, key)).abs() < 1e-4, "{} {}", whole, ip(&query, key));
            }
        }
    }

    #[test]
    fn a_range_decodes_as_in_the_whole(shape in shapes(), seed: u64, n in 0_usize..200, first in 0_usize..200, count in 0_usize..200) {
        let book = codebook(shape, seed);
        let packed = bytes(seed ^ 1, shape.codes_len(n));
        let codes = Codes::new(shape, n, &packed).unwrap();
        let whole = decoded(&book.view(), &codes);
        let mut rows = vec![0.0_f32; count * shape.dim()];
        let result = decode_into(&book.view(), &codes, first, &mut rows);
        if first + count <= n {
            prop_assert!(result.is_ok());
            prop_assert!(same_bits(&rows, &whole[first * shape.dim()..][..rows.len()]));
        } else {
            prop_assert_eq!(result, Err(Error::TooShort { what: "codes", needed: first + count, actual: n }));
            prop_assert!(rows.iter().all(|&x| x == 0.0));
        }
    }

    #[test]
    fn a_codebook_returns_its_centroids(shape in shapes(), seed: u64) {
        let centroids = random(seed, shape.codebook_len(), 1.0);
        let book = CodebookBuf::new(shape, &centroids).unwrap();
        let mut returned = vec![f32::NAN; centroids.len()];
        book.view().centroids_into(&mut returned).unwrap();
        prop_assert!(same_bits(&returned, &centroids) && same_bits(&book.centroids(), &centroids));
        prop_assert!(book.view().centroids_into(&mut returned[1..]).is_err());
    }
}

fn trained_bytes(trained: &Trained) -> (Vec<u32>, Vec<u8>, u64) {
    (trained.centroids.iter().map(|x| x.to_bits()).collect(), trained.codes.clone(), trained.error.to_bits())
}

#[test]
fn training_does_not_depend_on_the_number_of_threads() {
    let shape = PqShape::new(24, 6, 4).unwrap();
    let sets = [random(1, 500 * 24, 1.0), random(2, 77 * 24, 1.0), random(3, 24, 1.0)];
    let sets: Vec<&[f32]> = sets.iter().map(Vec::as_slice).collect();
    for start in [Start::Random, Start::PlusPlus] {
        let options = TrainOptions { iterations: 5, seed: 42, start, encode: true, ..Default::default() };
        let one_by_one: Vec<_> =
            sets.iter().map(|set| trained_bytes(&train(shape, set, &options).unwrap())).collect();
        let together =
            || -> Vec<_> { train_batch(shape, &sets, &options).unwrap().iter().map(trained_bytes).collect() };
        assert_eq!(together(), one_by_one);
        #[cfg(feature = "rayon")]
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert_eq!(pool.install(together), one_by_one);
        }
    }
}

#[test]
fn the_codes_of_training_are_those_of_encoding() {
    let shape = PqShape::new(24, 6, 5).unwrap();
    let rows = random(9, 333 * 24, 1.0);
    for max_vectors in [None, Some(100)] {
        let options = TrainOptions { iterations: 4, encode: true, max_vectors, ..Default::default() };
        let trained = train(shape, &rows, &options).unwrap();
        let book = CodebookBuf::new(shape, &trained.centroids).unwrap();
        let codes = Codes::new(shape, 333, &trained.codes).unwrap();
        assert_nearest(&book.view(), &rows, &codes, 0);
        let rest = decoded(&book.view(), &codes);
        let error: f64 = rest.iter().zip(&rows).map(|(a, b)| f64::from(a - b).powi(2)).sum();
        assert!((error - trained.error).abs() < 1e-3 * error, "{error} {}", trained.error);
    }
}

#[test]
fn more_iterations_and_a_warm_start_lower_the_error() {
    let shape = PqShape::new(16, 4, 6).unwrap();
    let rows = random(5, 2000 * 16, 1.0);
    let train = |iterations, start| {
        train(shape, &rows, &TrainOptions { iterations, start, encode: true, ..Default::default() }).unwrap()
    };
    let short = train(2, Start::Random);
    let warm = train(3, Start::From(&short.centroids));
    assert!(warm.error < short.error && train(10, Start::Random).error < short.error);
    assert_eq!((short.iterations, warm.iterations), (2, 3));
    let time_is_up = || true;
    let options = TrainOptions { time_is_up: Some(&time_is_up), ..Default::default() };
    assert_eq!(pq_core::train(shape, &rows, &options).unwrap().iterations, 1);
    let options = TrainOptions { tolerance: 0.5, ..Default::default() };
    assert!(pq_core::train(shape, &rows, &options).unwrap().iterations < 4);
}

#[test]
fn codes_that_lose_nothing_decode_exactly() {
    let shape = PqShape::new(4, 2, 3).unwrap();
    let rows: Vec<f32> = (0..8 * 4).map(|i| i as f32).collect(); // as many vectors as centroids
    let options = TrainOptions { iterations: 3, encode: true, ..Default::default() };
    let trained = train(shape, &rows, &options).unwrap();
    let book = CodebookBuf::new(shape, &trained.centroids).unwrap();
    let codes = Codes::new(shape, 8, &trained.codes).unwrap();
    assert_eq!(decoded(&book.view(), &codes), rows);
    assert_eq!(trained.error, 0.0);
}

#[test]
fn unusual_values_have_defined_codes() {
    let shape = PqShape::new(4, 1, 6).unwrap();
    let book = codebook(shape, 3);
    let plain = [0.3, 0.0, -0.2, 0.0];
    for backend in backends() {
        let code = |row: &[f32; 4], n: usize| {
            let mut packed = vec![0; shape.codes_len(n)];
            encode_into_with(backend, &book.view(), &row.repeat(n), 0, &mut packed).unwrap();
            Codes::new(shape, n, &packed).unwrap().iter_vector(n - 1).next().unwrap()
        };
        for n in [1, 64] {
            // NaN and infinities count as 0; a distance that overflows is never the least.
            assert_eq!(code(&[0.3, f32::NAN, -0.2, f32::INFINITY], n), code(&plain, n), "{backend:?}");
            assert_eq!(code(&[f32::MAX; 4], n), code(&[f32::MAX; 4], 1), "{backend:?}");
        }
    }
    // Clusters of one point, and of equal points.
    for n in [1, 3, 64, 65] {
        for rows in [vec![1.5; n * 4], random(8, n * 4, 1.0)] {
            let options = TrainOptions { encode: true, ..Default::default() };
            let trained = train(shape, &rows, &options).unwrap();
            assert!(trained.centroids.iter().all(|x| x.is_finite()));
            let book = CodebookBuf::new(shape, &trained.centroids).unwrap();
            assert_nearest(&book.view(), &rows, &Codes::new(shape, n, &trained.codes).unwrap(), 0);
        }
    }
}

#[test]
fn bad_arguments_are_errors() {
    let shape = PqShape::new(8, 4, 6).unwrap();
    let book = codebook(shape, 1);
    let mut packed = vec![0; shape.codes_len(2)];
    assert_eq!(
        encode_into(&book.view(), &[0.0_f32; 9], 0, &mut packed),
        Err(Error::PartialRow { what: "vectors", row: 8, actual: 9 })
    );
    assert!(matches!(encode_into(&book.view(), &[0.0_f32; 16], 64, &mut packed), Err(Error::Length { .. })));
    assert!(matches!(
        encode_into(&book.view(), &[0.0_f32; 16], usize::MAX, &mut packed),
        Err(Error::Length { .. })
    ));
    let codes = Codes::new(shape, 2, &packed).unwrap();
    let other = PqShape::new(8, 4, 5).unwrap();
    let table = vec![0.0; other.lut_len()];
    let lut = Lut::new(other, &table).unwrap();
    assert_eq!(scan_into(&lut, &codes, &mut [0.0; 2]), Err(Error::ShapeMismatch));
    let many = PqShape::new(300, 300, 1).unwrap();
    let table = vec![0.0; many.lut_len()];
    let mut storage = vec![0; many.quantized_lut_len(LutPrecision::U8)];
    let lut = Lut::new(many, &table).unwrap();
    let wrong = QuantizedLut::new(&lut, LutPrecision::U8, &mut storage);
    assert!(matches!(wrong, Err(Error::TooManySubspaces { m: 300, max: 257 })));
    let mut table = vec![0.0; other.lut_len()];
    table[7] = f32::NAN;
    let mut storage = vec![0; other.quantized_lut_len(LutPrecision::U8)];
    let wrong = QuantizedLut::new(&Lut::new(other, &table).unwrap(), LutPrecision::U8, &mut storage);
    assert!(matches!(wrong, Err(Error::NotFinite { index: 7, .. })));
    assert!(matches!(train(shape, &[] as &[f32], &TrainOptions::default()), Err(Error::Zero { .. })));
    assert!(matches!(train(shape, &[f32::NAN; 8], &TrainOptions::default()), Err(Error::NotFinite { .. })));
    let short = TrainOptions { start: Start::From(&[0.0; 3]), ..Default::default() };
    assert!(matches!(train(shape, &[0.0_f32; 8], &short), Err(Error::Length { .. })));
    for backend in Backend::ALL.into_iter().filter(|backend| !backend.is_available()) {
        assert_eq!(top_k_into_with(backend, &[1.0], 1, &mut [0]), Err(Error::BackendUnavailable));
    }
}

#[test]
fn views_that_do_not_fit_are_errors() {
    let (shape, other) = (PqShape::new(8, 4, 6).unwrap(), PqShape::new(8, 4, 5).unwrap());
    let (book, tables) = (codebook(shape, 1), vec![0.0; 2 * shape.lut_len()]);
    let bytes = vec![0; shape.codes_len(3)];
    let codes = Codes::new(shape, 3, &bytes).unwrap();
    assert!(matches!(Luts::new(shape, &tables[1..]), Err(Error::PartialRow { what: "luts", .. })));
    let luts = Luts::new(shape, &tables).unwrap();
    assert_eq!(luts.group(), 2);

    let (mut floats, mut stats) = (vec![0.0; SearchScratch::len(2, 3)], vec![SoftmaxStats::EMPTY; 2]);
    let short = SearchScratch::new(3, &mut floats[1..], &mut stats);
    assert!(matches!(short, Err(Error::TooShort { needed: 9, actual: 8, .. })));
    let huge = SearchScratch::new(usize::MAX, &mut floats, &mut stats);
    assert!(matches!(huge, Err(Error::TooShort { needed: usize::MAX, .. })));
    let search = Search { k: 2, ..Search::default() };
    let mut scratch = SearchScratch::new(3, &mut floats, &mut stats).unwrap();
    let found = search_into(&luts, &codes, &search, &mut scratch, &mut [0]);
    assert_eq!(found, Err(Error::TooShort { what: "tokens", needed: 2, actual: 1 }));
    let one = Luts::new(shape, &tables[..shape.lut_len()]).unwrap();
    assert!(matches!(
        search_into(&one, &codes, &search, &mut scratch, &mut [0; 2]),
        Err(Error::Length { .. })
    ));
    let wrong = Luts::new(other, &tables).unwrap();
    assert_eq!(search_into(&wrong, &codes, &search, &mut scratch, &mut [0; 2]), Err(Error::ShapeMismatch));
    let rerank = Rerank { k: 2, rule: GroupRule::SumOfSoftmax };
    let kept = rerank_into(&[0.0; 4], &[0.0_f32; 6], &rerank, &mut scratch, &mut [0]);
    assert_eq!(kept, Err(Error::TooShort { what: "kept", needed: 2, actual: 1 }));
    let kept = rerank_into(&[0.0; 5], &[0.0_f32; 6], &rerank, &mut scratch, &mut [0; 2]);
    assert!(matches!(kept, Err(Error::PartialRow { what: "queries", .. })));

    let fewer = Codes::new(shape, 2, &bytes).unwrap();
    assert!(matches!(CodedTokens::new(codes, fewer, book.view()), Err(Error::Length { .. })));
    let of_other = codebook(other, 1);
    assert!(matches!(CodedTokens::new(codes, codes, of_other.view()), Err(Error::ShapeMismatch)));
    let tokens = CodedTokens::new(codes, codes, book.view()).unwrap();
    assert!(matches!(
        tokens.with_key_scales(&[1.0_f32; 2][..]),
        Err(Error::Length { what: "key scales", .. })
    ));
    assert!(matches!(tokens.with_value_scales(&[1.0_f32; 4][..]), Err(Error::Length { .. })));
    assert!(tokens.with_key_scales(None::<&[f32]>).is_ok());
    let (mut out, mut stats) = (vec![0.0; 16], vec![SoftmaxStats::EMPTY; 2]);
    let mut scratch = vec![0.0; attend_scratch_len(shape, 2) + 1];
    let bias = [0.0_f32; 5];
    let masked = tokens.with_bias(&bias[..]);
    let result = attend_into(&luts, &masked, &mut scratch, &mut out, &mut stats);
    assert_eq!(result, Err(Error::Length { what: "bias", expected: 6, actual: 5 }));
    assert_eq!(attend_into(&luts, &tokens, &mut scratch, &mut out, &mut stats), Ok(()));
    let result = attend_into(&luts, &tokens, &mut scratch, &mut out, &mut stats[1..]);
    assert!(matches!(result, Err(Error::Length { what: "stats", .. })));
    let result = attend_into(&wrong, &tokens, &mut scratch, &mut out, &mut stats);
    assert_eq!(result, Err(Error::ShapeMismatch));
}

#[test]
fn errors_name_the_length_that_is_needed() {
    let (expected, needed, actual) = (4, 4, 3);
    let exact = Error::Length { what: "scores", expected, actual };
    assert_eq!(exact.to_string(), "scores has length 3, expected exactly 4");
    let short = Error::TooShort { what: "tokens", needed, actual };
    assert_eq!(short.to_string(), "tokens has length 3, expected at least 4");
    let partial = Error::PartialRow { what: "vectors", row: 2, actual };
    assert_eq!(partial.to_string(), "vectors has length 3, expected a multiple of 2");
}
