//! Grams of every kind and scale give maps that are finite in `f32` and inverse to each other; sums and
//! spectra at the limits of `f64` give results or errors.

use std::sync::LazyLock;

use proptest::prelude::*;
use svd_core::{
    Budget, Error, Gram, PostRope, Rotation, Rows, RowsMut, balanced_order, rank_for_removal, ranks_by_loss,
    ranks_by_removal,
};

use super::support::random;

const DIMS: [usize; 4] = [1, 2, 7, 16];
const ROWS: usize = 40;

/// Rows (n, dim) of every kind that a head can have: all of them for `seed`.
fn kinds(dim: usize, seed: u64) -> Vec<(&'static str, Vec<f32>)> {
    let base = random::<f32>(seed, ROWS * dim);
    let scaled = |factor: f32| base.iter().map(|x| x * factor).collect::<Vec<f32>>();
    let by_component =
        |factor: &dyn Fn(usize) -> f32| base.iter().enumerate().map(|(i, x)| x * factor(i % dim)).collect();
    let low_rank = base.chunks(dim).flat_map(|row| (0..dim).map(|d| row[0] * base[d])).collect();
    vec![
        ("full", scaled(1.0)),
        ("zero", vec![0.0; ROWS * dim]),
        ("no rows", vec![]),
        ("one token", base[..dim].to_vec()),
        ("low rank", low_rank),
        ("constant", base[..dim].repeat(ROWS)),
        ("half zero", by_component(&|d| if d < dim / 2 { 0.0 } else { 1.0 })),
        ("condition 1e12", by_component(&|d| 10.0_f32.powf(-6.0 * d as f32 / dim as f32))),
        ("36 orders", by_component(&|d| 10.0_f32.powf(18.0 - 36.0 * d as f32 / dim as f32))),
        ("huge", scaled(1e37)),
        ("tiny", scaled(1e-30)),
        ("denormal", scaled(1e-40)),
        ("smallest", base.iter().map(|x| f32::from_bits(1).copysign(*x)).collect()),
    ]
}

fn gram(rows: &[f32], dim: usize) -> Gram<PostRope> {
    let mut gram = Gram::new(dim).unwrap();
    gram.add_rows(Rows::contiguous(rows, dim).unwrap()).unwrap();
    gram
}

fn is_zero(rows: &[f32]) -> bool {
    rows.iter().all(|x| *x == 0.0)
}

/// Largest entry of `a^T b - I`, of (dim, dim) row-major maps.
fn identity_error(a: &[f64], b: &[f64], dim: usize) -> f64 {
    let mut largest = 0.0_f64;
    for r in 0..dim {
        for c in 0..dim {
            let sum: f64 = (0..dim).map(|d| a[d * dim + r] * b[d * dim + c]).sum();
            largest = largest.max((sum - f64::from(u8::from(r == c))).abs());
        }
    }
    largest
}

fn check(name: &str, rotation: &Rotation, stored: &Gram<PostRope>, probes: &Gram<PostRope>) {
    let dim = rotation.dim();
    let single = |map: &[f64]| map.iter().all(|x| (*x as f32).is_finite());
    assert!(single(rotation.basis()) && single(rotation.dual()), "{name}: a map is infinite in f32");
    let error = identity_error(rotation.basis(), rotation.dual(), dim);
    assert!(error < 1e-4, "{name}: the maps' product is {error} off the identity");
    assert!(rotation.sigma().windows(2).all(|pair| pair[0] >= pair[1] && pair[1] >= 0.0), "{name}");
    assert!(rotation.sigma().iter().all(|x| x.is_finite()), "{name}");
    // The folded weights and the error must be finite as well.
    let weight = random::<f32>(5, dim * 3);
    let (columns, rows) = (Rows::contiguous(&weight, 3).unwrap(), Rows::contiguous(&weight, dim).unwrap());
    for folded in [
        rotation.fold_basis(columns, dim).unwrap(),
        rotation.fold_dual(columns, dim).unwrap(),
        rotation.fold_output(rows, dim).unwrap(),
    ] {
        assert!(folded.iter().all(|x| x.is_finite()), "{name}: a folded weight");
    }
    for rank in 1..=dim {
        let error = rotation.score_error(stored, probes, rank).unwrap();
        assert!(error >= 0.0 && error.is_finite(), "{name}: error {error} at rank {rank}");
    }
    let rank = rank_for_removal(rotation.sigma(), 0.1).unwrap();
    assert!((1..=dim).contains(&rank), "{name}");
    balanced_order(rotation.sigma(), 1).unwrap();
}

