//! Products of rows with the matrices of a head's transform.

use crate::Backend;
use crate::simd::{Kernel, Run, Simd};

/// Multiplies rows (n, dim) by a matrix (dim, dim): `out[r, c] = sum_d rows[r, d] matrix[d, c]`, in ascending
/// d. The lengths fit, and dim is a multiple of 16.
pub(super) fn project(backend: Backend, rows: &[f32], matrix: &[f32], dim: usize, out: &mut [f32]) {
    backend.run(Project { rows, matrix, dim, out });
}

struct Project<'a, 'b> {
    rows: &'a [f32],
    matrix: &'a [f32],
    dim: usize,
    out: &'b mut [f32],
}

impl Kernel for Project<'_, '_> {
    type Output = ();

    fn scalar(self) {
        let Self { rows, matrix, dim, out } = self;
        for (row, out) in rows.chunks_exact(dim).zip(out.chunks_exact_mut(dim)) {
            out.fill(0.0);
            for (x, matrix) in row.iter().zip(matrix.chunks_exact(dim)) {
                out.iter_mut().zip(matrix).for_each(|(out, m)| *out += x * m);
            }
        }
    }

    /// Four rows share the loads of the matrix, whose 64 KiB at 128 components exceed the first-level cache.
    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let Self { rows, matrix, dim, out } = self;
        let four = rows.len() / (4 * dim) * 4 * dim;
        let (rows, rest) = rows.split_at(four);
        let (out, rest_out) = out.split_at_mut(four);
        for (rows, out) in rows.chunks_exact(4 * dim).zip(out.chunks_exact_mut(4 * dim)) {
            multiply::<S, 4>(s, rows, matrix, dim, out);
        }
        for (row, out) in rest.chunks_exact(dim).zip(rest_out.chunks_exact_mut(dim)) {
            multiply::<S, 1>(s, row, matrix, dim, out);
        }
    }
}

#[inline(always)]
fn multiply<S: Simd, const R: usize>(s: S, rows: &[f32], matrix: &[f32], dim: usize, out: &mut [f32]) {
    assert!(rows.len() == R * dim && out.len() == R * dim && matrix.len() == dim * dim);
    for c in (0..dim).step_by(S::LANES) {
        let mut sums = [s.splat(0.0); R];
        for (d, matrix) in matrix.chunks_exact(dim).enumerate() {
            // SAFETY: dim is a multiple of LANES, so LANES elements follow c.
            let m = unsafe { s.load(matrix[c..][..S::LANES].as_ptr()) };
            for (r, sum) in sums.iter_mut().enumerate() {
                *sum = s.mul_add(s.splat(rows[r * dim + d]), m, *sum);
            }
        }
        for (r, &sum) in sums.iter().enumerate() {
            // SAFETY: as above.
            unsafe { s.store(out[r * dim + c..][..S::LANES].as_mut_ptr(), sum) };
        }
    }
}
