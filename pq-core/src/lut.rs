//! Lookup tables: the inner products of a query's parts with all centroids.

mod quantized;

use kv_attend::{AnyRows, for_any_rows};

use crate::codebook::Subspace;
use crate::error::{check_len, count_rows};
use crate::simd::{Kernel, Run, Simd};
use crate::{Backend, Codebook, Element, Error, PqShape, Rows};

pub use quantized::{LutPrecision, QuantizedLut};

/// The lookup table of one query, borrowed: partial scores (m, ksub).
#[derive(Clone, Copy, Debug)]
pub struct Lut<'a> {
    shape: PqShape,
    values: &'a [f32],
}

impl<'a> Lut<'a> {
    /// Checks the length of a table (m, ksub), such as one that [`lut_into`] wrote.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn new(shape: PqShape, values: &'a [f32]) -> Result<Self, Error> {
        check_len("lut", values.len(), shape.lut_len())?;
        Ok(Self { shape, values })
    }

    /// The shape of the quantizer.
    #[must_use]
    pub const fn shape(&self) -> PqShape {
        self.shape
    }

    /// Partial scores of subspace `j`: (ksub,).
    ///
    /// # Panics
    /// When `j >= m`.
    #[must_use]
    pub fn row(&self, j: usize) -> &'a [f32] {
        &self.values[j * self.shape.ksub()..][..self.shape.ksub()]
    }

    pub(crate) fn rows(&self) -> core::slice::ChunksExact<'a, f32> {
        self.values.chunks_exact(self.shape.ksub())
    }
}

/// The lookup tables of a group of queries, borrowed: (group, m, ksub) of one shape.
///
/// # Examples
/// ```
/// use pq_core::{Luts, PqShape};
/// let shape = PqShape::new(2, 1, 1)?;
/// let luts = Luts::new(shape, &[1.0, 2.0, 3.0, 4.0])?;
/// assert_eq!((luts.group(), luts.lut(1).row(0)), (2, &[3.0, 4.0][..]));
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Luts<'a> {
    shape: PqShape,
    values: &'a [f32], // (group, m, ksub)
}

impl<'a> Luts<'a> {
    /// Checks the length of tables that were computed earlier or elsewhere; [`lut_into`] returns checked
    /// ones.
    ///
    /// # Errors
    /// [`Error::PartialRow`] when `values` does not consist of whole tables.
    pub fn new(shape: PqShape, values: &'a [f32]) -> Result<Self, Error> {
        count_rows("luts", values.len(), shape.lut_len())?;
        Ok(Self { shape, values })
    }

    /// The shape of the quantizer.
    #[must_use]
    pub const fn shape(&self) -> PqShape {
        self.shape
    }

    /// Number of queries.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.values.len() / self.shape.lut_len()
    }

    /// The table of query `g`.
    ///
    /// # Panics
    /// When `g >= group`.
    #[must_use]
    pub fn lut(&self, g: usize) -> Lut<'a> {
        let len = self.shape.lut_len();
        Lut { shape: self.shape, values: &self.values[g * len..][..len] }
    }
}

/// Computes the tables of inner products of queries with every centroid, and returns a view of them.
///
/// `lut[g, j, c] = <query[g]_j, centroid[j, c]>`, rounded products added in `f32` in ascending component
/// order: the same bits on every backend.
///
/// # Shapes
/// `queries` (group, dim), the query heads of a GQA group; `luts` (group, m, ksub), fully written.
/// # Errors
/// [`Error::PartialRow`] for `queries`, [`Error::Zero`] for no query, [`Error::Length`] for `luts`, which is
/// then untouched.
/// # Cost
/// group * ksub * dim multiply-adds, no allocation.
/// # Source
/// PQCache (arXiv 2407.12820), 3.4; MILLION (DAC 2025), III-B.
/// # Examples
/// ```
/// use pq_core::{CodebookBuf, PqShape, lut_into};
/// let shape = PqShape::new(2, 2, 1)?; // two subspaces of one component
/// let codebook = CodebookBuf::new(shape, &[0.0, 1.0, -1.0, 2.0])?;
/// let mut tables = vec![0.0; 2 * shape.lut_len()];
/// let luts = lut_into(&codebook.view(), &[3.0_f32, 10.0, 1.0, 1.0], &mut tables)?; // two query heads
/// assert_eq!(luts.lut(0).row(1), [-10.0, 20.0]);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn lut_into<'a, E: Element>(
    codebook: &Codebook<'_>,
    queries: &[E],
    luts: &'a mut [f32],
) -> Result<Luts<'a>, Error> {
    lut_into_with(Backend::detect(), codebook, queries, luts)
}

