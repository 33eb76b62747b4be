//! Faults of a run on a GPU with exact rows in host memory: a busy link, times of another machine, memory
//! that is refused, and decoders that are dropped inside a step. The run takes longer or ends with an error
//! that names the fault, and no token is wrong. Without a GPU these tests are skipped, which
//! `GPU_TESTS=require` turns into a failure.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{panic, ptr, thread};

use cudarc::driver::{result, sys};
use kv_device::Gpu;
use kv_gpu::Element;
use kv_llama_gpu::{Decoder, WeightLayout, Weights};
use kv_methods::Method;
use kv_reference::Error;
use kv_reference::device::method_cache;

use crate::support::{self, gpu, model, skip, teacher_forced};

/// Methods with rows on the host whose codebooks the prompt trains, or whose codes attend while rows arrive.
const METHODS: [&str; 3] = ["pqcache:tokens=64", "pqcache:tokens=96:offloaded=int8:held=0", "hybrid"];

/// Runs next to copies in both directions over the link, four in flight in each.
fn occupied<T>(gpu: &Gpu, run: impl FnOnce() -> T) -> T {
    const BYTES: usize = 64 << 20;
    let (stop, started) = (AtomicBool::new(false), AtomicUsize::new(0));
    let copy = |to_device: bool| {
        let context = gpu.device().context();
        context.bind_to_thread().unwrap();
        let stream = context.new_stream().unwrap();
        // SAFETY: the context is current; both allocations have the bytes that are copied, and are freed
        // after the last copy.
        unsafe {
            let host = result::malloc_host(BYTES, sys::CU_MEMHOSTALLOC_PORTABLE).unwrap();
            ptr::write_bytes(host.cast::<u8>(), 0, BYTES);
            let device = result::malloc_sync(BYTES).unwrap();
            started.fetch_add(1, Ordering::Relaxed);
            while !stop.load(Ordering::Relaxed) {
                for _ in 0..4 {
                    let (there, stream) = (host as u64, stream.cu_stream());
                    let (to, from) = if to_device { (device, there) } else { (there, device) };
                    sys::cuMemcpyAsync(to, from, BYTES, stream).result().unwrap();
                }
                stream.synchronize().unwrap();
            }
            result::free_sync(device).unwrap();
            result::free_host(host).unwrap();
        }
    };
    thread::scope(|scope| {
        let copies = [true, false].map(|to_device| scope.spawn(move || copy(to_device)));
        while started.load(Ordering::Relaxed) < 2 && !copies.iter().any(|copy| copy.is_finished()) {
            thread::yield_now();
        }
        let done = panic::catch_unwind(AssertUnwindSafe(run));
        stop.store(true, Ordering::Relaxed); // also after a failure, or the copies would not end
        done.unwrap_or_else(|failure| panic::resume_unwind(failure))
    })
}

#[test]
fn a_busy_link_changes_no_token() {
    let Some(gpu) = gpu("a busy link") else { return };
    let (model, tokens) = model();
    let (prompt, run) = tokens[3000..4600].split_at(1500);
    let profile = support::profile(&model, &tokens[..2048], &["hybrid"]);
    for spec in METHODS {
        let timed = || {
            let start = Instant::now();
            let mut decoder = support::decoder(&gpu, &model, spec, &profile, 1, 1600);
            decoder.prefill(&[prompt.to_vec()], 256).unwrap();
            (teacher_forced(&mut decoder, run), decoder.fetched_rows().unwrap(), start.elapsed())
        };
        let (logits, fetched, quiet) = timed();
        let (again, fetched_again, busy) = occupied(&gpu, timed);
        println!("{spec}: {quiet:?}, next to copies {busy:?}");
        assert!(logits == again, "{spec}: other logits");
        assert_eq!(fetched, fetched_again, "{spec}");
    }
}

/// Runs so often that leaks would exceed the limit of device memory.
#[test]
fn what_is_dropped_inside_a_step_or_refused_leaves_nothing() {
    const LIMIT: usize = 400 << 20;
    let gpu = match Gpu::open_within(0, LIMIT) {
        Ok(gpu) => Arc::new(gpu),
        Err(error) => return skip("decoders dropped inside a step", &error),
    };
    let (model, tokens) = model();
    let weights = Arc::new(Weights::of(&gpu, &model, Element::F16, WeightLayout::Packed).unwrap());
    for spec in ["pqcache:tokens=64:codebooks=profile", "hybrid:keys=rotated"] {
        let method: Method = spec.parse().unwrap();
        let cache = |capacity| method_cache(&gpu, &method, &model.config, Element::F16, None, 1, capacity);
        let decoder =
            |capacity| Decoder::new(gpu.clone(), weights.clone(), cache(capacity).unwrap(), 1).unwrap();
        let generate = || {
            let mut decoder = decoder(2048);
            decoder.prefill(&[tokens[..1900].to_vec()], 512).unwrap();
            (0..100).for_each(|_| decoder.step().unwrap());
            (decoder.picked().unwrap(), decoder.logits().unwrap())
        };
        let expected = generate();
        let held = decoder(100_000).cache().bytes();
        let rounds = LIMIT / held + 2;
        for round in 0..rounds {
            let mut decoder = decoder(100_000);
            decoder.prefill(&[tokens[..300].to_vec()], 64).unwrap();
            (0..=round).for_each(|_| decoder.step().unwrap());
            drop(decoder); // its last steps run
            let refused = cache(1 << 31).map(drop);
            assert!(
                matches!(
                    refused,
                    Err(Error::Device(
                        kv_device::Error::HostMemory { .. } | kv_device::Error::DeviceMemory { .. }
                    ))
                ),
                "{spec}: {refused:?}"
            );
        }
        println!("{spec}: {rounds} rounds of {held} bytes");
        assert!(generate() == expected, "{spec}: other tokens afterwards");
    }
}

#[test]
fn a_decoder_that_is_dropped_on_a_busy_link_does_not_hang() {
    let Some(gpu) = gpu("a decoder that is dropped") else { return };
    let (model, _) = model();
    let weights = Arc::new(Weights::of(&gpu, &model, Element::F16, WeightLayout::Packed).unwrap());
    let method = "pqcache:tokens=2048:codebooks=profile".parse().unwrap();
    let cache = method_cache(&gpu, &method, &model.config, Element::F16, None, 1, 200_064).unwrap();
    let mut decoder = Decoder::new(gpu.clone(), weights, cache, 1).unwrap();
    decoder.fill_random(200_000).unwrap();
    occupied(&gpu, || {
        (0..4).for_each(|_| decoder.step().unwrap());
        let start = Instant::now();
        drop(decoder);
        assert!(start.elapsed() < Duration::from_secs(60)); // a step takes milliseconds
    });
}
