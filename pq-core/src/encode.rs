//! Encoding and decoding: vectors to packed codes in tiles of 64 or one by one, and codes to centroids.

use kv_attend::{AnyRows, for_any_rows};

use crate::assign::{
    CHAINS, Nearest, Sum, Tile, Vectors, assign_fitting, fill_tile, fits_f32, nearest_of_registers,
    squares_of, summed_error,
};
use crate::assign_one::assign_one;
use crate::codebook::Subspace;
use crate::codes_mut::{CodesMut, Place};
use crate::error::{check_at_least, check_len, count_rows};
use crate::pack::unpack_run;
use crate::simd::{BLOCK, Kernel, Run, Simd};
use crate::{Backend, Codebook, Codes, Element, Error, Rows};

/// The largest dsub for which 64 vectors are encoded at a time, bounded by the size of the tile on the stack.
const MAX_TILE_DSUB: usize = 64;

/// Up to this many rows, encoding one by one is faster than a tile: a register of points takes as long as six
/// to nine rows with AVX-512, five to seven with AVX2.
const FEW: usize = 6;

/// Encodes vectors: replaces each subvector by the index of its nearest centroid, and packs the indices as
/// the codes of vectors `first` and on.
///
/// The nearest centroid is the first minimum over `c` of `|centroid_c|^2 / 2 - <x, centroid_c>`, where the
/// products are subtracted in `f32` in ascending component order. Where this may overflow, for components of
/// 1e19 and more, squared distances in `f64` decide. A NaN or infinite component counts as 0. Returns the
/// summed squared error, which [`Drift`](crate::Drift) tracks.
///
/// # Shapes
/// `vectors` (n, dim); `codes` at least [`PqShape::codes_len`](crate::PqShape::codes_len) of `first + n`,
/// such as a page. The codes of other vectors keep their values.
/// # Errors
/// [`Error::PartialRow`] for `vectors`, [`Error::TooShort`] for `codes`, which is then untouched.
/// # Cost
/// n * ksub * dim multiply-adds, no allocation. Vectors are encoded up to 64 at a time, wherever `first` is;
/// a single one takes two to four times as long as each of 16 or more.
/// # Source
/// Jégou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search", TPAMI 2011.
/// # Examples
/// ```
/// use pq_core::{CodebookBuf, Codes, PqShape, encode_into};
/// let shape = PqShape::new(2, 2, 1)?; // the centroids of each component are 0 and 1
/// let codebook = CodebookBuf::new(shape, &[0.0, 1.0, 0.0, 1.0])?;
/// let mut page = vec![0; shape.codes_len(64)];
/// encode_into(&codebook.view(), &[0.1_f32, 0.9, 0.8, 0.2], 0, &mut page)?; // a prompt of two tokens
/// let error = encode_into(&codebook.view(), &[0.7_f32, 0.6], 2, &mut page)?; // the next token
/// assert!(Codes::new(shape, 3, &page)?.iter_vector(2).eq([1, 1]));
/// assert!((error - 0.25).abs() < 1e-6); // 0.3^2 + 0.4^2
/// # Ok::<(), pq_core::Error>(())
/// ```
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
    let dim = codebook.shape().dim();
    count_rows("vectors", vectors.len(), dim)?;
    let vectors = Rows::contiguous(vectors, dim)?;
    encode_rows_into_with(backend, codebook, vectors, first, codes)
}

/// [`encode_into`] for strided rows, such as one head of (tokens, heads, head_dim), without a copy.
///
/// # Shapes
/// `vectors` (n, dim); `codes` as for [`encode_into`].
/// # Errors
/// [`Error::Length`] for rows of another length, [`Error::TooShort`] for `codes`, which is then untouched.
/// # Cost
/// That of [`encode_into`], and up to a tenth more for strided access.
/// # Examples
/// ```
/// use pq_core::{CodebookBuf, Codes, PqShape, Rows, encode_rows_into};
/// let shape = PqShape::new(2, 2, 1)?; // the centroids of each component are 0 and 1
/// let codebook = CodebookBuf::new(shape, &[0.0, 1.0, 0.0, 1.0])?;
/// let cache = [0.1_f32, 0.9, 0.8, 0.2, 0.7, 0.6, 0.4, 0.3]; // 2 tokens of 2 heads of 2 components
/// let second_head = Rows::contiguous(&cache, 4)?.columns(2, 2)?;
/// let mut codes = vec![0; shape.codes_len(2)];
/// encode_rows_into(&codebook.view(), second_head, 0, &mut codes)?;
/// assert!(Codes::new(shape, 2, &codes)?.iter_vector(0).eq([1, 0]));
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn encode_rows_into<E: Element>(
    codebook: &Codebook<'_>,
    vectors: Rows<'_, E>,
    first: usize,
    codes: &mut [u8],
) -> Result<f64, Error> {
    encode_rows_into_with(Backend::detect(), codebook, vectors, first, codes)
}

