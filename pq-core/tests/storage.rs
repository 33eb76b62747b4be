//! Codes in pages are codes in one piece; what is saved comes back; bytes from elsewhere are errors.

#![allow(clippy::unwrap_used, clippy::panic)]

use half::f16;
use pq_core::*;
use proptest::prelude::*;

fn backends() -> impl Iterator<Item = Backend> {
    Backend::ALL.into_iter().filter(|backend| backend.is_available())
}

/// Random values in -1..1 from a seed.
fn random(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    random(seed, len).iter().map(|x| (x * 1e6) as i64 as u8).collect()
}

/// A pool that holds `packed` in pages in an order of its own, and the table.
fn in_pages(shape: PqShape, packed: &[u8], page_tokens: usize, seed: u64) -> (Vec<u8>, Vec<u32>) {
    let page = shape.codes_len(page_tokens);
    let used = packed.len().div_ceil(page);
    let mut free: Vec<u32> = (0..used as u32 + 3).collect();
    let mut pool = bytes(seed ^ 9, free.len() * page);
    let order = random(seed, used).into_iter().map(|x| ((x + 1.0) * 1e4) as usize);
    let table: Vec<u32> = order.map(|at| free.remove(at % free.len())).collect();
    for (chunk, &number) in packed.chunks(page).zip(&table) {
        pool[number as usize * page..][..chunk.len()].copy_from_slice(chunk);
    }
    (pool, table)
}

/// All results of the operations on codes, as bits.
fn results(backend: Backend, shape: PqShape, keys: Codes<'_>, values: Codes<'_>) -> Vec<u32> {
    let book = CodebookBuf::new(shape, &random(1, shape.codebook_len())).unwrap();
    let (n, group) = (keys.n(), 3);
    let tables = random(2, group * shape.lut_len());
    let luts = Luts::new(shape, &tables).unwrap();
    let mut scores = vec![0.0; n];
    scan_into_with(backend, &luts.lut(1), &keys, &mut scores).unwrap();
    for precision in [LutPrecision::U8, LutPrecision::U16] {
        let mut storage = vec![0; shape.quantized_lut_len(precision)];
        let lut = QuantizedLut::new_with(backend, &luts.lut(0), precision, &mut storage).unwrap();
        let mut quantized = vec![0.0; n];
        scan_quantized_into_with(backend, &lut, &keys, &mut quantized).unwrap();
        scores.extend(quantized);
    }
    let search = Search { k: n / 5, sinks: 2, recent: 7, ..Default::default() };
    let (mut floats, mut stats) = (vec![0.0; SearchScratch::len(group, n)], vec![SoftmaxStats::EMPTY; group]);
    let mut tokens = vec![0; search.found(n)];
    let mut scratch = SearchScratch::new(n, &mut floats, &mut stats).unwrap();
    search_into_with(backend, &luts, &keys, &search, &mut scratch, &mut tokens).unwrap();
    let mut scratch = vec![0.0; attend_scratch_len(shape, group)];
    let (mut out, mut stats) = (vec![0.0; group * shape.dim()], vec![SoftmaxStats::EMPTY; group]);
    let coded = CodedTokens::new(keys, values, book.view()).unwrap();
    attend_into_with(backend, &luts, &coded, &mut scratch, &mut out, &mut stats).unwrap();
    let mut decoded = vec![0.0; n * shape.dim()];
    decode_into(&book.view(), &keys, 0, &mut decoded).unwrap();
    let codes = (0..n).flat_map(|i| keys.iter_vector(i)).map(|c| c as u32);
    let floats = scores.iter().chain(&out).chain(&decoded).map(|x| x.to_bits());
    floats.chain(tokens).chain(codes).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn pages_give_the_bits_of_codes_in_one_piece(
        m in 1_usize..6, dsub in 1_usize..4, nbits in 1_u32..=10, seed: u64,
        n in prop_oneof![Just(0_usize), Just(64), Just(1024), 1_usize..2500], page in 1_usize..5, cut in 0_usize..40,
    ) {
        let (shape, page_tokens) = (PqShape::new(m * dsub, m, nbits).unwrap(), page * BLOCK);
        let [keys, values] = [seed, seed ^ 1].map(|seed| bytes(seed, shape.codes_len(n)));
        let whole = [&keys, &values].map(|bytes| Codes::new(shape, n, bytes).unwrap());
        let pages = [(&keys, seed ^ 2), (&values, seed ^ 3)].map(|(keys, seed)| in_pages(shape, keys, page_tokens, seed));
        let paged = pages.each_ref().map(|(pool, table)| Codes::paged(shape, n, pool, table, page_tokens).unwrap());
        let start = cut * BLOCK;
        for backend in backends() {
            prop_assert_eq!(results(backend, shape, whole[0], whole[1]), results(backend, shape, paged[0], paged[1]));
            if start <= n {
                let [a, b, c, d] = [whole[0], whole[1], paged[0], paged[1]].map(|codes| codes.slice(start..n).unwrap());
                prop_assert_eq!(results(backend, shape, a, b), results(backend, shape, c, d));
            }
        }
    }

    #[test]
    fn nothing_is_left_of_removed_vectors(m in 1_usize..6, nbits in 1_u32..=12, seed: u64, n in 0_usize..200, kept in 0_usize..250) {
        let shape = PqShape::new(m, m, nbits).unwrap();
        let mut codes = CodesBuf::from_packed(shape, n, bytes(seed, shape.codes_len(n))).unwrap();
        let first: Vec<u16> = (0..kept.min(n)).flat_map(|i| codes.view().iter_vector(i)).map(|c| c as u16).collect();
        let mut expected = vec![0xff; shape.codes_len(kept.min(n))];
        pack_codes_into(shape, &first, &mut expected).unwrap();
        codes.truncate(kept);
        // Without a removal the bytes are as given, padding included.
        if kept < n {
            prop_assert_eq!(codes.into_packed(), expected);
        } else {
            prop_assert_eq!(codes.into_packed(), bytes(seed, shape.codes_len(n)));
        }
    }

    #[test]
    fn codes_and_codebooks_come_back(m in 1_usize..6, dsub in 1_usize..4, nbits in 1_u32..=10, seed: u64, n in 0_usize..200) {
        let shape = PqShape::new(m * dsub, m, nbits).unwrap();
        let codes = CodesBuf::from_packed(shape, n, bytes(seed, shape.codes_len(n))).unwrap();
        let restored = CodesBuf::from_bytes(&codes.to_bytes()).unwrap();
        prop_assert_eq!((restored.view().shape(), restored.view().n()), (shape, n));
        prop_assert_eq!(restored.into_packed(), codes.into_packed());
        let book = CodebookBuf::new(shape, &random(seed, shape.codebook_len())).unwrap();
        prop_assert_eq!(CodebookBuf::from_bytes(&book.to_bytes::<f32>()).unwrap().centroids(), book.centroids());
        let halves: Vec<f16> = book.centroids().into_iter().map(f16::from_f32).collect();
        let half = CodebookBuf::from_bytes(&book.to_bytes::<f16>()).unwrap();
        prop_assert_eq!(half.centroids(), CodebookBuf::new(shape, &halves).unwrap().centroids());
        prop_assert!(book.to_bytes::<f16>().len() < book.to_bytes::<f32>().len() * 2 / 3 + 16);
    }
}

