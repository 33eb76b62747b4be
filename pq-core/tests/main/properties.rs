//! Compares the definitions with plain formulas in f64, and every backend with the scalar one, on random
//! shapes and values.

use pq_core::*;
use proptest::prelude::*;

use super::support::{backends, bytes, scaled, shapes};

/// Lengths at the edges of a block, and others.
fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![Just(0), Just(1), Just(63), Just(64), Just(65), Just(1024), Just(1025), 2_usize..400]
}

fn codebook(shape: PqShape, seed: u64) -> CodebookBuf {
    CodebookBuf::new(shape, &scaled(seed, shape.codebook_len(), 1.0)).unwrap()
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

/// The expected attention output, in f64, for decoded keys and values.
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
    fn tables_and_scores_have_the_same_bits_everywhere(
        shape in shapes(), seed: u64, n in lengths(), group in 1_usize..4,
    ) {
        let book = codebook(shape, seed);
        let queries = scaled(seed ^ 1, group * shape.dim(), 3.0);
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
    fn integer_tables_keep_their_bound_and_their_bits(
        shape in shapes(), seed: u64, n in lengths(), wide: bool,
    ) {
        let precision = if wide { LutPrecision::U16 } else { LutPrecision::U8 };
        let table = scaled(seed, shape.lut_len(), 5.0);
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
        let queries = scaled(seed ^ 4, group * keys.dim(), 1.0);
        let key_scales: Vec<f32> = scaled(seed ^ 5, n, 0.5).iter().map(|x| x + 1.0).collect();
        let value_scales: Vec<f32> = scaled(seed ^ 6, n, 0.5).iter().map(|x| x + 1.0).collect();
        let mut bias = scaled(seed ^ 7, group * n, 2.0);
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
        let (keys, values) = (scaled(seed, n * 24, 1.0), scaled(seed ^ 1, n * 16, 1.0));
        let queries = scaled(seed ^ 2, group * 24, 2.0);
        let attend = |range: core::ops::Range<usize>, out: &mut [f32], stats: &mut [SoftmaxStats]| {
            let (k, v) = (&keys[range.start * 24..range.end * 24], &values[range.start * 16..range.end * 16]);
            let tokens = ExactTokens::contiguous(k, 24, v, 16).unwrap();
            let (attention, mut scratch) = (Attention::default(), vec![0.0; queries.len()]);
            let queries = Rows::from(&queries[..]);
            attend_exact_into(&attention, queries, &tokens, &mut scratch, out, stats).unwrap();
        };
        let (mut whole, mut whole_stats) = (vec![0.0; group * 16], vec![SoftmaxStats::EMPTY; group]);
        attend(0..n, &mut whole, &mut whole_stats);
        // Sequentially into the same sums, and separately with a merge.
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
    fn top_k_equals_a_full_sort(
        seed: u64, n in prop_oneof![0_usize..300, 4000_usize..9000], k in 0_usize..9000, kind in 0..5,
    ) {
        let k = k % (n + 20);
        let scores: Vec<f32> = scaled(seed, n, 1.0)
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
        let tables = scaled(seed, group * shape.lut_len(), 2.0);
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
        // No rejected token has a clearly higher share than a token selected by score.
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
        let rows = scaled(seed, n * 6, 3.0);
        let count = count.min(rows.len());
        let centre = scaled(seed ^ 1, 6, 1.0);
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
    fn the_rotated_mean_is_taken_out_of_keys_and_put_back_into_scores(
        seed: u64, n in 1_usize..200, first in 0_usize..100_000,
    ) {
        let dim = 16;
        let mean = scaled(seed, dim, 2.0);
        let frequencies: Vec<f32> = (0..dim / 2).map(|i| 10_000_f32.powf(-(i as f32) / 8.0)).collect();
        let mut storage = vec![0.0; RopeMean::storage_len(dim)];
        let rope_mean = RopeMean::new(&mean, &frequencies, &mut storage).unwrap();
        let (keys, query) = (scaled(seed ^ 1, n * dim, 1.0), scaled(seed ^ 2, dim, 1.0));
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
    fn a_codebook_returns_its_centroids(shape in shapes(), seed: u64) {
        let centroids = scaled(seed, shape.codebook_len(), 1.0);
        let book = CodebookBuf::new(shape, &centroids).unwrap();
        let mut returned = vec![f32::NAN; centroids.len()];
        book.view().centroids_into(&mut returned).unwrap();
        prop_assert!(same_bits(&returned, &centroids) && same_bits(&book.centroids(), &centroids));
        prop_assert!(book.view().centroids_into(&mut returned[1..]).is_err());
    }
}
