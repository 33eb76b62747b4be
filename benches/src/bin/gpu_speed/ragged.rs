//! Decode attention on ragged ranks.

use cudarc::driver::CudaSlice;
use half::f16;
use kv_gpu::Element;
use kv_gpu::svd::{Attend, AttendArguments, AttendShape};
use svd_core::{Attention, ExactTokens, Rows, SoftmaxStats, attend_exact_into};

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

const DIM: usize = 128;
const HEADS: usize = 8;
const GROUP: usize = 4;
/// Ranks of the heads; their mean is half of `DIM`.
const KEY_RANKS: [u32; HEADS] = [16, 24, 40, 56, 64, 80, 104, 128];
const VALUE_RANKS: [u32; HEADS] = [128, 80, 24, 64, 56, 104, 16, 40];

pub fn run(watch: &Stopwatch) {
    let one = vec![32_768_u32];
    let long = vec![131_072_u32];
    // 2,048 to 8,192 tokens, in irregular order.
    let many: Vec<u32> = (0..32).map(|i| 2048 + (i * 2917 + 1300) % 6145).collect();
    for (load, lengths) in [("1 x 32768", one), ("1 x 131072", long), ("32 x 2048 to 8192", many)] {
        for (what, ranks) in
            [("full rank", [[DIM as u32; HEADS]; 2]), ("mean rank half", [KEY_RANKS, VALUE_RANKS])]
        {
            time(
                watch,
                &format!("{what}, {}/{HEADS} heads, {load} x {DIM}", HEADS * GROUP),
                &lengths,
                &ranks,
            );
        }
    }
}

fn time(watch: &Stopwatch, load: &str, lengths: &[u32], ranks: &[[u32; HEADS]; 2]) {
    if !watch.wants("attend, ragged ranks", load) {
        return;
    }
    let (batch, capacity) = (lengths.len(), *lengths.iter().max().unwrap() as usize);
    let sums = ranks.each_ref().map(|ranks| ranks.iter().sum::<u32>() as usize);
    let offsets = ranks.each_ref().map(|ranks| {
        (0..HEADS).map(|head| ranks[..head].iter().map(|&rank| u64::from(rank)).sum()).collect::<Vec<u64>>()
    });
    let tokens: usize = lengths.iter().map(|&n| n as usize).sum();
    let bytes = tokens * (sums[0] + sums[1]) * 2;
    let number = |i: usize| f16::from_f32(((i * 2_654_435_761) % 2001) as f32 / 1000.0 - 1.0);
    let stored = sums.map(|sum| (0..batch * capacity * sum).map(number).collect::<Vec<f16>>());
    let queries: Vec<f16> = (0..batch * HEADS * GROUP * DIM).map(|i| number(i * 31 + 5)).collect();
    let copies = BEYOND_CACHE / bytes + 2;
    let there: Vec<_> = (0..copies).map(|_| stored.each_ref().map(|x| watch.upload(x))).collect();
    let queries_there = watch.upload(&queries);
    let lengths_there = watch.upload(lengths);
    let ranks_there = ranks.each_ref().map(|ranks| watch.upload(ranks));
    let offsets_there = offsets.each_ref().map(|offsets| watch.upload(offsets));
    let attend = Attend::new(&watch.gpu, AttendShape { dim: DIM, element: Element::F16 }).unwrap();
    let workspace = watch.zeros::<u8>(attend.workspace_len(batch, HEADS, GROUP));
    let out = watch.zeros::<f16>(queries.len());
    let scale = 1.0 / (DIM as f32).sqrt();
    let arguments = |stored: &[CudaSlice<f16>; 2], pdl: bool| AttendArguments {
        batch,
        heads: HEADS,
        group: GROUP,
        capacity,
        keys: watch.pointer(&stored[0]).cast(),
        values: watch.pointer(&stored[1]).cast(),
        pages: None,
        queries: watch.pointer(&queries_there).cast(),
        lengths: watch.pointer(&lengths_there),
        key_ranks: watch.pointer(&ranks_there[0]),
        value_ranks: watch.pointer(&ranks_there[1]),
        key_offsets: watch.pointer(&offsets_there[0]),
        value_offsets: watch.pointer(&offsets_there[1]),
        key_rank_sum: sums[0],
        value_rank_sum: sums[1],
        scale,
        out: watch.pointer(&out).cast(),
        log_sum_exp: None,
        pdl,
        workspace: watch.pointer(&workspace),
    };
    let [us, us_pdl] = [false, true].map(|pdl| {
        let all: Vec<AttendArguments> = there.iter().map(|stored| arguments(stored, pdl)).collect();
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
        watch.time(4 * copies, |i, stream| unsafe { attend.launch(stream, &all[i % copies]) })
    });

    // Compares one head of the last sequence with the CPU.
    let got = watch.download(&out);
    let (sequence, head) = (batch - 1, 3);
    let n = lengths[sequence] as usize;
    let [rank_k, rank_v] = ranks.map(|ranks| ranks[head] as usize);
    let [keys, values] = [0, 1].map(|side| {
        let at = sequence * capacity * sums[side] + capacity * offsets[side][head] as usize;
        &stored[side][at..][..n * ranks[side][head] as usize]
    });
    let at = (sequence * HEADS + head) * GROUP * DIM;
    let rows = queries[at..][..GROUP * DIM].chunks_exact(DIM);
    let projected: Vec<f32> = rows.flat_map(|row| row[..rank_k].iter().map(|x| x.to_f32() * scale)).collect();
    let (mut expected, mut stats) = (vec![0.0; GROUP * rank_v], vec![SoftmaxStats::EMPTY; GROUP]);
    let tokens = ExactTokens::contiguous(keys, rank_k, values, rank_v).unwrap();
    let (attention, mut scratch) = (Attention::default(), vec![0.0; projected.len()]);
    let projected = Rows::from(&projected[..]);
    attend_exact_into(&attention, projected, &tokens, &mut scratch, &mut expected, &mut stats).unwrap();
    for (query, (expected, stats)) in expected.chunks_exact_mut(rank_v).zip(&stats).enumerate() {
        stats.normalize(expected);
        let got = &got[at + query * DIM..][..rank_v];
        let square = |x: f32| f64::from(x) * f64::from(x);
        let error: f64 = got.iter().zip(&*expected).map(|(a, b)| square(a.to_f32() - b)).sum();
        let norm: f64 = expected.iter().map(|&x| square(x)).sum();
        assert!((error / norm).sqrt() < 4e-3, "{load}: {}", (error / norm).sqrt());
    }
    watch.report("attend, ragged ranks", load, bytes as f64, us);
    watch.report("attend, ragged ranks, overlapped", load, bytes as f64, us_pdl);
}