fn check_pairs(dim: usize, seed: u64) {
    for (stored_name, stored_rows) in kinds(dim, seed) {
        for (probe_name, probe_rows) in kinds(dim, seed ^ 0xABCD) {
            let name = format!("{stored_name} against {probe_name}, dim {dim}, seed {seed}");
            let (stored, probes) = (gram(&stored_rows, dim), gram(&probe_rows, dim));
            let orthogonal = |rotation: &Rotation| {
                assert!(
                    identity_error(rotation.basis(), rotation.basis(), dim) < 1e-9,
                    "{name}: not orthogonal"
                );
            };
            let best = Rotation::score_optimal(&stored, &probes).unwrap();
            check(&name, &best, &stored, &probes);
            if is_zero(&stored_rows) || is_zero(&probe_rows) {
                orthogonal(&best);
                assert!(best.sigma().iter().all(|x| *x == 0.0), "{name}: {:?}", best.sigma());
            }
            for rotation in [Rotation::stacked(&stored, &probes), Rotation::principal(&stored)] {
                let rotation = rotation.unwrap();
                check(&name, &rotation, &stored, &probes);
                orthogonal(&rotation);
            }
            let centred = stored.centred();
            match Rotation::query_metric(&centred, &probes) {
                Ok(rotation) => {
                    check(&name, &rotation, &centred, &probes);
                    if is_zero(&probe_rows) {
                        orthogonal(&rotation);
                    }
                }
                Err(error) => {
                    assert_eq!(error, Error::Zero { what: "rows" });
                    assert!(stored_rows.is_empty() || probe_rows.is_empty(), "{name}");
                }
            }
            // About the mean of equal rows only rounding errors remain, of either sign.
            check(&name, &Rotation::score_optimal(&centred, &probes).unwrap(), &centred, &probes);
        }
    }
}

#[test]
fn maps_are_finite_and_inverse_for_every_pair_of_grams() {
    for dim in DIMS {
        for seed in 0..4 {
            check_pairs(dim, seed);
        }
    }
}

/// Products of the smallest components underflow next to those of the largest one.
#[test]
fn a_component_of_another_magnitude_leaves_the_basis_orthogonal() {
    for dim in [16, 33, 64, 80] {
        for (seed, [high, low]) in (0..).zip([[3e38, 1e-38], [1e38, 1e-36], [1e36, 1e-38], [1e34, 1e-38]]) {
            let rows = random::<f32>(seed, ROWS * dim);
            let scaled = rows.iter().enumerate().map(|(i, x)| x * if i % dim == 0 { high } else { low });
            let rotation = Rotation::principal(&gram(&scaled.collect::<Vec<f32>>(), dim)).unwrap();
            let error = identity_error(rotation.basis(), rotation.basis(), dim);
            assert!(error < 1e-12, "{dim} components of {high} and {low}: {error}");
            assert!(rotation.sigma().is_sorted_by(|a, b| a >= b), "{dim} components of {high} and {low}");
        }
    }
}

