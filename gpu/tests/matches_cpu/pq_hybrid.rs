//! Hybrid attention agrees with `pq_core::hybrid_select_into`, `pq_core::hybrid_attend_into` and
//! `pq_core::attend_exact_into`.

mod case;
mod lead;

use kv_gpu::pq::{HybridShape, TILE};
use kv_gpu::{Device, Element, Error};
use pq_core::{GroupRule, PqShape};

use crate::common::{Random, device};
use case::{Case, Index};

fn run(device: &Device, seeds: std::ops::Range<u64>, change: impl Fn(&mut Case), spoil: impl Fn(&mut [f32])) {
    for seed in seeds {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        change(&mut case);
        let inputs = case.inputs(&mut random, &spoil);
        let graph = case.index == Index::Token && !case.shape.paged;
        let Some(outputs) = case.run_on_device(device, &inputs, graph) else { continue };
        case.check(&inputs, &outputs);
    }
}

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    run(&device, 0..40, |_| (), |_| ());
}

/// As many rows as a bound needs, up to k of them.
#[test]
fn rows_within_a_bound_agree() {
    let Some(device) = device("rows_within_a_bound_agree") else { return };
    for (seeds, bound) in [(500..508, 0.02), (508..520, 0.1), (520..532, 0.3), (532..540, 1.0)] {
        run(&device, seeds, |case| case.adapt(bound), |_| ());
    }
    for group in 1..=8 {
        let of_group = |case: &mut Case| {
            case.shape.group = group;
            case.adapt(0.2);
        };
        run(&device, 540 + group as u64..541 + group as u64, of_group, |_| ());
    }
    for (seed, bad) in (550..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(2)) {
        run(&device, seed..seed + 1, |case| case.adapt(0.2), |queries| queries[7] = bad);
    }
}

/// On sm_90, tokens for several blocks of a cluster.
#[test]
fn many_rows_within_a_bound_agree() {
    let Some(device) = device("many_rows_within_a_bound_agree") else { return };
    for (seeds, rows, bound) in [(600..602, 1, 0.02), (603..605, 2, 0.1)] {
        let lengthen = |case: &mut Case| {
            let n = 39_990;
            (case.capacity, case.batch, case.heads) = (n, rows, 2);
            let shares = (0..rows).map(|i| ((rows - i) * n / rows) as u32);
            (case.lengths, case.ks) = (shares.clone().collect(), shares.collect());
            case.exact_lengths = vec![case.exact_capacity as u32; rows];
            case.page_tiles = if case.shape.paged { 8 } else { n.div_ceil(TILE) };
            case.adapt(bound);
        };
        run(&device, seeds, lengthen, |_| ());
    }
}

#[test]
fn loose_bounds_need_no_rows_and_a_bound_of_zero_needs_all() {
    let Some(device) = device("loose_bounds_need_no_rows_and_a_bound_of_zero_needs_all") else { return };
    for (seed, bound) in (620..632).zip([1e6, 0.0].repeat(6)) {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        case.adapt(bound);
        let inputs = case.inputs(&mut random, |_| ());
        let Some(outputs) = case.run_on_device(&device, &inputs, false) else { continue };
        for (i, &found) in outputs.found.iter().enumerate() {
            let most = if bound > 0.0 { 0 } else { case.most(i / case.heads) };
            assert_eq!(found as usize, most, "{case:?}");
        }
        case.check(&inputs, &outputs);
    }
}

#[test]
fn long_sequences_agree() {
    let Some(device) = device("long_sequences_agree") else { return };
    let lengthen = |case: &mut Case| {
        (case.capacity, case.batch, case.heads) = (40_000, 1, 2);
        (case.lengths, case.ks, case.exact_lengths) =
            (vec![39_990], vec![400], vec![case.exact_capacity as u32]);
        case.selected_len = 500;
        case.page_tiles = if case.shape.paged { 8 } else { 1250 };
    };
    run(&device, 100..106, lengthen, |_| ());
}

/// Selected tokens that hold nearly all weight, by codes and by exact rows alike, leave nothing behind.
#[test]
fn selected_tokens_of_nearly_all_weight_agree() {
    let Some(device) = device("selected_tokens_of_nearly_all_weight_agree") else { return };
    for (seed, spread) in (160..).zip([6.0, 12.0].repeat(5)) {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        (case.capacity, case.batch, case.heads, case.selected_len) = (9000, 1, 2, 9000);
        (case.lengths, case.ks, case.exact_lengths) = (vec![8990], vec![200], vec![0]);
        case.page_tiles = if case.shape.paged { 8 } else { 282 };
        (case.index, case.spread, case.has_code_queries, case.has_errors) =
            (Index::Token, spread, false, false);
        let mut inputs = case.inputs(&mut random, |_| ());
        case.decode_rows(&mut inputs);
        let Some(outputs) = case.run_on_device(&device, &inputs, false) else { continue };
        case.check(&inputs, &outputs);
    }
}

