//! RoPE by a given number of positions.

use crate::Error;
use crate::error::count_rows;

/// Rotates rows by RoPE, all by the same number of positions, which may be negative: the keys of a block and
/// the queries that score them, both after RoPE, by minus the position of the middle of the block.
///
/// Pairs are those of Llama: component `i` with `i + dim / 2`, by `positions * frequencies[i]` radians.
///
/// # Shapes
/// `frequencies` (dim / 2,); `rows` (n, dim), in place.
/// # Errors
/// [`Error::Zero`] without frequencies; [`Error::PartialRow`]; `rows` is then untouched.
/// # Cost
/// dim / 2 sines and cosines in `f64`, and 2 * n * dim multiply-adds; no allocation.
/// # Source
/// Su et al., RoFormer (arXiv 2104.09864), 3.2.
/// # Examples
/// ```
/// let (frequencies, mut rows) = ([0.5], [1.0, 0.0]);
/// pq_core::sq::rotate_by(&frequencies, -1, &mut rows)?;
/// assert!((rows[0] - 0.5_f32.cos()).abs() < 1e-6 && (rows[1] + 0.5_f32.sin()).abs() < 1e-6);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn rotate_by(frequencies: &[f32], positions: i64, rows: &mut [f32]) -> Result<(), Error> {
    if frequencies.is_empty() {
        return Err(Error::Zero { what: "frequencies" });
    }
    let half = frequencies.len();
    count_rows("rows", rows.len(), 2 * half)?;
    for (i, &frequency) in frequencies.iter().enumerate() {
        let (sin, cos) = libm::sincos(positions as f64 * f64::from(frequency));
        let (sin, cos) = (sin as f32, cos as f32);
        for row in rows.chunks_exact_mut(2 * half) {
            let (x, y) = (row[i], row[i + half]);
            (row[i], row[i + half]) = (cos * x - sin * y, sin * x + cos * y);
        }
    }
    Ok(())
}