/// [`encode_rows_into`] on a given backend.
///
/// # Errors
/// As [`encode_rows_into`], and [`Error::BackendUnavailable`].
pub fn encode_rows_into_with<E: Element>(
    backend: Backend,
    codebook: &Codebook<'_>,
    vectors: Rows<'_, E>,
    first: usize,
    codes: &mut [u8],
) -> Result<f64, Error> {
    backend.check()?;
    let (shape, n) = (codebook.shape(), vectors.rows());
    check_len("row", vectors.components(), shape.dim())?;
    check_at_least("codes", codes.len(), shape.codes_len(first.saturating_add(n)))?;
    encode(backend, codebook, vectors.into(), first, &mut CodesMut::new(shape, codes))
}

impl CodesMut<'_> {
    /// Encodes rows as vectors `first`, `first + 1`, and so on, as
    /// [`encode_rows_into`](crate::encode_rows_into) does. Other codes keep their values.
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`]; [`Error::Length`] for rows of another length; [`Error::TooShort`] when the
    /// pages have too little room. Nothing is then written.
    pub fn encode<E: Element>(
        &mut self,
        codebook: &Codebook<'_>,
        vectors: Rows<'_, E>,
        first: usize,
    ) -> Result<f64, Error> {
        self.encode_with(Backend::detect(), codebook, vectors, first)
    }

    /// [`encode`](Self::encode) on a given backend.
    ///
    /// # Errors
    /// As [`encode`](Self::encode), and [`Error::BackendUnavailable`].
    pub fn encode_with<E: Element>(
        &mut self,
        backend: Backend,
        codebook: &Codebook<'_>,
        vectors: Rows<'_, E>,
        first: usize,
    ) -> Result<f64, Error> {
        backend.check()?;
        if codebook.shape() != self.shape {
            return Err(Error::ShapeMismatch);
        }
        check_len("row", vectors.components(), self.shape.dim())?;
        check_at_least("pages", self.n, first.saturating_add(vectors.rows()))?;
        encode(backend, codebook, vectors.into(), first, self)
    }
}

/// [`encode_rows_into`] with checked arguments.
fn encode(
    backend: Backend,
    codebook: &Codebook<'_>,
    vectors: AnyRows<'_>,
    first: usize,
    codes: &mut CodesMut<'_>,
) -> Result<f64, Error> {
    for_any_rows!(vectors, vectors => encode_rows(backend, codebook, vectors, first, codes))
}

fn encode_rows<E: Element>(
    backend: Backend,
    codebook: &Codebook<'_>,
    vectors: Rows<'_, E>,
    first: usize,
    codes: &mut CodesMut<'_>,
) -> Result<f64, Error> {
    let (shape, n) = (codebook.shape(), vectors.rows());
    let mut error = 0.0;
    for i in (0..n).step_by(BLOCK) {
        let rows = vectors.slice(i..n.min(i + BLOCK))?;
        error += if rows.rows() <= FEW || shape.dsub() > MAX_TILE_DSUB {
            encode_one_by_one(backend, codebook, rows, first + i, codes)
        } else {
            encode_tile(backend, codebook, rows, first + i, codes)
        };
    }
    Ok(error)
}

/// Subspaces staged before they are packed.
const STAGED: usize = 8;

/// Encodes up to 64 rows as vectors `first` and on. The tile holds several subspaces, so that small subspaces
/// of a row are read together.
fn encode_tile<E: Element>(
    backend: Backend,
    codebook: &Codebook<'_>,
    rows: Rows<'_, E>,
    first: usize,
    codes: &mut CodesMut<'_>,
) -> f64 {
    let (m, dsub) = (codebook.shape().m(), codebook.shape().dsub());
    let mut tile = [0.0; MAX_TILE_DSUB * BLOCK];
    let points = rows.rows();
    let mut error = 0.0;
    let together = MAX_TILE_DSUB / dsub;
    for j in (0..m).step_by(together) {
        let count = together.min(m - j);
        let tile = &mut tile[..count * dsub * BLOCK];
        let squares = fill_tile(backend, Vectors { rows, chosen: None }, 0..points, j * dsub, tile);
        error += backend.run(EncodeSubspaces { codebook, from: j, tile, squares, points, first, codes });
    }
    error.max(0.0)
}

/// Encodes consecutive subspaces of up to 64 points, from vector `first` on. Returns the summed squared
/// error.
///
/// A call per subspace, with its arguments in memory, took a third of the time of 16 rows at (64, 4).
struct EncodeSubspaces<'a, 'c> {
    codebook: &'a Codebook<'a>,
    from: usize,     // the first subspace
    tile: &'a [f32], // (subspaces, dsub, 64)
    squares: f64,    // the sum of all squares
    points: usize,
    first: usize,
    codes: &'a mut CodesMut<'c>,
}

impl Kernel for EncodeSubspaces<'_, '_> {
    type Output = f64;

    fn scalar(self) -> f64 {
        self.run(Backend::Scalar)
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) -> f64 {
        if self.points <= SMALL
            && finds_small::<S>(self.codebook.shape().dsub(), self.codebook.shape().ksub())
            && fits_f32(self.codebook.subspace(self.from), self.squares)
            && let Some(place) = self.codes.place(self.first, self.points)
        {
            return self.run_small(s, &place);
        }
        self.run(s) // called once: it contains all of `assign`
    }
}

/// Vectors of a small tile.
const SMALL: usize = 16;

/// The indices and distances of the nearest centroids of a small tile's points, in several subspaces.
struct SmallNearest {
    index: [[u32; SMALL]; STAGED],
    distance: [[f32; SMALL]; STAGED],
}

/// Whether [`EncodeSubspaces::run_small`] is faster on small tiles.
#[inline(always)]
const fn finds_small<S: Simd>(dsub: usize, ksub: usize) -> bool {
    match S::LANES {
        16 => ksub >= 64 || (dsub == 2 && ksub == 16),
        8 => ksub >= 4,
        _ => false,
    }
}

impl SmallNearest {
    /// Finds the nearest centroids of up to `STAGED` tiles, each with its subspace: `R` registers of points;
    /// the other parameters are those of [`nearest_of_registers`].
    #[inline(always)]
    fn find<'a, S: Simd, const R: usize, const CHAINS: usize, const C: usize, const D: usize>(
        &mut self,
        s: S,
        tiles: impl Iterator<Item = (&'a [f32], Subspace<'a>)>,
    ) {
        assert!(R * S::LANES == SMALL);
        let out = self.index.iter_mut().zip(&mut self.distance);
        for ((values, subspace), (indices, distances)) in tiles.zip(out) {
            let start = [(s.splat(f32::INFINITY), s.splat_u32(0)); R];
            let best = nearest_of_registers::<S, R, CHAINS, C, D, false>(s, subspace, values, 0, start);
            for (v, (distance, index)) in best.into_iter().enumerate() {
                // SAFETY: R registers have as many lanes as both arrays.
                unsafe {
                    s.store(distances.as_mut_ptr().add(v * S::LANES), distance);
                    s.store_u32(indices.as_mut_ptr().add(v * S::LANES), index);
                }
            }
        }
    }
}

impl EncodeSubspaces<'_, '_> {
    /// The vector form for up to [`SMALL`] points if no distance overflows.
    #[inline(always)]
    fn run_small<S: Simd>(self, s: S, place: &Place) -> f64 {
        let mut staged = [[0; 2 * BLOCK]; STAGED];
        let mut nearest = SmallNearest { index: [[0; SMALL]; STAGED], distance: [[0.0; SMALL]; STAGED] };
        let mut sum = Sum::default();
        let (dsub, ksub) = (self.codebook.shape().dsub(), self.codebook.shape().ksub());
        let len = dsub * BLOCK;
        for (j, tile) in (self.from..).step_by(STAGED).zip(self.tile.chunks(STAGED * len)) {
            let subspaces = tile.chunks_exact(len).zip(self.codebook.subspaces_from(j));
            if const { S::LANES == 16 } {
                match (dsub, ksub) {
                    (2, 16) => nearest.find::<S, 1, 1, 4, 2>(s, subspaces),
                    (2, _) => nearest.find::<S, 1, CHAINS, 4, 2>(s, subspaces),
                    (4, _) => nearest.find::<S, 1, CHAINS, 4, 4>(s, subspaces),
                    (8, _) => nearest.find::<S, 1, CHAINS, 4, 8>(s, subspaces),
                    _ => nearest.find::<S, 1, CHAINS, 4, 0>(s, subspaces),
                }
            } else if const { S::LANES == 8 } {
                match dsub {
                    2 => nearest.find::<S, 2, 1, 2, 2>(s, subspaces),
                    _ => nearest.find::<S, 2, 1, 2, 0>(s, subspaces),
                }
            }
            let count = tile.len() / len;
            let found = nearest.distance.iter().zip(&nearest.index);
            for ((distances, indices), staged) in found.zip(&mut staged).take(count) {
                sum.add(&distances[..self.points], |distance| distance);
                place.stage(indices, staged);
            }
            for (j, staged) in (j..).zip(&staged).take(count) {
                self.codes.set_staged(place, j, staged);
            }
        }
        self.squares + 2.0 * sum.total()
    }

    #[inline(always)]
    fn run(self, on: impl Run + Copy) -> f64 {
        let Self { codebook, from, tile, squares, points, first, codes } = self;
        let mut nearest = Nearest::NONE;
        // The sum of squares over all subspaces proves for nearly all tiles that no distance overflows.
        let all_fit = fits_f32(codebook.subspace(from), squares);
        let mut error = if all_fit { squares } else { 0.0 };
        let mut distances = Sum::default();
        let place = codes.place(first, points);
        let mut staged = [[0; 2 * BLOCK]; STAGED];
        let len = codebook.shape().dsub() * BLOCK;
        for (j, tile) in (from..).step_by(STAGED).zip(tile.chunks(STAGED * len)) {
            for ((j, values), staged) in (j..).zip(tile.chunks_exact(len)).zip(&mut staged) {
                let (subspace, mut tile) = (codebook.subspace(j), Tile { values, points, squares });
                assign_fitting(on, subspace, tile, &mut nearest);
                if all_fit {
                    distances.add(&nearest.distance[..points], |distance| distance);
                } else {
                    tile.squares = squares_of(values, points);
                    error += summed_error(subspace, tile, &mut nearest);
                }
                match &place {
                    Some(place) => place.stage(&nearest.index, staged),
                    None => codes.set(on, first, j, &nearest.index[..points]),
                }
            }
            if let Some(place) = &place {
                for (j, staged) in (j..).zip(&staged).take(tile.len() / len) {
                    codes.set_staged(place, j, staged);
                }
            }
        }
        error + 2.0 * distances.total()
    }
}

/// Encodes rows as vectors `first` and on, a row at a time.
fn encode_one_by_one<E: Element>(
    backend: Backend,
    codebook: &Codebook<'_>,
    rows: Rows<'_, E>,
    first: usize,
    codes: &mut CodesMut<'_>,
) -> f64 {
    (first..)
        .zip(rows.iter())
        .map(|(at, row)| {
            let mut vector = codes.vector(at);
            assign_one(backend, codebook, row, &mut |j, codes| vector.set(j, codes))
        })
        .sum()
}

/// Decodes vectors from `first` on: replaces each code by its centroid.
///
/// # Shapes
/// `codes` (n, m) packed; `vectors` (count, dim) with `first + count <= n`, fully written, rounded to
/// nearest.
/// # Errors
/// [`Error::ShapeMismatch`], [`Error::PartialRow`] for `vectors`, or [`Error::TooShort`] for `codes`;
/// `vectors` is then untouched.
/// # Cost
/// One lookup and one write per component, no allocation.
/// # Examples
/// ```
/// use pq_core::{CodebookBuf, CodesBuf, PqShape, decode_into};
/// let shape = PqShape::new(2, 2, 1)?; // the centroids of each component are 0 and 1
/// let codebook = CodebookBuf::new(shape, &[0.0, 1.0, 0.0, 1.0])?;
/// let mut codes = CodesBuf::new(shape);
/// codes.append(&codebook.view(), &[0.1_f32, 0.9, 0.8, 0.2, 0.7, 0.6])?;
/// let mut last_two = [0.0_f32; 4];
/// decode_into(&codebook.view(), &codes.view(), 1, &mut last_two)?;
/// assert_eq!(last_two, [1.0, 0.0, 1.0, 1.0]);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn decode_into<E: Element>(
    codebook: &Codebook<'_>,
    codes: &Codes<'_>,
    first: usize,
    vectors: &mut [E],
) -> Result<(), Error> {
    let shape = codebook.shape();
    if codes.shape() != shape {
        return Err(Error::ShapeMismatch);
    }
    let count = count_rows("vectors", vectors.len(), shape.dim())?;
    check_at_least("codes", codes.n(), first.saturating_add(count))?;
    let block = codes.block_vectors();
    let mut at = first;
    let mut rest = vectors;
    while !rest.is_empty() {
        let here = (block - at % block).min(rest.len() / shape.dim());
        let (rows, later) = rest.split_at_mut(here * shape.dim());
        for (j, run) in codes.block(at / block).chunks_exact(codes.run_len()).enumerate() {
            let subspace = codebook.subspace(j);
            let codes = unpack_run(run, shape.nbits(), block);
            for (row, &c) in rows.chunks_exact_mut(shape.dim()).zip(&codes[at % block..]) {
                for (d, x) in row[j * shape.dsub()..][..shape.dsub()].iter_mut().enumerate() {
                    *x = E::from_f32(subspace.column(d)[usize::from(c)]);
                }
            }
        }
        at += here;
        rest = later;
    }
    Ok(())
}
