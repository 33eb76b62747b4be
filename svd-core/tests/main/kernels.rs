//! Every backend against the formula in `f64`; Grams bit for bit.

use half::{bf16, f16};
use proptest::prelude::*;
use svd_core::{Element, Gram, Map, PostRope, Rows, RowsMut};

use super::support::{backends, random};

/// Largest relative error of a sum of `n` terms in `f32`, with room for the backends' different orders.
fn tolerance(n: usize) -> f64 {
    1e-6 * (4.0 + (n as f64).sqrt())
}

fn ip<A: Element, B: Element>(a: &[A], b: &[B]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum()
}

fn one<E>(row: &[E; 1]) -> Rows<'_, E> {
    Rows::from(&row[..])
}

fn one_mut(x: &mut f32) -> RowsMut<'_, f32> {
    RowsMut::from(core::slice::from_mut(x))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn projection_equals_the_formula(
        n in 0_usize..12, dim in 1_usize..70, rank in 1_usize..70, seed in any::<u64>(),
    ) {
        let rank = rank.min(dim);
        // Of the second of three heads, into every third row of a cache.
        fn check<E: Element, O: Element>(columns: &[f32], [n, dim, rank]: [usize; 3], seed: u64, ulp: f64) {
            let map = Map::new(columns, dim, rank).unwrap();
            let rows = random::<E>(seed, n * 3 * dim);
            let rows = Rows::new(&rows, n, 3 * dim, 3 * dim).unwrap().columns(dim, dim).unwrap();
            for backend in backends() {
                let mut cache = vec![O::from_f32(f32::NAN); n * 3 * rank];
                let mut out = RowsMut::new(&mut cache, n, rank, 3 * rank).unwrap();
                map.project_into_with(backend, rows, out.reborrow()).unwrap();
                for (row, out) in rows.iter().zip(out.as_rows().iter()) {
                    for (c, x) in out.iter().enumerate() {
                        let column: Vec<f32> = columns.iter().skip(c).step_by(rank).copied().collect();
                        let exact = ip(row, &column);
                        let bound = tolerance(dim) * (dim as f64).sqrt() + ulp * exact.abs();
                        assert!((exact - f64::from(x.to_f32())).abs() < bound, "{backend:?}");
                    }
                }
                let gaps = cache.chunks_exact(3 * rank).flat_map(|rows| &rows[rank..]);
                assert!(gaps.into_iter().all(|x| x.to_f32().is_nan()), "{backend:?}");
            }
        }
        let columns = random::<f32>(seed, dim * rank);
        check::<bf16, f32>(&columns, [n, dim, rank], seed ^ 1, 0.0);
        check::<f32, f16>(&columns, [n, dim, rank], seed ^ 1, 1.0 / 2048.0);
        check::<f16, bf16>(&columns, [n, dim, rank], seed ^ 1, 1.0 / 256.0);
    }

    #[test]
    fn reconstruction_equals_the_formula(
        n in 0_usize..12, dim in 1_usize..70, rank in 1_usize..70, seed in any::<u64>(),
    ) {
        let rank = rank.min(dim);
        let (columns, rows) = (random::<f32>(seed, dim * rank), random::<f32>(seed ^ 1, n * rank));
        let map = Map::new(&columns, dim, rank).unwrap();
        for backend in backends() {
            let mut out = vec![f32::NAN; n * dim];
            map.reconstruct_into_with(backend, &rows, &mut out).unwrap();
            for (row, out) in rows.chunks(rank).zip(out.chunks(dim)) {
                for (column, &x) in columns.chunks(rank).zip(out) {
                    prop_assert!((ip(row, column) - f64::from(x)).abs() < tolerance(rank) * (rank as f64).sqrt());
                }
            }
        }
    }

    #[test]
    fn grams_have_the_same_bits_everywhere(
        n in 0_usize..300, dim in 1_usize..50, left in 0_usize..5, right in 0_usize..5, seed in any::<u64>(),
    ) {
        fn check<E: Element>(n: usize, dim: usize, left: usize, row_len: usize, seed: u64) {
            let rows = random::<E>(seed, n * row_len);
            let grams: Vec<Gram<PostRope>> = backends().map(|backend| {
                let mut gram = Gram::new(dim).unwrap();
                let rows = Rows::contiguous(&rows, row_len).unwrap().columns(left, dim).unwrap();
                gram.add_rows_with(backend, rows).unwrap();
                gram
            }).collect();
            for gram in &grams {
                assert_eq!(gram, &grams[0]);
            }
            let (matrix, centred, mean) = (grams[0].matrix(), grams[0].centred().matrix(), grams[0].mean());
            let column = |c: usize| rows.iter().skip(left + c).step_by(row_len).map(|x| f64::from(x.to_f32()));
            for r in 0..dim {
                let average = column(r).sum::<f64>() / n.max(1) as f64;
                assert!((mean[r] - average).abs() < 1e-12);
                for c in 0..dim {
                    let exact: f64 = column(r).zip(column(c)).map(|(x, y)| x * y).sum();
                    assert!((matrix[r * dim + c] - exact).abs() < 1e-10);
                    let about = exact - n as f64 * mean[r] * mean[c];
                    assert!((centred[r * dim + c] - about).abs() < 1e-10);
                }
            }
        }
        let row_len = left + dim + right;
        check::<f32>(n, dim, left, row_len, seed);
        check::<f16>(n, dim, left, row_len, seed);
        check::<bf16>(n, dim, left, row_len, seed);
    }
}

