//! Encoding, decoding and training: every code is the nearest centroid's by distances in f64, for every
//! backend, batch size and offset.

use half::{bf16, f16};
use pq_core::*;
use proptest::prelude::*;

use super::support::{backends, bytes, scaled, shapes};

fn codebook(shape: PqShape, seed: u64) -> CodebookBuf {
    CodebookBuf::new(shape, &scaled(seed, shape.codebook_len(), 1.0)).unwrap()
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
    let rows: Vec<E> = scaled(seed ^ 1, n * shape.dim(), 2.0).into_iter().map(E::from_f32).collect();
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

#[test]
fn long_vectors_and_subspaces_are_encoded() {
    // Around the components that are staged at a time, 256 and 1,024: of a vector, and of a subspace.
    for (dim, m, nbits) in [
        (256, 64, 4),
        (258, 129, 5),
        (1024, 1024, 2),
        (2100, 700, 4),
        (2048, 2, 6),
        (2050, 2, 4),
        (1500, 1, 10),
    ] {
        let shape = PqShape::new(dim, m, nbits).unwrap();
        check_encode::<f32>(shape, 3, 2, 1);
        check_encode::<f16>(shape, 4, 7, 0);
    }
}

/// Encodes the rows one by one: the definition of [`encode_into`].
fn encoded_one_by_one<E: Element>(
    backend: Backend,
    book: &Codebook<'_>,
    rows: &[E],
    first: usize,
    codes: &mut [u8],
) {
    let shape = book.shape();
    for (i, row) in rows.chunks_exact(shape.dim()).enumerate() {
        let len = shape.codes_len(first + i + 1);
        encode_into_with(backend, book, row, first + i, &mut codes[..len]).unwrap();
    }
}

/// A batch of any length at any offset has the bytes of its rows encoded one by one.
fn check_run<E: Element>(shape: PqShape, seed: u64, n: usize, first: usize, large: bool) {
    let book = codebook(shape, seed);
    let mut rows: Vec<E> = scaled(seed ^ 1, n * shape.dim(), 2.0).into_iter().map(E::from_f32).collect();
    if large {
        // Components whose squares overflow must not change the codes of other vectors.
        rows.iter_mut().step_by(7 * shape.dim() + 1).for_each(|x| *x = E::from_f32(3e22));
    }
    for backend in backends() {
        let before = bytes(seed ^ 2, shape.codes_len(first + n));
        let (mut expected, mut packed) = (before.clone(), before);
        encoded_one_by_one(backend, &book.view(), &rows, first, &mut expected);
        encode_into_with(backend, &book.view(), &rows, first, &mut packed).unwrap();
        assert_eq!(packed, expected, "{backend:?}, {shape:?}, {n} at {first}");
    }
}

#[test]
fn every_run_at_every_offset_has_the_codes_of_its_rows() {
    // Widths with tables smaller and larger than a register, components below and above a tile's.
    let shapes = [(4, 2, 1), (6, 3, 4), (8, 4, 5), (8, 2, 6), (12, 4, 8), (70, 1, 7), (3, 1, 10)];
    for (dim, m, nbits) in shapes {
        let shape = PqShape::new(dim, m, nbits).unwrap();
        for first in 0..BLOCK {
            for n in [1, 2, 3, 5, 6, 8, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 130] {
                if dim == 8 || (first + n) % 13 == 0 {
                    check_run::<f32>(shape, (first * 131 + n) as u64, n, first, false);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn codes_are_the_nearest_centroids(
        shape in shapes(), seed: u64, n in 0_usize..150, first in 0_usize..130,
    ) {
        if shape.ksub() * n <= 1 << 15 {
            check_encode::<f32>(shape, seed, n, first);
            check_encode::<f16>(shape, seed, n, first);
            check_encode::<bf16>(shape, seed, n, first);
        }
    }

    #[test]
    fn runs_have_the_codes_of_their_rows(
        shape in shapes(), seed: u64, n in 0_usize..200, first in 0_usize..130, large: bool,
    ) {
        if shape.ksub() * n <= 1 << 15 {
            check_run::<f32>(shape, seed, n, first, large);
            check_run::<f16>(shape, seed, n, first, false);
            check_run::<bf16>(shape, seed, n, first, large);
        }
    }

    #[test]
    fn a_range_decodes_as_in_the_whole(
        shape in shapes(), seed: u64, n in 0_usize..200, first in 0_usize..200, count in 0_usize..200,
    ) {
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
}

fn trained_bytes(trained: &Trained) -> (Vec<u32>, Vec<u8>, u64) {
    (trained.centroids.iter().map(|x| x.to_bits()).collect(), trained.codes.clone(), trained.error.to_bits())
}

#[test]
fn training_does_not_depend_on_the_number_of_threads() {
    let shape = PqShape::new(24, 6, 4).unwrap();
    let sets = [scaled(1, 500 * 24, 1.0), scaled(2, 77 * 24, 1.0), scaled(3, 24, 1.0)];
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
    let rows = scaled(9, 333 * 24, 1.0);
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
    let rows = scaled(5, 2000 * 16, 1.0);
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
    let rows: Vec<f32> = (0..8 * 4).map(|i| i as f32).collect(); // n = ksub
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
            // NaN and infinities count as 0; a distance that overflows is never the minimum.
            assert_eq!(code(&[0.3, f32::NAN, -0.2, f32::INFINITY], n), code(&plain, n), "{backend:?}");
            assert_eq!(code(&[f32::MAX; 4], n), code(&[f32::MAX; 4], 1), "{backend:?}");
        }
    }
    // Clusters of one point, and of equal points.
    for n in [1, 3, 64, 65] {
        for rows in [vec![1.5; n * 4], scaled(8, n * 4, 1.0)] {
            let options = TrainOptions { encode: true, ..Default::default() };
            let trained = train(shape, &rows, &options).unwrap();
            assert!(trained.centroids.iter().all(|x| x.is_finite()));
            let book = CodebookBuf::new(shape, &trained.centroids).unwrap();
            assert_nearest(&book.view(), &rows, &Codes::new(shape, n, &trained.codes).unwrap(), 0);
        }
    }
}
