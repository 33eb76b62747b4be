//! A decode step allocates nothing: table, scan, selection, attention on codes and on the window, appending a token.

#![allow(clippy::unwrap_used, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use pq_core::*;

struct Counting;

thread_local! {
    // Of this thread alone: the test harness allocates on its own thread at any time.
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: passes every call on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's contract is this function's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_decode_step_allocates_nothing() {
    let (n, group, dim) = (3000, 4, 64);
    for nbits in [4, 6, 8, 12] {
        let shape = PqShape::new(dim, 16, nbits).unwrap();
        let centroids: Vec<f32> = (0..shape.codebook_len()).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut storage = vec![0.0; shape.codebook_storage_len()];
        let codebook = Codebook::new(shape, &centroids, &mut storage).unwrap();
        let mut bytes: Vec<u8> = (0..shape.codes_len(n)).map(|i| (i * 31) as u8).collect();
        let queries: Vec<f32> = (0..group * dim).map(|i| (i as f32 * 0.11).cos() / 8.0).collect();
        let window: Vec<f32> = (0..64 * dim).map(|i| (i as f32 * 0.23).sin()).collect();
        let mut luts = vec![0.0; group * shape.lut_len()];
        let mut integers = vec![0; shape.quantized_lut_len(LutPrecision::U8)];
        let mut scratch = vec![0.0; attend_scratch_len(shape, group)];
        let (mut scores, mut combined) = (vec![0.0; group * n], vec![0.0; n]);
        let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
        let search = Search { k: n / 10, sinks: 4, recent: 64, rule: GroupRule::SumOfSoftmax };
        let mut tokens = vec![0; search.found(n)];

        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            let before = ALLOCATIONS.get();
            encode_into_with(backend, &codebook, &window[..dim], n - 1, &mut bytes).unwrap();
            let codes = Codes::new(shape, n, &bytes).unwrap();
            lut_into_with(backend, &codebook, &queries, &mut luts).unwrap();
            let lut = Lut::new(shape, &luts[..shape.lut_len()]).unwrap();
            let quantized = QuantizedLut::new_with(backend, &lut, LutPrecision::U8, &mut integers).unwrap();
            scan_quantized_into_with(backend, &quantized, &codes, &mut combined).unwrap();
            search_into(&luts, &codes, &search, &mut scores, &mut combined, &mut stats, &mut tokens).unwrap();
            out.fill(0.0);
            stats.fill(SoftmaxStats::EMPTY);
            let coded = CodedTokens {
                keys: codes,
                values: codes,
                codebook,
                key_scales: None,
                value_scales: None,
                bias: None,
            };
            attend_into_with(backend, &luts, &coded, &mut scratch, &mut out, &mut stats).unwrap();
            attend_exact_into(&queries, &window, &window, &mut combined[..64], &mut out, &mut stats).unwrap();
            assert_eq!(ALLOCATIONS.get(), before, "{backend:?} at {nbits} bits");
        }
    }
}
