//! Manifests and objects that differ from those written, through all layers of a store: one-line errors, and
//! no memory beyond a limit. `fuzz/fuzz_targets/store_objects.rs` does the same with a fuzzer's changes.

#![allow(clippy::unwrap_used)] // helpers of tests

mod support {
    pub mod hostile;
}

use allocation_counter::measure;
use support::hostile::{Change, Forged, Written};

/// Maximum bytes in use at once. The objects have a few thousand; manifests may claim 2^64.
const LIMIT: u64 = 1 << 20;

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
            let check = || runtime.block_on(written.check(&objects, forged));
            let allocated = measure(|| {
                if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(check)) {
                    eprintln!("seed {seed}: {changes:?}, {forged:?}");
                    std::panic::resume_unwind(panic);
                }
            });
            let most = allocated.bytes_max;
            assert!(most < LIMIT, "seed {seed}: {most} bytes at once, {changes:?}");
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
