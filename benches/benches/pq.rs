//! Every operation on every backend, one thread. Against faiss, numpy and torch: `benches/peers/pq.py`.

#![allow(clippy::unwrap_used, missing_docs)] // a bench that cannot run should say so by panicking

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kv_benches::keys;
use pq_core::*;

const N: usize = 32_768;
const DIM: usize = 128;

fn pq(c: &mut Criterion) {
    let rows = keys(N, DIM);
    for (m, nbits) in [(2, 6), (4, 8), (16, 8), (64, 4), (64, 8), (32, 12)] {
        let shape = PqShape::new(DIM, m, nbits).unwrap();
        let options =
            TrainOptions { iterations: 4, max_vectors: Some(8192), encode: true, ..Default::default() };
        let trained = train(shape, &rows, &options).unwrap();
        let codebook = CodebookBuf::new(shape, &trained.centroids).unwrap();
        let codebook = codebook.view();
        let codes = Codes::new(shape, N, &trained.codes).unwrap();
        let query: Vec<f32> = rows[..DIM].iter().map(|x| x / (DIM as f32).sqrt()).collect();
        let mut table = vec![0.0; shape.lut_len()];
        let luts = lut_into(&codebook, &query, &mut table).unwrap();
        let lut = luts.lut(0);
        let mut scores = vec![0.0; N];
        scan_into(&lut, &codes, &mut scores).unwrap();
        let first: f32 = codes.iter_vector(0).enumerate().map(|(j, c)| lut.row(j)[c]).sum();
        assert_eq!(scores[0], first);

        let mut group = c.benchmark_group(format!("pq/{m}x{nbits}"));
        group.throughput(Throughput::Elements(N as u64)).sample_size(10);
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            let mut tables = vec![0.0; shape.lut_len()];
            group.bench_function(format!("lut/{backend:?}"), |b| {
                b.iter(|| {
                    lut_into_with(backend, &codebook, &query, &mut tables).unwrap();
                });
            });
            group.bench_function(format!("scan/{backend:?}"), |b| {
                b.iter(|| scan_into_with(backend, &lut, &codes, &mut scores).unwrap());
            });
            for precision in [LutPrecision::U8, LutPrecision::U16] {
                let mut storage = vec![0; shape.quantized_lut_len(precision)];
                let lut = QuantizedLut::new(&lut, precision, &mut storage).unwrap();
                group.bench_function(format!("scan_{precision:?}/{backend:?}"), |b| {
                    b.iter(|| scan_quantized_into_with(backend, &lut, &codes, &mut scores).unwrap());
                });
            }
            let mut indices = vec![0; N / 10];
            group.bench_function(format!("top_k/{backend:?}"), |b| {
                b.iter(|| top_k_into_with(backend, &scores, N / 10, &mut indices).unwrap());
            });
            let tokens = CodedTokens::new(codes, codes, codebook).unwrap();
            let mut scratch = vec![0.0; attend_scratch_len(shape, 1)];
            let mut out = vec![0.0; DIM];
            group.bench_function(format!("attend/{backend:?}"), |b| {
                b.iter(|| {
                    let mut stats = [SoftmaxStats::EMPTY];
                    attend_into_with(backend, &luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
                });
            });
            let mut bytes = trained.codes.clone();
            group.bench_function(format!("append/{backend:?}"), |b| {
                b.iter(|| encode_into_with(backend, &codebook, &rows[..DIM], N - 1, &mut bytes).unwrap());
            });
            if backend != Backend::Scalar && nbits < 12 {
                group.bench_function(format!("encode/{backend:?}"), |b| {
                    b.iter(|| encode_into_with(backend, &codebook, &rows, 0, &mut bytes).unwrap());
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, pq);
criterion_main!(benches);