#[test]
fn scores_survive_a_scale_far_from_one() {
    // The maps are used in f32, with keys and queries whose scales differ by up to 1e37.
    let (dim, n) = (8, ROWS);
    let (keys, queries) = (random::<f32>(1, n * dim), random::<f32>(2, n * dim));
    for (key_scale, query_scale) in [(1.0, 1.0), (1e-12, 1e12), (1e15, 1e-15), (1e-30, 1.0), (1e18, 1e-18)] {
        let scaled = |rows: &[f32], scale: f32| rows.iter().map(|x| x * scale).collect::<Vec<f32>>();
        let (keys, queries) = (scaled(&keys, key_scale), scaled(&queries, query_scale));
        let (g_k, g_q) = (gram(&keys, dim), gram(&queries, dim));
        for rotation in
            [Rotation::score_optimal(&g_k, &g_q).unwrap(), Rotation::query_metric(&g_k, &g_q).unwrap()]
        {
            let project = |rows: &[f32], map: svd_core::MapBuf| {
                let mut out = vec![0.0; rows.len()];
                let (rows, projected) = (Rows::contiguous(rows, dim), RowsMut::contiguous(&mut out, dim));
                map.view().project_into(rows.unwrap(), projected.unwrap()).unwrap();
                out
            };
            let stored = project(&keys, rotation.basis_map(dim).unwrap());
            let probes = project(&queries, rotation.dual_map(dim).unwrap());
            let ip = |a: &[f32], b: &[f32]| {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>()
            };
            let largest = f64::from(key_scale) * f64::from(query_scale);
            for (q, probe) in queries.chunks(dim).zip(probes.chunks(dim)) {
                for (k, stored) in keys.chunks(dim).zip(stored.chunks(dim)) {
                    let difference = (ip(q, k) - ip(probe, stored)).abs();
                    assert!(difference < 1e-4 * largest, "{key_scale} {query_scale}: {difference}");
                }
            }
        }
    }
}

/// Sums near the limits of `from_sums`, of matrices that need not be positive semidefinite.
static ODD_MATRICES: LazyLock<Vec<Vec<f64>>> = LazyLock::new(|| {
    let most = 2.0 * f64::from(f32::MAX) * f64::from(f32::MAX) * u64::MAX as f64;
    [most, -most, 1e77, -1.0, 5e-324, -5e-324, 1e-300, 0.0]
        .iter()
        .flat_map(|&a| [vec![a; 4], vec![a, 0.0, 0.0, a], vec![0.0, a, a, 0.0], vec![a, 0.0, 0.0, 1.0]])
        .collect()
});

#[test]
fn any_sums_that_are_taken_give_finite_maps() {
    for a in ODD_MATRICES.iter() {
        for b in ODD_MATRICES.iter() {
            let gram = |matrix: &[f64]| Gram::<PostRope>::from_sums(2, u64::MAX, matrix, &[0.0; 2]).unwrap();
            let (a_gram, b_gram) = (gram(a), gram(b));
            let name = format!("{a:?} {b:?}");
            for rotation in [
                Rotation::score_optimal(&a_gram, &b_gram),
                Rotation::principal(&a_gram),
                Rotation::query_metric(&a_gram, &b_gram),
            ] {
                check(&name, &rotation.unwrap(), &a_gram, &b_gram);
            }
        }
    }
}

#[test]
fn sums_stay_finite_and_rows_do_not_wrap() {
    let from_sums = |rows: u64, x: f64| Gram::<PostRope>::from_sums(1, rows, &[x], &[0.0]);
    let refused = Err(Error::NotFinite { what: "sums" });
    let square = f64::from(f32::MAX) * f64::from(f32::MAX);
    assert!(from_sums(3, 3.0 * square).is_ok());
    for (rows, x) in [(1, 1e308), (0, 1.0), (3, 1e80), (u64::MAX, 1e300), (1, -1e308), (1, f64::INFINITY)] {
        assert_eq!(from_sums(rows, x), refused, "{rows} rows with {x}");
    }
    for sum in [1e40, -1e40, f64::NAN] {
        assert_eq!(Gram::<PostRope>::from_sums(1, 1, &[1.0], &[sum]), refused, "{sum}");
    }
    // The largest sum can be doubled until the row count overflows, which leaves the sum unchanged.
    let mut gram = from_sums(1, square).unwrap();
    for _ in 0..63 {
        gram.merge(&gram.clone()).unwrap();
    }
    let before = gram.clone();
    assert_eq!(gram.merge(&before), Err(Error::TooLarge));
    assert_eq!(gram, before);
    assert!(gram.matrix()[0].is_finite());
    let mut full = from_sums(u64::MAX, 1.0).unwrap();
    let before = full.clone();
    assert_eq!(full.add_rows(Rows::from(&[1.0_f32][..])), Err(Error::TooLarge));
    assert_eq!(full, before);
    full.add_rows(Rows::<f32>::contiguous(&[], 1).unwrap()).unwrap();
}

