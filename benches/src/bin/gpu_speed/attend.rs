//! Decode attention on codes.

use cudarc::driver::result::memcpy_dtod_async;
use half::{bf16, f16};
use kv_gpu::Element;
use kv_gpu::pq::{
    Addends, Attend, AttendArguments, AttendShape, CodeLayout, ExactTokens, Norms, Pages, Paging, Side, TILE,
};
use pq_core::{
    Attention, CodebookBuf, CodedTokens, Codes, PqShape, Rows, SoftmaxStats, attend_exact_into, attend_into,
    attend_scratch_len, lut_into,
};

use crate::rope_mean_scores::Means;
use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

/// The tokens and heads of a launch.
#[derive(Clone, Copy)]
struct Load {
    query_heads: usize,
    heads: usize,
    batch: usize,
    n: usize,            // coded tokens of the first sequence
    others: usize,       // and of the others
    exact: usize,        // exact tokens of a sequence
    page: Option<usize>, // tokens of a page
    element: Element,
    addends: bool, // of a rotated mean
    norms: bool,
    exact_fp8: bool,
}

const fn load(query_heads: usize, heads: usize, batch: usize, n: usize) -> Load {
    let (element, addends, norms, exact_fp8) = (Element::F16, false, false, false);
    Load { query_heads, heads, batch, n, others: n, exact: 0, page: None, element, addends, norms, exact_fp8 }
}

const LOADS: [Load; 5] = [
    load(32, 32, 1, 32_768),
    load(32, 32, 8, 32_768),
    load(32, 8, 1, 131_072),
    load(32, 8, 1, 32_768),
    load(32, 8, 4, 131_072),
];
/// Other groups, numbers of heads that do not divide the multiprocessors, batches and short contexts.
const SHAPES: [Load; 17] = [
    load(64, 8, 1, 32_768),
    load(64, 8, 1, 131_072),
    load(40, 8, 1, 32_768),
    load(48, 8, 1, 131_072),
    load(28, 4, 1, 32_768),
    load(96, 8, 1, 65_536),
    load(128, 8, 1, 65_536),
    load(16, 8, 1, 131_072),
    load(200, 40, 1, 32_768),
    load(67, 67, 1, 32_768),
    load(133, 133, 1, 32_768),
    load(8, 1, 1, 32_768),
    load(32, 8, 1, 1024),
    load(32, 32, 1, 1024),
    load(32, 8, 32, 4096),
    load(32, 8, 256, 512),
    Load { others: 512, ..load(32, 8, 32, 131_072) },
];
const PAGES: [usize; 4] = [16, 32, 64, 256];
const EXACT: [usize; 2] = [132, 1024];

pub fn run(watch: &Stopwatch) {
    let (four_bits, long) = (PqShape::new(128, 64, 8).unwrap(), load(32, 8, 1, 131_072));
    for (m, nbits) in [(64, 8), (64, 6), (128, 4), (64, 4), (32, 8)] {
        for load in LOADS {
            if load.batch == 1 || (m, nbits) == (64, 8) {
                time(watch, PqShape::new(128, m, nbits).unwrap(), load);
            }
        }
    }
    for load in LOADS.into_iter().filter(|load| load.batch == 1) {
        time(watch, PqShape::new(64, 32, 8).unwrap(), load);
    }
    SHAPES.into_iter().for_each(|load| time(watch, four_bits, load));
    PAGES.into_iter().for_each(|page| time(watch, four_bits, Load { page: Some(page), ..long }));
    for load in
        LOADS.into_iter().filter(|load| load.n * load.batch != long.n).chain([load(64, 8, 1, 131_072)])
    {
        for page in [16, 32] {
            time(watch, four_bits, Load { page: Some(page), ..load });
        }
    }
    for load in [load(32, 8, 1, 32_768), load(32, 32, 1, 32_768)] {
        for exact in EXACT {
            for exact_fp8 in [false, true] {
                time(watch, four_bits, Load { exact, exact_fp8, ..load });
            }
        }
    }
    for load in [long, load(32, 32, 1, 32_768), load(64, 8, 1, 131_072), Load { page: Some(32), ..long }] {
        for (addends, norms) in [(false, true), (true, false), (true, true)] {
            time(watch, four_bits, Load { addends, norms, ..load });
        }
    }
    for page in [None, Some(32)] {
        time(watch, four_bits, Load { element: Element::Bf16, page, ..long });
    }
}

