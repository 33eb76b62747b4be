//! Attention on projected rows at full and half rank; calibration of one head; one thread.

#![allow(clippy::unwrap_used, missing_docs)] // a bench that cannot run should say so by panicking

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_benches::keys;
use svd_core::{
    Attention, Backend, ExactTokens, Gram, PostRope, Rotation, Rows, SoftmaxStats, attend_exact_into_with,
};

const N: usize = 32_768;
const DIM: usize = 128;
const GROUP: usize = 4;

fn svd(c: &mut Criterion) {
    let rows = keys(N, DIM);
    let backends: Vec<Backend> = Backend::ALL.into_iter().filter(|backend| backend.is_available()).collect();
    let mut group = c.benchmark_group("svd");
    for rank in [DIM, DIM / 2] {
        let keys = &rows[..N * rank];
        let queries: Vec<f32> = rows[..GROUP * rank].iter().map(|x| x / 64.0).collect();
        let mut expected = vec![0.0; GROUP * rank];
        let tokens = ExactTokens::contiguous(keys, rank, keys, rank).unwrap();
        let attend_with = |backend: Backend, out: &mut [f32]| {
            out.fill(0.0);
            let (mut stats, mut scratch) = ([SoftmaxStats::EMPTY; GROUP], [0.0; GROUP * DIM]);
            let (attention, queries) = (Attention::default(), Rows::from(&queries[..]));
            attend_exact_into_with(backend, &attention, queries, &tokens, &mut scratch, out, &mut stats)
                .unwrap();
        };
        attend_with(Backend::Scalar, &mut expected);
        group.throughput(Throughput::Bytes((2 * N * rank * 4) as u64));
        for &backend in &backends {
            let mut out = vec![0.0; GROUP * rank];
            attend_with(backend, &mut out);
            assert!(out.iter().zip(&expected).all(|(a, b)| (a - b).abs() <= 1e-4 * b.abs().max(1.0)));
            group.bench_function(format!("attend/rank {rank}/{backend:?}"), |b| {
                b.iter(|| attend_with(backend, &mut out))
            });
        }
    }
    let mut gram = Gram::<PostRope>::new(DIM).unwrap();
    gram.add_rows(Rows::contiguous(&rows[..4096 * DIM], DIM).unwrap()).unwrap();
    group.throughput(Throughput::Elements(4096));
    for &backend in &backends {
        group.bench_function(format!("gram/{backend:?}"), |b| {
            b.iter(|| {
                let mut gram = Gram::<PostRope>::new(DIM).unwrap();
                let rows = Rows::contiguous(&rows[..4096 * DIM], DIM).unwrap();
                gram.add_rows_with(backend, rows).unwrap();
            });
        });
    }
    group.bench_function("rotation/score-optimal", |b| {
        b.iter(|| Rotation::score_optimal(&gram, &gram).unwrap())
    });
    group.finish();
}

criterion_group!(benches, svd);
criterion_main!(benches);
