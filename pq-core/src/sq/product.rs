//! Products of rows with a matrix.

use crate::simd::{Kernel, Simd};

/// `out[r, c] = sum_d rows[r, d] matrix[d, c]`, added in ascending d.
///
/// `rows` (n, depth), `matrix` (depth, columns), `out` (n, columns), fully written.
pub(super) struct Product<'a, 'b> {
    pub rows: &'a [f32],
    pub matrix: &'a [f32],
    pub columns: usize,
    pub out: &'b mut [f32],
}

/// Rows that share the loads of the matrix.
pub(super) const ROWS: usize = 4;

impl Kernel for Product<'_, '_> {
    type Output = ();

    fn scalar(self) {
        let Self { rows, matrix, columns, out } = self;
        for (row, out) in rows.chunks_exact(matrix.len() / columns).zip(out.chunks_exact_mut(columns)) {
            out.fill(0.0);
            for (x, matrix) in row.iter().zip(matrix.chunks_exact(columns)) {
                out.iter_mut().zip(matrix).for_each(|(out, m)| *out += x * m);
            }
        }
    }

    #[inline(always)]
    fn vector<S: Simd>(self, s: S) {
        let Self { rows, matrix, columns, out } = self;
        if columns < S::LANES {
            return Self { rows, matrix, columns, out }.scalar();
        }
        // Four rows and four registers of columns: no multiply-add waits for another. Two where there are 16.
        let wide = if S::WIDE { 4 * S::LANES } else { 2 * S::LANES };
        let mut c = 0;
        while c < columns {
            if c + wide <= columns {
                match S::WIDE {
                    true => column_tile::<S, 4>(s, rows, matrix, columns, c, out),
                    false => column_tile::<S, 2>(s, rows, matrix, columns, c, out),
                }
                c += wide;
            } else {
                // The last register may contain columns that are done.
                column_tile::<S, 1>(s, rows, matrix, columns, c.min(columns - S::LANES), out);
                c += S::LANES;
            }
        }
    }
}

/// `V` registers of columns of all rows: this part of the matrix stays in the first-level cache.
#[inline(always)]
fn column_tile<S: Simd, const V: usize>(
    s: S,
    rows: &[f32],
    matrix: &[f32],
    columns: usize,
    c: usize,
    out: &mut [f32],
) {
    let depth = matrix.len() / columns;
    for (rows, out) in rows.chunks(ROWS * depth).zip(out.chunks_mut(ROWS * columns)) {
        match rows.len() / depth {
            ROWS => tile::<S, ROWS, V>(s, rows, matrix, columns, c, out),
            _ => {
                for (row, out) in rows.chunks_exact(depth).zip(out.chunks_exact_mut(columns)) {
                    tile::<S, 1, V>(s, row, matrix, columns, c, out);
                }
            }
        }
    }
}

/// The columns from `c` on, `V` registers of them.
#[inline(always)]
fn tile<S: Simd, const R: usize, const V: usize>(
    s: S,
    rows: &[f32],
    matrix: &[f32],
    columns: usize,
    c: usize,
    out: &mut [f32],
) {
    let depth = rows.len() / R;
    assert!(c + V * S::LANES <= columns && out.len() == R * columns && matrix.len() == depth * columns);
    let mut sums = [[s.splat(0.0); V]; R];
    for d in 0..depth {
        for v in 0..V {
            // SAFETY: V registers of columns follow c, in each of the `depth` rows of the matrix.
            let m = unsafe { s.load(matrix.as_ptr().add(d * columns + c + v * S::LANES)) };
            for (r, sums) in sums.iter_mut().enumerate() {
                // SAFETY: there are R rows of `depth` elements.
                let x = unsafe { *rows.as_ptr().add(r * depth + d) };
                sums[v] = s.mul_add(s.splat(x), m, sums[v]);
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        for (v, &sum) in sums.iter().enumerate() {
            // SAFETY: V registers of columns follow c, in each of R rows.
            unsafe { s.store(out.as_mut_ptr().add(r * columns + c + v * S::LANES), sum) };
        }
    }
}
