//! Calls of every cache with arguments that it does not have: a typed error each, and the cache goes on.

#![allow(clippy::unwrap_used)]

use std::io::Write as _;

use codec_core::ModelKind;
use kv_attend::owner::Pair;
use kv_device::plan::{
    Bitstream, CodedRows, DeviceCuts, HybridPlan, PagedMemory, Plan, Retrieval, RowForm, RowHome, Training,
};
use kv_device::{CacheShape, Chunk, DeviceCache, Error, Gpu, Result, Timed};
use kv_gpu::Element;
use pq_core::{PqShape, TokenBudget, Window};

const CAPACITY: usize = 512;

fn shape() -> CacheShape {
    CacheShape {
        layers: 2,
        heads: 2,
        group: 4,
        head_dim: 64,
        frequencies: vec![0.1; 32],
        element: Element::F16,
        window: Window { sinks: 4, recent: 32, batch: 1 },
        batch: 2,
        capacity: CAPACITY,
    }
}

/// A plan of each kind, without data of a calibration.
fn plans() -> Vec<Plan> {
    let pages = Some(PagedMemory { page: 32, pool: Some(512) });
    let quantizers = Pair::of(|_| PqShape::new(64, 16, 8).unwrap());
    let (form, budget) = (RowForm { rotated_mean: true, norms: Pair::of(|_| None) }, TokenBudget::Ratio(0.2));
    let hybrid = |home, mean_errors, key_norms: Option<f32>| {
        let (bound, resident) = (None, 128);
        let form = RowForm { norms: Pair::new(key_norms, Some(1.0)), ..form };
        Plan::Hybrid(HybridPlan { quantizers, form, mean_errors, budget, bound, home, resident }, None)
    };
    let retrieval = |home, training| {
        let quantizer = PqShape::new(64, 4, 6).unwrap();
        Plan::Retrieval(Retrieval { quantizer, budget, training, home, resident: 128 }, None)
    };
    vec![
        Plan::Dense(None),
        Plan::Dense(pages),
        Plan::Codes { quantizers, rows: CodedRows::Plain(None), pages: None },
        Plan::Codes { quantizers, rows: CodedRows::Transformed(form, None), pages },
        hybrid(RowHome::Device, false, None),
        hybrid(RowHome::Host, true, Some(1.0)),
        retrieval(RowHome::HostInt8, None),
        retrieval(RowHome::Host, Some(Training { iterations: 2, max_keys: 256 })),
        Plan::Cuts(DeviceCuts { fractions: Pair::of(|_| 0.5), cuts_prompts: true }, None),
        Plan::Bitstream(Bitstream { has_transform: true, models: ModelKind::Families }, None),
        Plan::Int4,
    ]
}

#[test]
fn every_plan_fits_the_shape() {
    plans().iter().for_each(|plan| plan.check(&shape()).unwrap());
    let no_layers = CacheShape { layers: 0, ..shape() };
    assert!(plans().iter().all(|plan| matches!(plan.check(&no_layers), Err(Error::Argument(_)))));
}

/// The GPU, or `None` after reporting that the test is skipped; with `GPU_TESTS=require` this is a failure.
fn gpu() -> Option<Gpu> {
    let skip = |error| {
        assert!(std::env::var("GPU_TESTS").as_deref() != Ok("require"), "{error}");
        // Not println!, which the test harness would swallow.
        let _ = writeln!(std::io::stderr(), "SKIPPED arguments of caches: {error}");
    };
    Gpu::open(0).map_err(skip).ok()
}

#[test]
fn what_a_cache_does_not_have_is_a_typed_error() {
    let Some(gpu) = gpu() else { return };
    let other = Gpu::open(0).unwrap();
    for plan in plans() {
        let name = format!("{plan:?}");
        let mut cache = plan.build(&gpu, &shape()).unwrap();
        for (call, result) in wrong_calls(&mut cache, &gpu, &other) {
            assert!(matches!(result, Err(Error::Argument(_))), "{call} of {name}: {result:?}");
        }
        // Nothing has changed: two chunks of a sequence go through.
        cache.reserve(&gpu, &[0, 100]).unwrap();
        for (position, count) in [(0, 60), (60, 40)] {
            let chunk = Chunk { sequence: 1, position, count };
            (0..2).for_each(|layer| {
                cache.chunk_rows(&gpu, layer, &chunk).unwrap();
                cache.append(&gpu, layer, &chunk).unwrap();
            });
        }
        cache.set_lengths(&gpu, &[0, 100]).unwrap();
        cache.end(&gpu, 1).unwrap();
        gpu.synchronize().unwrap();
    }
}

fn wrong_calls(cache: &mut DeviceCache, gpu: &Gpu, other: &Gpu) -> Vec<(&'static str, Result<()>)> {
    let chunk = Chunk { sequence: 0, position: 0, count: 8 };
    let mut rows = |layer, chunk: Chunk| cache.chunk_rows(gpu, layer, &chunk).map(drop);
    let mut results = vec![
        ("layer of a chunk", rows(2, chunk)),
        ("sequence of a chunk", rows(0, Chunk { sequence: 2, ..chunk })),
        ("no tokens", rows(0, Chunk { count: 0, ..chunk })),
        ("end of a chunk", rows(0, Chunk { position: CAPACITY - 7, ..chunk })),
        ("position of a chunk", rows(0, Chunk { position: usize::MAX, ..chunk })),
    ];
    results.extend([
        ("rows not asked for", cache.append(gpu, 0, &chunk)),
        ("rows of another GPU", cache.chunk_rows(other, 0, &chunk).map(drop)),
        ("layer of rows", cache.rows(2).map(drop)),
        ("layer of ranks", cache.chunk_ranks(usize::MAX).map(drop)),
        ("too few lengths", cache.reserve(gpu, &[8])),
        ("too many lengths", cache.set_lengths(gpu, &[8; 3])),
        ("lengths", cache.set_lengths(gpu, &[CAPACITY + 1, 0])),
        ("length", cache.set_length(gpu, 0, usize::MAX)),
        ("sequence of a length", cache.set_length(gpu, 2, 8)),
        ("sequence that ends", cache.end(gpu, 2)),
        ("another GPU", cache.clear(other)),
        ("counters of another GPU", cache.fetched_rows(other).map(drop)),
        ("hashed tokens", cache.fill_random(gpu, CAPACITY + 1)),
    ]);
    cache.reserve(gpu, &[8, 0]).unwrap();
    cache.chunk_rows(gpu, 0, &chunk).unwrap();
    results.push(("append of another layer", cache.append(gpu, 1, &chunk)));
    results.push(("append of more tokens", cache.append(gpu, 0, &Chunk { count: 9, ..chunk })));
    cache.append(gpu, 0, &chunk).unwrap();
    results.push(("append of the same again", cache.append(gpu, 0, &chunk)));
    cache.clear(gpu).unwrap();
    results
}