#[test]
fn changed_bytes_are_errors_or_other_values() {
    let shape = PqShape::new(4, 2, 3).unwrap();
    let codes = CodesBuf::from_packed(shape, 70, bytes(1, shape.codes_len(70))).unwrap().to_bytes();
    let book = CodebookBuf::new(shape, &random(1, shape.codebook_len())).unwrap().to_bytes::<f32>();
    let read_codes = |bytes: &[u8]| CodesBuf::from_bytes(bytes).map(drop);
    let read_book = |bytes: &[u8]| CodebookBuf::from_bytes(bytes).map(drop);
    type Read<'a> = &'a dyn Fn(&[u8]) -> Result<(), Error>;
    let readers: [(&[u8], Read<'_>); 2] = [(&codes, &read_codes), (&book, &read_book)];
    for (saved, read) in readers {
        assert_eq!(read(saved), Ok(()));
        for len in 0..saved.len() {
            assert!(read(&saved[..len]).is_err(), "{len}");
        }
        assert!(matches!(read(&[saved, &[0]].concat()), Err(Error::TrailingBytes { extra: 1, .. })));
        for at in 0..saved.len() {
            for flip in [1, 0x80, 0xff] {
                let mut changed = saved.to_vec();
                changed[at] ^= flip;
                // Every size is checked against the length before anything is allocated.
                if let Err(error) = read(&changed) {
                    assert!(!error.to_string().contains('\n'));
                }
            }
        }
    }
    assert!(matches!(CodebookBuf::from_bytes(&codes), Err(Error::BadMagic { what: "a codebook" })));
}

#[test]
fn page_tables_are_checked() {
    let shape = PqShape::new(4, 2, 3).unwrap();
    let pool = vec![0; 4 * shape.codes_len(128) + 5];
    assert!(Codes::paged(shape, 300, &pool, &[3, 0, 1, 77], 128).is_ok()); // the fourth page is not used
    let missing = Codes::paged(shape, 300, &pool, &[3, 4, 1], 128);
    assert!(matches!(missing, Err(Error::Page { index: 1, page: 4, pages: 4 })));
    assert!(matches!(Codes::paged(shape, 300, &pool, &[3, 0], 128), Err(Error::TooShort { needed: 3, .. })));
    assert!(matches!(Codes::paged(shape, 300, &pool, &[3, 0], 0), Err(Error::Zero { .. })));
    assert!(matches!(
        Codes::paged(shape, 9, &pool, &[3], 96),
        Err(Error::Unaligned { at: 96, multiple: 64, .. })
    ));
    assert!(Codes::paged(shape, usize::MAX, &pool, &[3], usize::MAX - 63).is_err());
    let codes = Codes::new(shape, 100, &pool).unwrap();
    assert!(matches!(codes.slice(3..9), Err(Error::Unaligned { at: 3, .. })));
    assert!(matches!(codes.slice(64..101), Err(Error::TooShort { needed: 101, .. })));
    assert!(matches!(codes.slice(128..128), Err(Error::TooShort { .. })));
    assert_eq!(codes.slice(64..100).unwrap().n(), 36);
}

#[cfg(feature = "serde")]
#[test]
fn serde_carries_the_saved_bytes() {
    let shape = PqShape::new(4, 2, 3).unwrap();
    let book = CodebookBuf::new(shape, &random(1, shape.codebook_len())).unwrap();
    let codes = CodesBuf::from_packed(shape, 70, bytes(1, shape.codes_len(70))).unwrap();
    let books = HeadBooks::new(book.clone(), book.clone());
    let json = serde_json::to_string(&(&book, &codes, &books)).unwrap();
    let (book2, codes2, books2): (CodebookBuf, CodesBuf, HeadBooks) = serde_json::from_str(&json).unwrap();
    assert_eq!((book2.centroids(), codes2.to_bytes()), (book.centroids(), codes.to_bytes()));
    assert_eq!(books2.id(), books.id());
    let error = serde_json::from_str::<CodesBuf>("[1, 2, 3]").unwrap_err();
    assert!(
        error.to_string().contains("not those of codes")
            && serde_json::from_str::<CodesBuf>("[300]").is_err()
    );
}
