//! Manifests and objects that differ from those written, through all layers of a store: one-line errors, and
//! no memory beyond a limit. `fuzz/fuzz_targets/store_objects.rs` does the same with a fuzzer's changes.

#![allow(clippy::unwrap_used)] // helpers of tests

mod support {
    pub mod hostile;
}

use allocation_counter::measure;
use fastrand::Rng;
use support::hostile::{Change, Forged, Written};

/// Maximum bytes in use at once. The objects have a few thousand; manifests may claim 2^64.
const LIMIT: u64 = 1 << 20;

/// A value that is equally often small, near a power of two, or arbitrary.
fn value(random: &mut Rng) -> u64 {
    let value = random.u64(..);
    match value % 3 {
        0 => value,
        1 => value >> (value % 64),
        _ => (1 << (value % 64)) - u64::from(value & 64 != 0),
    }
}

fn change(random: &mut Rng) -> Change {
    Change { kind: random.u8(..), object: random.u8(..), at: random.u16(..), value: value(random) }
}

fn check_seeds(seeds: std::ops::Range<u64>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let written = runtime.block_on(Written::new());
    for seed in seeds {
        let mut random = Rng::with_seed(seed);
        let changes: Vec<Change> = (0..random.u8(1..=4)).map(|_| change(&mut random)).collect();
        let bytes: Vec<u8> = (0..random.u16(..300)).map(|_| random.u8(..)).collect();
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
