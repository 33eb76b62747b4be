//! The Hadamard transform with fixed signs: a rotation that depends on no data.
//!
//! It spreads every row over all components, so that each component of a row of norm `r` looks like a
//! Gaussian of deviation `r / sqrt(dim)`, whatever the row is. Quantizers for Gaussians then fit every head of
//! every model, and a token unlike those of any calibration text keeps the relative error of the others.
//!
//! # Definition
//! `y = (H ⊗ Q) D x` with `dim = 2^k odd`, row index `i = a odd + b`:
//! * `D` is diagonal: the sign of component `i` is negative where bit `i % 64` of the output `i / 64` of
//!   SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), started from state 0, is set;
//! * `H` is Sylvester's Hadamard matrix of order `2^k`, divided by `2^(k / 2)`, over `a`;
//! * `Q` is the discrete Hartley transform of order `odd`, over `b`:
//!   `Q[b, c] = (cos + sin)(2 pi b c / odd) / sqrt(odd)`.
//!
//! The signs and the order never change: stored codes depend on them.

use crate::Error;
#[cfg(feature = "alloc")]
use crate::Rotation;
use crate::error::count_rows;

/// The largest odd factor of a dimension.
const MAX_ODD: usize = 255;

/// The orthogonal transform of the module's definition for rows of `dim` components.
///
/// # Source
/// Fast transform: Fino, Algazi, "Unified Matrix Treatment of the Fast Walsh-Hadamard Transform", IEEE Trans.
/// Computers 1976; random signs: Ailon, Chazelle, "Approximate Nearest Neighbors and the Fast
/// Johnson-Lindenstrauss Transform", STOC 2006.
/// # Examples
/// ```
/// use svd_core::Hadamard;
/// let transform = Hadamard::new(96)?; // 32 x 3
/// let mut row = [0.0; 96];
/// row[7] = 10.0;
/// transform.forward(&mut row)?;
/// assert!(row.iter().all(|x| x.abs() < 1.5)); // spread over all components
/// transform.inverse(&mut row)?;
/// assert!((row[7] - 10.0).abs() < 1e-5 && row[8].abs() < 1e-5);
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Hadamard {
    dim: usize,
    odd: usize,              // the odd factor of `dim`
    hartley: [f32; MAX_ODD], // (odd,): (cos + sin)(2 pi i / odd), over sqrt(dim)
}

impl Hadamard {
    /// The transform of `dim` components.
    ///
    /// # Errors
    /// [`Error::Zero`]; [`Error::TooLarge`] if the largest odd divisor of `dim` is above 255.
    pub fn new(dim: usize) -> Result<Self, Error> {
        if dim == 0 {
            return Err(Error::Zero { what: "dim" });
        }
        let odd = dim >> dim.trailing_zeros();
        if odd > MAX_ODD {
            return Err(Error::TooLarge);
        }
        let mut hartley = [0.0; MAX_ODD];
        for (i, x) in hartley.iter_mut().enumerate().take(odd) {
            let (sin, cos) = libm::sincos(core::f64::consts::TAU * i as f64 / odd as f64);
            *x = ((cos + sin) / libm::sqrt(dim as f64)) as f32;
        }
        Ok(Self { dim, odd, hartley })
    }

    /// Components of a row.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Transforms rows (n, dim) in place.
    ///
    /// # Errors
    /// [`Error::PartialRow`]; `rows` is then untouched.
    /// # Cost
    /// Per row dim * log2(dim / odd) additions and dim * odd multiply-adds, odd being the odd factor of dim;
    /// no allocation.
    pub fn forward(&self, rows: &mut [f32]) -> Result<(), Error> {
        count_rows("rows", rows.len(), self.dim)?;
        for row in rows.chunks_exact_mut(self.dim) {
            flip_signs(row);
            self.mix(row);
        }
        Ok(())
    }