/// The bits of values in an element type.
fn bits(element: Element, values: &[f32]) -> Vec<u16> {
    let of = |&x: &f32| match element {
        Element::F16 => f16::from_f32(x).to_bits(),
        Element::Bf16 => bf16::from_f32(x).to_bits(),
    };
    values.iter().map(of).collect()
}

/// The values of elements.
fn wide(element: Element, bits: &[u16]) -> Vec<f32> {
    let of = |&x: &u16| match element {
        Element::F16 => f16::from_bits(x).to_f32(),
        Element::Bf16 => bf16::from_bits(x).to_f32(),
    };
    bits.iter().map(of).collect()
}

/// The FP8 bits (E4M3) of a number below 2, less the mantissa bits that have no room.
fn e4m3_bits(x: &f32) -> u8 {
    let magnitude = (x.abs() * 2_f32.powi(-120)).to_bits() >> 20; // with the exponent's bias of E4M3
    magnitude as u8 | if x.is_sign_negative() { 128 } else { 0 }
}

/// The number of FP8 bits.
fn of_e4m3(bits: u8) -> f32 {
    let magnitude = f32::from_bits(u32::from(bits & 127) << 20) * 2_f32.powi(120);
    if bits < 128 { magnitude } else { -magnitude }
}

fn time(watch: &Stopwatch, quantizer: PqShape, load: Load) {
    let Load { query_heads, heads, batch, n, others, exact, page, element, addends, norms, exact_fp8 } = load;
    let (dim, group) = (quantizer.dim(), query_heads / heads);
    let mut name = format!("attend ({m}, {nbits})", m = quantizer.m(), nbits = quantizer.nbits());
    if others != n {
        name += &format!(", one of {n} and {} of {others}", batch - 1);
    }
    if exact > 0 {
        name += &format!(", {exact} exact tokens");
    }
    if exact_fp8 {
        name += " in fp8";
    }
    if let Some(page) = page {
        name += &format!(", pages of {page}");
    }
    if element == Element::Bf16 {
        name += ", bf16";
    }
    if norms {
        name += ", norms";
    }
    if addends {
        name += ", addends";
    }
    let mean = (n + (batch - 1) * others) / batch;
    let shape_name = format!("{query_heads}/{heads} heads, {batch} x {mean} x {dim}");
    if !watch.wants(&name, &shape_name) {
        return;
    }
    let whole = [Side::Keys, Side::Values].map(|side| CodeLayout::new(quantizer, side).unwrap());
    let (paging, layouts) = match page {
        None => (Paging::Contiguous, whole),
        Some(page) if page % whole[0].tokens() == 0 => (Paging::Tiles, whole),
        Some(_) => (Paging::HalfTiles, whole.map(|layout| layout.half_tiles().unwrap())),
    };
    let shape =
        AttendShape { keys: quantizer, values: quantizer, group, element, paging, addends, norms, exact_fp8 };
    let attend = Attend::new(&watch.gpu, shape).unwrap();
    let mut state = 1_u64;
    let mut noise = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state >> 32
    };
    // One head's codes serve all heads; every head has a copy at its own address.
    let mut one_head = || {
        let mut bytes = vec![0_u8; quantizer.codes_len(n)];
        bytes.chunks_exact_mut(4).for_each(|four| four.copy_from_slice(&(noise() as u32).to_le_bytes()));
        bytes
    };
    let bytes = [one_head(), one_head()];
    let (tile_len, tokens) = (layouts[0].tile_len(), layouts[0].tokens());
    let tiles = n.div_ceil(tokens);
    let packed: [Vec<u8>; 2] = [0, 1].map(|side| {
        let mut packed = vec![0; tiles * tile_len];
        layouts[side].pack_into(&Codes::new(quantizer, n, &bytes[side]).unwrap(), &mut packed).unwrap();
        packed
    });
    // Pages in descending order, or the capacity of the first sequence for each.
    let page_tiles = page.map_or(tiles, |page| page / tokens);
    let max_pages = tiles / page_tiles;
    let table: Vec<u32> = (0..(batch * max_pages) as u32).rev().collect();
    let read = (n + (batch - 1) * others).div_ceil(tokens) * heads * tile_len; // bytes of a side
    let copies = (BEYOND_CACHE / (2 * read)).max(1) + usize::from(batch * tiles * heads * tile_len < 1 << 30);
    let one_head = [0, 1].map(|side| watch.upload(&packed[side]));
    let codes: Vec<_> = (0..copies)
        .map(|_| {
            [0, 1].map(|side: usize| {
                let there = watch.zeros::<u8>(batch * heads * tiles * tile_len);
                let (from, to) = (watch.pointer(&one_head[side]).address(), watch.pointer(&there).address());
                let piece =
                    if page.is_some() { page_tiles } else { others.min(n).div_ceil(tokens) } * tile_len;
                for i in 0..batch * heads * max_pages {
                    let (place, head) = (i / heads, i % heads);
                    let logical = if page.is_some() { batch * max_pages - 1 - place } else { place };
                    let first = logical % max_pages * page_tiles * tile_len;
                    let len = if logical == 0 && page.is_none() { packed[side].len() } else { piece };
                    let at = (place * heads + head) * page_tiles * tile_len;
                    let stream = watch.gpu.stream().cu_stream();
                    // SAFETY: both buffers have these bytes, and live until the stream has copied them.
                    unsafe { memcpy_dtod_async(to + at as u64, from + first as u64, len, stream) }.unwrap();
                }
                there
            })
        })
        .collect();

    let mut uniform = || (noise() % 2001) as f32 / 1000.0 - 1.0;
    let centroids: Vec<f32> =
        (0..quantizer.codebook_len()).map(|_| f16::from_f32(uniform()).to_f32()).collect();
    let mut elements = |len: usize| bits(element, &(0..len).map(|_| uniform()).collect::<Vec<_>>());
    let queries = elements(batch * query_heads * dim);
    let mut exact_rows = [elements(exact * dim), elements(exact * dim)];
    if exact_fp8 {
        exact_rows = exact_rows.map(|rows| {
            bits(element, &wide(element, &rows).iter().map(|x| of_e4m3(e4m3_bits(x))).collect::<Vec<_>>())
        });
    }
    let exact_there = exact_rows.each_ref().map(|rows| {
        let one_head: Vec<u8> = if exact_fp8 {
            wide(element, rows).iter().map(e4m3_bits).collect()
        } else {
            rows.iter().flat_map(|bits| bits.to_le_bytes()).collect()
        };
        watch.upload(&one_head.repeat(batch * heads))
    });
    let exact_factors = watch.upload(&vec![1_f32; 2 * heads]);
    let exact_lengths = watch.upload(&vec![exact as u32; batch]);
    let codebook = CodebookBuf::new(quantizer, &centroids).unwrap();
    let tables = [0, 1].map(|side| {
        let mut table = vec![f16::ZERO; layouts[side].table_len()];
        layouts[side].table_into(&codebook.view(), &mut table).unwrap();
        watch.upload(&table.repeat(heads))
    });
    let queries_there = watch.upload(&queries);
    let mut lengths = vec![others as u32; batch];
    lengths[0] = n as u32;
    let (lengths, table) = (watch.upload(&lengths), watch.upload(&table));
    let means = addends.then(|| Means::new(watch, heads, group, element));
    let addend_tiles = n.div_ceil(TILE);
    let addends_there =
        watch.zeros::<f16>(if addends { batch * query_heads * addend_tiles * TILE } else { 1 });
    let launch_means = |pdl: bool| {
        let (queries, lengths) = (watch.pointer(&queries_there).cast(), watch.pointer(&lengths));
        means
            .as_ref()
            .map(|means| means.launch(watch, (batch, addend_tiles), queries, lengths, &addends_there, pdl))
    };
    // Norms repeat in every tile, so that they are the same in pages.
    let of_tile: [Vec<f16>; 2] =
        [0, 1].map(|_| (0..tokens).map(|_| f16::from_f32(uniform() + 1.5)).collect());
    let places = if norms { batch * heads * tiles } else { 1 };
    let norms_there = [0, 1].map(|side| watch.upload(&of_tile[side].repeat(places)));
    let workspace = watch.zeros::<u8>(attend.workspace_len(batch, heads));
    let out = watch.zeros::<u16>(queries.len());
    let scale = 1.0 / (dim as f32).sqrt();
    let arguments = |copy: usize, pdl: bool| AttendArguments {
        batch,
        heads,
        tiles: page_tiles,
        key_codes: watch.pointer(&codes[copy % copies][0]),
        value_codes: watch.pointer(&codes[copy % copies][1]),
        key_table: watch.pointer(&tables[0]),
        value_table: watch.pointer(&tables[1]),
        queries: watch.pointer(&queries_there).cast(),
        lengths: watch.pointer(&lengths),
        pages: page.map(|_| Pages { table: watch.pointer(&table), max_pages }),
        addends: addends.then(|| Addends { values: watch.pointer(&addends_there), tiles: addend_tiles }),
        norms: norms.then(|| {
            let [keys, values] = [0, 1].map(|side: usize| watch.pointer(&norms_there[side]));
            Norms { keys, values }
        }),
        exact: (exact > 0).then(|| ExactTokens {
            keys: watch.pointer(&exact_there[0]).cast(),
            values: watch.pointer(&exact_there[1]).cast(),
            lengths: watch.pointer(&exact_lengths),
            capacity: exact,
        }),
        exact_factors: exact_fp8.then(|| watch.pointer(&exact_factors)),
        scale,
        out: watch.pointer(&out).cast(),
        log_sum_exp: None,
        pdl,
        workspace: watch.pointer(&workspace),
    };
    if let Some(launch) = launch_means(false) {
        launch(watch.gpu.stream().cu_stream()).unwrap();
    }
    let launches = if batch == 1 { 16 } else { 4 };
    let [us, us_pdl] = [false, true].map(|pdl| {
        let all: Vec<AttendArguments> = (0..copies).map(|copy| arguments(copy, pdl)).collect();
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
        let launch = |i: usize, stream| unsafe { attend.launch(stream, &all[i % copies]) };
        watch.time(launches, launch)
    });
    // The addends are computed before every launch.
    let us_both = launch_means(true).map(|launch_means| {
        let all: Vec<AttendArguments> = (0..copies).map(|copy| arguments(copy, true)).collect();
        watch.time(launches, |i, stream| {
            launch_means(stream)?;
            // SAFETY: as above.
            unsafe { attend.launch(stream, &all[i % copies]) }
        })
    });

    // Compares one head of the first sequence with the CPU.
    let got = watch.download(&out);
    let head = heads - 1;
    let at = head * group * dim..(head + 1) * group * dim;
    let scaled: Vec<f32> = wide(element, &queries[at.clone()]).iter().map(|x| x * scale).collect();
    let mut luts = vec![0.0; group * quantizer.lut_len()];
    let luts = lut_into(&codebook.view(), &scaled, &mut luts).unwrap();
    let (mut expected, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
    let [keys, values] = [0, 1].map(|side| Codes::new(quantizer, n, &bytes[side]).unwrap());
    let of_tokens = |of_tile: &Vec<f16>| -> Option<Vec<f32>> {
        norms.then(|| of_tile.iter().cycle().take(n).map(|x| x.to_f32()).collect())
    };
    let [key_norms, value_norms] = of_tile.each_ref().map(of_tokens);
    let bias: Option<Vec<f32>> = means
        .as_ref()
        .map(|means| scaled.chunks_exact(dim).flat_map(|query| means.expected(head, query, n)).collect());
    let tokens = CodedTokens::new(keys, values, codebook.view()).unwrap();
    let tokens = tokens.with_key_scales(key_norms.as_deref()).unwrap();
    let tokens = tokens.with_value_scales(value_norms.as_deref()).unwrap().with_bias(bias.as_deref());
    let mut scratch = vec![0.0; attend_scratch_len(quantizer, group)];
    attend_into(&luts, &tokens, &mut scratch, &mut expected, &mut stats).unwrap();
    if exact > 0 {
        let [keys, values] = [0, 1].map(|side| wide(element, &exact_rows[side]));
        let tokens = pq_core::ExactTokens::contiguous(&keys, dim, &values, dim).unwrap();
        let mut scratch = vec![0.0; scaled.len()];
        let (attention, queries) = (Attention::default(), Rows::from(&scaled[..]));
        attend_exact_into(&attention, queries, &tokens, &mut scratch, &mut expected, &mut stats).unwrap();
    }
    expected.chunks_exact_mut(dim).zip(&stats).for_each(|(out, stats)| stats.normalize(out));
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = wide(element, &got[at]).iter().zip(&expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&x| square(x)).sum();
    assert!(
        (error / norm).sqrt() < if element == Element::F16 { 2e-3 } else { 6e-3 },
        "{shape:?}: {}",
        (error / norm).sqrt()
    );

    let coded = n + (batch - 1) * others;
    let adjustments =
        if addends { 2 * query_heads * coded } else { 0 } + if norms { 4 * heads * coded } else { 0 };
    let exact_bytes = batch * heads * exact * dim * if exact_fp8 { 1 } else { 2 };
    let bytes = 2 * (read + exact_bytes) + adjustments;
    watch.report(&name, &shape_name, bytes as f64, us);
    watch.report(&format!("{name}, overlapped"), &shape_name, bytes as f64, us_pdl);
    if let Some(us) = us_both {
        watch.report(&format!("{name}, computed and overlapped"), &shape_name, bytes as f64, us);
    }
}
