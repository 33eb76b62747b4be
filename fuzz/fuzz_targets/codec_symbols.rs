//! Symbols come back from the lane coder, the same bytes and codes on every backend, and any stream decodes alike.
#![no_main]

use codec_core::*;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<u8>, Vec<u16>, Vec<u8>, u8)| {
    let (mut families, codes, stream, tokens) = input;
    families.truncate(LANES);
    if families.is_empty() {
        return;
    }
    let models = Models::families(&families);
    let rows: Vec<Row> = codes
        .chunks_exact(families.len())
        .map(|codes| {
            let mut row = [0; LANES];
            row[..codes.len()].copy_from_slice(codes);
            row
        })
        .collect();
    let mut expected = None;
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let mut coded = vec![];
        encode_symbols(backend, &models, &rows, &mut coded).unwrap();
        let mut decoded = vec![[0; LANES]; rows.len()];
        decode_symbols_into(backend, &models, &coded, &mut decoded).unwrap();
        for (decoded, row) in decoded.iter().flatten().zip(rows.iter().flatten()) {
            assert!(decoded == row || *decoded == ESCAPE);
        }
        let mut any = vec![[0; LANES]; tokens.into()];
        let result = decode_symbols_into(backend, &models, &stream, &mut any).map(|()| any);
        let all = (coded, decoded, result);
        assert_eq!(expected.get_or_insert_with(|| all.clone()), &all);
    }
});
