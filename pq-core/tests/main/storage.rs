//! Paged codes equal contiguous codes; serialization round-trips; corrupt bytes are errors.

use half::f16;
use pq_core::*;
use proptest::prelude::*;

use super::support::{backends, bytes, random};

/// A pool with the codes in shuffled pages, and the page table. Pages are written bit plane by bit plane, as
/// the layout's documentation specifies.
fn in_pages(codes: &Codes<'_>, page_tokens: usize, seed: u64) -> (Vec<u8>, Vec<u32>) {
    let (shape, block) = (codes.shape(), page_tokens.min(BLOCK));
    let (page, used) = (shape.page_len(page_tokens), codes.n().div_ceil(page_tokens));
    let mut free: Vec<u32> = (0..used as u32 + 3).collect();
    let mut pool = bytes(seed ^ 9, free.len() * page);
    let order = random::<f32>(seed, used).into_iter().map(|x| ((x + 1.0) * 1e4) as usize);
    let table: Vec<u32> = order.map(|at| free.remove(at % free.len())).collect();
    let run_len = block / 8 * shape.nbits() as usize;
    for t in 0..codes.n() {
        let at = table[t / page_tokens] as usize * page + t % page_tokens / block * shape.m() * run_len;
        for (j, code) in codes.iter_vector(t).enumerate() {
            let (mut plane, mut shift) = (at + j * run_len, 0);
            for width in [8, 4, 2, 1].into_iter().filter(|width| shape.nbits() as usize & width != 0) {
                let len = block / 8 * width;
                let (byte, place) = (&mut pool[plane + t % block % len], t % block / len * width);
                let mask = ((1_u32 << width) - 1) as u8;
                *byte = *byte & !(mask << place) | ((code >> shift) as u8 & mask) << place;
                (plane, shift) = (plane + len, shift + width);
            }
        }
    }
    (pool, table)
}

