//! The shipped functions against the plain `f64` formulas, on random shapes.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

use pq_core::{
    Codebook, Codes, Lut, PqShape, TrainOptions, attend_into, decode_into, encode_into, lut_into, scan_into,
    top_k_into, train,
};
use proptest::prelude::*;

/// A trained quantizer with its data: (shape, vectors, centroids, codes).
fn quantizer() -> impl Strategy<Value = (PqShape, Vec<f32>, Vec<f32>, Vec<u8>)> {
    (1_usize..=6, 1_usize..=5, 1_u32..=6, 1_usize..80, any::<u64>()).prop_flat_map(
        |(m, dsub, nbits, n, seed)| {
            let shape = PqShape::new(m * dsub, m, nbits).unwrap();
            prop::collection::vec(-8.0_f32..8.0, n * shape.dim()).prop_map(move |vectors| {
                let centroids =
                    train(shape, &vectors, &TrainOptions { iterations: 6, seed }).unwrap().centroids;
                let mut codes = vec![0; n * shape.code_size()];
                encode_into(&Codebook::new(shape, &centroids).unwrap(), &vectors, &mut codes).unwrap();
                (shape, vectors, centroids, codes)
            })
        },
    )
}

fn ip(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

proptest! {
    #[test]
    fn every_code_names_a_nearest_centroid((shape, vectors, centroids, codes) in quantizer()) {
        let codebook = Codebook::new(shape, &centroids).unwrap();
        let codes = Codes::new(shape, &codes).unwrap();
        for (i, vector) in vectors.chunks(shape.dim()).enumerate() {
            for ((j, x), c) in vector.chunks(shape.dsub()).enumerate().zip(codes.iter_vector(i)) {
                let distance = |c: usize| -> f64 {
                    codebook.centroid(j, c).iter().zip(x).map(|(&y, &x)| (f64::from(x) - f64::from(y)).powi(2)).sum()
                };
                let best = (0..shape.ksub()).map(distance).fold(f64::INFINITY, f64::min);
                prop_assert!(distance(c) <= best + 1e-4, "{} against {}", distance(c), best);
            }
        }
    }

    #[test]
    fn table_scores_equal_scores_of_decoded_keys((shape, _, centroids, codes) in quantizer(), q in -3.0_f32..3.0) {
        let codebook = Codebook::new(shape, &centroids).unwrap();
        let codes = Codes::new(shape, &codes).unwrap();
        let query: Vec<f32> = (0..shape.dim()).map(|d| q + d as f32 * 0.1).collect();
        let mut decoded = vec![0.0; codes.n() * shape.dim()];
        decode_into(&codebook, &codes, &mut decoded).unwrap();
        let mut table = vec![0.0; shape.lut_len()];
        lut_into(&codebook, &query, &mut table).unwrap();
        let mut scores = vec![0.0; codes.n()];
        scan_into(&Lut::new(shape, &table).unwrap(), &codes, &mut scores).unwrap();
        for (key, &score) in decoded.chunks(shape.dim()).zip(&scores) {
            prop_assert!((ip(&query, key) - f64::from(score)).abs() < 1e-2);
        }
    }

    #[test]
    fn attention_on_codes_equals_attention_on_decoded_rows((shape, _, centroids, codes) in quantizer()) {
        let codebook = Codebook::new(shape, &centroids).unwrap();
        let codes = Codes::new(shape, &codes).unwrap();
        let query: Vec<f32> = (0..shape.dim()).map(|d| (d as f32 * 0.7).sin()).collect();
        let mut decoded = vec![0.0; codes.n() * shape.dim()];
        decode_into(&codebook, &codes, &mut decoded).unwrap();
        let mut table = vec![0.0; shape.lut_len()];
        lut_into(&codebook, &query, &mut table).unwrap();
        let (mut scores, mut weights) = (vec![0.0; codes.n()], vec![0.0; shape.lut_len()]);
        let mut out = vec![0.0; shape.dim()];
        let lut = Lut::new(shape, &table).unwrap();
        let stats = attend_into(&lut, &codes, &codebook, &codes, &mut scores, &mut weights, &mut out).unwrap();

        let exact: Vec<f64> = decoded.chunks(shape.dim()).map(|key| ip(&query, key)).collect();
        let max = exact.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = exact.iter().map(|s| (s - max).exp()).sum();
        for d in 0..shape.dim() {
            let mean: f64 = exact
                .iter()
                .zip(decoded.chunks(shape.dim()))
                .map(|(s, value)| (s - max).exp() / sum * f64::from(value[d]))
                .sum();
            prop_assert!((mean - f64::from(out[d] / stats.sum)).abs() < 1e-2);
        }
    }

    #[test]
    fn top_k_equals_a_full_sort(scores in prop::collection::vec((-20_i32..20).prop_map(|x| x as f32), 0..200), k in 0_usize..220) {
        let mut indices = vec![0; scores.len()];
        let n = top_k_into(&scores, k, &mut indices).unwrap();
        let mut expected: Vec<u32> = (0..scores.len() as u32).collect();
        expected.sort_by(|&a, &b| scores[b as usize].total_cmp(&scores[a as usize]).then(a.cmp(&b)));
        expected.truncate(k);
        expected.sort_unstable();
        prop_assert_eq!(&indices[..n], &expected[..]);
    }
}

#[test]
fn training_does_not_depend_on_the_number_of_threads() {
    let shape = PqShape::new(24, 6, 4).unwrap();
    let vectors: Vec<f32> = (0..500 * 24).map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0).collect();
    let options = TrainOptions { iterations: 5, seed: 42 };
    let first = train(shape, &vectors, &options).unwrap();
    #[cfg(feature = "rayon")]
    for threads in [1, 2, 7] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool.install(|| train(shape, &vectors, &options)).unwrap().centroids, first.centroids);
    }
    assert_eq!(train(shape, &vectors, &options).unwrap().centroids, first.centroids);
}

#[test]
fn codes_that_lose_nothing_decode_exactly() {
    let shape = PqShape::new(4, 2, 3).unwrap();
    let vectors: Vec<f32> = (0..8 * 4).map(|i| i as f32).collect(); // as many vectors as centroids
    let centroids = train(shape, &vectors, &TrainOptions { iterations: 3, seed: 0 }).unwrap().centroids;
    let codebook = Codebook::new(shape, &centroids).unwrap();
    let mut codes = vec![0; 8 * shape.code_size()];
    encode_into(&codebook, &vectors, &mut codes).unwrap();
    let mut decoded = vec![0.0; vectors.len()];
    decode_into(&codebook, &Codes::new(shape, &codes).unwrap(), &mut decoded).unwrap();
    assert_eq!(decoded, vectors);
}
