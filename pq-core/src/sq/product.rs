//! Products of rows with a matrix.

use crate::simd::{Kernel, Simd};

/// `out[r, c] = sum_d rows[r, d] matrix[d, c]`, added in ascending d.
///
/// `rows` (n, depth), `matrix` (depth, stride), `out` (n, stride), of which the first columns are written.
pub(super) struct Product<'a, 'b> {
    pub rows: &'a [f32],
    pub matrix: &'a [f32],
    pub columns: usize,
    pub out: &'b mut [f32],
    pub stride: usize,
}

/// Rows that share the loads of the matrix.
pub(super) const ROWS: usize = 4;

impl Kernel for Product<'_, '_> {
    type Output = ();

    fn scalar(self) {
        let Self { rows, matrix, columns, out, stride } = self;
        for (row, out) in rows.chunks_exact(matrix.len() / stride).zip(out.chunks_exact_mut(stride)) {
            let out = &mut out[..columns];
            out.fill(0.0);
            for (x, matrix) in row.iter().zip(matrix.chunks_exact(stride)) {
                out.iter_mut().zip(matrix).for_each(|(out, m)| *out += x * m);
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(mut self, s: S) {
        if self.columns < S::LANES {
            return self.scalar();
        }
        let mut c = 0;
        while c < self.columns {
            // With four rows and four registers of columns no multiply-add waits for another, nor with two where
            // there are 16 registers.
            c += match (self.columns - c) / S::LANES {
                4.. if S::WIDE => self.column_tile::<S, 4>(s, c),
                2.. => self.column_tile::<S, 2>(s, c),
                // The last register may contain columns that are done.
                _ => self.column_tile::<S, 1>(s, c.min(self.columns - S::LANES)),
            };
        }
    }
}

impl Product<'_, '_> {
    /// `V` registers of columns of all rows, which are returned: this part of the matrix stays in the first-level
    /// cache.
    #[inline(always)]
    fn column_tile<S: Simd, const V: usize>(&mut self, s: S, c: usize) -> usize {
        let (stride, depth) = (self.stride, self.matrix.len() / self.stride);
        for (rows, out) in self.rows.chunks(ROWS * depth).zip(self.out.chunks_mut(ROWS * stride)) {
            match rows.len() / depth {
                ROWS => tile::<S, ROWS, V>(s, rows, self.matrix, c, out),
                _ => {
                    for (row, out) in rows.chunks_exact(depth).zip(out.chunks_exact_mut(stride)) {
                        tile::<S, 1, V>(s, row, self.matrix, c, out);
                    }
                }
            }
        }
        V * S::LANES
    }
}

/// The columns from `c` on, `V` registers of them, of `R` rows.
#[inline(always)]
fn tile<S: Simd, const R: usize, const V: usize>(
    s: S,
    rows: &[f32],
    matrix: &[f32],
    c: usize,
    out: &mut [f32],
) {
    let (depth, stride) = (rows.len() / R, out.len() / R);
    assert!(c + V * S::LANES <= stride && matrix.len() == depth * stride);
    let mut sums = [[s.splat(0.0); V]; R];
    for d in 0..depth {
        for v in 0..V {
            // SAFETY: V registers of columns follow c, in each of the `depth` rows of the matrix.
            let m = unsafe { s.load(matrix.as_ptr().add(d * stride + c + v * S::LANES)) };
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: there are R rows of `depth` elements.
                let x = unsafe { *rows.as_ptr().add(r * depth + d) };
                sums[v] = s.mul_add(s.splat(x), m, sums[v]);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (v, &sum) in sums.iter().enumerate() {
            // SAFETY: V registers of columns follow c, in each of R rows of `stride` elements.
            unsafe { s.store(out.as_mut_ptr().add(r * stride + c + v * S::LANES), sum) };
        }
    }
}