/// Few queries and codes of many components: weights are summed by code, then multiplied by the codebook.
#[test]
fn sums_by_code_agree() {
    let Some(device) = device("sums_by_code_agree") else { return };
    let shapes = [
        (128, (8, 8), 1),
        (128, (8, 4), 2),
        (128, (16, 8), 1),
        (128, (16, 8), 2),
        (128, (16, 4), 2),
        (128, (32, 8), 1),
        (128, (32, 4), 1),
        (64, (8, 8), 2),
        (64, (16, 8), 1),
        (64, (16, 4), 1),
    ];
    for (i, (dim, (m, nbits), group)) in shapes.into_iter().enumerate() {
        let of_shape = |case: &mut Case| {
            case.shape.keys = PqShape::new(dim, 16, 8).unwrap();
            (case.shape.values, case.shape.group) = (PqShape::new(dim, m, nbits).unwrap(), group);
        };
        let seed = 170 + 10 * i as u64;
        run(&device, seed..seed + 3, of_shape, |_| ());
        for (seed, bad) in (seed + 3..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            run(&device, seed..seed + 1, of_shape, |queries| queries[7] = bad);
        }
        // While the selection runs, with more tiles than a warp prefetches.
        let lengthen = |case: &mut Case| {
            of_shape(case);
            (case.capacity, case.batch, case.heads, case.selected_len) = (40_000, 1, 2, 500);
            (case.lengths, case.ks, case.exact_lengths) =
                (vec![39_990], vec![400], vec![case.exact_capacity as u32]);
            case.page_tiles = if case.shape.paged { 8 } else { 1250 };
        };
        run(&device, seed + 6..seed + 8, lengthen, |_| ());
    }
}

/// Without differences between the weights, the order of the tokens decides, over all blocks of a row.
#[test]
fn of_equal_tokens_the_first_are_selected() {
    let Some(device) = device("of_equal_tokens_the_first_are_selected") else { return };
    for (seed, (n, k)) in (120..).zip([(39_990, 400), (39_990, 39_989), (700, 30), (40_000, 20_000)]) {
        let mut random = Random(seed);
        let mut case = Case::random(&mut random);
        (case.capacity, case.batch, case.heads, case.selected_len) = (40_000, 1, 2, 40_000);
        (case.lengths, case.ks, case.exact_lengths) = (vec![n], vec![k], vec![case.exact_capacity as u32]);
        case.page_tiles = if case.shape.paged { 8 } else { 1250 };
        let inputs = case.inputs(&mut random, |queries| queries.fill(0.0));
        let Some(outputs) = case.run_on_device(&device, &inputs, false) else { continue };
        for selected in outputs.selected.chunks_exact(case.selected_len) {
            assert!(selected[..k as usize].iter().copied().eq(0..k), "{case:?}");
        }
        case.check(&inputs, &outputs);
    }
}

/// Sequences so long that a warp looks up the pages of its tiles several times.
#[test]
fn many_pages_agree() {
    let Some(device) = device("many_pages_agree") else { return };
    let lengthen = |case: &mut Case| {
        let quantizer = PqShape::new(64, 8, 4).unwrap();
        (case.shape.keys, case.shape.values) = (quantizer, quantizer);
        (case.shape.group, case.shape.paged, case.page_tiles) = (5, true, 3);
        (case.capacity, case.batch, case.heads) = (280_000, 1, 8);
        (case.lengths, case.ks, case.exact_lengths) =
            (vec![279_990], vec![400], vec![case.exact_capacity as u32]);
        case.selected_len = 500;
    };
    run(&device, 150..151, lengthen, |_| ());
    let adapt = |case: &mut Case| {
        lengthen(case);
        case.adapt(0.01);
    };
    run(&device, 151..152, adapt, |_| ());
}

#[test]
fn many_ragged_sequences_agree() {
    let Some(device) = device("many_ragged_sequences_agree") else { return };
    let ragged = |case: &mut Case| {
        (case.batch, case.capacity) = (40, 300);
        case.lengths = (0..40).map(|i| i * i % 301).collect();
        case.ks = (0..40).map(|i| i * 7 % 50).collect();
        case.exact_lengths = (0..40).map(|i| i % (case.exact_capacity as u32 + 1)).collect();
        case.selected_len = 40;
        case.page_tiles = if case.shape.paged { 3 } else { 10 };
    };
    run(&device, 200..206, ragged, |_| ());
}

/// Terms that are added to the scores: of every group, in long and in ragged sequences, in pages, with a
/// bound, of queries that are not finite.
#[test]
fn addends_agree() {
    let Some(device) = device("addends_agree") else { return };
    let add = |case: &mut Case| case.shape.addends = true;
    run(&device, 700..716, add, |_| ());
    for (seed, group) in (720..).zip((1..=8).cycle().take(16)) {
        let of_group = |case: &mut Case| {
            add(case);
            case.shape.group = group;
            if seed % 3 == 0 {
                case.adapt(0.2);
            }
        };
        run(&device, seed..seed + 1, of_group, |_| ());
    }
    let lengthen = |case: &mut Case| {
        add(case);
        (case.capacity, case.batch, case.heads) = (40_000, 2, 1);
        (case.lengths, case.ks) = (vec![39_990, 17], vec![400, 3]);
        case.exact_lengths = vec![case.exact_capacity as u32; 2];
        case.selected_len = 500;
        case.page_tiles = if case.shape.paged { 8 } else { 1250 };
    };
    run(&device, 740..744, lengthen, |_| ());
    for (seed, bad) in (750..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(2)) {
        run(&device, seed..seed + 1, add, |queries| queries[7] = bad);
    }
}

