//! `../same_bytes` holds what every language writes, reads and computes, bit for bit: the shared state and
//! the cache of a layer with product codes and with scalar codes, and attention of the cache. This test
//! covers Rust, on every backend, and C; `../python/tests/test_same_bytes.py` covers Python from the same
//! inputs.
//!
//! Inputs are such that no sum is rounded and every query sees one token alone, whose score exceeds all
//! others by more than 87: results do not depend on the order of sums, and so not on the machine.
//! `KVC_WRITE_SAME_BYTES=1 cargo test --test main across` writes the files anew, after a change of a
//! format.

use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;

use kv_attend::owner::{AnyLayer, AnyStore, Layer, Store, attend_batch_into_with};
use kv_attend::{Attention, Backend, ElementType, Rows, Window, Workspace};
use kv_owners::sq::{Basis, Bits};
use kvc::*;
use pq_core::{CodebookBuf, HeadBooks, HeadCodes, PqShape};

use super::support::{ok, rows_of, saved};

const DIM: usize = 16;
const TOKENS: usize = 60;
const WINDOW: Window = Window { sinks: 2, recent: 8, batch: 4 };

/// A linear congruential generator.
fn numbers(seed: u32) -> impl Iterator<Item = u32> {
    std::iter::successors(Some(seed), |x| Some(x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223))).skip(1)
}

/// (tokens, dim): signs.
fn keys() -> Vec<f32> {
    numbers(1).take(TOKENS * DIM).map(|x| if x >> 31 == 0 { 1.0 } else { -1.0 }).collect()
}

/// (n, dim): multiples of 1/32 from -4 to 4.
fn values(seed: u32, n: usize) -> Vec<f32> {
    numbers(seed).take(n * DIM).map(|x| (x >> 24) as f32 / 32.0 - 4.0).collect()
}

/// (3, dim): those of the last three tokens look for a sink, a coded token and a recent one.
fn queries(keys: &[f32]) -> Vec<f32> {
    [0, 20, 57].iter().flat_map(|t| &keys[t * DIM..][..DIM]).map(|x| 64.0 * x).collect()
}

/// Compares bytes to those of a file.
fn check(name: &str, bytes: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../same_bytes").join(name);
    if std::env::var_os("KVC_WRITE_SAME_BYTES").is_some() {
        std::fs::write(&path, bytes).unwrap();
    }
    assert!(std::fs::read(&path).unwrap_or_default() == bytes, "{name} is not what {} has", path.display());
}

fn bytes_of(floats: &[f32]) -> Vec<u8> {
    floats.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Rust appends, saves, restores and attends, on every backend.
fn check_rust<S>(kind: &str, shared: &[Arc<<S as Store<f32>>::Shared>])
where
    S: AnyStore,
    <S as Store<f32>>::Error: std::fmt::Debug,
{
    let (keys, values) = (keys(), values(2, TOKENS));
    let queries = queries(&keys);
    let rows = |x| Rows::contiguous(x, DIM).unwrap();
    for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
        let mut cache = Layer::<S, f32>::new(shared, WINDOW).unwrap();
        cache.append_with(backend, rows(&keys), rows(&values)).unwrap();
        let saved = cache.to_bytes_checked();
        check(&format!("{kind}.cache"), &saved);
        let restored = AnyLayer::<S>::from_bytes(&saved, shared).unwrap();
        assert_eq!((restored.element(), restored.to_bytes_checked()), (ElementType::F32, saved));
        let (by, workspace, mut out) =
            (Attention::scaled(1.0), &mut Workspace::default(), vec![0.0; 3 * DIM]);
        attend_batch_into_with(backend, &[&cache], &by, rows(&queries), workspace, &mut out).unwrap();
        check(&format!("{kind}.out"), &bytes_of(&out));
    }
}

