//! Scores and attention on codes: bytes and additions as in the crate's docs; one thread.

#![allow(clippy::unwrap_used, missing_docs)] // a bench that cannot run should say so by panicking

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_benches::keys;
use pq_core::{
    Codebook, Codes, Lut, PqShape, TrainOptions, attend_into, encode_into, lut_into, scan_into, train,
};

const N: usize = 32_768;
const DIM: usize = 128;

fn pq(c: &mut Criterion) {
    let rows = keys(N, DIM);
    for (m, nbits) in [(2, 6), (4, 8), (16, 8), (64, 8)] {
        let shape = PqShape::new(DIM, m, nbits).unwrap();
        let centroids =
            train(shape, &rows[..2048 * DIM], &TrainOptions { iterations: 4, seed: 0 }).unwrap().centroids;
        let codebook = Codebook::new(shape, &centroids).unwrap();
        let mut bytes = vec![0; N * shape.code_size()];
        encode_into(&codebook, &rows, &mut bytes).unwrap();
        let codes = Codes::new(shape, &bytes).unwrap();
        let query: Vec<f32> = rows[..DIM].iter().map(|x| x / (DIM as f32).sqrt()).collect();
        let mut table = vec![0.0; shape.lut_len()];
        lut_into(&codebook, &query, &mut table).unwrap();
        let lut = Lut::new(shape, &table).unwrap();
        let (mut scores, mut weights, mut out) = (vec![0.0; N], vec![0.0; shape.lut_len()], vec![0.0; DIM]);

        scan_into(&lut, &codes, &mut scores).unwrap();
        let first: f32 = codes.iter_vector(0).enumerate().map(|(j, c)| lut.row(j)[c]).sum();
        assert_eq!(scores[0], first);

        let mut group = c.benchmark_group(format!("pq/{m}x{nbits}"));
        group.throughput(Throughput::Elements(N as u64));
        group.bench_function("scan/scalar", |b| b.iter(|| scan_into(&lut, &codes, &mut scores).unwrap()));
        group.bench_function("attend/scalar", |b| {
            b.iter(|| {
                attend_into(&lut, &codes, &codebook, &codes, &mut scores, &mut weights, &mut out).unwrap()
            });
        });
        group.finish();
    }
}

criterion_group!(benches, pq);
criterion_main!(benches);
