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

/// Makes the sequences long, with rows for all selected tokens of each.
fn lengthen(case: &mut Case, heads: usize, lengths: &[u32], ks: &[u32]) {
    (case.capacity, case.batch, case.heads) = (40_000, lengths.len(), heads);
    (case.lengths, case.ks, case.selected_len) = (lengths.to_vec(), ks.to_vec(), 500);
    case.exact_lengths = vec![case.exact_capacity as u32; lengths.len()];
    case.page_tiles = if case.shape.paged { 8 } else { 1250 };
}

/// An option that `add` sets: in random shapes, of every group and every other one next to what `also` sets,
/// with a bound, in long and in ragged sequences, of queries that are not finite.
fn run_with(device: &Device, first_seed: u64, add: impl Fn(&mut Case), also: impl Fn(&mut Case)) {
    run(device, first_seed..first_seed + 16, &add, |_| ());
    for (seed, group) in (first_seed + 20..).zip((1..=8).cycle().take(16)) {
        let of_group = |case: &mut Case| {
            add(case);
            case.shape.group = group;
            if seed % 2 == 0 {
                also(case);
            }
            if seed % 3 == 0 {
                case.adapt(0.2);
            }
        };
        run(device, seed..seed + 1, of_group, |_| ());
    }
    let long = |case: &mut Case| {
        add(case);
        lengthen(case, 1, &[39_990, 17], &[400, 3]);
    };
    run(device, first_seed + 40..first_seed + 46, long, |_| ());
    for (seed, bad) in (first_seed + 50..).zip([f32::NAN, f32::INFINITY, f32::NEG_INFINITY].repeat(2)) {
        run(device, seed..seed + 1, &add, |queries| queries[7] = bad);
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
        let long = |case: &mut Case| {
            let n = 39_990;
            (case.capacity, case.batch, case.heads) = (n, rows, 2);
            let shares = (0..rows).map(|i| ((rows - i) * n / rows) as u32);
            (case.lengths, case.ks) = (shares.clone().collect(), shares.collect());
            case.exact_lengths = vec![case.exact_capacity as u32; rows];
            case.page_tiles = if case.shape.paged { 8 } else { n.div_ceil(TILE) };
            case.adapt(bound);
        };
        run(&device, seeds, long, |_| ());
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
    run(&device, 100..106, |case| lengthen(case, 2, &[39_990], &[400]), |_| ());
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
        let long = |case: &mut Case| {
            of_shape(case);
            lengthen(case, 2, &[39_990], &[400]);
        };
        run(&device, seed + 6..seed + 8, long, |_| ());
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
    let of_many = |case: &mut Case| {
        let quantizer = PqShape::new(64, 8, 4).unwrap();
        (case.shape.keys, case.shape.values) = (quantizer, quantizer);
        (case.shape.group, case.shape.paged, case.page_tiles) = (5, true, 3);
        (case.capacity, case.batch, case.heads) = (280_000, 1, 8);
        (case.lengths, case.ks, case.exact_lengths) =
            (vec![279_990], vec![400], vec![case.exact_capacity as u32]);
        case.selected_len = 500;
    };
    run(&device, 150..151, of_many, |_| ());
    let adapt = |case: &mut Case| {
        of_many(case);
        case.adapt(0.01);
    };
    run(&device, 151..152, adapt, |_| ());
    let add = |case: &mut Case| {
        of_many(case);
        add_mean_errors(case);
    };
    run(&device, 152..153, add, |_| ());
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

/// Terms that are added to the scores.
#[test]
fn addends_agree() {
    let Some(device) = device("addends_agree") else { return };
    run_with(&device, 700, |case| case.shape.addends = true, |_| ());
}

/// Norms of the coded values, next to addends.
#[test]
fn norms_of_values_agree() {
    let Some(device) = device("norms_of_values_agree") else { return };
    // At twice the spread the score of a single token may round by more than the tolerance.
    let multiply = |case: &mut Case| (case.shape.value_norms, case.spread) = (true, 1.0);
    run_with(&device, 800, multiply, |case| case.shape.addends = true);
}

/// Norms of the coded keys, next to addends, norms of values and mean errors.
#[test]
fn norms_of_keys_agree() {
    let Some(device) = device("norms_of_keys_agree") else { return };
    let multiply = |case: &mut Case| (case.shape.key_norms, case.spread) = (true, 1.0);
    let all = |case: &mut Case| {
        (case.shape.addends, case.shape.value_norms, case.shape.mean_errors) = (true, true, true);
    };
    run_with(&device, 1200, multiply, all);
}

/// Codes of keys of 6 bits, next to norms of keys and values, addends and mean errors.
#[test]
fn keys_of_6_bits_agree() {
    let Some(device) = device("keys_of_6_bits_agree") else { return };
    let with_6_bits = |case: &mut Case| {
        let (dim, m) = (case.shape.keys.dim(), if case.heads == 2 { 16 } else { case.shape.keys.dim() / 4 });
        (case.shape.keys, case.spread) = (PqShape::new(dim, m, 6).unwrap(), 1.0);
    };
    let all = |case: &mut Case| {
        (case.shape.addends, case.shape.key_norms) = (true, true);
        (case.shape.value_norms, case.shape.mean_errors) = (true, true);
    };
    run_with(&device, 1400, with_6_bits, all);
}

/// Norms of keys in sequences of many pages, whose tiles a warp looks up several times, and of different
/// lengths.
#[test]
fn norms_of_keys_in_pages_agree() {
    let Some(device) = device("norms_of_keys_in_pages_agree") else { return };
    for (seed, group) in (1300..).zip(1..=8) {
        let paged = |case: &mut Case| {
            (case.shape.keys, case.shape.group) = (PqShape::new(128, 32, 6).unwrap(), group);
            (case.shape.values, case.shape.key_norms) = (PqShape::new(128, 8, 8).unwrap(), true);
            (case.shape.paged, case.shape.addends, case.spread) = (true, group.is_multiple_of(2), 1.0);
            lengthen(case, 2, &[39_990, 0, 33, 12_345], &[400, 1, 5, 100]);
            case.page_tiles = 3;
        };
        run(&device, seed..seed + 1, paged, |_| ());
    }
}

fn add_mean_errors(case: &mut Case) {
    (case.shape.mean_errors, case.spread) = (true, 1.0);
}

/// Mean errors of the coded values, next to norms.
#[test]
fn mean_errors_agree() {
    let Some(device) = device("mean_errors_agree") else { return };
    run_with(&device, 900, add_mean_errors, |case| case.shape.value_norms = true);
}

/// Sequences that end within blocks and parts of them, at their ends and next to these. With queries of zeros
/// the first tokens are selected: some blocks whole, some sequences whole.
#[test]
fn mean_errors_of_incomplete_blocks_agree() {
    let Some(device) = device("mean_errors_of_incomplete_blocks_agree") else { return };
    const LENGTHS: [u32; 16] = [1, 15, 16, 17, 0, 255, 256, 257, 271, 272, 511, 512, 513, 4096, 4097, 4351];
    const KS: [u32; 16] = [0, 3, 16, 1, 5, 255, 256, 256, 260, 0, 300, 512, 255, 600, 4097, 4000];
    let end = |case: &mut Case, group: usize, index: Index| {
        add_mean_errors(case);
        (case.shape.group, case.index) = (group, index);
        (case.capacity, case.batch, case.heads) = (4400, LENGTHS.len(), 1);
        (case.lengths, case.ks, case.selected_len) = (LENGTHS.to_vec(), KS.to_vec(), 4400);
        case.exact_lengths =
            (0..).map(|i| i % (case.exact_capacity as u32 + 1)).take(LENGTHS.len()).collect();
        case.page_tiles = if case.shape.paged { 3 } else { 138 };
    };
    for (seed, group) in (1000..).zip(1..=8) {
        // Tokens that attention leaves out while the selection runs, and tokens that the selection hides.
        for (seed, index) in [(seed, Index::Token), (seed + 20, Index::Order)] {
            run(&device, seed..seed + 1, |case| end(case, group, index), |_| ());
            run(&device, seed + 40..seed + 41, |case| end(case, group, index), |queries| queries.fill(0.0));
        }
    }
}

/// So many heads that a row has one block of threads, and some warps three blocks of tokens.
#[test]
fn mean_errors_of_many_heads_agree() {
    let Some(device) = device("mean_errors_of_many_heads_agree") else { return };
    for (seed, group) in (1100..).zip([1, 4, 8]) {
        let of_many = |case: &mut Case| {
            add_mean_errors(case);
            let quantizer = PqShape::new(64, 8, 4).unwrap();
            (case.shape.keys, case.shape.values, case.shape.group) = (quantizer, quantizer, group);
            (case.capacity, case.batch, case.heads, case.selected_len) = (8700, 36, 2, 90);
            (case.lengths, case.ks) = ((0..36).map(|i| 8700 - i * i).collect(), vec![87; 36]);
            case.exact_lengths = vec![case.exact_capacity as u32; 36];
            case.page_tiles = if case.shape.paged { 8 } else { 272 };
        };
        run(&device, seed..seed + 1, of_many, |_| ());
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
        key_norms: false,
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
        HybridShape { keys: shape(128, 8, 6), ..good },
        HybridShape { keys: shape(128, 64, 6), ..good },
    ];
    for shape in bad {
        assert!(matches!(shape.programs((9, 0), 227 << 10), Err(Error::Unsupported { .. })), "{shape:?}");
    }
    assert!(
        matches!(good.programs((9, 0), 64 << 10), Err(Error::Unsupported { .. })),
        "too little shared memory"
    );
}
