//! Values and sizes at the ends of their types.

use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;
use pq_core::*;
use proptest::prelude::*;

use super::support::{backends, random};

fn decoded(codebook: &Codebook<'_>, codes: &Codes<'_>) -> Vec<f32> {
    let mut rows = vec![0.0; codes.n() * codes.shape().dim()];
    decode_into(codebook, codes, 0, &mut rows).unwrap();
    rows
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum()
}

#[test]
fn integer_tables_keep_their_bound_at_every_range() {
    let shape = PqShape::new(12, 6, 4).unwrap();
    for exponent in -149..124 {
        let range = 2_f64.powi(exponent);
        let table: Vec<f32> = random::<f32>(exponent as u64, shape.lut_len())
            .iter()
            .map(|&x| (f64::from(x) * range) as f32)
            .collect();
        let packed: Vec<u8> =
            random::<f32>(7, shape.codes_len(200)).iter().map(|x| (x * 1e6) as i64 as u8).collect();
        let codes = Codes::new(shape, 200, &packed).unwrap();
        let lut = Lut::new(shape, &table).unwrap();
        for precision in [LutPrecision::U8, LutPrecision::U16] {
            let mut expected: Option<Vec<f32>> = None;
            for backend in backends() {
                let mut storage = vec![0; shape.quantized_lut_len(precision)];
                let quantized = QuantizedLut::new_with(backend, &lut, precision, &mut storage).unwrap();
                let mut scores = vec![0.0; 200];
                scan_quantized_into_with(backend, &quantized, &codes, &mut scores).unwrap();
                for (i, &score) in scores.iter().enumerate() {
                    let exact: f64 =
                        codes.iter_vector(i).enumerate().map(|(j, c)| f64::from(lut.row(j)[c])).sum();
                    let rounding = 1e-5 * range + 3e-44;
                    let error = (f64::from(score) - exact).abs();
                    assert!(
                        error <= f64::from(quantized.error_bound()) + rounding,
                        "2^{exponent}, {precision:?}, {backend:?}: {error} for {}",
                        quantized.error_bound()
                    );
                }
                // The bound itself is small for every range that is not subnormal.
                let levels = if precision == LutPrecision::U8 { 255.0 } else { 65_535.0 };
                let least = f64::from(f32::MIN_POSITIVE).max(2.0 * range / levels);
                assert!(f64::from(quantized.error_bound()) <= 0.521 * 6.0 * least, "2^{exponent}");
                let expected = expected.get_or_insert_with(|| scores.clone());
                assert!(scores.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()), "{backend:?}");
            }
        }
    }
}

/// Encodes `n` copies of one row: its centroids and the error are those of f64, or equally near.
fn check_large<E: Element>(book: &CodebookBuf, row: &[f32], context: &str) {
    let (book, shape) = (book.view(), book.view().shape());
    let row: Vec<E> = row.iter().map(|&x| E::from_f32(x)).collect();
    let exact: Vec<f32> = row.iter().map(|x| x.to_f32()).collect();
    for backend in backends() {
        for n in [1, 64, 65] {
            let mut packed = vec![0; shape.codes_len(n)];
            let error = encode_into_with(backend, &book, &row.repeat(n), 0, &mut packed).unwrap();
            let codes = Codes::new(shape, n, &packed).unwrap();
            let rows = decoded(&book, &codes);
            let expected = squared_error(&rows, &exact.repeat(n));
            let size: f64 = exact.iter().chain(&rows).map(|&x| f64::from(x).powi(2)).sum::<f64>() * n as f64;
            let context = format!("{context}, {backend:?}, n {n}");
            assert!(
                (error - expected).abs() <= 1e-3 * expected + 1e-5 * size,
                "{context}: {error} for {expected}"
            );
            for ((j, x), c) in exact.chunks_exact(shape.dsub()).enumerate().zip(codes.iter_vector(n - 1)) {
                let distance = |c: usize| squared_error(x, &book.centroid(j, c).collect::<Vec<_>>());
                let best = (0..shape.ksub()).map(distance).fold(f64::INFINITY, f64::min);
                assert!(distance(c) <= best + 1e-6 * size, "{context}: {} for {best}", distance(c));
                // Of equal centroids the first.
                assert!((0..c).all(|other| !book.centroid(j, other).eq(book.centroid(j, c))), "{context}");
            }
        }
    }
}

