//! Untrusted serialized codes, codebooks and caches: an error or a value that serializes again, with
//! allocations bounded by the input's length.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pq_core::*;

fuzz_target!(|input: &[u8]| {
    if let Ok(codes) = CodesBuf::from_bytes(input) {
        assert_eq!(codes.to_bytes(), input);
        assert_eq!(codes.view().size() + 32, input.len());
    }
    if let Ok(book) = CodebookBuf::from_bytes(input) {
        let shape = book.view().shape();
        assert_eq!(book.centroids().len(), shape.codebook_len());
        assert!(2 * shape.codebook_len() < input.len());
    }
    if let Ok(books) = HeadBooks::from_bytes(input) {
        assert_eq!(HeadBooks::from_bytes(&books.to_bytes::<f32>()).unwrap().id(), books.id());
    }
    // A cache of one head whose codebooks have the id in the bytes.
    let shape = PqShape::new(4, 2, 2).unwrap();
    let centroids: Vec<f32> = (0..shape.codebook_len()).map(|i| i as f32).collect();
    let book = CodebookBuf::new(shape, &centroids).unwrap();
    let books = std::sync::Arc::new(HeadBooks::new(book.clone(), book));
    let mut named = input.to_vec();
    if let Some(id) = named.get_mut(44..52) {
        id.copy_from_slice(&books.id().to_le_bytes());
    }
    if let Ok(mut cache) = LayerCache::<f32>::from_bytes(&named, &[books]) {
        let mut out = [0.0; 4];
        let (attention, query) = (Attention::scaled(0.5), [0.5_f32; 4]);
        cache.attend_into(&attention, Rows::from(&query[..]), &mut Workspace::default(), &mut out).unwrap();
        cache.truncate(cache.len() / 2);
        let row = [1.0; 4];
        cache.append(Rows::from(&row[..]), Rows::from(&row[..])).unwrap();
    }
});
