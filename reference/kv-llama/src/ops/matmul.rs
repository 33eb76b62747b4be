//! Products with matrices of weights in either form, with the same results bit for bit.

use std::borrow::Cow;

use gemm_common::Parallelism;
use kv_model::Matrix;
use rayon::prelude::*;

use super::dot_codes::dot_codes;
use super::dot_rows::dot_rows;
use super::product;

/// Minimum multiply-adds that are worth a second thread.
const PARALLEL_FROM: usize = 1 << 17;

/// Numbers per share of the product of one vector. Shares of 2^16 made a decode step of the shipped model 20 to
/// 30 % slower on two cores; from 2^18 on it takes as long as with one share per thread.
const SHARE: usize = 4 * PARALLEL_FROM;

/// Numbers of a share in half precision that are decoded at a time: they stay in the first-level cache.
const TILE: usize = 1 << 12;

/// Numbers that are multiplied at a time with several vectors. The order in which gemm sums depends on the number of
/// rows of a call, so both forms have the same.
const PANEL: usize = 1 << 22;

/// Rows of `n_in` numbers that are about `len` numbers.
fn rows_of(len: usize, n_in: usize) -> usize {
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
        1 => multiply_one(weight, x, y),
        _ => multiply_many(weight, x, y),
    }
}

/// The product of one vector: reading the weights is most of its cost. Each thread takes shares of the rows.
fn multiply_one(weight: &Matrix, x: &[f32], y: &mut [f32]) {
    let share = rows_of(SHARE, x.len());
    let run = |(i, y): (usize, &mut [f32])| multiply_share(weight, i * share, x, y);
    match x.len() * y.len() >= PARALLEL_FROM {
        true => y.par_chunks_mut(share).enumerate().for_each(run),
        false => y.chunks_mut(share).enumerate().for_each(run),
    }
}

/// The product of one vector with the rows from the `first` on, as many as `y` has.
fn multiply_share(weight: &Matrix, first: usize, x: &[f32], y: &mut [f32]) {
    if let Some(numbers) = weight.as_f32() {
        return dot_rows(&numbers[first * x.len()..][..y.len() * x.len()], x, y);
    }
    if let Some(rows) = weight.as_codes() {
        return dot_codes(rows, first, x, y);
    }
    let tile = rows_of(TILE, x.len());
    let mut rows = vec![0.0; tile.min(y.len()) * x.len()];
    for (i, y) in y.chunks_mut(tile).enumerate() {
        let rows = &mut rows[..y.len() * x.len()];
        weight.rows_into(first + i * tile, rows);
        dot_rows(rows, x, y);
    }
}

/// The product of several vectors: all threads take part in the product with some of the rows, which are decoded
/// once.
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

/// `x W^T` for some rows of a matrix: `weight` (rows, n_in), `x` (n, n_in). They are `rows` columns of `y` (n, n_out),
/// from the given one on.
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
    // SAFETY: the assertion above has proved x (n, n_in), weight (rows, n_in), and `rows` columns of y (n, n_out) after
    // the first ones, which the slice begins behind.
    unsafe { product(n, rows, n_in, y, n_out, x, (n_in, 1), weight, (1, n_in), 1.0, parallelism) };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(n: usize, seed: usize) -> Vec<f32> {
        (0..n).map(|i| (((i + seed) * 7919) % 1000) as f32 / 500.0 - 1.0).collect()
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
                for (row, (a, b)) in weight.to_f32().chunks(n_in).zip(many.iter().zip(&one)) {
                    let terms = || row.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let (exact, bound) = (terms().sum::<f64>(), 1e-6 * terms().map(f64::abs).sum::<f64>());
                    assert!((f64::from(*a) - exact).abs() < bound && (f64::from(*b) - exact).abs() < bound);
                }
            }
        }
    }

    /// Every type that the reader knows, at sizes of one tile, several, and several shares or panels.
    #[test]
    fn blocks_have_the_products_of_their_numbers() {
        for (n_in, n_out) in [(256, 1), (256, 17), (768, 300), (1024, 1500), (1 << 17, 40)] {
            // One type is enough for the panels.
            let types = if n_in > 1024 { 1 } else { usize::MAX };
            for blocks in Matrix::examples(n_out, n_in).into_iter().take(types) {
                let floats = Matrix::new(blocks.to_f32().into_owned(), n_in);
                for n in [0, 1, 2, 33] {
                    let x = numbers(n * n_in, 7);
                    let [a, b] = [&blocks, &floats].map(|matrix| {
                        let mut y = vec![f32::NAN; n * n_out];
                        matmul(matrix, &x, &mut y);
                        y.into_iter().map(f32::to_bits).collect::<Vec<_>>()
                    });
                    assert!(a == b, "{n} by ({n_out}, {n_in})");
                }
            }
        }
    }
}