#[test]
fn large_components_have_nearest_centroids_and_errors() {
    for (dsub, nbits) in [(1, 3), (2, 6), (3, 8), (4, 5), (70, 4)] {
        let shape = PqShape::new(2 * dsub, 2, nbits).unwrap();
        for seed in 0..3 {
            let mut unit = random::<f32>(seed, shape.codebook_len());
            let half = shape.ksub() / 2 * dsub;
            for subspace in unit.chunks_exact_mut(shape.ksub() * dsub) {
                let (first, second) = subspace.split_at_mut(half);
                second.copy_from_slice(first); // every centroid twice
            }
            for scale in [1e-3, 1.0, 1e15, 1e19, 1e25, 3.4e38] {
                let centroids: Vec<f32> = unit.iter().map(|x| x * scale).collect();
                let book = CodebookBuf::new(shape, &centroids).unwrap();
                for size in [1e-3, 1.0, 1e12, 1e18, 1e19, 1e20, 1e30, 3e38, f32::MAX] {
                    let mut row: Vec<f32> =
                        random::<f32>(seed ^ 9, shape.dim()).iter().map(|x| x * size).collect();
                    let context = format!("dsub {dsub}, nbits {nbits}, centroids of {scale}, row of {size}");
                    check_large::<f32>(&book, &row, &context);
                    check_large::<bf16>(&book, &row.iter().map(|x| x * 0.9).collect::<Vec<_>>(), &context);
                    row[1..].fill(0.0);
                    row[0] = size;
                    check_large::<f32>(&book, &row, &context);
                }
            }
        }
    }
}

#[test]
fn training_on_the_largest_values_leaves_finite_centroids() {
    for seed in 0..40_u64 {
        let (dsub, nbits) = [(1, 1), (1, 3), (2, 2), (3, 4)][seed as usize % 4];
        let shape = PqShape::new(dsub, 1, nbits).unwrap();
        let ends = [f32::MAX, -f32::MAX, f32::MAX / 2.0, 0.0, 1.0, f32::MAX * 0.999];
        let kinds = 1 + seed as usize / 4 % ends.len();
        for n in [1, 3, 20, 200] {
            let pick = |x: &f32| ends[((x + 1.0) * 1e6) as usize % kinds];
            let rows: Vec<f32> = random::<f32>(seed, n * dsub).iter().map(pick).collect();
            for start in [Start::Random, Start::PlusPlus] {
                let options = TrainOptions { start, seed, encode: true, ..Default::default() };
                let trained = train(shape, &rows, &options).unwrap();
                let book = CodebookBuf::new(shape, &trained.centroids).unwrap();
                let codes = Codes::new(shape, n, &trained.codes).unwrap();
                let expected = squared_error(&decoded(&book.view(), &codes), &rows);
                assert!((trained.error - expected).abs() <= 1e-9 * expected, "{} {expected}", trained.error);
                if kinds.pow(dsub as u32) <= shape.ksub() {
                    assert_eq!(trained.error, 0.0, "{rows:?}");
                }
            }
        }
    }
}

#[test]
fn spare_centroids_go_to_points_without_one() {
    #[cfg(feature = "rayon")]
    let pools = [1, 2, 7].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    let corners: Vec<f32> = (0..27).flat_map(|i| [i % 3, i / 3 % 3, i / 9]).map(|x| x as f32).collect();
    for seed in 0..200_u64 {
        let shape = PqShape::new(6, 2, if seed % 2 == 0 { 6 } else { 5 }).unwrap();
        let (offset, scale) = ([0.0, -1.0, 5.0][seed as usize % 3], [1.0, 1e-3, 1e4][seed as usize / 3 % 3]);
        // Some points are many times as frequent as others.
        let n = [100, 150, 600][seed as usize / 9 % 3];
        let frequent = |x: f32| ((x * x * x.abs() * 27.0) as usize).min(26);
        let rows: Vec<f32> = random::<f32>(seed, 2 * n)
            .into_iter()
            .flat_map(|x| corners[3 * frequent(x)..][..3].iter().map(|y| (y + offset) * scale))
            .collect();
        for start in [Start::Random, Start::PlusPlus] {
            let options = TrainOptions { seed, start, encode: true, ..Default::default() };
            let trained = train(shape, &rows, &options).unwrap();
            let size: f64 = rows.iter().map(|&x| f64::from(x).powi(2)).sum();
            assert!(trained.error <= 1e-6 * size, "seed {seed}, {start:?}: {} of {size}", trained.error);
            #[cfg(feature = "rayon")]
            for pool in &pools {
                let again = pool.install(|| train(shape, &rows, &options)).unwrap();
                assert_eq!((&again.centroids, &again.codes), (&trained.centroids, &trained.codes));
            }
        }
    }
}

