//! Attention of a prompt agrees with `svd_core::attend_exact_into`, query by query.

use kv_gpu::pq::Pages;
use kv_gpu::svd::{AttendShape, Prefill, PrefillArguments};
use kv_gpu::{Device, Element};
use svd_core::{Attention, Backend, ExactTokens, Rows, SoftmaxStats, attend_exact_into_with};

use crate::common::{Buffer, Random, SIDES, device, from_element, launch, relative_error, to_element};

/// Maximum relative error of an output vector, by element type: the rounding of weights and of the output.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 2e-3), (Element::Bf16, 1.2e-2)];

#[test]
fn random_shapes_agree() {
    let Some(device) = device("random_shapes_agree") else { return };
    for seed in 0..90 {
        let mut random = Random(seed);
        let shape = random_shape(&mut random);
        let sizes = Sizes {
            batch: 1 + random.below(3),
            heads: 1 + random.below(4),
            group: 1 + random.below(4),
            capacity: random.pick(&[1, 40, 200, 600]),
            queries: 1 << 30,
            page: random.pick(&[None, Some(16), Some(48), Some(64), Some(256)]),
            window: random.pick(&[
                None,
                Some(1),
                Some(17),
                Some(100),
                Some(128),
                Some(300),
                Some(usize::MAX),
            ]),
        };
        check(&device, &mut random, shape, sizes, 1);
    }
}

/// More row blocks than multiprocessors, and many times more tiles than a ring holds.
#[test]
fn long_prompts_agree() {
    let Some(device) = device("long_prompts_agree") else { return };
    for (seed, dim) in [64, 128, 64, 128].into_iter().enumerate() {
        let mut random = Random(1000 + seed as u64);
        let shape = AttendShape { dim, element: random.pick(&[Element::F16, Element::Bf16]) };
        let whole = Sizes {
            batch: 2,
            heads: 5,
            group: 7,
            capacity: 2000,
            queries: 1 << 30,
            page: None,
            window: None,
        };
        for (page, window) in [(None, None), (Some(16), None), (Some(112), Some(333)), (None, Some(1000))] {
            check(&device, &mut random, shape, Sizes { page, window, ..whole }, 997);
        }
        // On sm_80 the places of pages are looked up every 2,048 tokens.
        let sizes = Sizes { heads: 1, group: 2, capacity: 5000, page: Some(16), ..whole };
        for window in [None, Some(64), Some(2500)] {
            check(&device, &mut random, shape, Sizes { window, ..sizes }, 331);
        }
    }
}

/// Few queries over many keys, and row blocks that do not fill a last round: blocks share keys.
#[test]
fn few_queries_agree() {
    let Some(device) = device("few_queries_agree") else { return };
    for seed in 0..32 {
        let mut random = Random(2000 + seed);
        let shape = random_shape(&mut random);
        let sizes = Sizes {
            batch: 1 + random.below(3),
            heads: 1 + random.below(3),
            group: 1 + random.below(6),
            capacity: random.pick(&[3000, 9000]),
            queries: random.pick(&[1, 100, 128, 500]),
            page: random.pick(&[None, Some(16), Some(192)]),
            window: random.pick(&[None, None, Some(1), Some(2000)]),
        };
        check(&device, &mut random, shape, sizes, 97);
    }
    // 160 row blocks on sm_90: with 132 multiprocessors, a round of whole ones before those that are split.
    // The seeds give more than 3,000 tokens, and as many queries as are allowed.
    for (seed, dim, queries) in [(3001, 128, 640), (3013, 64, 800)] {
        let shape = AttendShape { dim, element: Element::F16 };
        let sizes = Sizes { batch: 1, heads: 8, group: 4, capacity: 4000, queries, page: None, window: None };
        check(&device, &mut Random(seed), shape, sizes, 97);
    }
}

fn random_shape(random: &mut Random) -> AttendShape {
    AttendShape { dim: random.pick(&[64, 128]), element: random.pick(&[Element::F16, Element::Bf16]) }
}