    /// Undoes [`forward`](Self::forward) in place: attention over transformed values gives a transformed
    /// output, so this runs once per query.
    ///
    /// # Errors
    /// [`Error::PartialRow`]; `rows` is then untouched.
    /// # Cost
    /// As [`forward`](Self::forward).
    pub fn inverse(&self, rows: &mut [f32]) -> Result<(), Error> {
        count_rows("rows", rows.len(), self.dim)?;
        for row in rows.chunks_exact_mut(self.dim) {
            self.mix(row);
            flip_signs(row);
        }
        Ok(())
    }

    /// The transform as a rotation, to fold it into the weights on both sides of the cache with
    /// [`Rotation::fold_basis`] (`W_V`) and [`Rotation::fold_output`] (`W_O`): then no step computes it.
    ///
    /// # Errors
    /// None for a transform that exists; the signature is that of [`Rotation::from_parts`].
    /// # Examples
    /// ```
    /// use svd_core::{Hadamard, Rows};
    /// let transform = Hadamard::new(2)?;
    /// let w_v = [1.0_f32, 2.0, 3.0, 4.0]; // (dim, columns) of one head
    /// let folded = transform.rotation()?.fold_basis(Rows::contiguous(&w_v, 2)?, 2)?;
    /// let mut value = [1.0 + 2.0, 3.0 + 4.0]; // of the input (1, 1)
    /// transform.forward(&mut value)?;
    /// assert!((folded[0] + folded[1] - value[0]).abs() < 1e-6);
    /// # Ok::<(), svd_core::Error>(())
    /// ```
    #[cfg(feature = "alloc")]
    pub fn rotation(&self) -> Result<Rotation, Error> {
        let dim = self.dim;
        let mut basis = alloc::vec![0.0; dim * dim];
        for (i, row) in basis.chunks_exact_mut(dim).enumerate() {
            for (j, x) in row.iter_mut().enumerate() {
                *x = self.element(j, i);
            }
        }
        Rotation::from_parts(basis.clone(), basis, alloc::vec![1.0; dim])
    }

    /// Element (i, j) of the matrix, by the definition.
    #[cfg(feature = "alloc")]
    fn element(&self, i: usize, j: usize) -> f64 {
        let angle = core::f64::consts::TAU * ((i % self.odd) * (j % self.odd)) as f64 / self.odd as f64;
        let (sin, cos) = libm::sincos(angle);
        let is_negative = ((i / self.odd) & (j / self.odd)).count_ones() % 2 == 1;
        let magnitude = (cos + sin) / libm::sqrt(self.dim as f64);
        if is_negative != (signs(j / 64) >> (j % 64) & 1 == 1) { -magnitude } else { magnitude }
    }

