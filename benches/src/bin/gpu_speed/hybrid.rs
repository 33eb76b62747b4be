//! Attention on codes with exact rows for the tokens of the largest weight.

use half::f16;
use kv_gpu::pq::{
    Addends, BlockMeans, CodeLayout, ErrorBound, ExactRows, Hybrid, HybridArguments, HybridShape,
    MEAN_TOKENS, Pages, RowIndex, Side, TILE,
};
use kv_gpu::{DevicePtr, Element};
use pq_core::{
    Attention, CodebookBuf, CodedTokens, Codes, ExactTokens, GroupRule, HybridScratch, PqShape, RowBudget,
    Rows, SoftmaxStats, attend_exact_into, hybrid_attend_into, hybrid_select_into, lut_into,
};

use crate::selection::check_selection;
use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

/// (query heads, key/value heads, batch, tokens)
type Load = (usize, usize, usize, usize);

const LOADS: [Load; 5] =
    [(32, 32, 1, 32_768), (32, 8, 1, 131_072), (32, 8, 1, 32_768), (32, 32, 8, 32_768), (32, 8, 4, 131_072)];
/// Loads with two query heads for each key/value head.
const PAIRS: [Load; 2] = [(64, 32, 8, 32_768), (16, 8, 1, 131_072)];
/// `LOADS` with codes in pages of this many tokens, and a load so large that a warp has more than 32 tiles.
const PAGED: [(Load, usize); 4] = [
    ((32, 8, 1, 131_072), 32),
    ((32, 8, 1, 131_072), 256),
    ((32, 32, 1, 32_768), 32),
    ((32, 8, 8, 131_072), 32),
];
/// A load with fewer exact rows: one in this many tokens.
const LONG: (Load, usize) = ((32, 8, 1, 524_288), 400);
const DIM: usize = 128;
/// Sinks and window of a load whose rows a bound decides, and of the one with which it is compared.
const WINDOW: usize = 132;
/// Of the coded values, for such a bound.
const VALUE_ERROR: f32 = 0.5;

/// What a load has besides codes.
#[derive(Clone, Copy)]
struct Variant {
    share: usize, // one in this many tokens has its exact row
    page: Option<usize>,
    exact: usize,     // sinks and window
    addends: bool,    // terms that are added to the scores
    norms: [bool; 2], // of the keys, of the values
    means: bool,      // of the errors of the values
    adaptive: bool,   // `share` is the mean over heads that choose by a bound
}

impl Default for Variant {
    fn default() -> Self {
        let norms = [false; 2];
        Self { share: 100, page: None, exact: 0, addends: false, norms, means: false, adaptive: false }
    }
}

pub fn run(watch: &Stopwatch) {
    for (keys, values) in [((16, 8), (16, 8)), ((16, 8), (8, 8)), ((32, 8), (8, 8)), ((32, 4), (32, 4))] {
        let [keys, values] = [keys, values].map(|(m, nbits)| PqShape::new(DIM, m, nbits).unwrap());
        for load in LOADS {
            if load.2 == 1 || keys == values && keys.nbits() == 8 {
                time(watch, [keys, values], load, Variant::default());
            }
        }
    }
    let coarse = PqShape::new(DIM, 16, 8).unwrap();
    for load in PAIRS {
        time(watch, [coarse, coarse], load, Variant::default());
    }
    for load in LOADS.into_iter().filter(|load| load.2 == 1) {
        time(watch, [coarse, coarse], load, Variant { addends: true, ..Variant::default() });
    }
    for load in LOADS.into_iter().chain(PAIRS) {
        for (values, means) in [(true, false), (false, true), (true, true)] {
            time(
                watch,
                [coarse, coarse],
                load,
                Variant { norms: [false, values], means, ..Variant::default() },
            );
        }
    }
    let [keys, values] = [(32, 6), (8, 8)].map(|(m, nbits)| PqShape::new(DIM, m, nbits).unwrap());
    for load in LOADS {
        for adaptive in [false, true] {
            // As the method `hybrid` has it.
            let variant = Variant {
                exact: WINDOW,
                addends: true,
                norms: [true; 2],
                means: true,
                adaptive,
                share: 100,
                page: None,
            };
            time(watch, [keys, values], load, variant);
        }
        time(watch, [keys, values], load, Variant { norms: [true; 2], ..Variant::default() });
        time(watch, [keys, values], load, Variant { norms: [false, true], ..Variant::default() });
    }
    for (load, page) in PAGED {
        time(watch, [coarse, coarse], load, Variant { page: Some(page), ..Variant::default() });
    }
    let (load, share) = LONG;
    time(watch, [coarse, coarse], load, Variant { share, ..Variant::default() });
    for load in LOADS {
        for adaptive in [false, true] {
            time(watch, [coarse, coarse], load, Variant { exact: WINDOW, adaptive, ..Variant::default() });
        }
    }
}

