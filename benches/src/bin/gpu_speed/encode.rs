//! Codes of vectors.

use half::f16;
use kv_gpu::VectorElement;
use kv_gpu::pq::{CodeLayout, Encode, EncodeArguments, EncodeShape, Side, TILE};
use kv_gpu::pq::{EncodeGeneric, EncodeGenericArguments, EncodeGenericShape};
use pq_core::{CodebookBuf, Codes, PqShape, encode_into};

use crate::stopwatch::Stopwatch;

const HEADS: usize = 8;
const N: usize = 32_768;
const DIM: usize = 128;

pub fn run(watch: &Stopwatch) {
    into_blocks(watch);
    for (m, nbits) in [(64, 8), (64, 6), (32, 8)] {
        let (name, load) = (format!("encode ({m}, {nbits})"), format!("{HEADS} heads x {N} x {DIM}"));
        if !watch.wants(&name, &load) {
            continue;
        }
        let quantizer = PqShape::new(DIM, m, nbits).unwrap();
        let shape = EncodeShape { quantizer, side: Side::Keys, element: VectorElement::F16, paged: false };
        let encode = Encode::new(&watch.gpu, shape).unwrap();
        let layout = CodeLayout::new(quantizer, Side::Keys).unwrap();
        let vectors: Vec<f16> = kv_benches::keys(N, DIM).into_iter().map(f16::from_f32).collect();
        let centroids: Vec<f32> = kv_benches::keys(quantizer.ksub(), DIM)
            .chunks_exact(quantizer.dsub())
            .flatten()
            .copied()
            .collect();
        let there = watch.upload(&vectors.repeat(HEADS));
        let centroids_there = watch.upload(&centroids.repeat(HEADS));
        let (firsts, counts) = (watch.upload(&[0_u32]), watch.upload(&[N as u32]));
        let tiles_len = N / TILE * layout.tile_len();
        let codes = watch.zeros::<u8>(HEADS * tiles_len);
        let arguments = EncodeArguments {
            batch: 1,
            heads: HEADS,
            max_count: N,
            vectors: watch.pointer(&there).cast(),
            strides: [HEADS * N * DIM, N * DIM, DIM],
            centroids: watch.pointer(&centroids_there),
            firsts: watch.pointer(&firsts),
            counts: watch.pointer(&counts),
            codes: watch.pointer(&codes),
            tiles: N / TILE,
            pages: None,
        };
        // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
        let us = watch.time(2, |_, stream| unsafe { encode.launch(stream, &arguments) });

        // Compares the last head with the CPU: nearly all codes are equal, the others are ties within
        // rounding.
        let mut expected = vec![0; quantizer.codes_len(N)];
        let book = CodebookBuf::new(quantizer, &centroids).unwrap();
        encode_into(&book.view(), &vectors, 0, &mut expected).unwrap();
        let mut got = vec![0; quantizer.codes_len(N)];
        layout.unpack_into(&watch.download(&codes)[(HEADS - 1) * tiles_len..], N, &mut got).unwrap();
        let [got, expected] = [&got, &expected].map(|codes| Codes::new(quantizer, N, codes).unwrap());
        let differ =
            |token| got.iter_vector(token).zip(expected.iter_vector(token)).filter(|(a, b)| a != b).count();
        let differing: usize = (0..N).map(differ).sum();
        assert!(differing < N * m / 10_000, "{shape:?}: {differing} codes differ");

        // Multiply-adds, and a compare and two selects per distance, at one operation per lane and clock.
        let operations = (HEADS * N * m * quantizer.ksub() * (quantizer.dsub() + 3)) as f64;
        watch.report_with_floor(
            &name,
            &load,
            (HEADS * N * DIM * 2) as f64,
            us,
            operations / watch.operations_per_us(),
        );
    }
}

/// Encodes to the layout of `pq-core`.
fn into_blocks(watch: &Stopwatch) {
    let (name, load) = ("encode (2, 6)", format!("{HEADS} heads x {N} x {DIM}"));
    if !watch.wants(name, &load) {
        return;
    }
    let quantizer = PqShape::new(DIM, 2, 6).unwrap();
    let encode =
        EncodeGeneric::new(&watch.gpu, EncodeGenericShape { quantizer, element: VectorElement::F16 })
            .unwrap();
    let vectors: Vec<f16> = kv_benches::keys(N, DIM).into_iter().map(f16::from_f32).collect();
    let centroids = kv_benches::keys(quantizer.ksub(), DIM);
    let there = watch.upload(&vectors.repeat(HEADS));
    let centroids_there = watch.upload(&centroids.repeat(HEADS));
    let (firsts, counts) = (watch.upload(&[0_u32]), watch.upload(&[N as u32]));
    let codes_len = quantizer.codes_len(N);
    let codes = watch.zeros::<u8>(HEADS * codes_len);
    let arguments = EncodeGenericArguments {
        batch: 1,
        heads: HEADS,
        max_count: N,
        vectors: watch.pointer(&there).cast(),
        strides: [HEADS * N * DIM, N * DIM, DIM],
        centroids: watch.pointer(&centroids_there),
        firsts: watch.pointer(&firsts),
        counts: watch.pointer(&counts),
        capacity: N,
        codes: watch.pointer(&codes),
    };
    // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
    let us = watch.time(2, |_, stream| unsafe { encode.launch(stream, &arguments) });
    let mut expected = vec![0; codes_len];
    let book = CodebookBuf::new(quantizer, &centroids).unwrap();
    encode_into(&book.view(), &vectors, 0, &mut expected).unwrap();
    let got = watch.download(&codes);
    let [got, expected] =
        [&got[(HEADS - 1) * codes_len..], &expected].map(|codes| Codes::new(quantizer, N, codes).unwrap());
    let differing: usize =
        (0..N).filter(|&token| !got.iter_vector(token).eq(expected.iter_vector(token))).count();
    assert!(differing < N / 1_000, "{differing} tokens differ");
    let operations = (HEADS * N * 2 * quantizer.ksub() * (quantizer.dsub() + 3)) as f64;
    watch.report_with_floor(
        name,
        &load,
        (HEADS * N * DIM * 2) as f64,
        us,
        operations / watch.operations_per_us(),
    );
}
