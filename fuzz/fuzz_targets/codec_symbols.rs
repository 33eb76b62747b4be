//! The interleaved rANS coder returns the symbols, with the same bytes on every backend and regardless of the
//! codes after the last channel. Any stream decodes to the same result on every backend.
#![no_main]

use codec_core::*;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: (Vec<u8>, Vec<u16>, Vec<u8>, u8, u16)| {
    let (mut families, codes, stream, tokens, junk) = input;
    families.truncate(LANES);
    if families.is_empty() {
        return;
    }
    let models = Models::families(&families);
    let rows: Vec<Row> = codes
        .chunks_exact(families.len())
        .map(|codes| {
            let mut row = [junk; LANES];
            row[..codes.len()].copy_from_slice(codes);
            row
        })
        .collect();
    let mut expected = None;
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let mut coded = vec![];
        encode_symbols_with(backend, &models, &rows, &mut coded).unwrap();
        let mut decoded = vec![[0; LANES]; rows.len()];
        decode_symbols_into_with(backend, &models, &coded, &mut decoded).unwrap();
        for (decoded, row) in decoded.iter().zip(&rows) {
            let (decoded, behind) = decoded.split_at(families.len());
            assert!(decoded.iter().zip(row).all(|(decoded, code)| decoded == code || *decoded == ESCAPE));
            assert!(behind.iter().all(|&code| code == 0));
        }
        let mut any = vec![[0; LANES]; tokens.into()];
        let result = decode_symbols_into_with(backend, &models, &stream, &mut any).map(|()| any);
        let all = (coded, decoded, result);
        assert_eq!(expected.get_or_insert_with(|| all.clone()), &all);
    }
});
