//! Products with matrices of weights in either form.

use std::borrow::Cow;

use gemm_common::Parallelism;
use kv_model::Matrix;
use rayon::prelude::*;

use super::dot_rows::dot_rows;
use super::product;

/// Minimum multiply-adds that are worth a second thread.
const PARALLEL_FROM: usize = 1 << 17;

/// Numbers per share of the product of one vector. Shares of 2^16 made a decode step of the shipped model 20
/// to 30 % slower on two cores; from 2^18 on it takes as long as with one share per thread.
const SHARE: usize = 4 * PARALLEL_FROM;

/// Numbers of a share that are decoded at a time: they stay in the first-level cache.
pub(super) const TILE: usize = 1 << 12;

/// Maximum vectors that are multiplied one after the other with decoded numbers, which are in the first-level
/// cache. With more of them gemm is faster.
const FEW: usize = 8;

/// Numbers that are multiplied at a time with many vectors. The order in which gemm sums depends on the
/// number of rows of a call, so both forms have the same.
const PANEL: usize = 1 << 22;

/// Rows of `n_in` numbers that are about `len` numbers.
pub(super) fn rows_of(len: usize, n_in: usize) -> usize {
    (len / n_in).max(1)
}

/// `y = x W^T`: `weight` (n_out, n_in), `x` (n, n_in), `y` (n, n_out), fully written.
///
/// # Panics
/// When the lengths are inconsistent.
pub fn matmul(weight: &Matrix, x: &[f32], y: &mut [f32]) {
    let n = x.len() / weight.n_in();
    assert!(x.len() == n * weight.n_in() && y.len() == n * weight.n_out());
    match n {
        0 => {}
        1 => multiply_few(weight, x, y),
        2..=FEW if weight.as_f32().is_none() => {
            let mut columns = vec![0.0; y.len()];
            multiply_few(weight, x, &mut columns);
            for (i, y) in y.chunks_exact_mut(weight.n_out()).enumerate() {
                y.iter_mut().zip(columns.iter().skip(i).step_by(n)).for_each(|(y, column)| *y = *column);
            }
        }
        _ => multiply_many(weight, x, y),
    }
}

/// The products of one vector, or of a few: `y` (n_out, n). Reading the weights is most of their cost. Each
/// thread takes shares of the rows.
fn multiply_few(weight: &Matrix, x: &[f32], y: &mut [f32]) {
    let (n_in, n_out) = (weight.n_in(), weight.n_out());
    let n = x.len() / n_in;
    // The vector is put into fixed point once, for all shares.
    let coded = weight.as_codes().filter(|_| n == 1).map(|rows| (rows, rows.fixed_point(x)));
    let run = |rows: usize, (i, y): (usize, &mut [f32])| match &coded {
        Some((coded, x)) => coded.dot(i * rows, x, y),
        None => multiply_share(weight, i * rows, x, y),
    };
    match x.len() * n_out >= PARALLEL_FROM {
        true => {
            // As many shares for each thread, of as many rows.
            let shares = (n_in * n_out).div_ceil(SHARE).next_multiple_of(rayon::current_num_threads());
            let rows = n_out.div_ceil(shares);
            y.par_chunks_mut(rows * n).enumerate().for_each(|share| run(rows, share));
        }
        false => run(n_out, (0, y)),
    }
}

/// The products with the rows from the `first` on, as many as `y` (rows, n) has.
fn multiply_share(weight: &Matrix, first: usize, x: &[f32], y: &mut [f32]) {
    let n_in = weight.n_in();
    let n = x.len() / n_in;
    if let Some(numbers) = weight.as_f32().filter(|_| n == 1) {
        return dot_rows(&numbers[first * n_in..][..y.len() * n_in], x, y);
    }
    let tile = rows_of(TILE, n_in);
    let (mut rows, mut products) = (vec![0.0; tile * n_in], vec![0.0; tile]);
    for (i, y) in y.chunks_mut(tile * n).enumerate() {
        let some = y.len() / n;
        let (rows, products) = (&mut rows[..some * n_in], &mut products[..some]);
        weight.rows_into(first + i * tile, rows);
        for (i, x) in x.chunks_exact(n_in).enumerate() {
            dot_rows(rows, x, products);
            y.iter_mut().skip(i).step_by(n).zip(&*products).for_each(|(y, product)| *y = *product);
        }
    }
}

