//! Rotations are exact at full rank, have the least error in the closed form, and fold exactly.

use proptest::prelude::*;
use svd_core::{
    Budget, Error, Gram, NoRope, PostRope, PreRope, Rotation, Rows, RowsMut, balanced_order,
    rank_for_removal, ranks_by_loss, ranks_by_removal,
};

use super::support::random;

const DIM: usize = 6;

/// Correlated rows: (n, DIM) with shrinking scale per component, mixed by a fixed matrix.
fn rows(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    random::<f32>(seed, n * DIM)
        .chunks_exact(DIM)
        .flat_map(|row| {
            let x: [f32; DIM] = core::array::from_fn(|d| row[d] * scale / (1 << d) as f32);
            core::array::from_fn::<f32, DIM, _>(|d| x[d] + 0.5 * x[(d + 1) % DIM])
        })
        .collect()
}

fn gram(rows: &[f32]) -> Gram<PostRope> {
    let mut gram = Gram::new(DIM).unwrap();
    gram.add_rows(Rows::contiguous(rows, DIM).unwrap()).unwrap();
    gram
}

/// Mean squared score error over all pairs at `rank`.
fn score_error(rotation: &Rotation, queries: &[f32], keys: &[f32], rank: usize) -> f64 {
    let (key_map, query_map) = (rotation.basis_map(rank).unwrap(), rotation.dual_map(rank).unwrap());
    let project = |map: &svd_core::MapBuf, x: &[f32]| {
        let mut out = vec![0.0; rank];
        map.view().project_into(Rows::from(x), RowsMut::from(&mut out[..])).unwrap();
        out
    };
    let ip = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum::<f64>();
    let mut total = 0.0;
    for q in queries.chunks(DIM) {
        let projected = project(&query_map, q);
        for k in keys.chunks(DIM) {
            total += (ip(q, k) - ip(&projected, &project(&key_map, k))).powi(2);
        }
    }
    total / (queries.len() / DIM * (keys.len() / DIM)) as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_joint_query_metric_is_that_of_each_head_and_decorrelates_all(
        seed in any::<u64>(),
        (scale, weight) in (0.1_f32..10.0, 0.1_f64..10.0),
    ) {
        const ALL: usize = 2 * DIM;
        let queries = [rows(60, seed, scale), rows(50, seed ^ 2, 1.0)];
        // The second head repeats the first one, with noise.
        let (first, noise) = (rows(200, seed ^ 1, 1.0), rows(200, seed ^ 3, 0.3));
        let both: Vec<f32> = first
            .chunks_exact(DIM)
            .zip(noise.chunks_exact(DIM))
            .flat_map(|(x, n)| x.iter().copied().chain(x.iter().zip(n).map(|(x, n)| x + n)))
            .collect();
        let mut keys = Gram::<PostRope>::new(ALL).unwrap();
        keys.add_rows(Rows::contiguous(&both, ALL).unwrap()).unwrap();
        let (keys, metrics) = (keys.centred(), [gram(&queries[0]), gram(&queries[1])]);
        let weights = [1.0, weight];
        let rotation = Rotation::joint_query_metric(&keys, &[(&metrics[0], 1.0), (&metrics[1], weight)]).unwrap();
        let (a, b, c) = (rotation.basis(), rotation.dual(), keys.matrix());
        let metric: Vec<f64> = (0..ALL * ALL).map(|i| (i / ALL, i % ALL)).map(|(r, s)| {
            let head = r / DIM;
            let gram = metrics[head].matrix()[r % DIM * DIM + s % DIM];
            if s / DIM == head { gram * weights[head] / (metrics[head].rows() as f64 * DIM as f64) } else { 0.0 }
        }).collect();
        let dot = |f: &dyn Fn(usize) -> f64| (0..ALL).map(f).sum::<f64>();
        let largest = metric.iter().copied().fold(0.0, f64::max);
        for r in 0..ALL {
            for s in 0..ALL {
                // B A^T = I; A A^T is the metric; A^T C A is diagonal.
                let unit = f64::from(u8::from(r == s));
                prop_assert!((dot(&|i| b[r * ALL + i] * a[s * ALL + i]) - unit).abs() < 1e-6);
                let weight = dot(&|i| a[r * ALL + i] * a[s * ALL + i]);
                prop_assert!((weight - metric[r * ALL + s]).abs() < 1e-5 * largest);
                let times_c = |j: usize| dot(&|i| a[i * ALL + r] * c[i * ALL + j]);
                let covariance = dot(&|j| times_c(j) * a[j * ALL + s]) / 200.0;
                let expected = unit * rotation.sigma()[r].powi(2);
                prop_assert!((covariance - expected).abs() < 1e-9 * rotation.sigma()[0].powi(2));
            }
        }
        // What both heads have is in the first components: the error of half of them is below that of halves of
        // the heads' own.
        let lost = |sigma: &[f64]| sigma[sigma.len() / 2..].iter().map(|x| x * x).sum::<f64>();
        let own: f64 = (0..2).map(|head| {
            let rows: Vec<f32> = both.chunks_exact(ALL).flat_map(|row| row[head * DIM..][..DIM].to_vec()).collect();
            let one = Rotation::query_metric(&gram(&rows).centred(), &metrics[head]).unwrap();
            lost(one.sigma()) * weights[head]
        }).sum();
        prop_assert!(lost(rotation.sigma()) < own * (1.0 + 1e-6), "{} {own}", lost(rotation.sigma()));
    }

    #[test]
    fn the_query_metric_makes_equal_errors_cost_equally(seed in any::<u64>(), scale in 0.1_f32..10.0) {
        let (queries, keys) = (rows(60, seed, scale), rows(80, seed ^ 1, 1.0));
        let rotation = Rotation::query_metric(&gram(&keys).centred(), &gram(&queries)).unwrap();
        let order = balanced_order(rotation.sigma(), 3).unwrap();
        let rotation = rotation.reordered(&order).unwrap();
        prop_assert!(score_error(&rotation, &queries, &keys, DIM) < 1e-6 * f64::from(scale * scale).max(1.0));
        // Components are uncorrelated, with the deviations in sigma; B reconstructs rows.
        let mut coded = vec![0.0; keys.len()];
        let (rows, out) = (Rows::contiguous(&keys, DIM).unwrap(), RowsMut::contiguous(&mut coded, DIM).unwrap());
        rotation.basis_map(DIM).unwrap().view().project_into(rows, out).unwrap();
        let covariance = gram(&coded).centred().matrix();
        let largest = rotation.sigma().iter().copied().fold(0.0, f64::max).powi(2);
        for r in 0..DIM {
            for c in 0..DIM {
                let expected = if r == c { rotation.sigma()[r].powi(2) } else { 0.0 };
                prop_assert!((covariance[r * DIM + c] / 80.0 - expected).abs() < 1e-4 * largest);
            }
        }
        let mut back = vec![0.0; keys.len()];
        rotation.dual_map(DIM).unwrap().view().reconstruct_into(&coded, &mut back).unwrap();
        prop_assert!(back.iter().zip(&keys).all(|(a, b)| (a - b).abs() < 1e-3));
        // An error of 1 in any component costs the same, averaged over the queries: `dim` squared.
        for c in 0..DIM {
            let cost: f64 = queries.chunks(DIM).map(|q| {
                let mut probe = [0.0; DIM];
                let out = RowsMut::from(&mut probe[..]);
                rotation.dual_map(DIM).unwrap().view().project_into(Rows::from(q), out).unwrap();
                f64::from(probe[c]).powi(2)
            }).sum::<f64>() / 60.0;
            prop_assert!((cost - DIM as f64).abs() < 1e-2 * DIM as f64, "{cost}");
        }
    }

    #[test]
    fn closed_form_is_never_worse(seed in any::<u64>(), scale in 0.1_f32..10.0, rank in 1_usize..DIM) {
        let (queries, keys) = (rows(20, seed, scale), rows(40, seed ^ 1, 1.0));
        let (g_q, g_k) = (gram(&queries), gram(&keys));
        let best = Rotation::score_optimal(&g_k, &g_q).unwrap();
        let stacked = Rotation::stacked(&g_k, &g_q).unwrap();
        let (a, b) = (score_error(&best, &queries, &keys, rank), score_error(&stacked, &queries, &keys, rank));
        prop_assert!(a <= b * 1.001 + 1e-9, "{a} against {b}");
        prop_assert!(score_error(&best, &queries, &keys, DIM) < 1e-7 * f64::from(scale * scale).max(1.0));
    }

    #[test]
    fn the_error_from_the_grams_is_that_of_the_scores(seed in any::<u64>(), rank in 1..=DIM) {
        let (queries, keys) = (rows(20, seed, 1.0), rows(40, seed ^ 1, 1.0));
        let (g_q, g_k) = (gram(&queries), gram(&keys));
        for rotation in [Rotation::score_optimal(&g_k, &g_q), Rotation::stacked(&g_k, &g_q), Rotation::principal(&g_k)] {
            let rotation = rotation.unwrap();
            let nothing = Rotation::from_parts(vec![0.0; DIM * DIM], vec![0.0; DIM * DIM], vec![0.0; DIM]).unwrap();
            let direct = score_error(&rotation, &queries, &keys, rank) / score_error(&nothing, &queries, &keys, 1);
            let error = rotation.score_error(&g_k, &g_q, rank).unwrap();
            prop_assert!((error - direct.sqrt()).abs() < 1e-5, "{error} {}", direct.sqrt());
        }
    }

    #[test]
    fn the_closed_form_is_the_best_of_its_rank(seed in any::<u64>(), rank in 1..DIM) {
        // No matrix of that rank has a smaller error than the dropped singular values (Eckart, Young).
        let (queries, keys) = (rows(20, seed, 1.0), rows(30, seed ^ 1, 1.0));
        let (g_q, g_k) = (gram(&queries), gram(&keys));
        let rotation = Rotation::score_optimal(&g_k, &g_q).unwrap();
        let squares: f64 = queries.chunks(DIM).flat_map(|q| keys.chunks(DIM).map(move |k| {
            q.iter().zip(k).map(|(&q, &k)| f64::from(q) * f64::from(k)).sum::<f64>().powi(2)
        })).sum();
        let all: f64 = rotation.sigma().iter().map(|s| s * s).sum();
        prop_assert!((all - squares).abs() < 1e-9 * squares);
        let least = (rotation.sigma()[rank..].iter().map(|s| s * s).sum::<f64>() / squares).sqrt();
        let error = rotation.score_error(&g_k, &g_q, rank).unwrap();
        prop_assert!((error - least).abs() < 1e-7, "{error} {least}");
    }

    #[test]
    fn the_closed_form_does_not_depend_on_the_scale_of_keys(seed in any::<u64>(), rank in 1..DIM) {
        let (queries, keys) = (rows(30, seed, 1.0), rows(30, seed ^ 1, 1.0));
        let scaled: Vec<f32> = keys.iter().map(|x| x * 64.0).collect();
        let error = |keys: &[f32]| {
            let rotation = Rotation::score_optimal(&gram(keys), &gram(&queries)).unwrap();
            rotation.score_error(&gram(keys), &gram(&queries), rank).unwrap()
        };
        prop_assert!((error(&keys) - error(&scaled)).abs() < 1e-7);
    }

    #[test]
    fn principal_directions_hold_what_so_many_can(seed in any::<u64>(), rank in 1..DIM) {
        let gram = gram(&rows(50, seed, 1.0));
        let rotation = Rotation::principal(&gram).unwrap();
        // The trace is invariant, and each direction's energy is its squared singular value.
        let total: f64 = (0..DIM).map(|d| gram.matrix()[d * DIM + d]).sum();
        let kept: f64 = rotation.sigma()[..rank].iter().map(|s| s * s).sum();
        let all: f64 = rotation.sigma().iter().map(|s| s * s).sum();
        prop_assert!((all - total).abs() < 1e-12 * total && kept <= total);
        let energy: f64 = (0..rank).map(|c| {
            let direction: Vec<f64> = (0..DIM).map(|d| rotation.basis()[d * DIM + c]).collect();
            let matrix = gram.matrix();
            (0..DIM * DIM).map(|i| direction[i / DIM] * matrix[i] * direction[i % DIM]).sum::<f64>()
        }).sum();
        prop_assert!((energy - kept).abs() < 1e-11 * total);
    }

    #[test]
    fn folded_weights_equal_projected_vectors(seed in any::<u64>(), rank in 1..=DIM) {
        let mut values = Gram::<NoRope>::new(DIM).unwrap();
        values.add_rows(Rows::contiguous(&rows(30, seed, 1.0), DIM).unwrap()).unwrap();
        let mut outputs = Gram::new(DIM).unwrap();
        outputs.add_rows(Rows::contiguous(&rows(30, seed ^ 9, 2.0), DIM).unwrap()).unwrap();
        let rotation = Rotation::score_optimal(&values, &outputs).unwrap();
        let (w_v, w_o) = (rows(4, seed ^ 2, 1.0), rows(3, seed ^ 3, 1.0)); // (DIM, 4) and (3, DIM)
        let (v_rows, o_rows) = (Rows::contiguous(&w_v, 4).unwrap(), Rows::contiguous(&w_o, DIM).unwrap());
        let x = [0.3, -1.0, 0.7, 2.0];
        let apply = |w: &[f32], x: &[f32]| -> Vec<f32> {
            w.chunks(x.len()).map(|row| row.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
        };
        let v = apply(&w_v, &x);
        // Folding and projecting give the same components.
        for (folded, map) in [
            (rotation.fold_basis(v_rows, rank).unwrap(), rotation.basis_map(rank).unwrap()),
            (rotation.fold_dual(v_rows, rank).unwrap(), rotation.dual_map(rank).unwrap()),
        ] {
            let mut projected = vec![0.0; rank];
            map.view().project_into(Rows::from(&v[..]), RowsMut::from(&mut projected[..])).unwrap();
            for (a, b) in projected.iter().zip(apply(&folded, &x)) {
                prop_assert!((a - b).abs() < 1e-3 * (1.0 + a.abs()), "{a} {b}");
            }
        }
        if rank == DIM {
            let folded = apply(&rotation.fold_output(o_rows, rank).unwrap(), &apply(&rotation.fold_basis(v_rows, rank).unwrap(), &x));
            for (a, b) in apply(&w_o, &v).iter().zip(&folded) {
                prop_assert!((a - b).abs() < 1e-3 * (1.0 + a.abs()), "{a} {b}");
            }
        }
    }

    #[test]
    fn ranks_meet_budgets_and_are_nested(
        decays in prop::collection::vec(0.0_f64..0.5, 1..8),
        dim in 1_usize..40,
        multiple in 1_usize..20,
        fractions in prop::collection::vec(0.0_f64..=1.0, 2),
    ) {
        let spectra: Vec<Vec<f64>> =
            decays.iter().map(|decay| (0..dim).map(|c| (-decay * c as f64).exp()).collect()).collect();
        let heads: Vec<&[f64]> = spectra.iter().map(Vec::as_slice).collect();
        let weights: Vec<f64> = (0..heads.len()).map(|h| 1.0 + h as f64).collect();
        let least = heads.len() * multiple.min(dim);
        for rule in [
            &|budget| ranks_by_removal(&heads, budget, multiple) as Result<Vec<usize>, Error>,
            &|budget| ranks_by_loss(&heads, &weights, budget, multiple),
        ] as [&dyn Fn(Budget) -> Result<Vec<usize>, Error>; 2] {
            let mut smaller = vec![0; heads.len()];
            let mut fractions = fractions.clone();
            fractions.sort_by(f64::total_cmp);
            for fraction in fractions {
                let components = (fraction * (dim * heads.len()) as f64) as usize;
                match rule(Budget::Fraction(fraction)) {
                    Err(error) => prop_assert_eq!(error, Error::Budget { least, components }),
                    Ok(ranks) => {
                        prop_assert!(components >= least && ranks.iter().sum::<usize>() <= components);
                        prop_assert!(ranks.iter().all(|&r| r == dim || r % multiple == 0), "{:?}", ranks);
                        prop_assert!(ranks.iter().zip(&smaller).all(|(a, b)| a >= b), "{:?} {:?}", ranks, smaller);
                        smaller = ranks;
                    }
                }
            }
            prop_assert_eq!(rule(Budget::Fraction(1.0)).unwrap(), vec![dim; heads.len()]);
        }
    }

    #[test]
    fn loss_allocation_is_the_best_of_all(seed in any::<u64>(), budget in 3_usize..=12) {
        let sigma = |h: u64| -> Vec<f64> {
            let mut sigma: Vec<f64> = rows(1, seed ^ h, 1.0)[..4].iter().map(|x| f64::from(x.abs())).collect();
            sigma.sort_by(|a, b| b.total_cmp(a));
            sigma
        };
        let spectra = [sigma(1), sigma(2), sigma(3)];
        let heads = spectra.each_ref().map(Vec::as_slice);
        let weights = [1.0, 2.0, 0.5];
        let loss = |ranks: &[usize]| -> f64 {
            (0..3).map(|h| weights[h] * heads[h][ranks[h]..].iter().map(|x| x * x).sum::<f64>()).sum()
        };
        let best = (0..64)
            .map(|i| [1 + i % 4, 1 + i / 4 % 4, 1 + i / 16])
            .filter(|ranks| ranks.iter().sum::<usize>() <= budget)
            .map(|ranks| loss(&ranks))
            .fold(f64::INFINITY, f64::min);
        let ranks = ranks_by_loss(&heads, &weights, Budget::Bytes { per_token: 2 * budget, per_component: 2 }, 1).unwrap();
        prop_assert!(loss(&ranks) <= best + 1e-12, "{:?}: {} above {}", ranks, loss(&ranks), best);
    }
}

#[test]
fn removal_rate_of_the_paper() {
    let heads: [&[f64]; 2] = [&[10.0, 1.0, 0.1, 0.01], &[4.0, 3.0, 2.0, 1.0]];
    assert_eq!(rank_for_removal(heads[1], 0.3), Ok(2)); // 1 + 2 of 10
    assert_eq!(rank_for_removal(heads[1], 0.29), Ok(3));
    assert_eq!(rank_for_removal(&[0.0; 3], 0.0), Ok(1)); // nothing is lost
    assert_eq!(ranks_by_removal(&heads, Budget::Fraction(0.5), 1), Ok(vec![1, 3]));
    assert_eq!(ranks_by_removal(&heads, Budget::Fraction(1.0), 1), Ok(vec![4, 4]));
}

#[test]
fn bad_input_is_an_error() {
    assert!(Gram::<PreRope>::new(0).is_err() && Gram::<PreRope>::new(usize::MAX / 2).is_err());
    assert_eq!(Gram::<PreRope>::new(1 << 20), Err(Error::TooLarge));
    let mut gram = Gram::<PreRope>::new(3).unwrap();
    let wide = Rows::contiguous(&[1.0_f32; 4], 4).unwrap();
    assert_eq!(gram.add_rows(wide), Err(Error::Length { what: "row", expected: 3, actual: 4 }));
    assert_eq!(gram.add_rows(Rows::<f32>::contiguous(&[], 3).unwrap()), Ok(()));
    for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        assert_eq!(gram.add_rows(Rows::from(&[1.0, x, 1.0][..])), Err(Error::NotFinite { what: "rows" }));
    }
    let wide = [f32::MAX, 1.0, 2.0, f32::NAN]; // elements outside the columns are not read
    gram.add_rows(Rows::from(&wide[..]).columns(0, 3).unwrap()).unwrap();
    assert_eq!(gram.rows(), 1);
    let other = Gram::new(2).unwrap();
    assert!(gram.clone().merge(&other).is_err());
    assert!(Rotation::score_optimal(&gram, &other).is_err());
    assert!(Rotation::from_parts(vec![0.0; 4], vec![0.0; 3], vec![1.0; 2]).is_err());
    let rotation = Rotation::principal(&gram).unwrap();
    assert_eq!(rotation.basis_map(4), Err(Error::Rank { rank: 4, dim: 3 }));
    assert_eq!(rotation.dual_map(0), Err(Error::Zero { what: "rank" }));
    let wide = Rows::from(&[1.0_f32; 7][..]);
    assert!(rotation.fold_basis(wide, 2).is_err() && rotation.fold_output(wide, 2).is_err());
    assert_eq!(rotation.fold_output(Rows::<f32>::contiguous(&[], 3).unwrap(), 3), Ok(vec![]));
    let fraction = Budget::Fraction(0.5);
    for sigma in [&[1.0, 2.0][..], &[f64::NAN], &[-1.0], &[f64::INFINITY], &[]] {
        assert!(rank_for_removal(sigma, 0.1).is_err(), "{sigma:?}");
        assert!(ranks_by_removal(&[sigma], fraction, 1).is_err(), "{sigma:?}");
    }
    assert!(rank_for_removal(&[1.0], f64::NAN).is_err() && ranks_by_removal(&[], fraction, 1).is_err());
    assert!(ranks_by_removal(&[&[1.0; 4]], Budget::Fraction(1.5), 1).is_err());
    assert!(ranks_by_removal(&[&[1.0; 4]], fraction, 0).is_err());
    assert!(ranks_by_loss(&[&[1.0; 4]], &[f64::NAN], fraction, 1).is_err());
    assert_eq!(ranks_by_removal(&[&[1.0; 4]], Budget::Fraction(1.0), usize::MAX), Ok(vec![4]));
    assert!(ranks_by_removal(&[&[1.0; 4]], Budget::Bytes { per_token: 9, per_component: 0 }, 1).is_err());
}

