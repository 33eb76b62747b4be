//! Times `svd-core`; `benches/peers/svd.py` runs it and its peers and writes the tables.
//!
//! Reads rows (n, 128) from `rows.f32` in the folder, writes the ordered rotation (128, 128) to `basis.f64`,
//! and prints a JSON line per measurement.

#![allow(clippy::unwrap_used)] // a measurement that cannot run should say so by panicking

use std::hint::black_box;
use std::path::Path;

use half::{bf16, f16};
use kv_benches::{floats, median};
use rayon::ThreadPoolBuilder;
use svd_core::{
    Attention, Backend, DecodeHead, Element, ExactTokens, Gram, NoRope, PrefillHead, PrefillRules, Rotation,
    Rows, Schedule, SoftmaxStats, TaskCost, attend_exact_into_with, schedule_decode, schedule_prefill,
};

const DIM: usize = 128;
const KV_HEADS: usize = 8;
const GROUP: usize = 4;
const TOKENS: usize = 32_768;

fn main() {
    let folder = std::env::args().nth(1).unwrap();
    rotations(Path::new(&folder));
    attention::<f32>("f32");
    attention::<bf16>("bf16");
    attention::<f16>("f16");
    schedules();
}

fn report(what: &str, path: &str, seconds: f64) {
    println!("{{\"what\":\"{what}\",\"path\":\"{path}\",\"seconds\":{seconds:e}}}");
}

/// Times the computation of an ordered rotation from rows.
fn rotations(folder: &Path) {
    let rows = floats(&folder.join("rows.f32")).unwrap();
    let rotation = |backend: Backend| {
        let mut gram = Gram::<NoRope>::new(DIM).unwrap();
        gram.add_rows_with(backend, Rows::contiguous(&rows, DIM).unwrap()).unwrap();
        Rotation::principal(&gram).unwrap()
    };
    let bytes: Vec<u8> = rotation(Backend::detect()).basis().iter().flat_map(|x| x.to_le_bytes()).collect();
    std::fs::write(folder.join("basis.f64"), bytes).unwrap();
    for threads in [1, 2] {
        let pool = ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for backend in backends() {
            let seconds = pool.install(|| median(9, || drop(black_box(rotation(backend)))));
            report(&format!("rotation, {threads} threads"), &format!("{backend:?}"), seconds);
        }
    }
    let mut gram = Gram::<NoRope>::new(DIM).unwrap();
    gram.add_rows(Rows::contiguous(&rows, DIM).unwrap()).unwrap();
    report("eigenproblem", "", median(9, || drop(black_box(Rotation::principal(&gram).unwrap()))));
    report("closed form", "", median(9, || drop(black_box(Rotation::score_optimal(&gram, &gram).unwrap()))));
}

/// One decode step of all heads at full and half rank, and the time to read the rows.
fn attention<E: Element>(name: &str) {
    let noise = |n: usize, seed: u32| -> Vec<E> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                E::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
            })
            .collect()
    };
    let (keys, values) = (noise(KV_HEADS * TOKENS * DIM, 1), noise(KV_HEADS * TOKENS * DIM, 2));
    let queries: Vec<f32> = noise(KV_HEADS * GROUP * DIM, 3).iter().map(|x| x.to_f32() / 4.0).collect();
    let seconds = median(7, || {
        black_box(read(&keys));
        black_box(read(&values));
    });
    report(&format!("read, {name}"), "", seconds);
    for rank in [DIM, DIM / 2] {
        let step = |backend: Backend, out: &mut [f32]| {
            let rows = keys.chunks_exact(TOKENS * rank).zip(values.chunks_exact(TOKENS * rank));
            let heads = queries.chunks_exact(GROUP * DIM).zip(out.chunks_exact_mut(GROUP * rank));
            for ((keys, values), (queries, out)) in rows.zip(heads) {
                let mut stats = [SoftmaxStats::EMPTY; GROUP];
                out.fill(0.0);
                let tokens = ExactTokens::contiguous(keys, rank, values, rank).unwrap();
                let (queries, mut scratch) = (Rows::from(&queries[..GROUP * rank]), [0.0; GROUP * DIM]);
                let attention = Attention::default();
                attend_exact_into_with(backend, &attention, queries, &tokens, &mut scratch, out, &mut stats)
                    .unwrap();
                stats.iter().zip(out.chunks_exact_mut(rank)).for_each(|(stats, out)| stats.normalize(out));
            }
        };
        let mut expected = vec![0.0; KV_HEADS * GROUP * rank];
        step(Backend::Scalar, &mut expected);
        for backend in backends() {
            let mut out = vec![0.0; expected.len()];
            let seconds = median(9, || step(backend, &mut out));
            assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-5));
            report(&format!("attend, {name}, rank {rank}"), &format!("{backend:?}"), seconds);
        }
    }
}

