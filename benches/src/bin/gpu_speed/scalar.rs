//! Decode attention on scalar codes.

use cudarc::driver::result::memcpy_dtod_async;
use cudarc::driver::{CudaSlice, DeviceRepr, ValidAsZeroBits};
use half::f16;
use kv_gpu::Element;
use kv_gpu::sq::{Attend, AttendArguments, AttendShape, IntegerQueries, Queries, QueriesArguments};
use pq_core::SoftmaxStats;
use pq_core::sq::{self, Shape};

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

const DIM: usize = 128;
const BLOCK: usize = 256;

/// Query heads, KV heads, sequences and their tokens.
const LOADS: [(usize, usize, usize, usize); 12] = [
    (32, 8, 1, 131_072),
    (32, 8, 4, 131_072),
    (32, 8, 16, 8_192),
    (32, 8, 256, 512),
    (32, 8, 1, 32_768),
    (32, 8, 1, 1_024),
    (56, 8, 1, 131_072),
    (64, 8, 1, 131_072),
    (96, 8, 1, 131_072),
    (128, 8, 1, 131_072),
    (8, 1, 1, 32_768),
    (32, 32, 1, 32_768),
];

pub fn run(watch: &Stopwatch) {
    for load in LOADS {
        for bits in [2, 3, 4] {
            time(watch, "", Shape::uniform(DIM, bits).unwrap(), bits, load);
        }
        // Components of falling deviation: codes of 0 to 7 bits.
        let sigma: Vec<f32> = (0..DIM).map(|i| 0.97_f32.powi(i as i32)).collect();
        let mixed = sq::allot(&sigma, DIM / 16 * 3, &mut [0; DIM]).unwrap();
        time(watch, " of mixed widths", mixed, 3, load);
    }
}

/// A copy of `one` for each of `n` places.
fn repeat<T: DeviceRepr + ValidAsZeroBits>(watch: &Stopwatch, one: &CudaSlice<T>, n: usize) -> CudaSlice<T> {
    let there = watch.zeros::<T>(one.len() * n);
    let bytes = one.len() * size_of::<T>();
    let (from, to) = (watch.pointer(one).address(), watch.pointer(&there).address());
    for i in 0..n {
        let stream = watch.gpu.stream().cu_stream();
        // SAFETY: both buffers have these bytes, and live until the stream has copied them.
        unsafe { memcpy_dtod_async(to + (i * bytes) as u64, from, bytes, stream) }.unwrap();
    }
    there
}

