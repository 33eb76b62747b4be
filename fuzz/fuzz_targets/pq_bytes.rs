//! Untrusted packed codes and codebooks: rejected, or safe to use; integer tables agree on every backend.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pq_core::*;

fuzz_target!(|input: (u8, u8, u8, u16, Vec<u8>, Vec<u16>)| {
    let (dim, m, nbits, n, bytes, loose) = input;
    let Ok(shape) = PqShape::new(dim.into(), m.into(), nbits.into()) else { return };
    if shape.codebook_len() > 1 << 14 {
        return;
    }
    // The bytes as a codebook, then as codes; both may be too short.
    let mut numbers: Vec<f32> = bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect();
    let _ = CodebookBuf::new(shape, &numbers);
    let _ = Codes::new(shape, n.into(), &bytes);
    let mut packed = vec![0; shape.codes_len(loose.len() / shape.m())];
    if pack_codes_into(shape, &loose, &mut packed).is_ok() {
        let codes = Codes::new(shape, loose.len() / shape.m(), &packed).unwrap();
        for (i, vector) in loose.chunks_exact(shape.m()).enumerate() {
            assert!(codes.iter_vector(i).eq(vector.iter().map(|&c| usize::from(c))));
        }
    }
    numbers.resize(shape.lut_len(), 0.5);
    let lut = Lut::new(shape, &numbers).unwrap();
    let held = bytes.len() / shape.block_size();
    let codes = Codes::new(shape, held * BLOCK, &bytes[..held * shape.block_size()]).unwrap();
    for precision in [LutPrecision::U8, LutPrecision::U16] {
        let mut expected: Option<Vec<f32>> = None;
        for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
            let mut storage = vec![0; shape.quantized_lut_len(precision)];
            let Ok(lut) = QuantizedLut::new_with(backend, &lut, precision, &mut storage) else { continue };
            let mut scores = vec![0.0; codes.n()];
            scan_quantized_into_with(backend, &lut, &codes, &mut scores).unwrap();
            let expected = expected.get_or_insert_with(|| scores.clone());
            assert!(scores.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()));
        }
    }
});
