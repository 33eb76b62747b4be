use crate::error::check_len;
use crate::{Codebook, Error, PqShape};

/// A query's table of partial scores, borrowed: (m, ksub).
#[derive(Clone, Copy, Debug)]
pub struct Lut<'a> {
    shape: PqShape,
    values: &'a [f32],
}

impl<'a> Lut<'a> {
    /// Wraps a table written by [`lut_into`].
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn new(shape: PqShape, values: &'a [f32]) -> Result<Self, Error> {
        check_len("lut", values.len(), shape.lut_len())?;
        Ok(Self { shape, values })
    }

    /// The shape it was made for.
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
}

/// Fills the table of inner products of one query with every centroid.
///
/// `lut[j, c] = <query_j, centroid[j, c]>`, added in `f32` in ascending component order.
///
/// # Shapes
/// `query` (dim,); `lut` (m, ksub), fully written.
/// # Errors
/// [`Error::Length`]; `lut` is then untouched.
/// # Cost
/// ksub * dim multiply-adds, no allocation.
/// # Source
/// PQCache (arXiv 2407.12820), 3.4; MILLION (DAC 2025), III-B.
pub fn lut_into(codebook: &Codebook<'_>, query: &[f32], lut: &mut [f32]) -> Result<(), Error> {
    let shape = codebook.shape();
    check_len("query", query.len(), shape.dim())?;
    check_len("lut", lut.len(), shape.lut_len())?;
    for (j, (q, row)) in query.chunks_exact(shape.dsub()).zip(lut.chunks_exact_mut(shape.ksub())).enumerate()
    {
        for (centroid, score) in codebook.subspace(j).chunks_exact(shape.dsub()).zip(row) {
            *score = q.iter().zip(centroid).map(|(&q, &y)| q * y).sum();
        }
    }
    Ok(())
}