fn time(
    watch: &Stopwatch,
    what: &str,
    keys: Shape,
    bits: u32,
    (query_heads, heads, batch, n): (usize, usize, usize, usize),
) {
    let name = format!("scalar attend, keys of {} bits{what}, values of {bits}", keys.bits());
    let shape_name = format!("{query_heads}/{heads} heads, {batch} x {n} x {DIM}");
    if !watch.wants(&name, &shape_name) {
        return;
    }
    let (group, blocks, values) = (query_heads / heads, n / BLOCK, Shape::uniform(DIM, bits).unwrap());
    let shape = AttendShape {
        dim: DIM,
        key_slots: keys.slots(),
        uniform_keys: keys.widths().iter().all(|&width| width == keys.widths()[0]),
        value_bits: bits as usize,
        block: BLOCK,
        group,
        element: Element::F16,
        mean_errors: false,
        addends: false,
        paged: false,
    };
    let attend = Attend::new(&watch.gpu, shape).unwrap();
    let mut state = 1_u64;
    let mut noise = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 32) as u32
    };
    // One head's codes serve all heads; every head has a copy at its own address.
    let key_words: Vec<u32> = (0..keys.words_len(n)).map(|_| noise()).collect();
    let value_words: Vec<u32> = (0..values.words_len(n)).map(|_| noise()).collect();
    let steps: Vec<u8> = (0..blocks * DIM).map(|_| 120 + noise() as u8 % 16).collect();
    let norms: Vec<u8> = (0..n).map(|_| 100 + noise() as u8 % 64).collect();
    // The same for all blocks: in this basis, with frequencies of 0.
    let queries: Vec<f16> =
        (0..group * DIM).map(|_| f16::from_f32((noise() % 2001) as f32 / 1000.0 - 1.0)).collect();
    let basis: Vec<f32> = (0..DIM * DIM).map(|i| if i % (DIM + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let mut dual = vec![0.0; shape.dual_table().table_len()];
    shape.dual_table().table_into(&basis, &mut dual).unwrap();
    let table = shape.key_table();
    let mut table_words = vec![0; table.table_len()];
    table.table_into(&keys, &mut table_words).unwrap();

    let places = batch * heads;
    let read = places * (4 * (key_words.len() + value_words.len()) + steps.len() + norms.len());
    let copies = BEYOND_CACHE / read + 1;
    let [one_keys, one_values] = [&key_words, &value_words].map(|words| watch.upload(words));
    let codes: Vec<_> =
        (0..copies).map(|_| [&one_keys, &one_values].map(|one| repeat(watch, one, places))).collect();
    let bytes_there = [&steps, &norms].map(|bytes| repeat(watch, &watch.upload(bytes), places));
    let queries_there = repeat(watch, &watch.upload(&queries), places);
    let (duals, frequencies) = (watch.upload(&dual.repeat(heads)), watch.zeros::<f32>(DIM / 2));
    let rows = places * blocks * group;
    let query_words = watch.zeros::<u32>(rows * IntegerQueries::words_len(DIM));
    let units = watch.zeros::<f32>(rows * 2);
    let integers =
        IntegerQueries { words: watch.pointer(&query_words), units: watch.pointer(&units), blocks };
    let tables = watch.upload(&table_words.repeat(heads));
    let lengths = watch.upload(&vec![n as u32; batch]);
    let workspace = watch.zeros::<u8>(attend.workspace_len(batch, heads));
    let out = watch.zeros::<f16>(batch * query_heads * DIM);
    let scale = 1.0 / (DIM as f32).sqrt();
    let transform = Queries::new(&watch.gpu, shape).unwrap();
    let query_arguments = |pdl: bool| QueriesArguments {
        batch,
        heads,
        queries: watch.pointer(&queries_there).cast(),
        duals: watch.pointer(&duals),
        frequencies: watch.pointer(&frequencies),
        first: 0,
        steps: watch.pointer(&bytes_there[0]),
        key_tables: watch.pointer(&tables),
        lengths: watch.pointer(&lengths),
        blocks,
        pages: None,
        scale,
        out: integers,
        pdl,
    };
    let query_times = [false, true].map(|pdl| {
        let arguments = query_arguments(pdl);
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
        watch.time(16, |_, stream| unsafe { transform.launch(stream, &arguments) })
    });
    let arguments = |copy: usize, pdl: bool| AttendArguments {
        batch,
        heads,
        blocks,
        keys: watch.pointer(&codes[copy][0]),
        values: watch.pointer(&codes[copy][1]),
        norms: watch.pointer(&bytes_there[1]),
        mean_errors: None,
        addends: None,
        key_tables: watch.pointer(&tables),
        queries: integers,
        lengths: watch.pointer(&lengths),
        pages: None,
        out: watch.pointer(&out).cast(),
        log_sum_exp: None,
        pdl,
        workspace: watch.pointer(&workspace),
    };
    let launches = if batch == 1 { 16 } else { 4 };
    let [us, us_pdl] = [false, true].map(|pdl| {
        let all: Vec<AttendArguments> = (0..copies).map(|copy| arguments(copy, pdl)).collect();
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
        watch.time(launches, |i, stream| unsafe { attend.launch(stream, &all[i % copies]) })
    });

    // Compares the first head of the first sequence with the CPU.
    let got: Vec<f32> = watch.download(&out)[..group * DIM].iter().map(|x| x.to_f32()).collect();
    let (mut expected, mut stats) = (vec![0.0; group * DIM], vec![SoftmaxStats::EMPTY; group]);
    let mut scratch = vec![0.0; sq::attend_scratch_len(&keys, &values, BLOCK, group)];
    for b in 0..blocks {
        let of = |words: &[u32], shape: &Shape| {
            let len = shape.words_len(BLOCK);
            words[b * len..][..len].to_vec()
        };
        let (key_words, value_words) = (of(&key_words, &keys), of(&value_words, &values));
        let of_keys = sq::Keys::new(keys, BLOCK, &steps[b * DIM..][..DIM], &key_words).unwrap();
        let of_values = sq::Values::new(values, &norms[b * BLOCK..][..BLOCK], &value_words).unwrap();
        let scaled: Vec<f32> = queries.iter().map(|x| x.to_f32() * scale).collect();
        let block = sq::Block::new(of_keys, of_values).unwrap();
        sq::attend_into(&scaled, &block, &mut scratch, &mut expected, &mut stats).unwrap();
    }
    expected.chunks_exact_mut(DIM).zip(&stats).for_each(|(out, stats)| stats.normalize(out));
    let square = |x: f32| f64::from(x) * f64::from(x);
    let error: f64 = got.iter().zip(&expected).map(|(a, b)| square(a - b)).sum();
    let norm: f64 = expected.iter().map(|&x| square(x)).sum();
    assert!((error / norm).sqrt() < 3e-3, "{shape:?}: {}", (error / norm).sqrt());

    watch.report(&name, &shape_name, read as f64, us);
    watch.report(&format!("{name}, overlapped"), &shape_name, read as f64, us_pdl);
    let (name, written) = (name.replace("attend", "queries"), (rows * (2 * DIM + 8)) as f64);
    watch.report(&name, &shape_name, written, query_times[0]);
    watch.report(&format!("{name}, overlapped"), &shape_name, written, query_times[1]);
}