/// C appends and saves to an empty cache, and attends to what it restores. Frees the caches.
unsafe fn check_c(
    kind: &str,
    cache: *mut kvc_cache,
    load: impl Fn(*const u8, usize, *mut *mut kvc_cache) -> i32,
) {
    let (k, v) = (keys(), values(2, TOKENS));
    unsafe {
        ok(kvc_cache_append(cache, &rows_of(&k, DIM), &rows_of(&v, DIM)));
        let bytes = saved(|out, len, n| kvc_cache_save(cache, out, len, n));
        check(&format!("{kind}.cache"), &bytes);
        let (mut restored, mut workspace) = (null_mut(), null_mut());
        ok(load(bytes.as_ptr(), bytes.len(), &mut restored));
        ok(kvc_workspace_new(&mut workspace));
        let by = kvc_attention { scale: 1.0, softcap: 0.0, window: 0 };
        let (queries, mut out) = (queries(&k), vec![0.0; 3 * DIM]);
        let (queries, len) = (rows_of(&queries, DIM), out.len());
        ok(kvc_cache_attend(restored, workspace, &by, &queries, out.as_mut_ptr(), len));
        check(&format!("{kind}.out"), &bytes_of(&out));
        kvc_workspace_free(workspace);
        kvc_cache_free(restored);
        kvc_cache_free(cache);
    }
}

const C_WINDOW: kvc_window = kvc_window { sinks: 2, recent: 8, batch: 4 };

#[test]
fn product_codes() {
    // Keys: all combinations of signs of four components.
    let shape = PqShape::new(DIM, 4, 4).unwrap();
    let sign = |i: usize| if (i / 4 % 16) >> (i % 4) & 1 == 0 { 1.0 } else { -1.0 };
    let signs: Vec<f32> = (0..16 * DIM).map(sign).collect();
    let book = |centroids: &[f32]| CodebookBuf::new(shape, centroids).unwrap();
    let books = Arc::new(HeadBooks::new(book(&signs), book(&values(3, 16))));
    let bytes = books.to_bytes_checked::<f32>();
    check("pq.books", &bytes);
    check_rust::<HeadCodes>("pq", &[books]);
    unsafe {
        let (mut books, mut cache) = (null_mut(), null_mut());
        let bytes = kvc_bytes { data: bytes.as_ptr(), len: bytes.len() };
        ok(kvc_books_load(&bytes, 1, &mut books));
        check("pq.books", &saved(|out, len, n| kvc_books_save(books, 0, out, len, n)));
        ok(kvc_cache_pq(books, KVC_F32, &C_WINDOW, &mut cache));
        check_c("pq", cache, |data, len, out| kvc_cache_load_pq(books, data, len, out));
        kvc_books_free(books);
    }
}

#[test]
fn scalar_codes() {
    let identity: Vec<f32> = (0..DIM * DIM).map(|i| if i % (DIM + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let basis = Basis {
        block: 32,
        mean: vec![0.0; DIM],
        basis: identity.clone(),
        dual: identity,
        sigma: vec![1.0; DIM],
        value_mean: values(4, 1),
        value_scale: 0.5,
    };
    let (frequencies, bytes) = ([0.0; DIM / 2], basis.to_bytes());
    check("sq.basis", &bytes);
    let head = basis.head(&frequencies, &Bits::uniform(4)).unwrap();
    check("sq.head", &head.to_bytes());
    check_rust::<kv_owners::sq::Codes>("sq", &[head]);
    let bits = kvc_bits { keys: 4.0, values: 4, mean_error: 0 };
    unsafe {
        let (mut bases, mut heads, mut cache) = (null_mut(), null_mut(), null_mut());
        let bytes = kvc_bytes { data: bytes.as_ptr(), len: bytes.len() };
        ok(kvc_bases_load(&bytes, 1, &mut bases));
        check("sq.basis", &saved(|out, len, n| kvc_bases_save(bases, 0, out, len, n)));
        ok(kvc_heads_new(bases, frequencies.as_ptr(), DIM / 2, &bits, &mut heads));
        check("sq.head", &saved(|out, len, n| kvc_heads_save(heads, 0, out, len, n)));
        ok(kvc_cache_sq(heads, KVC_F32, &C_WINDOW, &mut cache));
        check_c("sq", cache, |data, len, out| kvc_cache_load_sq(heads, data, len, out));
        kvc_heads_free(heads);
        kvc_bases_free(bases);
    }
}
