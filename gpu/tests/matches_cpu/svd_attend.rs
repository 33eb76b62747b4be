//! Attention on ragged ranks agrees with `svd_core::attend_exact_into`.

use half::{bf16, f16};
use kv_gpu::pq::Pages;
use kv_gpu::svd::{Attend, AttendArguments, AttendShape};
use kv_gpu::{Device, Element, Error};
use svd_core::{Attention, Backend, ExactTokens, Rows, SoftmaxStats, attend_exact_into_with};

use crate::common::{Buffer, Random, SIDES, device, from_element, launch, relative_error, to_element};

/// Maximum relative error of an output vector, by element type: the rounding of weights and of the output.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 2e-3), (Element::Bf16, 1.2e-2)];
/// Maximum absolute error of the log-sum-exp.
const LOG_SUM_EXP: f32 = 2e-3;

fn run(device: &Device, random: &mut Random, batches: &[usize], capacities: &[usize], spoiler: Option<f32>) {
    let shape =
        AttendShape { dim: random.pick(&[64, 128]), element: random.pick(&[Element::F16, Element::Bf16]) };
    let AttendShape { dim, element } = shape;
    let (batch, heads, group) = (random.pick(batches), 1 + random.below(6), 1 + random.below(16));
    let capacity = random.pick(capacities);
    let lengths: Vec<u32> = (0..batch)
        .map(|_| if random.below(4) == 0 { random.pick(&[0, 1, capacity]) } else { random.below(capacity + 1) } as u32)
        .collect();
    let mut ranks = || (0..heads).map(|_| 8 * (1 + random.below(dim / 8)) as u32).collect::<Vec<u32>>();
    let ranks = SIDES.map(|_| ranks());
    let offsets = ranks.each_ref().map(|ranks| {
        let before = |head: usize| ranks[..head].iter().map(|&rank| u64::from(rank)).sum();
        (0..heads).map(before).collect::<Vec<u64>>()
    });
    let sums = ranks.each_ref().map(|ranks| ranks.iter().sum::<u32>() as usize);
    let rounded = |x: f32| from_element(element, to_element(element, x));
    let stored = sums
        .map(|sum| -> Vec<f32> { random.normals(batch * capacity * sum).into_iter().map(rounded).collect() });
    let mut queries: Vec<f32> =
        random.normals(batch * heads * group * dim).into_iter().map(|x| rounded(2.0 * x)).collect();
    if let Some(spoiler) = spoiler {
        queries[3] = spoiler; // a component that is read at any rank
    }

    let bits = |x: &[f32]| x.iter().map(|&x| to_element(element, x)).collect::<Vec<u16>>();
    let stored_there = stored.each_ref().map(|x| Buffer::new(device, &bits(x)));
    let queries_there = Buffer::new(device, &bits(&queries));
    let lengths_there = Buffer::new(device, &lengths);
    let ranks_there = ranks.each_ref().map(|ranks| Buffer::new(device, ranks));
    let offsets_there = offsets.each_ref().map(|offsets| Buffer::new(device, offsets));
    let attend = Attend::new(device, shape).unwrap();
    let workspace = Buffer::new(device, &vec![0_u8; attend.workspace_len(batch, heads, group)]);
    let scale = 1.0 / (dim as f32).sqrt();
    let pdl = random.below(2) == 1;
    let rows = |attend: &Attend, rows: [&Buffer<u16>; 2], capacity: usize, pages: Option<Pages>| {
        let out = Buffer::new(device, &vec![u16::MAX; batch * heads * group * dim]); // NaN
        let log_sum_exp = Buffer::new(device, &vec![f32::NAN; batch * heads * group]);
        let arguments = AttendArguments {
            batch,
            heads,
            group,
            capacity,
            keys: rows[0].pointer().cast(),
            values: rows[1].pointer().cast(),
            pages,
            queries: queries_there.pointer().cast(),
            lengths: lengths_there.pointer(),
            key_ranks: ranks_there[0].pointer(),
            value_ranks: ranks_there[1].pointer(),
            key_offsets: offsets_there[0].pointer(),
            value_offsets: offsets_there[1].pointer(),
            key_rank_sum: sums[0],
            value_rank_sum: sums[1],
            scale,
            out: out.pointer().cast(),
            log_sum_exp: Some(log_sum_exp.pointer()),
            pdl,
            workspace: workspace.pointer(),
        };
        launch!(device, attend, &arguments);
        (out.read(), log_sum_exp.read().iter().map(|x| x.to_bits()).collect::<Vec<u32>>())
    };
    let launch = || rows(&attend, stored_there.each_ref(), capacity, None);
    let (out, log_sum_exp) = launch();
    assert!(launch() == (out.clone(), log_sum_exp.clone()), "two runs differ");

    // The same rows in pages, in any order and with unused pages between them: the same bytes.
    let page = random.pick(&[16, 48, 64]);
    let max_pages = capacity.div_ceil(page);
    let mut table: Vec<u32> = (0..2 * (batch * max_pages) as u32).collect();
    (1..table.len()).rev().for_each(|i| table.swap(i, random.below(i + 1)));
    let paged = SIDES.map(|side| {
        let (side, total) = (side as usize, 2 * batch * max_pages);
        let mut pages = vec![u16::MAX; total * page * sums[side]]; // NaN
        for (sequence, head) in (0..batch).flat_map(|sequence| (0..heads).map(move |head| (sequence, head))) {
            let (rank, offset) = (ranks[side][head] as usize, offsets[side][head] as usize);
            let from = sequence * capacity * sums[side] + capacity * offset;
            for token in 0..lengths[sequence] as usize {
                let number = table[sequence * max_pages + token / page] as usize;
                let to = number * page * sums[side] + page * offset + token % page * rank;
                let row = bits(&stored[side][from + token * rank..][..rank]);
                pages[to..to + rank].copy_from_slice(&row);
            }
        }
        Buffer::new(device, &pages)
    });
    let table = Buffer::new(device, &table);
    let pages = Pages { table: table.pointer(), max_pages };
    let attend = Attend::paged(device, shape).unwrap();
    let in_pages = rows(&attend, paged.each_ref(), page, Some(pages));
    assert!(
        in_pages == (out.clone(), log_sum_exp.clone()),
        "{shape:?}: pages of {page}, lengths {lengths:?}"
    );

    let tolerance = TOLERANCES.iter().find(|(e, _)| *e == element).unwrap().1;
    for pair in 0..batch * heads {
        let (sequence, head) = (pair / heads, pair % heads);
        let n = lengths[sequence] as usize;
        let [rank_k, rank_v] = ranks.each_ref().map(|ranks| ranks[head] as usize);
        let [keys, values] = SIDES.map(|side| {
            let side = side as usize;
            let at = sequence * capacity * sums[side] + capacity * offsets[side][head] as usize;
            &stored[side][at..][..n * ranks[side][head] as usize]
        });
        let rows = queries[pair * group * dim..][..group * dim].chunks_exact(dim);
        let projected: Vec<f32> = rows.flat_map(|row| row[..rank_k].iter().map(|x| x * scale)).collect();
        let (mut expected, mut stats) = (vec![0.0; group * rank_v], vec![SoftmaxStats::EMPTY; group]);
        // Rounded as on the device.
        let [keys, values] = [keys, values].map(|rows| -> Vec<f32> {
            match element {
                Element::F16 => rows.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
                Element::Bf16 => rows.iter().map(|&x| bf16::from_f32(x).to_f32()).collect(),
            }
        });
        let tokens = ExactTokens::contiguous(&keys, rank_k, &values, rank_v).unwrap();
        let (attention, mut scratch) = (Attention::default(), vec![0.0; projected.len()]);
        let queries = Rows::from(&projected[..]);
        attend_exact_into_with(
            Backend::Scalar,
            &attention,
            queries,
            &tokens,
            &mut scratch,
            &mut expected,
            &mut stats,
        )
        .unwrap();
        for (query, (expected, stats)) in expected.chunks_exact_mut(rank_v).zip(&stats).enumerate() {
            let index = pair * group + query;
            let got = &out[index * dim..][..dim];
            assert!(got[rank_v..].iter().all(|&bits| bits == u16::MAX), "{shape:?}: written beyond the rank");
            let got: Vec<f32> = got[..rank_v].iter().map(|&bits| from_element(element, bits)).collect();
            let place = format!(
                "{shape:?} lengths {lengths:?} ranks {ranks:?} group {group}, pair {pair} query {query}"
            );
            if projected[query * rank_k..][..rank_k].iter().any(|x| !x.is_finite()) {
                assert!(n <= 1 || got.iter().all(|x| x.is_nan()), "{place}: {got:?}");
                continue;
            }
            stats.normalize(expected);
            let error = relative_error(&got, expected);
            assert!(error <= tolerance, "{place}: error {error}");
            let log = f32::from_bits(log_sum_exp[index]);
            if n == 0 {
                assert_eq!(log, f32::NEG_INFINITY, "{place}");
            } else {
                let expected = stats.max + stats.sum.ln();
                assert!((log - expected).abs() <= LOG_SUM_EXP, "{place}: log-sum-exp {log} for {expected}");
            }
        }
    }
}

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    for seed in 0..60 {
        run(&device, &mut Random(seed), &[1, 2, 5], &[1, 15, 16, 17, 100, 700, 3000], None);
    }
}

#[test]
fn many_ragged_sequences_agree() {
    let Some(device) = device("many_ragged_sequences_agree") else { return };
    for seed in 100..104 {
        run(&device, &mut Random(seed), &[33, 70, 200], &[300], None);
    }
}

#[test]
fn numbers_that_are_none_stay_with_their_query() {
    let Some(device) = device("numbers_that_are_none_stay_with_their_query") else { return };
    for (seed, spoiler) in
        [f32::NAN, f32::INFINITY, f32::NEG_INFINITY].into_iter().cycle().take(6).enumerate()
    {
        run(&device, &mut Random(2000 + seed as u64), &[2], &[100], Some(spoiler));
    }
}

#[test]
fn shapes_without_a_kernel_are_errors() {
    for dim in [0, 32, 96, 256] {
        let shape = AttendShape { dim, element: Element::F16 };
        assert!(matches!(shape.program(), Err(Error::Unsupported { .. })), "{dim}");
    }
}
