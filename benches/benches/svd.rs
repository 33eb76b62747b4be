//! Attention on rows that are left, at full and at half rank; calibration of one head; one thread.

#![allow(clippy::unwrap_used, missing_docs)] // a bench that cannot run should say so by panicking

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_benches::keys;
use svd_core::{Gram, Rotation, attend_into};

const N: usize = 32_768;
const DIM: usize = 128;

fn svd(c: &mut Criterion) {
    let rows = keys(N, DIM);
    let mut group = c.benchmark_group("svd");
    for rank in [DIM, DIM / 2] {
        let (keys, q) = (&rows[..N * rank], &rows[..rank]);
        let q: Vec<f32> = q.iter().map(|x| x / 64.0).collect();
        let (mut scores, mut out) = (vec![0.0; N], vec![0.0; rank]);
        let stats = attend_into(&q, keys, keys, &mut scores, &mut out).unwrap();
        assert!(stats.sum >= 1.0 && out.iter().all(|x| x.is_finite()));
        group.throughput(Throughput::Bytes((2 * N * rank * 4) as u64));
        group.bench_function(format!("attend/rank {rank}/scalar"), |b| {
            b.iter(|| attend_into(&q, keys, keys, &mut scores, &mut out).unwrap());
        });
    }
    let mut gram = Gram::new(DIM).unwrap();
    gram.add_rows(&rows[..4096 * DIM]).unwrap();
    group.throughput(Throughput::Elements(4096));
    group.bench_function("gram/scalar", |b| {
        b.iter(|| Gram::new(DIM).unwrap().add_rows(&rows[..4096 * DIM]).unwrap())
    });
    group.bench_function("rotation/score-optimal", |b| {
        b.iter(|| Rotation::score_optimal(&gram, &gram).unwrap())
    });
    group.finish();
}

criterion_group!(benches, svd);
criterion_main!(benches);
