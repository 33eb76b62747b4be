//! Symmetric eigenproblems and small dense algebra, in `f64` by nalgebra.

use alloc::vec::Vec;

use nalgebra::{DMatrix, SymmetricEigen};

use crate::Error;

/// Eigenvalues in descending order with their eigenvectors as columns. Signs are fixed (the largest component of each
/// vector is positive), so that the same matrix gives the same basis everywhere.
pub(crate) fn symmetric(matrix: DMatrix<f64>) -> Result<(Vec<f64>, DMatrix<f64>), Error> {
    if matrix.iter().any(|x| !x.is_finite()) {
        return Err(Error::NotFinite { what: "matrix" });
    }
    let dim = matrix.nrows();
    let eigen = SymmetricEigen::try_new(matrix, f64::EPSILON, 10_000).ok_or(Error::NoConvergence)?;
    let mut order: Vec<usize> = (0..dim).collect();
    order.sort_by(|&a, &b| eigen.eigenvalues[b].total_cmp(&eigen.eigenvalues[a]));
    let values = order.iter().map(|&i| eigen.eigenvalues[i]).collect();
    let mut vectors = DMatrix::zeros(dim, dim);
    for (mut vector, &i) in vectors.column_iter_mut().zip(&order) {
        let column = eigen.eigenvectors.column(i);
        let sign = if column[column.iamax()] < 0.0 { -1.0 } else { 1.0 };
        vector.axpy(sign, &column, 0.0);
    }
    Ok((values, vectors))
}

/// `V L^(1/2)` of a symmetric positive semidefinite matrix, with eigenvalues below `floor` times the largest raised to
/// that: what was never seen in calibration keeps a well-conditioned direction instead of a division by zero.
pub(crate) fn factor(matrix: DMatrix<f64>, floor: f64) -> Result<DMatrix<f64>, Error> {
    let (values, mut vectors) = symmetric(matrix)?;
    let least = (values.first().copied().unwrap_or(0.0) * floor).max(f64::MIN_POSITIVE);
    for (c, value) in values.iter().enumerate() {
        vectors.column_mut(c).scale_mut(libm::sqrt(value.max(least)));
    }
    Ok(vectors)
}