#[test]
fn arguments_are_checked() {
    let Some(device) = device("arguments_are_checked") else { return };
    let shape = AttendShape { dim: 64, element: Element::F16 };
    let nothing = Buffer::new(&device, &[0_u64; 2]);
    let of_pages = |max_pages| Some(Pages { table: nothing.pointer().cast(), max_pages });
    let pages = of_pages(1);
    let valid = PrefillArguments {
        batch: 1,
        heads: 1,
        group: 1,
        capacity: 16,
        max_count: 16,
        keys: nothing.pointer().cast(),
        values: nothing.pointer().cast(),
        pages: None,
        queries: nothing.pointer().cast(),
        strides: [1024, 64, 64],
        lengths: nothing.pointer().cast(), // no token: nothing else is read
        counts: nothing.pointer().cast(),
        window: None,
        key_ranks: nothing.pointer().cast(),
        value_ranks: nothing.pointer().cast(),
        key_offsets: nothing.pointer(),
        value_offsets: nothing.pointer(),
        key_rank_sum: 64,
        value_rank_sum: 64,
        padded: false,
        scale: 1.0,
        out: nothing.pointer().cast(),
        workspace: nothing.pointer().cast(),
    };
    let launch = |prefill: &Prefill, arguments: PrefillArguments| {
        // SAFETY: the sequence has no tokens, so that only the first ranks and offsets are read.
        #[allow(unsafe_code)]
        let launched = unsafe { prefill.launch(device.stream().cu_stream(), &arguments) };
        launched.map_err(|error| error.to_string())
    };
    let (whole, paged) = (Prefill::new(&device, shape).unwrap(), Prefill::paged(&device, shape).unwrap());
    assert_eq!(launch(&whole, valid), Ok(()));
    assert_eq!(launch(&paged, PrefillArguments { pages, ..valid }), Ok(()));
    let refused = |prefill, arguments, problem: &str| {
        assert_eq!(launch(prefill, arguments), Err(format!("svd::Prefill: {problem}")));
    };
    for sum in [0, 63, 72] {
        let ranks = "a sum of ranks that the ranks of the heads cannot have";
        refused(&whole, PrefillArguments { key_rank_sum: sum, ..valid }, ranks);
    }
    let both = "pages are given exactly when it is compiled for them";
    refused(&whole, PrefillArguments { pages, ..valid }, both);
    refused(&paged, valid, both);
    let odd = "pages that do not have a multiple of 16 tokens";
    refused(&paged, PrefillArguments { pages, capacity: 24, ..valid }, odd);
    refused(&whole, PrefillArguments { window: Some(0), ..valid }, "a window of no tokens");
    refused(&whole, PrefillArguments { scale: f32::NAN, ..valid }, "a scale that is not positive");
    refused(&whole, PrefillArguments { strides: [1024, 63, 64], ..valid }, "a stride is not a multiple of 2");
    let long = format!("{} tokens of a sequence, but at most {} fit a launch", 1_u64 << 31, 1 << 30);
    refused(&whole, PrefillArguments { capacity: 1 << 31, ..valid }, &long);
    let long = format!("{} tokens of a sequence, but at most {} fit a launch", usize::MAX, 1 << 30);
    refused(&paged, PrefillArguments { pages: of_pages(usize::MAX), ..valid }, &long);
    device.stream().synchronize().unwrap();
}

#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    heads: usize,
    group: usize,
    capacity: usize,
    queries: usize,      // of a sequence, at most
    page: Option<usize>, // tokens of a page
    window: Option<usize>,
}