/// Reads every byte, with enough independent sums to saturate the loads.
fn read<E: Element>(rows: &[E]) -> [u64; 32] {
    // SAFETY: elements are plain numbers without padding, and any bits are a u64.
    let (_, words, _) = unsafe { rows.align_to::<u64>() };
    let mut sums = [0_u64; 32];
    for chunk in words.as_chunks::<32>().0 {
        sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
    }
    sums
}

/// Makespans for uneven ranks (multiples of 16, coefficient of variation 0.45) relative to the ideal: mean
/// and worst of 50 draws.
fn schedules() {
    let mut state = 1_u64;
    let mut uniform = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / (1 << 24) as f64
    };
    let model = TaskCost { per_task: 2048, granule: 64 };
    let rules = PrefillRules { row_block: 128, granule: 16, per_task: 2048, causal: true };
    for processors in [108, 132] {
        for (batch, longest) in
            [(1, 32_768), (2, 32_768), (4, 32_768), (8, 32_768), (16, 16_384), (32, 8192), (64, 4096)]
        {
            let (mut decode, mut prefill, mut seconds, mut tasks) = (vec![], vec![], vec![], vec![]);
            for _ in 0..50 {
                // A sum of four uniform numbers is nearly normal.
                let costs: Vec<usize> = (0..KV_HEADS)
                    .map(|_| {
                        let z: f64 = ((0..4).map(|_| uniform()).sum::<f64>() - 2.0) * 3.0_f64.sqrt();
                        16 * ((116.0 + 52.0 * z) / 16.0).round().clamp(2.0, 16.0) as usize
                    })
                    .collect();
                let part = |x: f64| if batch == 1 { 1.0 } else { 0.25 + 0.75 * x };
                let lengths: Vec<usize> =
                    (0..batch).map(|_| (part(uniform()) * f64::from(longest)) as usize).collect();
                let each = |length: &usize| -> Vec<(usize, usize)> {
                    costs.iter().map(|&cost| (*length, cost)).collect()
                };
                let heads: Vec<DecodeHead> =
                    lengths.iter().flat_map(each).map(|(tokens, cost)| DecodeHead { tokens, cost }).collect();
                let mut plan = None;
                seconds.push(median(3, || plan = Some(schedule_decode(&heads, processors, model).unwrap())));
                let plan = plan.unwrap();
                tasks.push(plan.tasks().len() as f64);
                decode.push(ratio(&plan));
                // Prompts with 4 query heads per KV head.
                let heads: Vec<PrefillHead> = lengths
                    .iter()
                    .flat_map(each)
                    .flat_map(|head| [head; GROUP])
                    .map(|(tokens, cost)| PrefillHead { rows: tokens, tokens, cost })
                    .collect();
                prefill.push(ratio(&schedule_prefill(&heads, processors, rules).unwrap()));
            }
            let worst = |x: &[f64]| x.iter().copied().fold(0.0, f64::max);
            let mean = |x: &[f64]| x.iter().sum::<f64>() / x.len() as f64;
            println!(
                "{{\"what\":\"schedule\",\"processors\":{processors},\"batch\":{batch},\"longest\":{longest},\"tasks\":{:.0},\
                 \"decode\":{:.4},\"decode_worst\":{:.4},\"prefill\":{:.4},\"prefill_worst\":{:.4},\"seconds\":{:e}}}",
                mean(&tasks),
                mean(&decode),
                worst(&decode),
                mean(&prefill),
                worst(&prefill),
                mean(&seconds)
            );
        }
    }
}

fn ratio(schedule: &Schedule) -> f64 {
    schedule.makespan() as f64 / schedule.ideal()
}

fn backends() -> impl Iterator<Item = Backend> {
    [Backend::Avx512, Backend::Avx2, Backend::Neon].into_iter().filter(|backend| backend.is_available())
}
