use crate::assign::{Nearest, Tile, assign, assign_one, fill_tile};
use crate::codes::set_vector;
use crate::error::check_len;
use crate::pack::{BLOCK, pack_run};
use crate::{Backend, Codebook, Codes, Element, Error};

/// Subspaces of up to this many components are encoded 64 vectors at a time, which needs a tile on the stack.
const MAX_TILE_DSUB: usize = 64;

/// Replaces each subvector by the index of its nearest centroid, and packs the indices as vectors `first` and on.
///
/// The nearest centroid is the first minimum over `c` of `|centroid_c|^2 / 2 - <x, centroid_c>`, products subtracted in
/// `f32` in ascending component order. Components so large that these may overflow, from 1e19 on, are compared by squared
/// distances in `f64`. A NaN or infinite component is treated as 0. Returns the summed squared error, which
/// [`Drift`](crate::Drift) follows.
///
/// # Shapes
/// `vectors` (n, dim); `codes` [`PqShape::codes_len`](crate::PqShape::codes_len) of `first + n`, of which the codes of
/// other vectors are left alone.
/// # Errors
/// [`Error::Length`]; `codes` is then untouched.
/// # Cost
/// n * ksub * dim multiply-adds, no allocation. Whole blocks of 64 vectors are fastest, then single vectors.
/// # Source
/// Jégou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search", TPAMI 2011.
pub fn encode_into<E: Element>(
    codebook: &Codebook<'_>,
    vectors: &[E],
    first: usize,
    codes: &mut [u8],
) -> Result<f64, Error> {
    encode_into_with(Backend::detect(), codebook, vectors, first, codes)
}

/// [`encode_into`] on a given backend.
///
/// # Errors
/// As [`encode_into`], and [`Error::BackendUnavailable`].
pub fn encode_into_with<E: Element>(
    backend: Backend,
    codebook: &Codebook<'_>,
    vectors: &[E],
    first: usize,
    codes: &mut [u8],
) -> Result<f64, Error> {
    backend.check()?;
    let shape = codebook.shape();
    let n = vectors.len() / shape.dim();
    check_len("vectors", vectors.len(), n * shape.dim())?;
    check_len("codes", codes.len(), shape.codes_len(first.saturating_add(n)))?;
    let mut error = 0.0;
    let mut i = 0;
    while i < n {
        let at = first + i;
        if at.is_multiple_of(BLOCK) && i + BLOCK <= n && shape.dsub() <= MAX_TILE_DSUB {
            let rows = &vectors[i * shape.dim()..][..BLOCK * shape.dim()];
            let block = &mut codes[at / BLOCK * shape.block_size()..][..shape.block_size()];
            error += encode_block(backend, codebook, rows, block);
            i += BLOCK;
        } else {
            error += encode_vector(backend, codebook, &vectors[i * shape.dim()..][..shape.dim()], at, codes);
            i += 1;
        }
    }
    Ok(error)
}

/// Encodes 64 vectors into their block.
fn encode_block<E: Element>(backend: Backend, codebook: &Codebook<'_>, rows: &[E], block: &mut [u8]) -> f64 {
    let shape = codebook.shape();
    let mut tile = [0.0; MAX_TILE_DSUB * BLOCK];
    let values = &mut tile[..shape.dsub() * BLOCK];
    let mut nearest = Nearest::NONE;
    let mut error = 0.0;
    for (j, run) in block.chunks_exact_mut(8 * shape.nbits() as usize).enumerate() {
        let squares = fill_tile(rows, shape.dim(), j * shape.dsub(), values);
        error += assign(backend, codebook.subspace(j), Tile { values, points: BLOCK, squares }, &mut nearest);
        pack_run(&nearest.index.map(|c| c as u16), shape.nbits(), run);
    }
    error.max(0.0)
}

/// Encodes one vector as vector `at`.
fn encode_vector<E: Element>(
    backend: Backend,
    codebook: &Codebook<'_>,
    vector: &[E],
    at: usize,
    codes: &mut [u8],
) -> f64 {
    let shape = codebook.shape();
    let error = core::cell::Cell::new(0.0);
    set_vector(shape, codes, at, |j| {
        let x = &vector[j * shape.dsub()..][..shape.dsub()];
        let (c, distance) = assign_one(backend, codebook.subspace(j), x);
        error.set(error.get() + distance);
        c as u16
    });
    error.get()
}

/// Replaces each code by its centroid.
///
/// # Shapes
/// `codes` (n, m) packed; `vectors` (n, dim), fully written, rounded to nearest.
/// # Errors
/// [`Error::ShapeMismatch`] or [`Error::Length`]; `vectors` is then untouched.
/// # Cost
/// One look-up and one write a component, no allocation.
pub fn decode_into<E: Element>(
    codebook: &Codebook<'_>,
    codes: &Codes<'_>,
    vectors: &mut [E],
) -> Result<(), Error> {
    let shape = codebook.shape();
    if codes.shape() != shape {
        return Err(Error::ShapeMismatch);
    }
    check_len("vectors", vectors.len(), codes.n().saturating_mul(shape.dim()))?;
    for (b, rows) in vectors.chunks_mut(BLOCK * shape.dim()).enumerate() {
        for (j, run) in codes.block(b).chunks_exact(8 * shape.nbits() as usize).enumerate() {
            let subspace = codebook.subspace(j);
            let codes = crate::pack::unpack_run(run, shape.nbits());
            for (row, c) in rows.chunks_exact_mut(shape.dim()).zip(codes) {
                for (d, x) in row[j * shape.dsub()..][..shape.dsub()].iter_mut().enumerate() {
                    *x = E::from_f32(subspace.column(d)[usize::from(c)]);
                }
            }
        }
    }
    Ok(())
}
