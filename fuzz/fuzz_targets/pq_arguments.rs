//! Any shape, codes and numbers: an error or a result, never a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pq_core::{
    Codebook, Codes, Lut, PqShape, TrainOptions, attend_into, encode_into, lut_into, scan_into, top_k_into,
    train,
};

fuzz_target!(|input: (u8, u8, u8, Vec<f32>, Vec<u8>, u16)| {
    let (dim, m, nbits, numbers, bytes, k) = input;
    let Ok(shape) = PqShape::new(dim.into(), m.into(), nbits.into()) else { return };
    if shape.codebook_len() > 1 << 14 {
        return;
    }
    let n = numbers.len() / shape.dim();
    let vectors = &numbers[..n * shape.dim()];
    let Ok(trained) = train(shape, vectors, &TrainOptions { iterations: 3, seed: k.into() }) else { return };
    let codebook = Codebook::new(shape, &trained.centroids).unwrap();
    let mut own = vec![0; n * shape.code_size()];
    encode_into(&codebook, vectors, &mut own).unwrap();
    let mut table = vec![0.0; shape.lut_len()];
    lut_into(&codebook, &vectors[..shape.dim()], &mut table).unwrap();
    let lut = Lut::new(shape, &table).unwrap();
    for bytes in [&own, &bytes] {
        let Ok(codes) = Codes::new(shape, bytes) else { continue };
        let (mut scores, mut weights, mut out) =
            (vec![0.0; codes.n()], vec![0.0; shape.lut_len()], vec![0.0; shape.dim()]);
        scan_into(&lut, &codes, &mut scores).unwrap();
        let _ = top_k_into(&scores, k.into(), &mut vec![0; codes.n()]).unwrap();
        attend_into(&lut, &codes, &codebook, &codes, &mut scores, &mut weights, &mut out).unwrap();
    }
});
