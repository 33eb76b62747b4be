//! A decode step allocates nothing: projection of query and key, attention on the projected rows.

#![allow(clippy::unwrap_used, unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use svd_core::*;

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
    let (n, group, dim, rank) = (1000, 4, 64, 40);
    let columns = vec![0.1; dim * rank];
    let map = Map::new(&columns, dim, rank).unwrap();
    let queries = vec![0.5_f32; group * dim];
    let mut projected = vec![0.0; group * rank];
    let (keys, values) = (vec![half::bf16::ONE; n * rank], vec![half::bf16::ONE; n * rank]);
    let mut scratch = vec![0.0; attend_exact_scratch_len(group, rank)];
    let (mut out, mut stats) = (vec![0.0; group * rank], vec![SoftmaxStats::EMPTY; group]);
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let before = ALLOCATIONS.get();
        let rows = Rows::contiguous(&queries, dim).unwrap();
        map.project_into_with(backend, rows, RowsMut::contiguous(&mut projected, rank).unwrap()).unwrap();
        let tokens = ExactTokens::contiguous(&keys, rank, &values, rank).unwrap();
        let (attention, projected) = (Attention::scaled(0.125), Rows::from(&projected[..]));
        attend_exact_into_with(backend, &attention, projected, &tokens, &mut scratch, &mut out, &mut stats)
            .unwrap();
        normalize_all(&stats, &mut out).unwrap();
        assert_eq!(ALLOCATIONS.get(), before, "{backend:?}");
    }
}
