//! Manifests and objects that differ from those written, through all layers of a store: one-line errors, and
//! no memory beyond a limit. `fuzz/fuzz_targets/store_objects.rs` does the same with a fuzzer's changes.

#![allow(clippy::unwrap_used, unsafe_code)] // helpers of tests, and an allocator that counts

mod support {
    pub mod hostile;
}

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use support::hostile::{Change, Forged, Written};

/// The system's allocator, recording the largest request of a thread.
struct Watching;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: forwards every call to the system's allocator.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.set(LARGEST.get().max(layout.size()));
        // SAFETY: the caller's contract is this function's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, p: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(p, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Maximum bytes of one allocation. The objects have a few thousand; manifests may claim 2^64.
const LIMIT: usize = 1 << 20;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// A value that is equally often small, near a power of two, or arbitrary.
    fn value(&mut self) -> u64 {
        let value = self.next();
        match value % 3 {
            0 => value,
            1 => value >> (value % 64),
            _ => (1 << (value % 64)) - u64::from(value & 64 != 0),
        }
    }

    fn bytes(&mut self) -> Vec<u8> {
        let len = self.next() % 300;
        (0..len).map(|_| self.next() as u8).collect()
    }

    fn change(&mut self) -> Change {
        let [kind, object, at] = [(); 3].map(|()| self.next());
        Change { kind: kind as u8, object: object as u8, at: at as u16, value: self.value() }
    }
}

fn check_seeds(seeds: std::ops::Range<u64>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let written = runtime.block_on(Written::new());
    for seed in seeds {
        let mut random = Random(seed);
        let changes: Vec<Change> = (0..1 + random.next() % 4).map(|_| random.change()).collect();
        let bytes = random.bytes();
        for forged in [Forged::Nothing, Forged::Objects, Forged::Frames] {
            let objects = written.changed(&changes, &bytes, forged);
            LARGEST.set(0);
            let check = || runtime.block_on(written.check(&objects, forged));
            if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)) {
                eprintln!("seed {seed}: {changes:?}, {forged:?}");
                std::panic::resume_unwind(panic);
            }
            assert!(LARGEST.get() < LIMIT, "seed {seed}: {} bytes at once, {changes:?}", LARGEST.get());
        }
    }
}

#[test]
fn changed_objects_are_what_was_written_or_errors() {
    check_seeds(0..2_000);
}

#[test]
#[ignore = "long: 100,000 changes"]
fn many_changed_objects_are_what_was_written_or_errors() {
    std::thread::scope(|scope| {
        for seeds in [2_000..51_000, 51_000..100_000] {
            scope.spawn(|| check_seeds(seeds));
        }
    });
}
