//! Norms of vectors in a byte each, so that vectors of every length share the centroids.

use crate::Error;
use crate::assign::finite;
use crate::error::{check_len, count_rows};

/// Steps per octave of a coded norm.
const STEPS: f32 = 16.0;
/// The code of a norm of 1.
const ONE: f32 = 128.0;

/// Encodes a vector's norm in a byte: sixteen steps per octave from 2^-8 to 2^8, so the error is at most 2.2
/// %. Norms outside this range get the nearest code, 0 or 255; NaN gets 0.
///
/// # Examples
/// ```
/// use pq_core::{decode_norm, encode_norm};
/// assert_eq!(decode_norm(encode_norm(4.0)), 4.0);
/// assert!((decode_norm(encode_norm(7.3)) / 7.3 - 1.0).abs() < 0.022);
/// ```
#[must_use]
pub fn encode_norm(norm: f32) -> u8 {
    // The cast saturates, and maps NaN to 0.
    (libm::log2f(norm) * STEPS + ONE + 0.5) as u8
}

/// The norm that a code represents.
#[must_use]
pub fn decode_norm(code: u8) -> f32 {
    libm::exp2f((f32::from(code) - ONE) / STEPS)
}

/// The unit of the norms of rows: the largest power of two that is not above the root mean square of their
/// norms, from 2^-126 to 2^126; 1 if all rows are 0. Norms of rows that are divided by it, which is exact,
/// have codes of [`encode_norm`] from 2^-8 to 2^8 of it. A NaN or infinite component counts as 0.
///
/// # Shapes
/// `rows` (n, dim).
/// # Errors
/// [`Error::Zero`], [`Error::PartialRow`].
/// # Examples
/// ```
/// assert_eq!(pq_core::norm_scale(&[3000.0, 4000.0, -4000.0, 3000.0], 2)?, 4096.0);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn norm_scale(rows: &[f32], dim: usize) -> Result<f32, Error> {
    let n = count_rows("rows", rows.len(), dim)?;
    let squares: f64 = rows.iter().map(|&x| f64::from(finite(x))).map(|x| x * x).sum();
    if squares == 0.0 {
        return Ok(1.0);
    }
    let exponent = libm::floor(libm::log2(libm::sqrt(squares / n as f64)));
    Ok(libm::exp2(exponent.clamp(-126.0, 126.0)) as f32)
}

/// Whether [`norm_scale`] can return this number: a power of two from 2^-126 to 2^126, so that it and its
/// reciprocal multiply without rounding. A scale from a file may be anything.
///
/// # Examples
/// ```
/// use pq_core::is_norm_scale;
/// assert!(is_norm_scale(0.25) && !is_norm_scale(3.0) && !is_norm_scale(f32::NAN));
/// ```
#[must_use]
pub fn is_norm_scale(scale: f32) -> bool {
    const FRACTION: u32 = (1 << 23) - 1;
    scale > 0.0 && scale.is_normal() && scale.recip().is_normal() && scale.to_bits() & FRACTION == 0
}

/// Divides every row by its coded norm, so that tokens of every norm share the centroids. The norm takes 8
/// bits per vector.
///
/// # Shapes
/// `rows` (n, dim); `norms` (n,), fully written.
/// # Errors
/// [`Error::Length`], [`Error::Zero`]; `rows` is then untouched.
/// # Source
/// The gain-shape quantizers of Gersho, Gray, "Vector Quantization and Signal Compression", 12.10.
/// # Examples
/// ```
/// let mut rows = [3.0, 4.0];
/// let mut norms = [0];
/// pq_core::divide_by_norms(&mut rows, 2, &mut norms)?;
/// let norm = pq_core::decode_norm(norms[0]);
/// assert!((norm - 5.0).abs() < 0.12 && (rows[0] * norm - 3.0).abs() < 1e-6);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn divide_by_norms(rows: &mut [f32], dim: usize, norms: &mut [u8]) -> Result<(), Error> {
    if dim == 0 {
        return Err(Error::Zero { what: "dim" });
    }
    check_len("rows", rows.len(), norms.len().saturating_mul(dim))?;
    for (row, norm) in rows.chunks_exact_mut(dim).zip(norms) {
        *norm = encode_norm(libm::sqrtf(row.iter().map(|x| x * x).sum()));
        let scale = 1.0 / decode_norm(*norm);
        row.iter_mut().for_each(|x| *x *= scale);
    }
    Ok(())
}
