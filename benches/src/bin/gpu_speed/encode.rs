//! Codes of vectors.

use half::f16;
use kv_gpu::VectorElement;
use kv_gpu::pq::{
    Append, AppendArguments, AppendShape, CodeLayout, Encode, EncodeArguments, EncodeShape, Paging, Side,
    TILE,
};
use kv_gpu::pq::{EncodeGeneric, EncodeGenericArguments, EncodeGenericShape};
use pq_core::{CodebookBuf, Codes, PqShape, encode_into};

use crate::stopwatch::{BEYOND_CACHE, Stopwatch};

const HEADS: usize = 8;
const N: usize = 32_768;
const DIM: usize = 128;

pub fn run(watch: &Stopwatch) {
    append(watch);
    into_blocks(watch);
    for (m, nbits) in [(64, 8), (64, 6), (32, 8)] {
        let (name, load) = (format!("encode ({m}, {nbits})"), format!("{HEADS} heads x {N} x {DIM}"));
        if !watch.wants(&name, &load) {
            continue;
        }
        let quantizer = PqShape::new(DIM, m, nbits).unwrap();
        let shape = EncodeShape {
            quantizer,
            side: Side::Keys,
            element: VectorElement::F16,
            paging: Paging::Contiguous,
        };
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

/// Appends keys and values of one layer: (batch, tokens of each sequence).
const APPENDS: [(usize, usize); 3] = [(1, 1), (32, 1), (32, 32)];

/// Tokens of a step.
fn append(watch: &Stopwatch) {
    let quantizers = [(64, 8), (64, 6), (64, 4), (128, 4), (32, 8)];
    for ((m, nbits), (batch, n)) in quantizers.into_iter().flat_map(|q| APPENDS.map(|load| (q, load))) {
        let (name, load) =
            (format!("append ({m}, {nbits})"), format!("{HEADS} heads, {batch} x {n} x {DIM}"));
        if !watch.wants(&name, &load) {
            continue;
        }
        let quantizer = PqShape::new(DIM, m, nbits).unwrap();
        let element = VectorElement::F16;
        let shape = AppendShape { keys: quantizer, values: quantizer, element, paging: Paging::Contiguous };
        let append = Append::new(&watch.gpu, shape).unwrap();
        let layout = CodeLayout::new(quantizer, Side::Keys).unwrap();
        let vectors: Vec<f16> = kv_benches::keys(n, DIM).into_iter().map(f16::from_f32).collect();
        let centroids: Vec<f32> = kv_benches::keys(quantizer.ksub(), DIM);
        let rows = watch.upload(&vectors.repeat(batch * HEADS));
        // Every layer has its own codebooks, so that they come from memory and not from L2.
        let copies = BEYOND_CACHE / (2 * HEADS * quantizer.codebook_len() * 4) + 1;
        let books: Vec<_> = (0..copies).map(|_| watch.upload(&centroids.repeat(2 * HEADS))).collect();
        let firsts = watch.upload(&vec![1000_u32; batch]);
        let counts = watch.upload(&vec![n as u32; batch]);
        let tiles = (1000 + n).div_ceil(TILE);
        let codes = [(); 2].map(|()| watch.zeros::<u8>(batch * HEADS * tiles * layout.tile_len()));
        let [us, us_pdl] = [false, true].map(|pdl| {
            let all: Vec<_> = books
                .iter()
                .map(|book| AppendArguments {
                    batch,
                    heads: HEADS,
                    max_count: n,
                    keys: watch.pointer(&rows).cast(),
                    values: watch.pointer(&rows).cast(),
                    strides: [HEADS * n * DIM, n * DIM, DIM],
                    key_centroids: watch.pointer(book),
                    value_centroids: watch.pointer(book).offset(HEADS * quantizer.codebook_len()),
                    firsts: watch.pointer(&firsts),
                    counts: watch.pointer(&counts),
                    key_codes: watch.pointer(&codes[0]),
                    value_codes: watch.pointer(&codes[1]),
                    tiles,
                    pages: None,
                    pdl,
                })
                .collect();
            // SAFETY: the buffers have the shapes that the arguments require, and outlive the graph.
            watch.time(16, |i, stream| unsafe { append.launch(stream, &all[i % copies]) })
        });

        // Compares the values of the last head with the CPU.
        let mut expected = vec![0; quantizer.codes_len(1000 + n)];
        let book = CodebookBuf::new(quantizer, &centroids).unwrap();
        encode_into(&book.view(), &vectors, 1000, &mut expected).unwrap();
        let mut got = vec![0; quantizer.codes_len(1000 + n)];
        let of_head = watch.download(&codes[1]).split_off((batch * HEADS - 1) * tiles * layout.tile_len());
        let values = CodeLayout::new(quantizer, Side::Values).unwrap();
        values.unpack_into(&of_head, 1000 + n, &mut got).unwrap();
        let [got, expected] = [&got, &expected].map(|codes| Codes::new(quantizer, 1000 + n, codes).unwrap());
        let differ =
            |token| got.iter_vector(token).zip(expected.iter_vector(token)).filter(|(a, b)| a != b).count();
        let differing: usize = (1000..1000 + n).map(differ).sum();
        assert!(differing <= 1 + n * m / 1_000, "{shape:?}: {differing} codes differ");

        // The codebooks, and the vectors, of both sides.
        let bytes = 2 * HEADS * (4 * quantizer.codebook_len() + 2 * batch * n * DIM);
        watch.report(&name, &load, bytes as f64, us);
        watch.report(&format!("{name}, overlapped"), &load, bytes as f64, us_pdl);
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