#[test]
fn sums_made_elsewhere_are_taken() {
    let rows: Vec<f32> = (0..20 * 9).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut gram = Gram::<PreRope>::new(20).unwrap();
    gram.add_rows(Rows::contiguous(&rows, 20).unwrap()).unwrap();
    let sums: Vec<f64> = gram.mean().iter().map(|mean| mean * 9.0).collect();
    let taken = Gram::<PreRope>::from_sums(20, 9, &gram.matrix(), &sums).unwrap();
    assert_eq!((taken.rows(), taken.matrix()), (9, gram.matrix()));
    assert!(taken.mean().iter().zip(gram.mean()).all(|(a, b)| (a - b).abs() < 1e-15));
    let with = |matrix: &[f64], sums: &[f64]| Gram::<PreRope>::from_sums(2, 1, matrix, sums);
    assert!(matches!(with(&[1.0; 3], &[0.0; 2]), Err(Error::Length { .. })));
    assert!(matches!(with(&[1.0; 4], &[0.0; 3]), Err(Error::Length { .. })));
    assert!(matches!(with(&[f64::NAN; 4], &[0.0; 2]), Err(Error::NotFinite { .. })));
}

#[test]
fn orders_that_are_no_permutation_are_errors() {
    let rotation = Rotation::stacked(&gram(&rows(9, 1, 1.0)), &gram(&rows(9, 2, 1.0))).unwrap();
    assert_eq!(rotation.reordered(&[0, 1, 2, 3, 4, 4]), Err(Error::Order { component: 4 }));
    assert_eq!(rotation.reordered(&[0, 1, 2, 3, 4, 6]), Err(Error::Order { component: 6 }));
    assert!(matches!(rotation.reordered(&[0]), Err(Error::Length { .. })));
    assert!(balanced_order(&[1.0; 6], 4).is_err() && balanced_order(&[1.0; 6], 0).is_err());
    assert!(balanced_order(&[], usize::MAX).is_err());
    assert_eq!(balanced_order(&[0.0; 4], 2).unwrap().len(), 4);
}
