//! Attention of a prompt on ragged ranks.

use cudarc::driver::{DeviceRepr, ValidAsZeroBits};
use half::{bf16, f16};
use kv_gpu::Element;
use kv_gpu::pq::Pages;
use kv_gpu::svd::{AttendShape, Prefill, PrefillArguments};
use svd_core::{Attention, ExactTokens, Rows, SoftmaxStats, attend_exact_into};

use crate::stopwatch::Stopwatch;

const DIM: usize = 128;
const HEADS: usize = 8;
const GROUP: usize = 4;

/// The last tokens of a prompt of `n` tokens.
#[derive(Clone, Copy)]
struct Load {
    n: usize,
    chunk: Option<usize>, // queries, if not all
    rank: usize,
    page: Option<usize>,   // tokens of a page
    window: Option<usize>, // tokens that a query attends to
}

pub fn run(watch: &Stopwatch) {
    let load = |n, rank| Load { n, chunk: None, rank, page: None, window: None };
    let loads = [8192, 32_768].map(|n| [load(n, 128), load(n, 64)]).concat();
    for &load in &loads {
        time::<f16>(watch, Element::F16, load);
        time::<bf16>(watch, Element::Bf16, load);
    }
    let windows = [1024, 4096].map(|window| Load { window: Some(window), ..load(32_768, 128) });
    let pages = [16, 64].map(|page| loads.iter().map(move |&load| Load { page: Some(page), ..load }));
    let of_chunk = |chunk| Load { chunk: Some(chunk), ..load(32_768, 128) };
    let chunks = [128, 256, 384, 512, 640, 768, 1024].map(of_chunk);
    for load in windows.into_iter().chain(pages.into_iter().flatten()).chain(chunks) {
        time::<f16>(watch, Element::F16, load);
    }
}

fn time<T: svd_core::Element + DeviceRepr + ValidAsZeroBits>(
    watch: &Stopwatch,
    element: Element,
    Load { n, chunk, rank, page, window }: Load,
) {
    let what = if rank == DIM { "full rank" } else { "half rank" };
    let load = &format!("{what}, {}/{HEADS} heads, 1 x {n} x {DIM}", HEADS * GROUP);
    let mut kernel = String::from("prefill, ragged ranks");
    if element == Element::Bf16 {
        kernel += ", bf16";
    }
    if let Some(page) = page {
        kernel += &format!(", pages of {page}");
    }
    if let Some(chunk) = chunk {
        kernel += &format!(", chunk of {chunk}");
    }
    if let Some(window) = window {
        kernel += &format!(", window of {window}");
    }
    let kernel = &kernel;
    if !watch.wants(kernel, load) {
        return;
    }
    let number = |i: usize| T::from_f32(((i * 2_654_435_761) % 2001) as f32 / 1000.0 - 1.0);
    let keys: Vec<T> = (0..HEADS * n * rank).map(number).collect();
    let values: Vec<T> = (0..HEADS * n * rank).map(|i| number(i + 3)).collect();
    let query_heads = HEADS * GROUP;
    let count = chunk.unwrap_or(n);
    let queries: Vec<T> = (0..count * query_heads * DIM).map(|i| number(i * 31 + 5)).collect();
    // Pages in reverse order; without pages the sequence is one page.
    let capacity = page.unwrap_or(n);
    let table: Vec<u32> = (0..(n / capacity) as u32).rev().collect();
    let in_pages = |rows: &[T]| -> Vec<T> {
        let of_page = |&page: &u32| {
            (0..HEADS).flat_map(move |head| {
                &rows[(head * n + page as usize * capacity) * rank..][..capacity * rank]
            })
        };
        table.iter().flat_map(of_page).copied().collect()
    };
    let [keys_there, values_there] = [&keys, &values].map(|rows| watch.upload(&in_pages(rows)));
    let (queries_there, table_there) = (watch.upload(&queries), watch.upload(&table));
    let lengths = [n, count].map(|length| watch.upload(&[length as u32]));
    let ranks = watch.upload(&[rank as u32; HEADS]);
    let offsets: Vec<u64> = (0..HEADS).map(|head| (head * rank) as u64).collect();
    let offsets = watch.upload(&offsets);
    let out = watch.zeros::<T>(queries.len());
    let of = if page.is_some() { Prefill::paged } else { Prefill::new };
    let prefill = of(&watch.gpu, AttendShape { dim: DIM, element }).unwrap();
    let workspace = watch.zeros::<u8>(prefill.workspace_len());
    let scale = 1.0 / (DIM as f32).sqrt();
    let arguments = PrefillArguments {
        batch: 1,
        heads: HEADS,
        group: GROUP,
        capacity,
        max_count: count,
        keys: watch.pointer(&keys_there).cast(),
        values: watch.pointer(&values_there).cast(),
        pages: page.map(|_| Pages { table: watch.pointer(&table_there), max_pages: table.len() }),
        queries: watch.pointer(&queries_there).cast(),
        strides: [count * query_heads * DIM, query_heads * DIM, DIM],
        lengths: watch.pointer(&lengths[0]),
        counts: watch.pointer(&lengths[1]),
        window,
        key_ranks: watch.pointer(&ranks),
        value_ranks: watch.pointer(&ranks),
        key_offsets: watch.pointer(&offsets),
        value_offsets: watch.pointer(&offsets),
        key_rank_sum: HEADS * rank,
        value_rank_sum: HEADS * rank,
        padded: false,
        scale,
        out: watch.pointer(&out).cast(),
        workspace: watch.pointer(&workspace),
    };
    // One launch per replay, as for the peers: more in a row lower the clock.
    // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
    let us = watch.time(1, |_, stream| unsafe { prefill.launch(stream, &arguments) });

    // Compares the last query of the last head with the CPU.
    let at = queries.len() - DIM;
    let query: Vec<f32> = queries[at..][..rank].iter().map(|x| x.to_f32() * scale).collect();
    let (mut expected, mut stats) = (vec![0.0; rank], [SoftmaxStats::EMPTY]);
    let seen = window.unwrap_or(n).min(n);
    let first = (HEADS * n - seen) * rank;
    let tokens = ExactTokens::contiguous(&keys[first..], rank, &values[first..], rank).unwrap();
    let (attention, query, mut scratch) = (Attention::default(), Rows::from(&query[..]), vec![0.0; rank]);
    attend_exact_into(&attention, query, &tokens, &mut scratch, &mut expected, &mut stats).unwrap();
    stats[0].normalize(&mut expected);
    let got = watch.download(&out);
    let worst = got[at..].iter().zip(&expected).map(|(a, b)| (a.to_f32() - b).abs()).fold(0.0, f32::max);
    assert!(worst < 2e-3, "{load}: {worst}");
    // Two matrix products over half of the square, or what the window or the chunk leaves of it, at 16
    // multiply-adds per lane and clock on sm_90 and 8 before.
    let unseen = (n - seen).max(n - count);
    let operations = (query_heads * (n * n - unseen * unseen) * rank) as f64;
    let each = if watch.gpu.capability() >= (9, 0) { 16.0 } else { 8.0 };
    let per_us = each * watch.operations_per_us();
    watch.report_with_floor(
        kernel,
        load,
        (2 * (keys.len() + queries.len()) * 2) as f64,
        us,
        operations / per_us,
    );
}
