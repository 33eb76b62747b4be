//! Encoding and decoding of a plane of 1,024 channels; one thread.

#![allow(clippy::unwrap_used, missing_docs)] // a bench that cannot run should say so by panicking

use codec_core::{PlaneProfile, Predictor, decode_into, encode};
use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_benches::keys;

const TOKENS: usize = 256;
const CHANNELS: usize = 1024;

fn codec(c: &mut Criterion) {
    let rows = keys(2 * TOKENS, CHANNELS);
    let (sample, chunk) = rows.split_at(TOKENS * CHANNELS);
    let profile = PlaneProfile::fit(sample, CHANNELS, Predictor::Mean, 0.5).unwrap();
    let plane = profile.plane().unwrap();
    let mut bytes = vec![];
    encode(&plane, chunk, &mut bytes).unwrap();
    let mut decoded = vec![0.0; chunk.len()];
    decode_into(&plane, &bytes, &mut decoded).unwrap();
    assert!(chunk.iter().zip(&decoded).all(|(a, b)| (a - b).abs() < 4.0));

    let mut group = c.benchmark_group("codec");
    group.throughput(Throughput::Elements(chunk.len() as u64));
    group.bench_function("encode/mean/scalar", |b| {
        b.iter(|| {
            bytes.clear();
            encode(&plane, chunk, &mut bytes).unwrap();
        });
    });
    group.bench_function("decode/mean/scalar", |b| {
        b.iter(|| decode_into(&plane, &bytes, &mut decoded).unwrap())
    });
    group.finish();
}

criterion_group!(benches, codec);
criterion_main!(benches);