fn time(
    watch: &Stopwatch,
    quantizers: [PqShape; 2],
    (query_heads, heads, batch, n): Load,
    Variant { share, page, exact, addends, norms: [key_norms, value_norms], means, adaptive }: Variant,
) {
    let (group, k) = (query_heads / heads, n / share);
    let [keys, values] = quantizers;
    let codes_of = |shape: PqShape| format!("({}, {})", shape.m(), shape.nbits());
    let percent = 100.0 / share as f64;
    let mut name = format!("hybrid {} {}, {percent} % exact", codes_of(keys), codes_of(values));
    if let Some(page) = page {
        name += &format!(", pages of {page}");
    }
    if exact > 0 {
        name += &format!(", {exact} of sinks and window");
    }
    if addends {
        name += ", addends";
    }
    if key_norms {
        name += ", norms of keys";
    }
    if value_norms {
        name += ", norms of values";
    }
    if means {
        name += ", mean errors";
    }
    if adaptive {
        name += ", by a bound";
    }
    let load = format!("{query_heads}/{heads} heads, {batch} x {n} x {DIM}");
    if !watch.wants(&name, &load) {
        return;
    }
    let (element, rule) = (Element::F16, GroupRule::SumOfSoftmax);
    let paged = page.is_some();
    let (mean_errors, has_norms) = (means, key_norms || value_norms);
    let shape = HybridShape {
        keys,
        values,
        group,
        element,
        rule,
        paged,
        addends,
        key_norms,
        value_norms,
        mean_errors,
        adaptive,
    };
    let hybrid = Hybrid::new(&watch.gpu, shape).unwrap();
    let layouts = [(keys, Side::Keys), (values, Side::Values)]
        .map(|(shape, side)| CodeLayout::new(shape, side).unwrap());
    let mut state = 1_u64;
    let mut noise = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 32
    };
    // One head's codes and rows serve all heads; every head has a copy at its own address.
    let bytes = quantizers.map(|shape| {
        let mut bytes = vec![0_u8; shape.codes_len(n)];
        bytes.chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&(noise() as u32).to_le_bytes()));
        bytes
    });
    // Pages in descending order, or a sequence in one piece.
    let page_tiles = page.map_or(n.div_ceil(TILE), |page| page / TILE);
    let max_pages = n.div_ceil(TILE) / page_tiles;
    let page_table: Vec<u32> = (0..(batch * max_pages) as u32).rev().collect();
    let packed: [Vec<u8>; 2] = [0, 1].map(|side| {
        let tile_len = layouts[side].tile_len();
        let mut packed = vec![0; n.div_ceil(TILE) * tile_len];
        layouts[side]
            .pack_into(&Codes::new(quantizers[side], n, &bytes[side]).unwrap(), &mut packed)
            .unwrap();
        let pages = packed.chunks_exact(page_tiles * tile_len).rev().flat_map(|page| page.repeat(heads));
        pages.collect::<Vec<u8>>().repeat(batch)
    });
    let mut uniform = || f16::from_f32((noise() % 2001) as f32 / 1000.0 - 1.0);
    let rows_of_head: [Vec<f16>; 2] = [0, 1].map(|_| (0..n * DIM).map(|_| uniform()).collect());
    let rows_of_all = rows_of_head.each_ref().map(|rows| rows.repeat(batch * heads));
    let copies = (BEYOND_CACHE / (packed[0].len() + packed[1].len())).max(1) + 1;
    let codes: Vec<_> = (0..copies).map(|_| packed.each_ref().map(|codes| watch.upload(codes))).collect();
    let rows_there: Vec<_> =
        (0..copies).map(|_| rows_of_all.each_ref().map(|rows| watch.upload(rows))).collect();

    let wide = |x: &[f16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let books = quantizers.map(|shape| {
        let centroids: Vec<f16> = (0..shape.codebook_len()).map(|_| uniform()).collect();
        CodebookBuf::new(shape, &wide(&centroids)).unwrap()
    });
    let queries: Vec<f16> = (0..batch * query_heads * DIM).map(|_| uniform()).collect();
    let tables = [0, 1].map(|side| {
        let mut table = vec![f16::ZERO; layouts[side].table_len()];
        layouts[side].table_into(&books[side].view(), &mut table).unwrap();
        watch.upload(&table.repeat(heads))
    });
    let queries_there = watch.upload(&queries);
    let page_table = watch.upload(&page_table);
    let most = if adaptive { n } else { k };
    let (lengths, ks) = (watch.upload(&vec![n as u32; batch]), watch.upload(&vec![most as u32; batch]));
    let exact_lengths = watch.upload(&vec![exact as u32; batch]);
    let value_errors = watch.upload(&vec![VALUE_ERROR; heads]);
    let found = watch.upload(&vec![k as u32; batch * heads]);
    // Those of the first head serve all.
    let tiles = n.div_ceil(TILE);
    let addends_of_head: Vec<f16> =
        (0..if addends { group * n.next_multiple_of(TILE) } else { 0 }).map(|_| uniform()).collect();
    let addends_there: Vec<_> = (0..if addends { copies } else { 0 })
        .map(|_| watch.upload(&addends_of_head.repeat(batch * heads)))
        .collect();
    let norms_of_head: Vec<f16> = (0..if has_norms { n } else { 0 })
        .map(|_| f16::from_f32(1.5) + uniform() * f16::from_f32(0.5))
        .collect();
    let norms_there: Vec<_> = (0..if has_norms { copies } else { 0 })
        .map(|_| [(); 2].map(|()| watch.upload(&norms_of_head.repeat(batch * heads))))
        .collect();
    let blocks = if means { n / MEAN_TOKENS } else { 0 };
    let means_of_head: Vec<f16> = (0..blocks * DIM).map(|_| uniform()).collect();
    let means_there: Vec<_> = (0..if means { copies } else { 0 })
        .map(|_| watch.upload(&means_of_head.repeat(batch * heads)))
        .collect();
    let workspace = watch.zeros::<u8>(hybrid.workspace_len(batch, heads, n.next_multiple_of(TILE)));
    let selected = watch.zeros::<u32>(batch * heads * most);
    let out = watch.zeros::<f16>(queries.len());
    let scale = 1.0 / (DIM as f32).sqrt();
    let arguments = |copy: usize, pdl: bool, bound: f32| HybridArguments {
        batch,
        heads,
        tiles: page_tiles,
        key_codes: watch.pointer(&codes[copy][0]),
        value_codes: watch.pointer(&codes[copy][1]),
        key_table: watch.pointer(&tables[0]),
        value_table: watch.pointer(&tables[1]),
        key_errors: None,
        key_norms: key_norms.then(|| watch.pointer(&norms_there[copy][0])),
        value_norms: value_norms.then(|| watch.pointer(&norms_there[copy][1])),
        // All blocks are whole.
        mean_errors: means.then(|| BlockMeans {
            means: watch.pointer(&means_there[copy]),
            blocks,
            recent: DevicePtr::dangling(),
            recent_parts: BlockMeans::recent_parts(0),
            summed: DevicePtr::dangling(),
        }),
        queries: watch.pointer(&queries_there).cast(),
        code_queries: None,
        lengths: watch.pointer(&lengths),
        pages: page.map(|_| Pages { table: watch.pointer(&page_table), max_pages }),
        addends: addends.then(|| Addends { values: watch.pointer(&addends_there[copy]), tiles }),
        ks: watch.pointer(&ks),
        bound: adaptive.then(|| ErrorBound {
            bound,
            value_errors: watch.pointer(&value_errors),
            found: watch.pointer(&found),
            total: None,
        }),
        selected: watch.pointer(&selected),
        selected_len: most,
        rows: ExactRows {
            keys: watch.pointer(&rows_there[copy][0]).cast(),
            values: watch.pointer(&rows_there[copy][1]).cast(),
            capacity: n,
            index: RowIndex::Token,
            arriving: false,
        },
        // The first rows of each head.
        exact: (exact > 0).then(|| kv_gpu::pq::ExactTokens {
            keys: watch.pointer(&rows_there[copy][0]).cast(),
            values: watch.pointer(&rows_there[copy][1]).cast(),
            lengths: watch.pointer(&exact_lengths),
            capacity: n,
        }),
        scale,
        out: watch.pointer(&out).cast(),
        log_sum_exp: None,
        pdl,
        workspace: watch.pointer(&workspace),
    };
    // The bound whose heads read k rows on average.
    let mut bound = 0.0;
    if adaptive {
        let (mut low, mut high) = (1e-5_f32, 1.0_f32);
        for _ in 0..24 {
            bound = (low * high).sqrt();
            // SAFETY: as below.
            unsafe { hybrid.select(watch.gpu.stream().cu_stream(), &arguments(0, false, bound)) }.unwrap();
            let rows: usize = watch.download(&found).iter().map(|&found| found as usize).sum();
            if rows > batch * heads * k { low = bound } else { high = bound }
        }
    }
    let [us, us_pdl] = [false, true].map(|pdl| {
        let all: Vec<HybridArguments> = (0..copies).map(|copy| arguments(copy, pdl, bound)).collect();
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
        let launch = |i: usize, stream| unsafe {
            hybrid.select(stream, &all[i % copies])?;
            hybrid.attend(stream, &all[i % copies])
        };
        watch.time(if batch == 1 { 16 } else { 4 }, launch)
    });

    // Compares one head with the CPU, which attends to the rows that the device has selected.
    let (got, selected, found) = (watch.download(&out), watch.download(&selected), watch.download(&found));
    let rows: usize = found.iter().map(|&found| found as usize).sum();
    let head = batch * heads - 1;
    let k = found[head] as usize;
    let at = head * group * DIM..(head + 1) * group * DIM;
    let scaled: Vec<f32> = wide(&queries[at.clone()]).iter().map(|x| x * scale).collect();
    let mut luts = vec![0.0; group * keys.lut_len()];
    let luts = lut_into(&books[0].view(), &scaled, &mut luts).unwrap();
    let (mut expected, mut stats) = (vec![0.0; group * DIM], vec![SoftmaxStats::EMPTY; group]);
    let [key_codes, value_codes] = [0, 1].map(|side| Codes::new(quantizers[side], n, &bytes[side]).unwrap());
    let addend = |(query, token): (usize, usize)| {
        addends_of_head[(token / TILE * group + query) * TILE + token % TILE].to_f32()
    };
    let places = (0..group).flat_map(|query| (0..n).map(move |token| (query, token)));
    let bias: Vec<f32> = if addends { places.map(addend).collect() } else { Vec::new() };
    let norms = wide(&norms_of_head);
    let tokens = CodedTokens::new(key_codes, value_codes, books[1].view())
        .unwrap()
        .with_key_scales(key_norms.then_some(&norms[..]))
        .unwrap()
        .with_value_scales(value_norms.then_some(&norms[..]))
        .unwrap()
        .with_bias(addends.then_some(&bias[..]));
    let (mut floats, mut coded) =
        (vec![0.0; HybridScratch::len(values, group, n)], vec![SoftmaxStats::EMPTY; group]);
    let mut scratch = HybridScratch::new(values, n, &mut floats, &mut coded).unwrap();
    let options = pq_core::Hybrid { rows: RowBudget::Count(k), rule, ..Default::default() };
    hybrid_select_into(&luts, &tokens, &options, &mut scratch, &mut vec![0; k]).unwrap();
    let selected = &selected[head * most..][..k];
    assert!(selected.is_sorted_by(|a, b| a < b), "{name}: {selected:?}");
    check_selection(rule, scratch.search().scores(), n, selected, &name);
    hybrid_attend_into(&tokens, selected, &mut scratch, &mut expected, &mut stats).unwrap();
    let of_queries =
        scratch.search().scores().chunks_exact(n).zip(&stats).zip(expected.chunks_exact_mut(DIM));
    for ((scores, stats), out) in of_queries {
        for (scores, mean) in scores.chunks(MEAN_TOKENS).zip(wide(&means_of_head).chunks_exact(DIM)) {
            let weight: f32 = scores.iter().map(|score| (score - stats.max).exp()).sum();
            out.iter_mut().zip(mean).for_each(|(out, mean)| *out += weight * mean);
        }
    }
    let exact_tokens: Vec<u32> = (0..exact as u32).collect();
    let rows_here = ExactTokens::contiguous(&rows_of_head[0], DIM, &rows_of_head[1], DIM).unwrap();
    for tokens in [selected, &exact_tokens].into_iter().filter(|tokens| !tokens.is_empty()) {
        let (attention, mut scratch) = (Attention::default(), vec![0.0; scaled.len()]);
        let (queries, rows) = (Rows::from(&scaled[..]), rows_here.chosen(tokens).unwrap());
        attend_exact_into(&attention, queries, &rows, &mut scratch, &mut expected, &mut stats).unwrap();
    }
    expected.chunks_exact_mut(DIM).zip(&stats).for_each(|(out, stats)| stats.normalize(out));
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = wide(&got[at]).iter().zip(&expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&x| square(x)).sum();
    assert!((error / norm).sqrt() < 2e-3, "{shape:?}: {}", (error / norm).sqrt());

    let exact_rows = rows + batch * heads * exact;
    let read = packed[0].len()
        + packed[1].len()
        + 2 * batch
            * heads
            * (norms.len() * (usize::from(key_norms) + usize::from(value_norms)) + means_of_head.len())
        + exact_rows * DIM * 2 * 2;
    watch.report(&name, &load, read as f64, us);
    watch.report(&format!("{name}, overlapped"), &load, read as f64, us_pdl);
}
