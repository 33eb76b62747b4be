use alloc::vec;
use alloc::vec::Vec;

use crate::Error;
use crate::error::check_len;

/// Streaming second moment: the sum of `x^T x` over rows, in `f64`. Nothing of the rows is kept.
///
/// Products and sums are in `f64`: at the condition numbers of keys an `f32` Gram loses the small directions.
///
/// # Examples
/// ```
/// let mut gram = svd_core::Gram::new(2)?;
/// gram.add_rows(&[1.0, 2.0, 3.0, 4.0])?;
/// assert_eq!(gram.matrix(), [10.0, 14.0, 14.0, 20.0]);
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Gram {
    dim: usize,
    rows: u64,
    lower: Vec<f64>, // (dim, dim) row-major, only column <= row is kept up to date
}

impl Gram {
    /// An empty sum for rows of `dim` components.
    ///
    /// # Errors
    /// [`Error::Zero`] or [`Error::TooLarge`].
    pub fn new(dim: usize) -> Result<Self, Error> {
        if dim == 0 {
            return Err(Error::Zero { what: "dim" });
        }
        let len = dim.checked_mul(dim).ok_or(Error::TooLarge)?;
        Ok(Self { dim, rows: 0, lower: vec![0.0; len] })
    }

    /// Adds the rows of `rows` (n, dim).
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::NotFinite`]; the sum is then unchanged.
    /// # Cost
    /// n * dim * (dim + 1) / 2 multiply-adds.
    pub fn add_rows(&mut self, rows: &[f32]) -> Result<(), Error> {
        let n = rows.len() / self.dim;
        check_len("rows", rows.len(), n * self.dim)?;
        if rows.iter().any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "rows" });
        }
        for row in rows.chunks_exact(self.dim) {
            for (i, &x) in row.iter().enumerate() {
                let x = f64::from(x);
                for (sum, &y) in self.lower[i * self.dim..][..=i].iter_mut().zip(row) {
                    *sum += x * f64::from(y);
                }
            }
        }
        self.rows += n as u64;
        Ok(())
    }

    /// Adds another sum. The same rows split and merged in the same order give the same bytes, whichever threads ran them.
    ///
    /// # Errors
    /// [`Error::Length`] when the dimensions differ.
    pub fn merge(&mut self, other: &Self) -> Result<(), Error> {
        check_len("gram", other.dim, self.dim)?;
        for (sum, x) in self.lower.iter_mut().zip(&other.lower) {
            *sum += x;
        }
        self.rows += other.rows;
        Ok(())
    }

    /// Components of a row.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Rows added so far.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// The full symmetric matrix (dim, dim).
    #[must_use]
    pub fn matrix(&self) -> Vec<f64> {
        let dim = self.dim;
        (0..dim * dim)
            .map(|i| (i / dim, i % dim))
            .map(|(r, c)| self.lower[r.max(c) * dim + r.min(c)])
            .collect()
    }
}
