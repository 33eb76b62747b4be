//! Symmetric eigenproblems in `f64`, solved by nalgebra.

use alloc::vec::Vec;

use nalgebra::{DMatrix, SymmetricEigen};

use crate::Error;

/// Eigenvalues in descending order with their eigenvectors as columns. Signs are fixed (the largest component
/// of each vector is positive), so that the same matrix gives the same basis everywhere.
pub(crate) fn symmetric(mut matrix: DMatrix<f64>) -> Result<(Vec<f64>, DMatrix<f64>), Error> {
    if matrix.iter().any(|x| !x.is_finite()) {
        return Err(Error::NotFinite { what: "matrix" });
    }
    let dim = matrix.nrows();
    // Elements far below the rounding of the largest one, whose products would underflow.
    let least = libm::ldexp(matrix.amax(), -200);
    matrix.iter_mut().filter(|x| x.abs() < least).for_each(|x| *x = 0.0);
    let eigen = SymmetricEigen::try_new(matrix, f64::EPSILON, 10_000).ok_or(Error::NoConvergence)?;
    if !eigen.eigenvalues.iter().chain(eigen.eigenvectors.iter()).all(|x| x.is_finite()) {
        return Err(Error::NoConvergence);
    }
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

/// Positive eigenvalues, and eigenvectors, of `matrix / 16^exponent`.
pub(crate) struct Spectrum {
    pub values: Vec<f64>, // descending, the largest about 1, none below the floor
    pub vectors: DMatrix<f64>,
    pub exponent: i32,
}

/// The spectrum of a symmetric positive semidefinite matrix. Eigenvalues below `floor` times the largest are
/// raised to that floor, so that directions without calibration data cause no division by zero. `None` if no
/// eigenvalue is positive, as for rows that are all zero.
///
/// Scaling by a power of 16 is exact, and the square and fourth roots of that power are powers of two as
/// well.
pub(crate) fn spectrum(matrix: DMatrix<f64>, floor: f64) -> Result<Option<Spectrum>, Error> {
    let (mut values, vectors) = symmetric(matrix)?;
    let exponent = libm::frexp(values[0]).1.div_euclid(4);
    values.iter_mut().for_each(|value| *value = libm::ldexp(*value, -4 * exponent));
    let largest = values[0];
    values.iter_mut().for_each(|value| *value = value.max(largest * floor));
    Ok((largest > 0.0).then_some(Spectrum { values, vectors, exponent }))
}
