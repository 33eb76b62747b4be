//! One codebook: training, encoding, decoding, search by inner product.

use kv_attend::{AnyRows, Rows, SoftmaxStats, for_any_rows};
use pq_core::{
    CodebookBuf, Codes, PqShape, Search, SearchScratch, TrainOptions, decode_into, encode_rows_into,
    lut_into, search_into, train,
};

use crate::args;
use crate::error::{Result, call};
use crate::rows::{kvc_rows, rows};
use crate::save::save;

/// A codebook of one head's keys or values.
pub struct kvc_codebook(CodebookBuf);

/// How codebooks are trained. The same rows and settings give the same bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvc_training {
    /// Most iterations; 25 is usual. 0 counts as 1.
    pub iterations: usize,
    /// Most rows, drawn at random; 0 for all.
    pub max_rows: usize,
    /// The seed of random choices.
    pub seed: u64,
}

impl kvc_training {
    pub(crate) unsafe fn read<'a>(options: *const Self) -> Result<TrainOptions<'a>> {
        let Self { iterations, max_rows, seed } = *args::get(options, "options")?;
        let max_vectors = (max_rows > 0).then_some(max_rows);
        Ok(TrainOptions { iterations, max_vectors, seed, ..TrainOptions::default() })
    }
}

/// Floats of the largest codebook: 2^28 bytes.
const MOST_FLOATS: usize = 1 << 26;

/// A shape whose codebook has a reasonable size.
pub(crate) fn shape(dim: usize, m: usize, nbits: u32) -> Result<PqShape> {
    let shape = PqShape::new(dim, m, nbits)?;
    match dim.checked_mul(1 << nbits) {
        Some(floats) if floats <= MOST_FLOATS => Ok(shape),
        _ => Err(pq_core::Error::TooLarge.into()),
    }
}

/// Trains a codebook of `m` subspaces and `nbits` (1 to 12) bits per code on rows of one head; `m` divides their
/// components. A code has m * nbits bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_train(
    sample: *const kvc_rows,
    m: usize,
    nbits: u32,
    options: *const kvc_training,
    codebook: *mut *mut kvc_codebook,
) -> i32 {
    call(|| {
        let codebook = args::out_handle(codebook)?;
        let (sample, options) = (rows(sample, "rows")?, kvc_training::read(options)?);
        let shape = for_any_rows!(sample, sample => shape(sample.components(), m, nbits))?;
        let trained = for_any_rows!(sample, sample => {
            let vectors: Vec<_> = sample.iter().flatten().copied().collect();
            train(shape, &vectors, &options)
        })?;
        codebook.write(kvc_codebook(CodebookBuf::new(shape, &trained.centroids)?));
        Ok(())
    })
}

/// The codebook of Gaussians, which needs no training: for rows in a Hadamard basis divided by their norms, with
/// subspaces of 1, 2, 4, 8 or 16 components and 4 to 8 bits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_gaussian(
    dim: usize,
    m: usize,
    nbits: u32,
    codebook: *mut *mut kvc_codebook,
) -> i32 {
    call(|| {
        let codebook = args::out_handle(codebook)?;
        codebook.write(kvc_codebook(CodebookBuf::gaussian(shape(dim, m, nbits)?)?));
        Ok(())
    })
}

/// Frees a codebook; NULL is allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_free(codebook: *mut kvc_codebook) {
    args::free(codebook);
}

/// Saves a codebook to a buffer. `written` becomes its bytes, also with KVC_TOO_SHORT.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_save(
    codebook: *const kvc_codebook,
    buffer: *mut u8,
    len: usize,
    written: *mut usize,
) -> i32 {
    call(|| save(&args::get(codebook, "codebook")?.0.to_bytes_checked::<f32>(), buffer, len, written))
}

/// Reads a saved codebook.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_load(
    data: *const u8,
    len: usize,
    codebook: *mut *mut kvc_codebook,
) -> i32 {
    call(|| {
        let codebook = args::out_handle(codebook)?;
        codebook.write(kvc_codebook(CodebookBuf::from_bytes(args::slice(data, len, "data")?)?));
        Ok(())
    })
}

/// Bytes of the codes of `n` vectors: they are packed in blocks of 64.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_codes_len(
    codebook: *const kvc_codebook,
    n: usize,
    len: *mut usize,
) -> i32 {
    call(|| {
        let len = args::out(len, "len")?;
        len.write(args::get(codebook, "codebook")?.0.view().shape().codes_len(n));
        Ok(())
    })
}

/// Encodes vectors (n, dim) to `codes`, kvc_codebook_codes_len bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_encode(
    codebook: *const kvc_codebook,
    vectors: *const kvc_rows,
    codes: *mut u8,
    len: usize,
) -> i32 {
    call(|| {
        let book = args::get(codebook, "codebook")?.0.view();
        let codes = args::slice_mut(codes, len, "codes")?;
        codes.fill(0); // of the vectors that the last block has room for
        for_any_rows!(rows(vectors, "vectors")?, vectors => encode_rows_into(&book, vectors, 0, codes))?;
        Ok(())
    })
}

/// Decodes `n` vectors (n, dim) to `out`, whose length in floats is `out_len`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_decode(
    codebook: *const kvc_codebook,
    codes: *const u8,
    len: usize,
    n: usize,
    out: *mut f32,
    out_len: usize,
) -> i32 {
    call(|| {
        let book = args::get(codebook, "codebook")?.0.view();
        let codes = args::slice(codes, len, "codes")?;
        let out = args::slice_mut(out, out_len, "out")?;
        let expected = n.saturating_mul(book.shape().dim());
        if out.len() != expected {
            return Err(pq_core::Error::Length { what: "out", expected, actual: out.len() }.into());
        }
        Ok(decode_into(&book, &Codes::new(book.shape(), n, codes)?, 0, out)?)
    })
}

/// The `k` of `n` coded vectors with the largest inner products with queries (group, dim), scaled as for
/// attention: the query heads of a group share their selection. Writes indices in ascending order to `indices`,
/// whose length is at least min(k, n), and their number to `found`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvc_codebook_search(
    codebook: *const kvc_codebook,
    codes: *const u8,
    len: usize,
    n: usize,
    queries: *const kvc_rows,
    k: usize,
    indices: *mut u32,
    indices_len: usize,
    found: *mut usize,
) -> i32 {
    call(|| {
        let book = args::get(codebook, "codebook")?.0.view();
        let codes = Codes::new(book.shape(), n, args::slice(codes, len, "codes")?)?;
        let (group, queries) = floats(rows(queries, "queries")?);
        let (indices, found) =
            (args::slice_mut(indices, indices_len, "indices")?, args::out(found, "found")?);
        let mut table = vec![0.0; group.saturating_mul(book.shape().lut_len())];
        let luts = lut_into(&book, &queries, &mut table)?;
        let mut scores = vec![0.0; SearchScratch::len(group, n)];
        let mut stats = vec![SoftmaxStats::EMPTY; group];
        let mut scratch = SearchScratch::new(n, &mut scores, &mut stats)?;
        found.write(search_into(&luts, &codes, &Search { k, ..Search::default() }, &mut scratch, indices)?);
        Ok(())
    })
}

/// Rows as contiguous floats, and their number.
fn floats(rows: AnyRows<'_>) -> (usize, Vec<f32>) {
    fn copy<E: kv_attend::Element>(rows: Rows<'_, E>) -> (usize, Vec<f32>) {
        (rows.rows(), rows.iter().flatten().map(|x| x.to_f32()).collect())
    }
    for_any_rows!(rows, rows => copy(rows))
}