/// Compares every `step`-th output of random lengths, counts, ranks and strides.
fn check(device: &Device, random: &mut Random, shape: AttendShape, sizes: Sizes, step: usize) {
    let AttendShape { dim, element } = shape;
    let Sizes { batch, heads, group, capacity, queries: most_queries, page, window } = sizes;
    let lengths: Vec<u32> = (0..batch).map(|_| random.below(capacity + 1) as u32).collect();
    // Whole prompts, and prompts whose beginning was cached.
    let counts: Vec<u32> = lengths
        .iter()
        .map(|&n| if random.below(2) == 0 { n } else { random.below(n as usize + 1) as u32 })
        .map(|count| count.min(most_queries as u32))
        .collect();
    let max_count = *counts.iter().max().unwrap() as usize;
    let half = random.below(2) == 0; // ranks of at most dim / 2: on sm_80 blocks of 128 rows
    let most = if half { dim / 16 } else { dim / 8 };
    let mut ranks = || (0..heads).map(|_| 8 * (1 + random.below(most)) as u32).collect::<Vec<u32>>();
    let ranks = SIDES.map(|_| ranks());
    let padded = random.below(3) == 0;
    let widths = ranks.each_ref().map(|ranks| {
        let width = |&rank: &u32| if padded { dim } else { rank as usize };
        ranks.iter().map(width).collect::<Vec<_>>()
    });
    let offsets = widths.each_ref().map(|widths| {
        let before = |head: usize| widths[..head].iter().map(|&width| width as u64).sum();
        (0..heads).map(before).collect::<Vec<u64>>()
    });
    let sums = widths.each_ref().map(|widths| widths.iter().sum::<usize>());
    let rounded = |x: f32| from_element(element, to_element(element, x));
    let mut stored = sums
        .map(|sum| -> Vec<f32> { random.normals(batch * capacity * sum).into_iter().map(rounded).collect() });
    // Elements beyond the lengths, or beyond the rank of a padded row, are not read.
    for (side, sequence, head) in (0..2 * batch * heads).map(|i| (i % 2, i / 2 % batch, i / 2 / batch)) {
        let (width, start) = (widths[side][head], capacity * offsets[side][head] as usize);
        let tokens = &mut stored[side][sequence * capacity * sums[side] + start..][..capacity * width];
        tokens[lengths[sequence] as usize * width..].fill(f32::NAN);
        // Nor are keys before the first query's window used, nor values more than a few tiles before it.
        let first_query = (lengths[sequence] - counts[sequence]) as usize;
        let unseen =
            (first_query + 1).saturating_sub(window.unwrap_or(usize::MAX)).saturating_sub(512 * side);
        tokens[..unseen * width].fill(f32::NAN);
        tokens.chunks_exact_mut(width).for_each(|row| row[ranks[side][head] as usize..].fill(f32::NAN));
    }
    // Query heads are part of longer rows, as after a fused QKV projection.
    let query_heads = heads * group;
    let row = query_heads + random.below(3);
    let mut queries: Vec<f32> =
        random.normals(batch * max_count * row * dim).into_iter().map(|x| rounded(2.0 * x)).collect();
    if !queries.is_empty() {
        queries[0] = f32::NAN; // must affect this query alone
    }

    let bits = |x: &[f32]| x.iter().map(|&x| to_element(element, x)).collect::<Vec<u16>>();
    // Without pages a sequence is one page. Other pages hold NaN, and the table ends in numbers of no page.
    let page_tokens = page.unwrap_or(capacity);
    let max_pages = capacity.div_ceil(page_tokens);
    let total = if page.is_some() { 2 * batch * max_pages } else { batch };
    let mut table: Vec<u32> = (0..total as u32).collect();
    if page.is_some() {
        (1..table.len()).rev().for_each(|i| table.swap(i, random.below(i + 1)));
    }
    let stored_there = SIDES.map(|side| {
        let side = side as usize;
        let mut pool = vec![u16::MAX; total * page_tokens * sums[side]]; // NaN
        for i in 0..batch * heads * capacity {
            let (sequence, head, token) = (i / capacity / heads, i / capacity % heads, i % capacity);
            let (width, offset) = (widths[side][head], offsets[side][head] as usize);
            let from = sequence * capacity * sums[side] + capacity * offset + token * width;
            let number = table[sequence * max_pages + token / page_tokens] as usize;
            let to = number * page_tokens * sums[side] + page_tokens * offset + token % page_tokens * width;
            pool[to..to + width].copy_from_slice(&bits(&stored[side][from..from + width]));
        }
        Buffer::new(device, &pool)
    });
    for (sequence, row) in table.chunks_exact_mut(max_pages).take(batch).enumerate() {
        row[(lengths[sequence] as usize).div_ceil(page_tokens)..].fill(u32::MAX);
    }
    let table = Buffer::new(device, &table);
    let queries_there = Buffer::new(device, &bits(&queries));
    let [lengths_there, counts_there] = [&lengths, &counts].map(|x| Buffer::new(device, x));
    let ranks_there = ranks.each_ref().map(|ranks| Buffer::new(device, ranks));
    let offsets_there = offsets.each_ref().map(|offsets| Buffer::new(device, offsets));
    let out = Buffer::new(device, &vec![u16::MAX; queries.len()]); // NaN
    let of = if page.is_some() { Prefill::paged } else { Prefill::new };
    let prefill = of(device, shape).unwrap();
    let workspace = Buffer::new(device, &vec![0_u8; prefill.workspace_len()]);
    let scale = 1.0 / (dim as f32).sqrt();
    let arguments = PrefillArguments {
        batch,
        heads,
        group,
        capacity: page_tokens,
        max_count,
        keys: stored_there[0].pointer().cast(),
        values: stored_there[1].pointer().cast(),
        pages: page.map(|_| Pages { table: table.pointer(), max_pages }),
        queries: queries_there.pointer().cast(),
        strides: [max_count * row * dim, row * dim, dim],
        lengths: lengths_there.pointer(),
        counts: counts_there.pointer(),
        window,
        key_ranks: ranks_there[0].pointer(),
        value_ranks: ranks_there[1].pointer(),
        key_offsets: offsets_there[0].pointer(),
        value_offsets: offsets_there[1].pointer(),
        key_rank_sum: sums[0],
        value_rank_sum: sums[1],
        padded,
        scale,
        out: out.pointer().cast(),
        workspace: workspace.pointer(),
    };
    let launch = |out: &Buffer<u16>| {
        let arguments = PrefillArguments { out: out.pointer().cast(), ..arguments };
        launch!(device, prefill, &arguments);
        out.read()
    };
    let (again, out) = (launch(&Buffer::new(device, &vec![u16::MAX; queries.len()])), launch(&out));
    assert!(again == out, "{shape:?} lengths {lengths:?} counts {counts:?}: other bytes");

    let tolerance = TOLERANCES.iter().find(|(e, _)| *e == element).unwrap().1;
    for (i, got) in out.chunks_exact(dim).enumerate().step_by(step) {
        let (sequence, query, query_head) = (i / row / max_count, i / row % max_count, i % row);
        let head = query_head / group;
        let place = format!(
            "{shape:?} lengths {lengths:?} counts {counts:?} ranks {ranks:?} padded {padded} page {page:?} \
             window {window:?}, output {i}"
        );
        if query >= counts[sequence] as usize || query_head >= query_heads {
            assert!(got.iter().all(|&bits| bits == u16::MAX), "{place}: written for no query");
            continue;
        }
        let end = (lengths[sequence] - counts[sequence]) as usize + query + 1;
        let n = window.unwrap_or(end).min(end);
        let [rank_k, rank_v] = ranks.each_ref().map(|ranks| ranks[head] as usize);
        let [keys, values] = SIDES.map(|side| {
            let side = side as usize;
            let at = sequence * capacity * sums[side] + capacity * offsets[side][head] as usize;
            let width = widths[side][head];
            let rows = stored[side][at..][..end * width].chunks_exact(width).skip(end - n);
            rows.flat_map(|row| &row[..ranks[side][head] as usize]).copied().collect::<Vec<f32>>()
        });
        let query: Vec<f32> = queries[i * dim..][..rank_k].iter().map(|x| x * scale).collect();
        let beyond = if padded { 0 } else { u16::MAX };
        assert!(got[rank_v..].iter().all(|&bits| bits == beyond), "{place}: beyond the rank");
        let got: Vec<f32> = got[..rank_v].iter().map(|&bits| from_element(element, bits)).collect();
        if query.iter().any(|x| x.is_nan()) {
            assert!(got.iter().all(|x| x.is_nan()), "{place}: {got:?}");
            continue;
        }
        let (mut expected, mut stats) = (vec![0.0; rank_v], [SoftmaxStats::EMPTY]);
        let tokens = ExactTokens::contiguous(&keys, rank_k, &values, rank_v).unwrap();
        let (attention, mut scratch) = (Attention::default(), vec![0.0; rank_k]);
        let query = Rows::from(&query[..]);
        attend_exact_into_with(
            Backend::Scalar,
            &attention,
            query,
            &tokens,
            &mut scratch,
            &mut expected,
            &mut stats,
        )
        .unwrap();
        stats[0].normalize(&mut expected);
        // Where the values nearly cancel, the error is relative to the norm of a mean of values of about
        // 1.
        let length = (rank_v as f64 / n as f64).sqrt();
        let norm = expected.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        let error = relative_error(&got, &expected) * norm / norm.max(length);
        assert!(error <= tolerance, "{place}: error {error}");
    }
}