#[test]
fn every_half_is_widened_exactly() {
    for bits in 0..=u16::MAX {
        let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
        for backend in backends() {
            let columns = [1.0];
            let map = Map::new(&columns, 1, 1).unwrap();
            let mut out = [0.0; 2];
            let [a, b] = &mut out;
            map.project_into_with(backend, one(&[half]), one_mut(a)).unwrap();
            map.project_into_with(backend, one(&[brain]), one_mut(b)).unwrap();
            for (x, y) in out.iter().zip([half.to_f32(), brain.to_f32()]) {
                assert!(*x == y || x.is_nan() && y.is_nan(), "{backend:?} {bits:#x}: {x} {y}");
            }
        }
    }
}

#[test]
fn long_sums_do_not_depend_on_how_chunks_are_spread() {
    let rows = random::<f32>(5, 3 * 10_000);
    let mut whole = Gram::<PostRope>::new(3).unwrap();
    whole.add_rows(Rows::contiguous(&rows, 3).unwrap()).unwrap();
    // Chunks of 4,096 rows, as `add_rows` sums them.
    let mut parts = Gram::new(3).unwrap();
    for rows in rows.chunks(3 * 4096) {
        let mut part = Gram::new(3).unwrap();
        part.add_rows(Rows::contiguous(rows, 3).unwrap()).unwrap();
        parts.merge(&part).unwrap();
    }
    assert_eq!(whole, parts);
}

#[test]
fn bad_shapes_are_errors() {
    assert!(
        Map::new(&[1.0; 6], 2, 3).is_err()
            && Map::new(&[], 2, 0).is_err()
            && Map::new(&[1.0; 3], 2, 1).is_err()
    );
    let map = Map::new(&[1.0; 2], 2, 1).unwrap();
    let project = |rows: Rows<'_, f32>, out: &mut [f32], rank| {
        map.project_into(rows, RowsMut::contiguous(out, rank).unwrap())
    };
    let three = [1.0; 4];
    assert!(project(Rows::from(&three[..3]), &mut [0.0], 1).is_err());
    assert!(project(Rows::from(&three[..2]), &mut [0.0; 2], 2).is_err());
    assert!(project(Rows::contiguous(&three, 2).unwrap(), &mut [0.0], 1).is_err());
    assert!(Map::new(&[1.0; 2], 2, 1).unwrap().reconstruct_into(&[1.0; 2], &mut [0.0; 2]).is_err());
}
