//! Rows of lower rank without a cache around them: attention is that of a cache, and what does not fit is an
//! error.

use half::f16;
use svd_core::*;

use super::owners::{DIM, DIM_V, decaying, maps};
use super::support::{backends, random};

/// The tokens of head 0, without a cache around them.
fn reduced<E: Element>(folded: bool, n: usize) -> (ReducedRows<E>, Vec<f32>, Vec<f32>) {
    let mut reduced = ReducedRows::new(maps(folded)[0].clone());
    let (keys, values) = (decaying(41, n, 1, DIM), decaying(42, n, 1, DIM_V));
    let rows = [Rows::contiguous(&keys, DIM), Rows::contiguous(&values, DIM_V)].map(Result::unwrap);
    reduced.append(Backend::detect(), rows[0], rows[1]).unwrap();
    (reduced, keys, values)
}

#[test]
fn rows_without_a_cache_attend_to_any_range_as_a_cache_with_a_sliding_window_does() {
    for (folded, n) in [(false, 150), (true, 70)] {
        let (reduced, keys, values) = reduced::<f32>(folded, n);
        let mut cache =
            LowRankHeadCache::new(reduced.maps().clone(), Window { sinks: 0, recent: 0, batch: 1 });
        let rows = [Rows::contiguous(&keys, DIM), Rows::contiguous(&values, DIM_V)].map(Result::unwrap);
        cache.append(rows[0], rows[1]).unwrap();
        assert_eq!((cache.store().rows(), cache.size()), (reduced.rows(), reduced.size()));
        let queries = random::<f32>(43, 70 * DIM); // more than go through the rows together
        for (backend, first) in backends().flat_map(|backend| [0, 1, 63, 64, n - 1].map(|t| (backend, t))) {
            let mut scratch = vec![f32::NAN; cache.scratch_len(1, 70)];
            let mut both = [vec![0.0; 70 * DIM_V], vec![0.0; 70 * DIM_V]];
            let mut stats = [[SoftmaxStats::EMPTY; 70]; 2];
            let attention =
                Attention { window: Some(n - first), softcap: Some(3.0), ..Attention::scaled(1.0) };
            let (cap, [out, expected]) = (attention.softcap, &mut both);
            reduced.attend_into(backend, &queries, first..n, cap, &mut scratch, out, &mut stats[0]).unwrap();
            let rows = Rows::from(&queries[..]);
            let stats = &mut stats[1];
            cache.attend_into_with(backend, &attention, rows, &mut scratch, expected, stats).unwrap();
            for (x, expected) in out.iter().zip(expected) {
                assert!((*x - *expected).abs() < 1e-5 * (1.0 + expected.abs()), "{backend:?} from {first}");
            }
        }
    }
}

#[test]
fn wide_rows_are_rounded_once_and_saturate() {
    for folded in [false, true] {
        let ((half, keys, values), (single, ..)) = (reduced::<f16>(folded, 40), reduced::<f32>(folded, 40));
        for (half, single) in half.rows().into_iter().zip(single.rows()) {
            assert!(half.iter().zip(single).all(|(x, &single)| *x == f16::from_f32(single)));
        }
        let maps = half.maps();
        let rows = Rows::contiguous(&keys, DIM).unwrap();
        assert_eq!(maps.keys().reduce::<_, f16>(Backend::detect(), rows).unwrap(), half.rows()[0]);
        assert_eq!(maps.size(), 4 * 2 * if folded { 8 * 5 } else { 8 * 5 + 6 * 3 });
        let large: Vec<f32> = values.iter().map(|x| x.signum() * 3e38).collect();
        let large = Rows::contiguous(&large, DIM_V).unwrap();
        let stored = maps.values().reduce::<_, f16>(Backend::detect(), large).unwrap();
        assert!(stored.iter().all(|x| x.is_finite()) && stored.contains(&f16::MAX), "{stored:?}");
    }
}

#[test]
fn arguments_that_do_not_fit_rows_are_errors() {
    let (mut reduced, keys, values) = reduced::<f32>(false, 30);
    let rows = |n: usize, dim: usize| Rows::contiguous(&keys[..n * dim], dim).unwrap();
    assert!(reduced.append(Backend::detect(), rows(2, DIM), rows(1, DIM_V)).is_err());
    assert!(reduced.append(Backend::detect(), rows(1, DIM + 1), rows(1, DIM_V)).is_err());
    assert!(reduced.append(Backend::detect(), rows(1, DIM), rows(1, DIM_V + 1)).is_err());
    assert_eq!((reduced.len(), reduced.rows()[1].len()), (30, 30 * 3));
    let enough = reduced.scratch_len(1);
    let attend = |q: usize, range, softcap, scratch: usize, out: usize| {
        let (mut scratch, mut out) = (vec![0.0; scratch], vec![7.0; out]);
        let (stats, queries) = (&mut [SoftmaxStats::EMPTY; 1], &values[..q]);
        let done =
            reduced.attend_into(Backend::Scalar, queries, range, softcap, &mut scratch, &mut out, stats);
        assert!(done.is_ok() || (out.iter().all(|&x| x == 7.0) && stats[0] == SoftmaxStats::EMPTY));
        done.is_ok()
    };
    assert!(attend(DIM, 0..30, None, enough, DIM_V) && attend(DIM, 30..30, None, enough, DIM_V));
    assert!(!attend(DIM + 1, 0..30, None, enough, DIM_V) && !attend(DIM, 0..31, None, enough, DIM_V));
    assert!(!attend(DIM, 3..30, None, enough - 1, DIM_V) && !attend(DIM, 0..30, None, enough, DIM_V + 1));
    assert!(!attend(DIM, 0..30, Some(f32::NAN), enough, DIM_V));
    let maps = reduced.maps();
    let mut out = [0.0; 4];
    assert!(maps.keys().project_queries(Backend::detect(), rows(1, DIM), &mut out).is_err());
    assert!(maps.keys().reduce::<_, f32>(Backend::detect(), rows(1, DIM - 1)).is_err());
}