    /// `H ⊗ Q`, which is symmetric and its own inverse.
    fn mix(&self, row: &mut [f32]) {
        let odd = self.odd;
        let mut half = odd;
        while half < self.dim {
            for pair in row.chunks_exact_mut(2 * half) {
                let (a, b) = pair.split_at_mut(half);
                for (a, b) in a.iter_mut().zip(b) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            half *= 2;
        }
        if odd == 1 {
            return row.iter_mut().for_each(|x| *x *= self.hartley[0]);
        }
        for run in row.chunks_exact_mut(odd) {
            let mut sums = [0.0; MAX_ODD];
            for (b, sum) in sums.iter_mut().enumerate().take(odd) {
                *sum = run.iter().enumerate().map(|(c, x)| x * self.hartley[b * c % odd]).sum();
            }
            run.copy_from_slice(&sums[..odd]);
        }
    }
}

/// The signs of components `64 word` to `64 word + 63`: output `word` of SplitMix64 from state 0.
const fn signs(word: usize) -> u64 {
    let mut z = (word as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn flip_signs(row: &mut [f32]) {
    for (word, part) in row.chunks_mut(64).enumerate() {
        let signs = signs(word);
        for (i, x) in part.iter_mut().enumerate() {
            *x = f32::from_bits(x.to_bits() ^ (((signs >> i) as u32) << 31));
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use std::vec::Vec;

    const DIMS: [usize; 14] = [1, 2, 3, 8, 10, 16, 64, 80, 96, 128, 134, 144, 255, 256];

    fn noise(len: usize) -> Vec<f32> {
        (0..len).map(|i| ((i * 2_654_435_761 + 7) % 1013) as f32 / 506.0 - 1.0).collect()
    }

    #[test]
    fn the_transform_is_the_matrix_of_the_definition() {
        for dim in DIMS {
            let transform = Hadamard::new(dim).unwrap();
            let row = noise(dim);
            let mut fast = row.clone();
            transform.forward(&mut fast).unwrap();
            for (i, fast) in fast.iter().enumerate() {
                let exact: f64 = (0..dim).map(|j| transform.element(i, j) * f64::from(row[j])).sum();
                assert!((f64::from(*fast) - exact).abs() < 1e-5, "{dim}: {i}: {fast} {exact}");
            }
        }
    }

    #[test]
    fn the_inverse_returns_the_rows_and_norms_stay() {
        for dim in DIMS {
            let transform = Hadamard::new(dim).unwrap();
            let rows = noise(3 * dim);
            let mut there = rows.clone();
            transform.forward(&mut there).unwrap();
            let norm = |rows: &[f32]| rows.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            assert!((norm(&there) / norm(&rows) - 1.0).abs() < 1e-5, "{dim}");
            transform.inverse(&mut there).unwrap();
            assert!(there.iter().zip(&rows).all(|(a, b)| (a - b).abs() < 1e-5), "{dim}");
        }
    }

    #[test]
    fn a_lone_component_is_spread_over_all() {
        for dim in DIMS {
            let transform = Hadamard::new(dim).unwrap();
            for i in 0..dim {
                let mut row = std::vec![0.0; dim];
                row[i] = (dim as f32).sqrt();
                transform.forward(&mut row).unwrap();
                let largest = row.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
                assert!(largest < 1.4143, "{dim}: {largest}");
            }
        }
    }

    /// Stored codes depend on the signs.
    #[test]
    fn the_signs_never_change() {
        assert_eq!([signs(0), signs(1)], [0xE220_A839_7B1D_CDAF, 0x6E78_9E6A_A1B9_65F4]);
    }

    #[test]
    fn folded_weights_give_transformed_values_and_the_same_output() {
        let (dim, columns) = (48, 5);
        let transform = Hadamard::new(dim).unwrap();
        let rotation = transform.rotation().unwrap();
        let (w_v, w_o, input) = (noise(dim * columns), noise(7 * dim), noise(columns));
        let product = |w: &[f32], x: &[f32]| -> Vec<f32> {
            w.chunks_exact(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
        };
        let mut value = product(&w_v, &input);
        let output = product(&w_o, &value);
        transform.forward(&mut value).unwrap();
        let w_v = rotation.fold_basis(crate::Rows::contiguous(&w_v, columns).unwrap(), dim).unwrap();
        let w_o = rotation.fold_output(crate::Rows::contiguous(&w_o, dim).unwrap(), dim).unwrap();
        let folded = product(&w_v, &input);
        assert!(folded.iter().zip(&value).all(|(a, b)| (a - b).abs() < 1e-4));
        assert!(product(&w_o, &folded).iter().zip(&output).all(|(a, b)| (a - b).abs() < 1e-4));
    }

    #[test]
    fn wrong_sizes_are_errors() {
        assert_eq!(Hadamard::new(0).unwrap_err(), Error::Zero { what: "dim" });
        assert_eq!(Hadamard::new(2 * 257).unwrap_err(), Error::TooLarge);
        let transform = Hadamard::new(4).unwrap();
        let short = Error::PartialRow { what: "rows", row: 4, actual: 5 };
        assert_eq!(transform.forward(&mut [0.0; 5]), Err(short));
        assert_eq!(transform.inverse(&mut [0.0; 5]), Err(short));
        assert_eq!(transform.forward(&mut []), Ok(()));
    }
}
