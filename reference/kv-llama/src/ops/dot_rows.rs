//! The inner products of one vector with the rows of a matrix, which read each element once.

use kv_attend::Backend;
use kv_attend::simd::{Kernel, Run, Simd, dot};

/// `out[i] = rows[i] . x`: `rows` (out.len(), x.len()).
///
/// The order of additions depends on the length of a row and the CPU, not on the number of rows. Rows are
/// read one after the other: four at a time take 1.5 to 2 times as long where they come from memory, since
/// the CPU prefetches along one stream.
///
/// # Panics
/// When the lengths are inconsistent.
pub(crate) fn dot_rows(rows: &[f32], x: &[f32], out: &mut [f32]) {
    assert_eq!(rows.len(), out.len() * x.len());
    Backend::detect().run(DotRows { rows, x, out });
}

/// [`dot_rows`]; the lengths are consistent.
struct DotRows<'a> {
    rows: &'a [f32],
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for DotRows<'_> {
    type Output = ();

    fn scalar(self) {
        for (out, row) in self.out.iter_mut().zip(self.rows.chunks_exact(self.x.len())) {
            *out = dot(self.x, row);
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let (x, tail) = self.x.split_at(self.x.len() - self.x.len() % (4 * S::LANES));
        for (out, row) in self.out.iter_mut().zip(self.rows.chunks_exact(self.x.len())) {
            let (row, row_tail) = row.split_at(x.len());
            let mut sums = [s.splat(0.0); 4];
            for first in (0..x.len()).step_by(4 * S::LANES) {
                for (i, sum) in sums.iter_mut().enumerate() {
                    let at = first + i * S::LANES;
                    // SAFETY: the row has as many numbers as `x`, of which four registers begin at `first`.
                    *sum =
                        unsafe { s.mul_add(s.load(row.as_ptr().add(at)), s.load(x.as_ptr().add(at)), *sum) };
                }
            }
            let [a, b, c, d] = s.sum4(sums);
            *out = (a + b) + (c + d) + dot(tail, row_tail);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_backends_agree_with_the_formula() {
        for len in [1, 15, 16, 31, 32, 33, 64, 100, 896] {
            for n in [0, 1, 3, 4, 5, 9] {
                let value = |i: usize| ((i * 7919) % 1000) as f32 / 500.0 - 1.0;
                let rows: Vec<f32> = (0..n * len).map(value).collect();
                let x: Vec<f32> = (0..len).map(|i| value(i + 13)).collect();
                for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                    let mut out = vec![f32::NAN; n];
                    backend.run(DotRows { rows: &rows, x: &x, out: &mut out });
                    for (out, row) in out.iter().zip(rows.chunks(len)) {
                        let terms = || row.iter().zip(&x).map(|(a, b)| f64::from(*a) * f64::from(*b));
                        let (exact, bound) =
                            (terms().sum::<f64>(), 1e-6 * terms().map(f64::abs).sum::<f64>());
                        assert!((f64::from(*out) - exact).abs() <= bound, "{backend:?}, {n} rows of {len}");
                    }
                }
            }
        }
    }
}
