//! Finds, loads, decodes, lists, verifies and deletes in a store with corrupted manifests, frames and
//! profile: the result is the original data, a one-line error, or a missing chunk.
#![no_main]

use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};

#[path = "../../codec-core/kv-store/tests/support/hostile.rs"]
mod hostile;

use hostile::{Change, Forged, Written};

static STORE: LazyLock<(Runtime, Written)> = LazyLock::new(|| {
    let runtime = Builder::new_current_thread().enable_time().build().unwrap();
    let written = runtime.block_on(Written::new());
    (runtime, written)
});

fuzz_target!(|input: (Vec<(u8, u8, u16, u64)>, Vec<u8>, u8)| {
    let (changes, bytes, forged) = input;
    let changes: Vec<Change> = changes
        .into_iter()
        .map(|(kind, object, at, value)| Change { kind, object, at, value })
        .take(8) // objects may double
        .collect();
    let forged = [Forged::Nothing, Forged::Objects, Forged::Frames][usize::from(forged) % 3];
    let (runtime, written) = &*STORE;
    let objects = written.changed(&changes, &bytes, forged);
    runtime.block_on(written.check(&objects, forged));
});