/// The products of many vectors: all threads take part in the product with some of the rows, which are
/// decoded once.
fn multiply_many(weight: &Matrix, x: &[f32], y: &mut [f32]) {
    let (n_in, n_out) = (weight.n_in(), weight.n_out());
    let some = rows_of(PANEL, n_in);
    let parallel = x.len() * n_out >= PARALLEL_FROM;
    for first in (0..n_out).step_by(some) {
        let rows = decoded(weight, first, some.min(n_out - first));
        product_of_rows(&rows, x, (&mut *y, first), n_in, parallel);
    }
}

/// `n` rows from the `first` on.
fn decoded(weight: &Matrix, first: usize, n: usize) -> Cow<'_, [f32]> {
    let n_in = weight.n_in();
    if let Some(numbers) = weight.as_f32() {
        return numbers[first * n_in..][..n * n_in].into();
    }
    let mut rows = vec![0.0; n * n_in];
    let some = rows_of(SHARE, n_in);
    rows.par_chunks_mut(some * n_in)
        .enumerate()
        .for_each(|(i, rows)| weight.rows_into(first + i * some, rows));
    rows.into()
}

/// `x W^T` for some rows of a matrix: `weight` (rows, n_in), `x` (n, n_in). They are `rows` columns of `y`
/// (n, n_out), from the given one on.
///
/// # Panics
/// When the lengths are inconsistent.
fn product_of_rows(weight: &[f32], x: &[f32], (y, column): (&mut [f32], usize), n_in: usize, parallel: bool) {
    let (n, rows) = (x.len() / n_in, weight.len() / n_in);
    let n_out = y.len() / n;
    assert!(
        x.len() == n * n_in && weight.len() == rows * n_in && y.len() == n * n_out && column + rows <= n_out
    );
    let parallelism = if parallel { Parallelism::Rayon(0) } else { Parallelism::None };
    let y = &mut y[column..];
    // SAFETY: the assertion above has proved x (n, n_in), weight (rows, n_in), and `rows` columns of y (n,
    // n_out) after the first ones, which the slice begins behind.
    unsafe { product(n, rows, n_in, y, n_out, x, (n_in, 1), weight, (1, n_in), 1.0, parallelism) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| (((i + seed) * 7919) % 1000) as f32 / 500.0 - 1.0).collect()
    }

    /// `y = rows x`, up to 2e-6 of the sum of all magnitudes, where the numbers of `x` have errors up to
    /// `rounding`.
    fn assert_products(rows: &[f32], x: &[f32], y: &[f32], rounding: f64) {
        for (row, y) in rows.chunks(x.len()).zip(y) {
            let terms = || row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
            let rounded: f64 = row.iter().map(|w| f64::from(w.abs()) * rounding).sum();
            let (exact, bound) = (terms().sum::<f64>(), 2e-6 * terms().map(f64::abs).sum::<f64>() + rounded);
            assert!((f64::from(*y) - exact).abs() <= bound, "{y} for {exact}, rows of {}", x.len());
        }
    }

    #[test]
    fn products_equal_the_formula() {
        // Some rows, and more than a panel of them.
        for (n, n_in, n_out) in [(5, 37, 19), (2, 4096, 1100)] {
            let weight = Matrix::new(numbers(n_in * n_out, 0), n_in);
            let x = numbers(n * n_in, 13);
            let mut many = vec![0.0; n * n_out];
            matmul(&weight, &x, &mut many);
            for (x, many) in x.chunks(n_in).zip(many.chunks(n_out)) {
                let mut one = vec![0.0; n_out];
                matmul(&weight, x, &mut one);
                for y in [many, &one] {
                    assert_products(&weight.to_f32(), x, y, 0.0);
                }
            }
        }
    }

    /// Half the step of a vector in fixed point whose largest number is 1.
    const HALF_STEP: f64 = 1.0 / 65534.0;

    /// Every type that the reader knows, at sizes of one tile, several, and several shares or panels, for one
    /// vector, a few and many.
    #[test]
    fn blocks_have_the_products_of_their_numbers() {
        for (n_in, n_out) in [(256, 1), (256, 17), (768, 300), (1024, 1500), (1 << 17, 40)] {
            // One type is enough for the panels.
            let types = if n_in > 1024 { 1 } else { usize::MAX };
            for blocks in Matrix::examples(n_out, n_in).into_iter().take(types) {
                let floats = blocks.to_f32();
                for n in [0, 1, 2, FEW, FEW + 1, 33] {
                    let x = numbers(n * n_in, 7);
                    let mut y = vec![f32::NAN; n * n_out];
                    matmul(&blocks, &x, &mut y);
                    for (x, y) in x.chunks(n_in).zip(y.chunks(n_out)) {
                        assert_products(&floats, x, y, if n == 1 { HALF_STEP } else { 0.0 });
                    }
                }
            }
        }
    }
}