/// [`lut_into`] on a given backend.
///
/// # Errors
/// As [`lut_into`], and [`Error::BackendUnavailable`].
pub fn lut_into_with<'a, E: Element>(
    backend: Backend,
    codebook: &Codebook<'_>,
    queries: &[E],
    luts: &'a mut [f32],
) -> Result<Luts<'a>, Error> {
    backend.check()?;
    let shape = codebook.shape();
    let group = count_rows("queries", queries.len(), shape.dim())?;
    if group == 0 {
        return Err(Error::Zero { what: "number of queries" });
    }
    check_len("luts", luts.len(), group.saturating_mul(shape.lut_len()))?;
    fill_luts(backend, codebook, Rows::from(queries).into(), luts);
    Ok(Luts { shape, values: luts })
}

/// Fills the tables of the queries, a single row.
fn fill_luts(backend: Backend, codebook: &Codebook<'_>, queries: AnyRows<'_>, luts: &mut [f32]) {
    for_any_rows!(queries, queries => backend.run(FillLuts { codebook, queries: queries.row(0), luts }));
}

struct FillLuts<'a, E> {
    codebook: &'a Codebook<'a>,
    queries: &'a [E],
    luts: &'a mut [f32],
}

impl<'a, E: Element> FillLuts<'a, E> {
    /// Pairs every subvector of every query with its subspace and its row of the tables.
    fn rows(self) -> impl Iterator<Item = (&'a [E], Subspace<'a>, &'a mut [f32])> {
        let shape = self.codebook.shape();
        let subspaces = self.queries.chunks_exact(shape.dsub()).zip(self.luts.chunks_exact_mut(shape.ksub()));
        let codebook = self.codebook;
        subspaces.enumerate().map(move |(i, (q, row))| (q, codebook.subspace(i % shape.m()), row))
    }
}

impl<E: Element> Kernel for FillLuts<'_, E> {
    type Output = ();

    fn scalar(self) {
        for (q, subspace, row) in self.rows() {
            for (d, &q) in q.iter().enumerate() {
                for (score, &y) in row.iter_mut().zip(subspace.column(d)) {
                    let product = q.to_f32() * y;
                    *score = if d == 0 { product } else { *score + product };
                }
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let ksub = self.codebook.shape().ksub();
        if ksub < S::LANES {
            return self.scalar();
        }
        for (q, subspace, row) in self.rows() {
            if ksub >= 4 * S::LANES {
                fill_row::<E, S, 4>(s, q, subspace, row);
            } else {
                fill_row::<E, S, 1>(s, q, subspace, row);
            }
        }
    }
}

/// Computes one row, `R` registers of centroids at a time, whose sums stay in registers over the components.
/// `R * LANES` divides ksub.
#[inline(always)]
fn fill_row<E: Element, S: Simd, const R: usize>(s: S, q: &[E], subspace: Subspace<'_>, row: &mut [f32]) {
    let columns = &subspace.columns[..q.len() * row.len()];
    for c in (0..row.len()).step_by(R * S::LANES) {
        let mut sums = [s.splat(0.0); R];
        for (d, &q) in q.iter().enumerate() {
            let q = s.splat(q.to_f32());
            for (v, sum) in sums.iter_mut().enumerate() {
                // SAFETY: c + R * LANES <= ksub, since both are powers of two; `columns` is (dsub, ksub).
                let product =
                    s.mul(q, unsafe { s.load(columns.as_ptr().add(d * row.len() + c + v * S::LANES)) });
                *sum = if d == 0 { product } else { s.add(*sum, product) };
            }
        }
        for (v, sum) in sums.into_iter().enumerate() {
            // SAFETY: as above.
            unsafe { s.store(row.as_mut_ptr().add(c + v * S::LANES), sum) };
        }
    }
}
