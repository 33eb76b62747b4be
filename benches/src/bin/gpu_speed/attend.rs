//! Decode attention on codes.

use half::f16;
use kv_gpu::Element;
use kv_gpu::pq::{Attend, AttendArguments, AttendShape, CodeLayout, Side, TILE};
use pq_core::{
    CodebookBuf, CodedTokens, Codes, PqShape, SoftmaxStats, attend_into, attend_scratch_len, lut_into,
};

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

/// (query heads, key/value heads, batch, tokens)
const LOADS: [(usize, usize, usize, usize); 5] =
    [(32, 32, 1, 32_768), (32, 32, 8, 32_768), (32, 8, 1, 131_072), (32, 8, 1, 32_768), (32, 8, 4, 131_072)];

pub fn run(watch: &Stopwatch) {
    for (m, nbits) in [(64, 8), (64, 6), (128, 4), (64, 4), (32, 8)] {
        for load in LOADS {
            if load.2 == 1 || (m, nbits) == (64, 8) {
                time(watch, PqShape::new(128, m, nbits).unwrap(), load);
            }
        }
    }
    for load in LOADS.into_iter().filter(|load| load.2 == 1) {
        time(watch, PqShape::new(64, 32, 8).unwrap(), load);
    }
}

fn time(watch: &Stopwatch, quantizer: PqShape, (query_heads, heads, batch, n): (usize, usize, usize, usize)) {
    let (dim, group) = (quantizer.dim(), query_heads / heads);
    let name = format!("attend ({m}, {nbits})", m = quantizer.m(), nbits = quantizer.nbits());
    let load = format!("{query_heads}/{heads} heads, {batch} x {n} x {dim}");
    if !watch.wants(&name, &load) {
        return;
    }
    let shape =
        AttendShape { keys: quantizer, values: quantizer, group, element: Element::F16, paged: false };
    let attend = Attend::new(&watch.gpu, shape).unwrap();
    let layouts = [Side::Keys, Side::Values].map(|side| CodeLayout::new(quantizer, side).unwrap());
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
    let tile_bytes = n.div_ceil(TILE) * layouts[0].tile_len();
    let packed: [Vec<u8>; 2] = [0, 1].map(|side| {
        let mut packed = vec![0; tile_bytes];
        layouts[side].pack_into(&Codes::new(quantizer, n, &bytes[side]).unwrap(), &mut packed).unwrap();
        packed.repeat(batch * heads)
    });
    let copies = (BEYOND_CACHE / (2 * packed[0].len())).max(1) + 1;
    let codes: Vec<_> = (0..copies).map(|_| [watch.upload(&packed[0]), watch.upload(&packed[1])]).collect();

    let mut uniform = || f16::from_f32((noise() % 2001) as f32 / 1000.0 - 1.0);
    let centroids: Vec<f16> = (0..quantizer.codebook_len()).map(|_| uniform()).collect();
    let queries: Vec<f16> = (0..batch * query_heads * dim).map(|_| uniform()).collect();
    let wide = |x: &[f16]| x.iter().map(|x| x.to_f32()).collect::<Vec<f32>>();
    let codebook = CodebookBuf::new(quantizer, &wide(&centroids)).unwrap();
    let tables = [0, 1].map(|side| {
        let mut table = vec![f16::ZERO; layouts[side].table_len()];
        layouts[side].table_into(&codebook.view(), &mut table).unwrap();
        watch.upload(&table.repeat(heads))
    });
    let queries_there = watch.upload(&queries);
    let lengths = watch.upload(&vec![n as u32; batch]);
    let workspace = watch.zeros::<u8>(attend.workspace_len(batch, heads));
    let out = watch.zeros::<f16>(queries.len());
    let scale = 1.0 / (dim as f32).sqrt();
    let arguments = |copy: usize, pdl: bool| AttendArguments {
        batch,
        heads,
        tiles: n.div_ceil(TILE),
        key_codes: watch.pointer(&codes[copy % copies][0]),
        value_codes: watch.pointer(&codes[copy % copies][1]),
        key_table: watch.pointer(&tables[0]),
        value_table: watch.pointer(&tables[1]),
        queries: watch.pointer(&queries_there).cast(),
        lengths: watch.pointer(&lengths),
        pages: None,
        exact: None,
        scale,
        out: watch.pointer(&out).cast(),
        log_sum_exp: None,
        pdl,
        workspace: watch.pointer(&workspace),
    };
    let [us, us_pdl] = [false, true].map(|pdl| {
        let all: Vec<AttendArguments> = (0..copies).map(|copy| arguments(copy, pdl)).collect();
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
        let launch = |i: usize, stream| unsafe { attend.launch(stream, &all[i % copies]) };
        watch.time(if batch == 1 { 16 } else { 4 }, launch)
    });

    // Compares one head with the CPU.
    let got = watch.download(&out);
    let head = batch * heads - 1;
    let at = head * group * dim..(head + 1) * group * dim;
    let scaled: Vec<f32> = wide(&queries[at.clone()]).iter().map(|x| x * scale).collect();
    let mut luts = vec![0.0; group * quantizer.lut_len()];
    let luts = lut_into(&codebook.view(), &scaled, &mut luts).unwrap();
    let (mut expected, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
    let [keys, values] = [0, 1].map(|side| Codes::new(quantizer, n, &bytes[side]).unwrap());
    let tokens = CodedTokens::new(keys, values, codebook.view()).unwrap();
    let mut scratch = vec![0.0; attend_scratch_len(quantizer, group)];
    attend_into(&luts, &tokens, &mut scratch, &mut expected, &mut stats).unwrap();
    expected.chunks_exact_mut(dim).zip(&stats).for_each(|(out, stats)| stats.normalize(out));
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = wide(&got[at]).iter().zip(&expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&x| square(x)).sum();
    assert!((error / norm).sqrt() < 2e-3, "{shape:?}: {}", (error / norm).sqrt());

    watch.report(&name, &load, (2 * packed[0].len()) as f64, us);
    watch.report(&format!("{name}, overlapped"), &load, (2 * packed[0].len()) as f64, us_pdl);
}
