//! Keys and values of chosen tokens from pinned host memory, against a copy over the same PCIe link.

use cudarc::driver::result::memcpy_htod_async;
use kv_gpu::DevicePtr;
use kv_gpu::pq::{Gather, GatherArguments};

use crate::stopwatch::Stopwatch;

const HEADS: usize = 8;
const N: usize = 131_072;
const WANTED: usize = 13_107;
const ROW: usize = 256; // bytes: 128 halves

pub fn run(watch: &Stopwatch) {
    let shape = format!("{WANTED} of {N} tokens, {HEADS} heads");
    if !watch.wants("gather", &shape) {
        return;
    }
    let bytes = HEADS * N * ROW;
    // SAFETY: written before they are read.
    let mut host = [0, 1].map(|_| unsafe { watch.gpu.context().alloc_pinned::<u8>(bytes) }.unwrap());
    for (side, host) in host.iter_mut().enumerate() {
        // Every row contains its index.
        for (i, row) in host.as_mut_slice().unwrap().chunks_exact_mut(ROW).enumerate() {
            row.chunks_exact_mut(8)
                .for_each(|word| word.copy_from_slice(&((2 * i + side) as u64).to_le_bytes()));
        }
    }
    // Ascending, as from a search, with irregular gaps.
    let rows: Vec<u32> =
        (0..HEADS * WANTED).map(|i| ((i % WANTED) * 10 + (i * 7 + i / 3) % 10) as u32).collect();
    let out_len = HEADS * WANTED * ROW;
    let (keys_out, values_out) = (watch.zeros::<u8>(out_len), watch.zeros::<u8>(out_len));
    let rows_there = watch.upload(&rows);
    let pinned = |side: usize| DevicePtr::new(host[side].as_ptr().unwrap() as u64).unwrap();
    let arguments = GatherArguments {
        heads: HEADS,
        keys: pinned(0),
        values: pinned(1),
        head_rows: N,
        rows: watch.pointer(&rows_there),
        places: None,
        counts: None,
        list_len: WANTED,
        keys_out: watch.pointer(&keys_out),
        values_out: watch.pointer(&values_out),
        out_len: WANTED,
        prefetch: None,
    };
    let gather = Gather::new(&watch.gpu, ROW).unwrap();
    // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
    let us = watch.time(2, |_, stream| unsafe { gather.launch(stream, &arguments) });
    for (side, out) in [keys_out, values_out].iter().enumerate() {
        for (i, row) in watch.download(out).chunks_exact(ROW).enumerate() {
            let from = (i / WANTED * N + rows[i] as usize) * 2 + side;
            assert!(row.chunks_exact(8).all(|word| word == (from as u64).to_le_bytes()), "row {i}");
        }
    }

    let there = watch.zeros::<u8>(bytes);
    let pointer = watch.pointer(&there).address();
    let source = host[0].as_slice().unwrap();
    let stream = watch.gpu.stream().cu_stream();
    // SAFETY: the buffer has as many bytes as the source, and both outlive the copies.
    let copy_us = watch.replay(|| unsafe { memcpy_htod_async(pointer, source, stream) }.unwrap());
    let floor_us = copy_us * (2 * out_len) as f64 / bytes as f64;
    watch.report_with_floor("gather", &shape, (2 * out_len) as f64, us, floor_us);
}
