use crate::error::check_len;
use crate::{Codes, Error, Lut};

/// Scores every code against a query's look-up table (asymmetric distance computation).
///
/// `scores[i] = sum over j of lut[j, codes[i, j]]`, added in `f32` in ascending `j`.
///
/// # Shapes
/// `lut` (m, ksub); `codes` (n, m) packed; `scores` (n,), fully written.
/// # Errors
/// [`Error::ShapeMismatch`] or [`Error::Length`]; `scores` is then untouched.
/// # Cost
/// n * m additions, one pass over `codes`, no allocation.
/// # Source
/// Jégou, Douze, Schmid, "Product Quantization for Nearest Neighbor Search", TPAMI 2011.
/// # Examples
/// ```
/// use pq_core::{Codebook, Codes, Lut, PqShape, encode_into, lut_into, scan_into};
/// let shape = PqShape::new(2, 1, 1)?; // one subspace, two centroids
/// let codebook = Codebook::new(shape, &[1.0, 0.0, 0.0, 1.0])?;
/// let mut bytes = [0; 2];
/// encode_into(&codebook, &[0.9, 0.1, 0.2, 0.8], &mut bytes)?;
/// let mut table = [0.0; 2];
/// lut_into(&codebook, &[3.0, 5.0], &mut table)?;
/// let mut scores = [0.0; 2];
/// scan_into(&Lut::new(shape, &table)?, &Codes::new(shape, &bytes)?, &mut scores)?;
/// assert_eq!(scores, [3.0, 5.0]);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn scan_into(lut: &Lut<'_>, codes: &Codes<'_>, scores: &mut [f32]) -> Result<(), Error> {
    if lut.shape() != codes.shape() {
        return Err(Error::ShapeMismatch);
    }
    check_len("scores", scores.len(), codes.n())?;
    for (i, score) in scores.iter_mut().enumerate() {
        *score = codes.iter_vector(i).enumerate().map(|(j, c)| lut.row(j)[c]).sum();
    }
    Ok(())
}