#[test]
fn training_ends_by_itself_and_asks_for_a_tolerance() {
    let shape = PqShape::new(4, 2, 4).unwrap();
    for seed in 0..20 {
        let mut rows = random::<f32>(seed, 300 * 4);
        if seed % 2 == 0 {
            rows.iter_mut().for_each(|x| *x = (*x * 1.5).round());
        }
        let asked = AtomicUsize::new(0);
        let time_is_up = || asked.fetch_add(1, Ordering::Relaxed) > 10_000;
        let options = |tolerance| TrainOptions {
            iterations: usize::MAX,
            time_is_up: Some(&time_is_up),
            tolerance,
            seed,
            ..Default::default()
        };
        for tolerance in [0.0, 1e-3, 0.5, f64::MAX] {
            let trained = train(shape, &rows, &options(tolerance)).unwrap();
            assert!(trained.iterations < 300, "{}", trained.iterations);
        }
        for tolerance in [f64::NAN, -1e-9, -1.0, f64::NEG_INFINITY, f64::INFINITY] {
            assert_eq!(train(shape, &rows, &options(tolerance)).unwrap_err(), Error::Tolerance);
        }
    }
}

#[test]
fn a_masked_token_contributes_nothing() {
    let (keys, values) = (PqShape::new(8, 4, 6).unwrap(), PqShape::new(12, 3, 5).unwrap());
    let value_book = CodebookBuf::new(values, &random::<f32>(1, values.codebook_len())).unwrap();
    let tables = random::<f32>(2, 3 * keys.lut_len());
    let luts = Luts::new(keys, &tables).unwrap();
    for seed in 0..40_u64 {
        let n = [1, 64, 130, 1100][seed as usize % 4];
        let byte = |x: &f32| (x * 1e6) as i64 as u8;
        let key_bytes: Vec<u8> = random::<f32>(seed, keys.codes_len(n)).iter().map(byte).collect();
        let value_bytes: Vec<u8> = random::<f32>(seed ^ 5, values.codes_len(n)).iter().map(byte).collect();
        let mut bias = random::<f32>(seed ^ 6, 3 * n);
        let mut scales = random::<f32>(seed ^ 7, n);
        let mut spoiled = scales.clone();
        for t in (0..n).filter(|t| t % 3 == seed as usize % 3) {
            (0..3).for_each(|g| bias[g * n + t] = f32::NEG_INFINITY);
            spoiled[t] = [f32::INFINITY, f32::NAN, f32::NEG_INFINITY, f32::MAX][t / 3 % 4];
            scales[t] = 1.0;
        }
        for backend in backends() {
            let attend = |key_scales: &[f32], value_scales: &[f32]| {
                let key_codes = Codes::new(keys, n, &key_bytes).unwrap();
                let value_codes = Codes::new(values, n, &value_bytes).unwrap();
                let tokens = CodedTokens::new(key_codes, value_codes, value_book.view()).unwrap();
                let tokens = tokens.with_key_scales(key_scales).unwrap();
                let tokens = tokens.with_value_scales(value_scales).unwrap().with_bias(bias.as_slice());
                let mut scratch = vec![0.0; attend_scratch_len(values, 3)];
                let (mut out, mut stats) = (vec![0.0; 3 * 12], vec![SoftmaxStats::EMPTY; 3]);
                attend_into_with(backend, &luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
                (out, stats)
            };
            let expected = attend(&scales, &scales);
            assert!(expected.0.iter().all(|x| x.is_finite()));
            assert_eq!(attend(&scales, &spoiled), expected, "{backend:?}, n {n}: value scales");
            assert_eq!(attend(&spoiled, &scales), expected, "{backend:?}, n {n}: key scales");
        }
    }
}

/// Sizes of every magnitude, many at the edge of an overflow.
fn sizes() -> impl Strategy<Value = usize> {
    let near =
        (0_u32..64, 0_usize..5).prop_map(|(shift, off)| (1_usize << shift).wrapping_add(off).wrapping_sub(2));
    prop_oneof![3 => near, 1 => any::<usize>(), 1 => (0_usize..100).prop_map(|x| usize::MAX - x)]
}

fn as_far_as_it_goes(exact: u128) -> usize {
    usize::try_from(exact).unwrap_or(usize::MAX)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn sizes_saturate_or_are_errors(
        dim in sizes(), divisor in 0_u32..64, nbits in 1_u32..=12, n in sizes(), group in sizes(),
    ) {
        let m = if dim.is_multiple_of(1 << divisor) { dim >> divisor } else { dim };
        let Ok(shape) = PqShape::new(dim, m, nbits) else { return Ok(()) };
        let (d, m, ksub) = (dim as u128, m as u128, 1_u128 << nbits);
        prop_assert_eq!(shape.lut_len() as u128, m * ksub);
        prop_assert_eq!(shape.codebook_len() as u128, d * ksub);
        prop_assert_eq!(shape.codebook_storage_len() as u128, d * ksub + m * ksub);
        prop_assert_eq!(shape.block_size() as u128, 8 * m * u128::from(nbits));
        let codes_len = (n as u128).div_ceil(64) * 8 * m * u128::from(nbits);
        prop_assert_eq!(shape.codes_len(n), as_far_as_it_goes(codes_len));
        for (precision, planes) in [(LutPrecision::U8, 1), (LutPrecision::U16, 2)] {
            prop_assert_eq!(shape.quantized_lut_len(precision) as u128, planes * m * ksub.max(16));
        }
        let columns = if d == m { 2 * d } else { d }; // the scalar form has sums and totals
        let scratch = columns * ksub.max(16) + group as u128 * 1024;
        prop_assert_eq!(attend_scratch_len(shape, group), as_far_as_it_goes(scratch));
        let floats = (group as u128 + 1) * n as u128;
        prop_assert_eq!(SearchScratch::len(group, n), as_far_as_it_goes(floats));
        prop_assert_eq!(RopeMean::storage_len(dim), as_far_as_it_goes(d * 64));
    }

    #[test]
    fn tables_of_any_shape_are_errors_where_they_do_not_fit(
        dim in sizes(), divisor in 0_u32..64, nbits in 1_u32..=12, group in 1_usize..5,
    ) {
        let m = if dim.is_multiple_of(1 << divisor) { dim >> divisor } else { dim };
        let Ok(shape) = PqShape::new(dim, m, nbits) else { return Ok(()) };
        let codes = Codes::new(shape, 0, &[]).unwrap();
        let small = PqShape::new(2, 1, 1).unwrap();
        let values = CodebookBuf::new(small, &[0.5; 4]).unwrap();
        let tokens = CodedTokens::new(codes, Codes::new(small, 0, &[]).unwrap(), values.view()).unwrap();
        let luts = Luts::new(shape, &[]).unwrap();
        let one = [0.0];
        let partial = Luts::new(shape, &one).map(|_| ());
        prop_assert!(matches!(partial, Err(Error::PartialRow { .. })), "{:?}", partial);
        let mut stats = vec![SoftmaxStats::EMPTY; group];
        let is_length = |error| matches!(error, Err(Error::Length { actual, expected: 0, .. }) if actual == group);
        for backend in backends() {
            let (mut scratch, mut out) = (vec![0.0; attend_scratch_len(small, group)], vec![0.0; group * 2]);
            let result = attend_into_with(backend, &luts, &tokens, &mut scratch, &mut out, &mut stats);
            prop_assert!(is_length(result), "{:?}", result);
        }
        let search = Search { k: usize::MAX, sinks: usize::MAX, recent: usize::MAX, rule: GroupRule::SumOfSoftmax };
        let mut scratch = SearchScratch::new(0, &mut [], &mut stats).unwrap();
        let result = search_into(&luts, &codes, &search, &mut scratch, &mut []).map(|_| ());
        prop_assert!(is_length(result), "{:?}", result);
    }

    #[test]
    fn positions_may_be_of_any_size(first in sizes(), n in 1_usize..200) {
        let (mean, mut storage) = ([0.5, -1.0, 2.0, 0.25], [0.0; 256]);
        let rope_mean = RopeMean::new(&mean, &[1.0, 0.01], &mut storage).unwrap();
        let (mut keys, mut scores) = (vec![0.0; 4 * n], vec![f32::NAN; n]);
        rope_mean.subtract(first, &mut keys).unwrap();
        rope_mean.scores_into(&[1.0; 4], first, &mut scores).unwrap();
        // A rotation preserves the norm.
        for key in keys.chunks_exact(4) {
            let length: f32 = key.iter().map(|x| x * x).sum();
            prop_assert!((length - 5.3125).abs() < 1e-4);
        }
        prop_assert!(scores.iter().all(|score| score.abs() < 5.0));
    }
}
