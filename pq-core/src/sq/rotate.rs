use crate::Error;
use crate::error::count_rows;

/// Rotates rows by RoPE to positions `first`, `first + 1`, ..., which may be negative: keys before RoPE
/// relative to the middle of their block (`first = -(block / 2)`), or, with a single row, a rotated query by
/// minus the position of the block's middle.
///
/// Pairs are those of Llama: component `i` with `i + dim / 2`, by `position * frequencies[i]` radians.
///
/// # Shapes
/// `frequencies` (dim / 2,); `rows` (n, dim), in place.
/// # Errors
/// [`Error::Zero`] without frequencies; [`Error::PartialRow`]; `rows` is then untouched.
/// # Cost
/// n * dim / 2 sines and cosines in `f64`; no allocation.
/// # Source
/// Su et al., RoFormer (arXiv 2104.09864), 3.2.
/// # Examples
/// ```
/// let (frequencies, mut rows) = ([0.5], [1.0, 0.0, 1.0, 0.0]);
/// pq_core::sq::rotate_from(&frequencies, -1, &mut rows)?;
/// assert!((rows[1] + 0.5_f32.sin()).abs() < 1e-6 && rows[2..] == [1.0, 0.0]);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn rotate_from(frequencies: &[f32], first: i64, rows: &mut [f32]) -> Result<(), Error> {
    if frequencies.is_empty() {
        return Err(Error::Zero { what: "frequencies" });
    }
    let half = frequencies.len();
    count_rows("rows", rows.len(), 2 * half)?;
    for (i, row) in rows.chunks_exact_mut(2 * half).enumerate() {
        let position = first as f64 + i as f64;
        let (x, y) = row.split_at_mut(half);
        for ((x, y), &frequency) in x.iter_mut().zip(y).zip(frequencies) {
            let (sin, cos) = libm::sincos(position * f64::from(frequency));
            let (a, b) = (f64::from(*x), f64::from(*y));
            (*x, *y) = ((cos * a - sin * b) as f32, (sin * a + cos * b) as f32);
        }
    }
    Ok(())
}