/// Mean errors of the coded values: of every group, next to norms and addends, in long and in ragged sequences,
/// in pages, with a bound, of queries that are not finite.
#[test]
fn mean_errors_agree() {
    let Some(device) = device("mean_errors_agree") else { return };
    let add = |case: &mut Case| (case.shape.mean_errors, case.spread) = (true, 1.0);
    run(&device, 900..916, add, |_| ());
    for (seed, group) in (920..).zip((1..=8).cycle().take(16)) {
        let of_group = |case: &mut Case| {
            add(case);
            (case.shape.group, case.shape.value_norms) = (group, seed % 2 == 0);
            if seed % 3 == 0 {
                case.adapt(0.2);
            }
        };
        run(&device, seed..seed + 1, of_group, |_| ());
    }
    let lengthen = |case: &mut Case| {
        add(case);
        (case.capacity, case.batch, case.heads) = (40_000, 2, 1);
        (case.lengths, case.ks) = (vec![39_990, 17], vec![400, 3]);
        case.exact_lengths = vec![case.exact_capacity as u32; 2];
        case.selected_len = 500;
        case.page_tiles = if case.shape.paged { 8 } else { 1250 };
    };
    run(&device, 940..944, lengthen, |_| ());
    for (seed, bad) in (950..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
        run(&device, seed..seed + 1, add, |queries| queries[7] = bad);
    }
}

/// Norms of the coded values: of every group, in long and in ragged sequences, in pages, with a bound, of
/// queries that are not finite.
#[test]
fn norms_of_values_agree() {
    let Some(device) = device("norms_of_values_agree") else { return };
    // At twice the spread the score of a single token may round by more than the tolerance.
    let multiply = |case: &mut Case| (case.shape.value_norms, case.spread) = (true, 1.0);
    run(&device, 800..816, multiply, |_| ());
    for (seed, group) in (820..).zip((1..=8).cycle().take(16)) {
        let of_group = |case: &mut Case| {
            multiply(case);
            (case.shape.group, case.shape.addends) = (group, seed % 2 == 0);
            if seed % 3 == 0 {
                case.adapt(0.2);
            }
        };
        run(&device, seed..seed + 1, of_group, |_| ());
    }
    let lengthen = |case: &mut Case| {
        multiply(case);
        (case.capacity, case.batch, case.heads) = (40_000, 2, 1);
        (case.lengths, case.ks) = (vec![39_990, 17], vec![400, 3]);
        case.exact_lengths = vec![case.exact_capacity as u32; 2];
        case.selected_len = 500;
        case.page_tiles = if case.shape.paged { 8 } else { 1250 };
    };
    run(&device, 840..846, lengthen, |_| ());
    for (seed, bad) in (850..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(2)) {
        run(&device, seed..seed + 1, multiply, |queries| queries[7] = bad);
    }
}

#[test]
fn queries_that_are_not_finite_spoil_themselves_alone() {
    let Some(device) = device("queries_that_are_not_finite_spoil_themselves_alone") else { return };
    for (seed, bad) in (300..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(4)) {
        run(&device, seed..seed + 1, |_| (), |queries| queries[7] = bad);
    }
}

#[test]
fn shapes_without_kernels_are_errors() {
    let shape = |dim, m, nbits| PqShape::new(dim, m, nbits).unwrap();
    let good = HybridShape {
        keys: shape(128, 16, 8),
        values: shape(128, 8, 8),
        group: 4,
        element: Element::F16,
        rule: GroupRule::SumOfSoftmax,
        paged: false,
        addends: false,
        value_norms: false,
        mean_errors: false,
        adaptive: false,
    };
    assert!(good.programs((9, 0), 227 << 10).is_ok());
    let bad = [
        HybridShape { group: 0, ..good },
        HybridShape { group: 9, ..good },
        HybridShape { keys: shape(64, 16, 8), ..good },
        HybridShape { keys: shape(128, 64, 8), ..good },
        HybridShape { values: shape(128, 4, 8), ..good },
        HybridShape { values: shape(128, 16, 6), ..good },
    ];
    for shape in bad {
        assert!(matches!(shape.programs((9, 0), 227 << 10), Err(Error::Unsupported { .. })), "{shape:?}");
    }
    assert!(
        matches!(good.programs((9, 0), 64 << 10), Err(Error::Unsupported { .. })),
        "too little shared memory"
    );
}