#[test]
fn the_stride_of_a_single_row_does_not_matter() {
    let row = random::<f32>(5, 16);
    for stride in [usize::MAX, usize::MAX / 2, 1 << 60] {
        let mut gram = Gram::<PostRope>::new(16).unwrap();
        gram.add_rows(Rows::new(&row, 1, 16, stride).unwrap()).unwrap();
        assert_eq!(gram, self::gram(&row, 16));
    }
}

#[test]
fn maps_too_large_for_an_error_are_refused() {
    let gram = gram(&random::<f32>(3, 20), 2);
    let rotation = Rotation::from_parts(vec![1e200; 4], vec![1e200; 4], vec![1.0; 2]).unwrap();
    assert_eq!(rotation.score_error(&gram, &gram, 1), Err(Error::NotFinite { what: "rotation" }));
}

proptest! {
    /// Ranks depend on ratios of singular values and of weights alone, at every scale.
    #[test]
    fn ranks_do_not_depend_on_the_scale(
        spectra in prop::collection::vec(prop::collection::vec(0.0_f64..1.0, 1..9), 1..5),
        exponent in -1070_i32..=1023,
        weight_exponent in -1070_i32..=1023,
        removal in 0.0_f64..=1.0,
        fraction in 0.0_f64..=1.0,
    ) {
        // Few bits, so that a scale of 2^-1070 loses none of them.
        let coarse = |x: f64| (x * 8.0).round() / 8.0;
        let spectra: Vec<Vec<f64>> = spectra.into_iter().map(|sigma| {
            let mut sigma: Vec<f64> = sigma.into_iter().map(coarse).collect();
            sigma.sort_by(|a, b| b.total_cmp(a));
            sigma
        }).collect();
        let power = |exponent: i32| 2.0_f64.powi(exponent / 2) * 2.0_f64.powi(exponent - exponent / 2);
        let scaled: Vec<Vec<f64>> =
            spectra.iter().map(|sigma| sigma.iter().map(|x| x * power(exponent)).collect()).collect();
        let weights: Vec<f64> = (0..spectra.len()).map(|h| (h % 3) as f64 / 2.0).collect();
        let scaled_weights: Vec<f64> = weights.iter().map(|x| x * power(weight_exponent)).collect();
        fn view(spectra: &[Vec<f64>]) -> Vec<&[f64]> {
            spectra.iter().map(Vec::as_slice).collect()
        }
        for (plain, scaled) in spectra.iter().zip(&scaled) {
            prop_assert_eq!(rank_for_removal(plain, removal), rank_for_removal(scaled, removal));
        }
        let budget = Budget::Fraction(fraction);
        prop_assert_eq!(
            ranks_by_removal(&view(&spectra), budget, 1),
            ranks_by_removal(&view(&scaled), budget, 1)
        );
        prop_assert_eq!(
            ranks_by_loss(&view(&spectra), &weights, budget, 1),
            ranks_by_loss(&view(&scaled), &scaled_weights, budget, 1)
        );
    }
}

#[test]
fn spectra_at_the_end_of_the_range_keep_their_ranks() {
    assert_eq!(rank_for_removal(&[1e308; 3], 0.0), Ok(3));
    assert_eq!(rank_for_removal(&[f64::MAX; 4], 0.5), Ok(2));
    assert_eq!(rank_for_removal(&[f64::MAX, 1.0, 5e-324], 1e-9), Ok(1));
    let heads: [&[f64]; 2] = [&[f64::MAX; 3], &[f64::MAX, 1.0, 1.0]];
    assert_eq!(ranks_by_removal(&heads, Budget::Fraction(0.67), 1), Ok(vec![3, 1]));
    // A weight of 0 wins nothing, however large the values.
    let fraction = Budget::Fraction(0.67);
    assert_eq!(ranks_by_loss(&[&[f64::MAX; 3], &[1e200; 3]], &[0.0, 1.0], fraction, 1), Ok(vec![1, 3]));
    assert_eq!(ranks_by_loss(&[&[1e200; 3], &[1e201; 3]], &[f64::MAX; 2], fraction, 1), Ok(vec![1, 3]));
}
