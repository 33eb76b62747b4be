//! Arbitrary shapes, codes and values: an error or a result, never a panic, and the same result on every
//! backend.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pq_core::*;

fuzz_target!(|input: (u8, u8, u8, Vec<f32>, Vec<u8>, u16)| {
    let (dim, m, nbits, numbers, bytes, k) = input;
    let Ok(shape) = PqShape::new(dim.into(), m.into(), nbits.into()) else { return };
    if shape.codebook_len() > 1 << 14 {
        return;
    }
    let n = numbers.len() / shape.dim();
    let vectors = &numbers[..n * shape.dim()];
    let options = TrainOptions { iterations: 3, seed: k.into(), encode: true, ..Default::default() };
    let Ok(trained) = train(shape, vectors, &options) else { return };
    let Ok(codebook) = CodebookBuf::new(shape, &trained.centroids) else { return };
    let codebook = codebook.view();
    let mut table = vec![0.0; shape.lut_len()];
    let luts = lut_into(&codebook, &vectors[..shape.dim()], &mut table).unwrap();
    let lut = luts.lut(0);
    let given = bytes.len() / shape.block_size() * BLOCK;
    for (n, bytes) in [(n, &trained.codes), (given, &bytes), (given.saturating_sub(9), &bytes)] {
        let Ok(codes) = Codes::new(shape, n, bytes) else { continue };
        let mut scores = vec![0.0; n];
        scan_into(&lut, &codes, &mut scores).unwrap();
        let mut indices = vec![0; n.min(k.into())];
        top_k_into(&scores, k.into(), &mut indices).unwrap();
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            let mut again = vec![0.0; n];
            scan_into_with(backend, &lut, &codes, &mut again).unwrap();
            assert!(
                scores
                    .iter()
                    .zip(&again)
                    .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
            );
            let mut found = vec![0; indices.len()];
            top_k_into_with(backend, &scores, k.into(), &mut found).unwrap();
            assert_eq!(found, indices);
            let mut scratch = vec![0.0; attend_scratch_len(shape, 1)];
            let mut out = vec![0.0; shape.dim()];
            let tokens = CodedTokens::new(codes, codes, codebook).unwrap();
            let mut stats = [SoftmaxStats::EMPTY];
            attend_into_with(backend, &luts, &tokens, &mut scratch, &mut out, &mut stats).unwrap();
        }
    }
});