/// All results of the operations on codes, as bits, and the outputs of attention.
fn results(backend: Backend, keys: Codes<'_>, values: Codes<'_>) -> (Vec<u32>, Vec<f32>) {
    let shape = keys.shape();
    let book = CodebookBuf::new(shape, &random::<f32>(1, shape.codebook_len())).unwrap();
    let (n, group) = (keys.n(), 3);
    let tables = random::<f32>(2, group * shape.lut_len());
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
    let floats = scores.iter().chain(&decoded).map(|x| x.to_bits());
    normalize_all(&stats, &mut out).unwrap();
    (floats.chain(tokens).chain(codes).collect(), out)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn pages_are_codes_in_one_piece(
        m in 1_usize..12, dsub in 1_usize..4, nbits in 1_u32..=10, seed: u64,
        n in prop_oneof![Just(0_usize), Just(64), Just(1024), 1_usize..100, 1_usize..2500],
        page_tokens in prop_oneof![Just(16_usize), Just(32), (1_usize..5).prop_map(|page| page * BLOCK)],
        value_page_tokens in prop_oneof![Just(16_usize), Just(32), Just(64)], cut in 0_usize..40,
    ) {
        let shape = PqShape::new(m * dsub, m, nbits).unwrap();
        let [keys, values] = [seed, seed ^ 1].map(|seed| bytes(seed, shape.codes_len(n)));
        let [keys, values] = [&keys, &values].map(|bytes| Codes::new(shape, n, bytes).unwrap());
        let (key_pool, key_table) = in_pages(&keys, page_tokens, seed ^ 2);
        let (value_pool, value_table) = in_pages(&values, value_page_tokens, seed ^ 3);
        let paged_keys = Codes::paged(shape, n, &key_pool, &key_table, page_tokens).unwrap();
        let paged_values = Codes::paged(shape, n, &value_pool, &value_table, value_page_tokens).unwrap();
        for backend in backends() {
            for start in [0, cut * BLOCK] {
                if start > n {
                    continue;
                }
                let parts = [keys, values, paged_keys, paged_values].map(|codes| codes.slice(start..n).unwrap());
                let [a, b, c, d] = parts;
                let ((bits, out), (paged_bits, paged_out)) = (results(backend, a, b), results(backend, c, d));
                prop_assert_eq!(bits, paged_bits);
                if value_page_tokens == BLOCK || backend == Backend::Scalar {
                    prop_assert_eq!(&out, &paged_out);
                }
                // Small pages sum in another order.
                for (x, y) in out.iter().zip(&paged_out) {
                    prop_assert!((x - y).abs() < 1e-5, "{} {}", x, y);
                }
            }
        }
    }

    #[test]
    fn a_slice_of_small_pages_begins_at_any_page(
        n in 1_usize..300, pages in 0_usize..20, seed: u64, nbits in 1_u32..=8,
    ) {
        let shape = PqShape::new(6, 3, nbits).unwrap();
        let codes = bytes(seed, shape.codes_len(n));
        let (pool, table) = in_pages(&Codes::new(shape, n, &codes).unwrap(), 16, seed ^ 1);
        let paged = Codes::paged(shape, n, &pool, &table, 16).unwrap();
        let start = 16 * pages.min(n / 16);
        let (later, of_table) = (paged.slice(start..n).unwrap(), &table[start / 16..]);
        let expected = Codes::paged(shape, n - start, &pool, of_table, 16).unwrap();
        for backend in backends() {
            prop_assert_eq!(results(backend, later, later), results(backend, expected, expected));
        }
    }

    #[test]
    fn pages_are_written_as_they_are_read(
        seed: u64, nbits in 1_u32..=12, runs in proptest::collection::vec(0_usize..90, 1..5),
        page_tokens in prop_oneof![Just(16_usize), Just(32), Just(64), Just(192)],
    ) {
        let shape = PqShape::new(6, 3, nbits).unwrap();
        let n: usize = runs.iter().sum();
        let book = CodebookBuf::new(shape, &random::<f32>(1, shape.codebook_len())).unwrap();
        let rows = random::<f32>(seed, n * 6);
        let rows = Rows::contiguous(&rows, 6).unwrap();
        let zeros = vec![0; shape.codes_len(n)];
        let (mut pool, table) = in_pages(&Codes::new(shape, n, &zeros).unwrap(), page_tokens, seed);
        let before = pool.clone();
        for backend in backends() {
            let mut whole = CodesBuf::new(shape);
            let mut first = 0;
            let mut pages = CodesMut::paged(shape, &mut pool, &table, page_tokens).unwrap();
            for run in &runs {
                let rows = rows.slice(first..first + run).unwrap();
                let error = whole.append_rows_with(backend, &book.view(), rows).unwrap();
                prop_assert_eq!(pages.encode_with(backend, &book.view(), rows, first).unwrap(), error);
                first += run;
            }
            let full = table.len() * page_tokens;
            let room = pages.encode(&book.view(), rows, full - n + 1);
            let too_long = matches!(room, Err(Error::TooShort { what: "pages", .. }));
            prop_assert!(too_long || n == 0);
            let paged = Codes::paged(shape, n, &pool, &table, page_tokens).unwrap();
            prop_assert!((0..n).all(|i| paged.iter_vector(i).eq(whole.view().iter_vector(i))));
        }
        // Other sequences' pages are untouched.
        let page = shape.page_len(page_tokens);
        for (i, (page, before)) in pool.chunks(page).zip(before.chunks(page)).enumerate() {
            prop_assert!(table.contains(&(i as u32)) || page == before);
        }
    }

    #[test]
    fn nothing_is_left_of_removed_vectors(
        m in 1_usize..6, nbits in 1_u32..=12, seed: u64, n in 0_usize..200, kept in 0_usize..250,
    ) {
        let shape = PqShape::new(m, m, nbits).unwrap();
        let mut codes = CodesBuf::from_packed(shape, n, bytes(seed, shape.codes_len(n))).unwrap();
        let first = (0..kept.min(n)).flat_map(|i| codes.view().iter_vector(i));
        let first: Vec<u16> = first.map(|c| c as u16).collect();
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
    fn codes_and_codebooks_come_back(
        m in 1_usize..6, dsub in 1_usize..4, nbits in 1_u32..=10, seed: u64, n in 0_usize..200,
    ) {
        let shape = PqShape::new(m * dsub, m, nbits).unwrap();
        let codes = CodesBuf::from_packed(shape, n, bytes(seed, shape.codes_len(n))).unwrap();
        let restored = CodesBuf::from_bytes(&codes.to_bytes()).unwrap();
        prop_assert_eq!((restored.view().shape(), restored.view().n()), (shape, n));
        prop_assert_eq!(restored.into_packed(), codes.into_packed());
        let book = CodebookBuf::new(shape, &random::<f32>(seed, shape.codebook_len())).unwrap();
        prop_assert_eq!(CodebookBuf::from_bytes(&book.to_bytes::<f32>()).unwrap().centroids(), book.centroids());
        let halves: Vec<f16> = book.centroids().into_iter().map(f16::from_f32).collect();
        let half = CodebookBuf::from_bytes(&book.to_bytes::<f16>()).unwrap();
        prop_assert_eq!(half.centroids(), CodebookBuf::new(shape, &halves).unwrap().centroids());
        prop_assert!(book.to_bytes::<f16>().len() < book.to_bytes::<f32>().len() * 2 / 3 + 16);
    }
}

/// Sizes at which every kernel gathers several times.
#[test]
fn many_subspaces_in_small_pages_are_codes_in_one_piece() {
    for (m, nbits) in [(70, 8), (33, 7), (64, 6), (130, 5), (64, 4), (200, 1)] {
        let shape = PqShape::new(m, m, nbits).unwrap();
        let n = 2200;
        let codes = bytes(m as u64, shape.codes_len(n));
        let whole = Codes::new(shape, n, &codes).unwrap();
        for page_tokens in [16, 32] {
            let (pool, table) = in_pages(&whole, page_tokens, 7);
            let paged = Codes::paged(shape, n, &pool, &table, page_tokens).unwrap();
            for backend in backends() {
                let ((bits, out), (paged_bits, paged_out)) =
                    (results(backend, whole, whole), results(backend, paged, paged));
                assert!(bits == paged_bits, "{m}x{nbits}, pages of {page_tokens}, {backend:?}");
                assert!(out.iter().zip(&paged_out).all(|(x, y)| (x - y).abs() < 1e-4));
            }
        }
    }
}

#[test]
fn changed_bytes_are_errors_or_other_values() {
    let shape = PqShape::new(4, 2, 3).unwrap();
    let codes = CodesBuf::from_packed(shape, 70, bytes(1, shape.codes_len(70))).unwrap().to_bytes();
    let loud = CodebookBuf::new(shape, &vec![1e5_f32; shape.codebook_len()]).unwrap(); // beyond f16
    assert!(matches!(CodebookBuf::from_bytes(&loud.to_bytes::<f16>()), Err(Error::NotFinite { .. })));
    let book = CodebookBuf::new(shape, &random::<f32>(1, shape.codebook_len())).unwrap().to_bytes::<f32>();
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
    for page_tokens in [1, 8, 48, 96] {
        assert_eq!(
            Codes::paged(shape, 9, &pool, &[3], page_tokens).unwrap_err(),
            Error::PageTokens { page_tokens }
        );
    }
    assert!(matches!(Codes::paged(shape, 9, &pool, &[32], 16), Err(Error::Page { pages: 32, .. })));
    let mut written = pool.clone();
    assert!(matches!(CodesMut::paged(shape, &mut written, &[4], 128), Err(Error::Page { page: 4, .. })));
    assert!(CodesMut::paged(shape, &mut written, &[0, 1], usize::MAX - 63).is_err());
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
    let book = CodebookBuf::new(shape, &random::<f32>(1, shape.codebook_len())).unwrap();
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
