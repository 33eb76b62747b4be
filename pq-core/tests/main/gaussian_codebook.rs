//! The codebooks of Gaussians that are part of the crate.

use half::f16;
use pq_core::*;

#[path = "../../examples/gaussian_codebook.rs"]
#[allow(dead_code)]
mod make;

fn same_as_made(dsub: usize, nbits: u32) {
    let made = make::trained(dsub, nbits).unwrap();
    let stored: Vec<f16> = gaussian_centroids(dsub, nbits).unwrap().map(f16::from_f32).collect();
    assert_eq!(made, stored, "{dsub} components, {nbits} bits");
}

#[test]
fn stored_tables_are_those_that_the_example_makes() {
    for dsub in [1, 2, 4, 8, 16] {
        same_as_made(dsub, 4);
    }
    same_as_made(2, 6);
}

#[test]
#[ignore = "long: k-means of 131,072 vectors by scalar code"]
fn all_stored_tables_are_those_that_the_example_makes() {
    for nbits in 5..=8 {
        for dsub in [1, 2, 4, 8, 16] {
            same_as_made(dsub, nbits);
        }
    }
}

/// Mean squared errors of a component of Gaussian rows: those of the best scalar quantizers (Max, 1960, table
/// 1) for one component, lower for more components at the same bits, and above the rate-distortion bound.
#[test]
fn errors_are_those_of_good_quantizers() {
    let max = [(4, 0.009_497), (5, 0.002_499)];
    for (nbits, expected) in max {
        let error = error(1, nbits);
        assert!((error / expected - 1.0).abs() < 0.05, "{nbits}: {error}");
    }
    assert!(error(2, 8) < 0.009_0 && error(4, 8) < 0.105 && error(8, 8) < 0.32);
    for (dsub, nbits) in [(1, 4), (2, 6), (4, 8), (8, 8), (16, 8)] {
        assert!(error(dsub, nbits) > 2.0_f64.powf(-2.0 * f64::from(nbits) / dsub as f64));
    }
}

fn error(dsub: usize, nbits: u32) -> f64 {
    let (rows, decoded) = coded(dsub, nbits);
    let squares = rows.iter().zip(&decoded).map(|(x, y)| f64::from(x - y).powi(2));
    squares.sum::<f64>() / rows.len() as f64 * 16.0
}

/// Rows (4096, 16) of independent components, and as they are decoded.
fn coded(dsub: usize, nbits: u32) -> (Vec<f32>, Vec<f32>) {
    let shape = PqShape::new(16, 16 / dsub, nbits).unwrap();
    let book = CodebookBuf::gaussian(shape).unwrap();
    // Sums of uniform numbers; unit variance over sqrt(dim), as rows of norm 1 have.
    let mut state = 99_u64;
    let mut next = || {
        (0..12)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 24) as f32 - 0.5
            })
            .sum::<f32>()
    };
    let rows: Vec<f32> = (0..4096 * 16).map(|_| next() / 4.0).collect();
    let mut codes = CodesBuf::new(shape);
    codes.append(&book.view(), &rows).unwrap();
    let mut decoded = vec![0.0; rows.len()];
    decode_into(&book.view(), &codes.view(), 0, &mut decoded).unwrap();
    (rows, decoded)
}

/// Decoded rows times the gain have rows as their mean: no part of a row is lost in an average of many.
#[test]
fn gains_undo_the_shortening_of_rows() {
    for nbits in 4..=8 {
        for dsub in [1, 2, 4, 8, 16] {
            let (rows, decoded) = coded(dsub, nbits);
            let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(x * y)).sum::<f64>();
            let gain = f64::from(gaussian_gain(dsub, nbits).unwrap());
            let kept = gain * dot(&rows, &decoded) / dot(&rows, &rows);
            assert!((kept - 1.0).abs() < 0.02, "{dsub} components, {nbits} bits: {kept}");
        }
    }
}

#[test]
fn other_subspaces_are_errors() {
    for (dsub, nbits) in [(3, 8), (0, 8), (32, 8), (1, 3), (1, 9)] {
        let expected = Error::NoGaussian { dsub, nbits };
        assert_eq!(gaussian_centroids(dsub, nbits).err(), Some(expected));
        assert_eq!(gaussian_gain(dsub, nbits), Err(expected));
    }
    let shape = PqShape::new(96, 32, 8).unwrap();
    assert_eq!(CodebookBuf::gaussian(shape).err(), Some(Error::NoGaussian { dsub: 3, nbits: 8 }));
}
