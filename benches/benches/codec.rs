//! Encoding and decoding of a plane of 1,024 channels; one thread. `codec_speed` compares it
//! with other coders.

#![allow(clippy::unwrap_used, missing_docs)] // a bench that cannot run should say so by panicking

use codec_core::*;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_benches::keys;

const TOKENS: usize = 1024;
const HEADS: usize = 8;
const HEAD_DIM: usize = 128;

fn codec(c: &mut Criterion) {
    let channels = HEADS * HEAD_DIM;
    let rows = keys(2 * TOKENS, channels);
    let (sample, chunk) = rows.split_at(TOKENS * channels);
    let options = FitOptions {
        predictor: PredictorKind::Mean,
        steps: Steps::Deviations(0.5),
        models: ModelKind::Families,
        coder: Coder::InterleavedRans,
    };
    let plane = PlaneBuf::fit(sample, channels, None, &options).unwrap();
    let planes = [plane.view(); 2];
    let info = FrameInfo::new(1, HEADS, HEAD_DIM, TOKENS);
    let mut group = c.benchmark_group("codec");
    group.throughput(Throughput::Elements(2 * chunk.len() as u64));
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let mut bytes = vec![];
        group.bench_function(format!("encode frame/{backend:?}"), |b| {
            b.iter(|| {
                bytes.clear();
                encode_frame_with(backend, &info, &planes, &[chunk; 2], &mut bytes).unwrap();
            });
        });
        let frame = Frame::parse(&bytes, info.elements()).unwrap();
        let mut decoded = vec![0.0; chunk.len()];
        group.bench_function(format!("decode frame/{backend:?}"), |b| {
            b.iter(|| {
                for side in [Side::Keys, Side::Values] {
                    frame.decode_plane_into_with(backend, &planes[0], 0, side, None, &mut decoded).unwrap();
                }
            });
        });
        assert!(chunk.iter().zip(&decoded).all(|(a, b)| (a - b).abs() < 1.0));
    }
    group.finish();
}

criterion_group!(benches, codec);
criterion_main!(benches);
