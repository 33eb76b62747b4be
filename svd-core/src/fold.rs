//! Absorbing a rotation into the weights around the cache, so that a decode step pays nothing for it.

use alloc::vec;
use alloc::vec::Vec;

use crate::Error;
use crate::error::check_len;

/// `A^T W`: folds the stored map into the projection that makes the vectors.
///
/// # Shapes
/// `store` (dim, dim); `weight` (dim, columns), the rows of one head of `W_V`; a bias is a weight of one column.
/// # Errors
/// [`Error::Length`] or [`Error::Zero`].
/// # Cost
/// dim * dim * columns multiply-adds in `f64`.
/// # Source
/// ZACK, 5.1, V compression.
pub fn fold_input(store: &[f32], weight: &[f32], dim: usize) -> Result<Vec<f32>, Error> {
    let columns = checked_columns(store, weight, dim)?;
    let mut out = vec![0.0; weight.len()];
    for (c, out) in out.chunks_exact_mut(columns.max(1)).enumerate() {
        for (i, out) in out.iter_mut().enumerate() {
            *out = (0..dim)
                .map(|d| f64::from(store[d * dim + c]) * f64::from(weight[d * columns + i]))
                .sum::<f64>() as f32;
        }
    }
    Ok(out)
}

/// `W B`: folds the way back into the projection that reads the attention's output.
///
/// # Shapes
/// `probe` (dim, dim); `weight` (rows, dim), the columns of one query head of `W_O`.
/// # Errors
/// [`Error::Length`] or [`Error::Zero`].
/// # Cost
/// rows * dim * dim multiply-adds in `f64`.
/// # Source
/// ZACK, 5.1, V compression.
pub fn fold_output(probe: &[f32], weight: &[f32], dim: usize) -> Result<Vec<f32>, Error> {
    checked_columns(probe, weight, dim)?;
    let mut out = vec![0.0; weight.len()];
    for (row, out) in weight.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
        for (c, out) in out.iter_mut().enumerate() {
            *out = (0..dim).map(|d| f64::from(row[d]) * f64::from(probe[d * dim + c])).sum::<f64>() as f32;
        }
    }
    Ok(out)
}

fn checked_columns(map: &[f32], weight: &[f32], dim: usize) -> Result<usize, Error> {
    if dim == 0 {
        return Err(Error::Zero { what: "dim" });
    }
    check_len("map", map.len(), dim.checked_mul(dim).ok_or(Error::TooLarge)?)?;
    let columns = weight.len() / dim;
    check_len("weight", weight.len(), columns * dim)?;
    Ok(columns)
}
