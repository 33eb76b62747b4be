//! How many k-means iterations overlap with a prefill: PQCache's cost model and its fit.

use core::ops::RangeInclusive;

use crate::Error;

/// A model of the time that clustering takes, and of the time of a layer's prefill, as functions of the
/// sequence length.
///
/// PQCache trains on the CPU while the GPU prefills the next layer. The time of a k-means iteration is linear
/// in the sequence length, that of a layer's prefill quadratic. Both are fitted by least squares, with no
/// coefficient below 0, to profiles at a few lengths.
///
/// # Source
/// PQCache (arXiv 2407.12820), 3.3.
/// # Examples
/// ```
/// use pq_core::ClusteringCost;
/// let iteration = [(1_000, 0.011), (2_000, 0.021), (4_000, 0.041)]; // 1 ms + 10 us per token
/// let layer = [(1_000, 0.1), (2_000, 0.3), (4_000, 1.0), (8_000, 3.6)]; // 50 us per token + 50 ns per token^2
/// let model = ClusteringCost::fit(&iteration, &layer)?;
/// assert_eq!(model.iterations(2_000, 3..=300), 14);
/// assert_eq!(model.iterations(8_000, 3..=300), 44);
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ClusteringCost {
    /// Seconds of one iteration over all heads of a layer: `c[0] + c[1] * n`.
    pub iteration: [f64; 2],
    /// Seconds of a layer's prefill: `c[0] + c[1] * n + c[2] * n^2`.
    pub layer: [f64; 3],
}

impl ClusteringCost {
    /// Fits profiles of (sequence length, seconds): at least two lengths for an iteration, three for a layer.
    ///
    /// # Errors
    /// [`Error::Underdetermined`] for too few different lengths, [`Error::NotFinite`] for a time that is not
    /// finite.
    pub fn fit(iteration: &[(usize, f64)], layer: &[(usize, f64)]) -> Result<Self, Error> {
        Ok(Self { iteration: fit("iteration profile", iteration)?, layer: fit("layer profile", layer)? })
    }

    /// The maximum number of iterations over `n` tokens that overlap with one layer's prefill, clamped to
    /// `allowed`.
    #[must_use]
    pub fn iterations(&self, n: usize, allowed: RangeInclusive<usize>) -> usize {
        let n = n as f64;
        let layer = self.layer[0] + n * (self.layer[1] + n * self.layer[2]);
        let iteration = self.iteration[0] + n * self.iteration[1];
        // A nonpositive time gives no bound. The factor keeps rounding from taking one iteration off an exact
        // fit.
        let hidden = if iteration > 0.0 { (layer / iteration * (1.0 + 5e-7)) as usize } else { usize::MAX };
        hidden.min(*allowed.end()).max(*allowed.start())
    }
}

/// Fits a polynomial with `N` coefficients of at least 0 by the normal equations, in lengths divided by the
/// longest.
fn fit<const N: usize>(what: &'static str, profile: &[(usize, f64)]) -> Result<[f64; N], Error> {
    if let Some(index) = profile.iter().position(|(_, seconds)| !seconds.is_finite()) {
        return Err(Error::NotFinite { what, index });
    }
    let longest = profile.iter().map(|&(n, _)| n).max().unwrap_or(0) as f64;
    // Times are scaled to 1 by a power of two, which is exact: their products do not overflow.
    let most = profile.iter().fold(0.0_f64, |most, &(_, seconds)| most.max(seconds.abs()));
    let exponent = libm::frexp(most).1;
    let mut matrix = [[0.0; N]; N];
    let mut right = [0.0; N];
    for &(n, seconds) in profile {
        let (x, seconds) = (n as f64 / longest, libm::ldexp(seconds, -exponent));
        let mut powers = [1.0; N];
        for i in 1..N {
            powers[i] = powers[i - 1] * x;
        }
        for i in 0..N {
            right[i] += powers[i] * seconds;
            for j in 0..N {
                matrix[i][j] += powers[i] * powers[j];
            }
        }
    }
    solve(matrix, right).ok_or(Error::Underdetermined { what, needed: N })?;
    // The best fit without negative coefficients is the least-squares fit of some of the powers. The squared
    // error of such a fit is below that of zero by `right * coefficients`.
    let (mut coefficients, mut best) = ([0.0; N], 0.0);
    for powers in 1..1_usize << N {
        let Some(fitted) = solve_for(powers, matrix, right) else { continue };
        let explained: f64 = right.iter().zip(&fitted).map(|(right, c)| right * c).sum();
        if fitted.iter().all(|&c| c >= 0.0) && explained > best {
            (coefficients, best) = (fitted, explained);
        }
    }
    let mut scale = 1.0;
    for coefficient in &mut coefficients {
        *coefficient = libm::ldexp(*coefficient / scale, exponent);
        scale *= longest;
    }
    Ok(coefficients)
}

/// Solves the normal equations for the powers whose bits are set; the other coefficients are 0.
fn solve_for<const N: usize>(
    powers: usize,
    mut matrix: [[f64; N]; N],
    mut right: [f64; N],
) -> Option<[f64; N]> {
    for i in (0..N).filter(|i| powers >> i & 1 == 0) {
        matrix.iter_mut().for_each(|row| row[i] = 0.0);
        matrix[i] = [0.0; N];
        (matrix[i][i], right[i]) = (1.0, 0.0);
    }
    solve(matrix, right)
}

/// Gaussian elimination without pivoting: the matrix is positive definite unless there are too few lengths.
fn solve<const N: usize>(mut matrix: [[f64; N]; N], mut right: [f64; N]) -> Option<[f64; N]> {
    for i in 0..N {
        let pivot = matrix[i];
        if pivot[i] <= 1e-9 || pivot[i].is_nan() {
            return None;
        }
        for row in i + 1..N {
            let factor = matrix[row][i] / pivot[i];
            for (x, pivot) in matrix[row].iter_mut().zip(pivot).skip(i) {
                *x -= factor * pivot;
            }
            right[row] -= factor * right[i];
        }
    }
    let mut solution = [0.0; N];
    for i in (0..N).rev() {
        let known: f64 = (i + 1..N).map(|j| matrix[i][j] * solution[j]).sum();
        solution[i] = (right[i] - known) / matrix[i][i];
    }
    Some(solution)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_lengths_are_an_error() {
        let layer = [(1, 1.0), (2, 2.0), (3, 3.0)];
        assert!(matches!(
            ClusteringCost::fit(&[(5, 1.0), (5, 1.1)], &layer),
            Err(Error::Underdetermined { needed: 2, .. })
        ));
        assert!(matches!(
            ClusteringCost::fit(&layer, &layer[..2]),
            Err(Error::Underdetermined { needed: 3, .. })
        ));
        assert!(matches!(ClusteringCost::fit(&[], &layer), Err(Error::Underdetermined { .. })));
        assert!(matches!(ClusteringCost::fit(&[(1, f64::NAN)], &layer), Err(Error::NotFinite { .. })));
    }

    /// The parabola through these times of a layer is negative at 0 and at 4,096 tokens, and the line through
    /// those of an iteration at 0.
    #[test]
    fn no_coefficient_is_negative() {
        let layer = [(128, 0.0064), (256, 0.016), (512, 0.0263)];
        let iteration = [(100, 1.0), (200, 3.0), (400, 7.0)]; // 0.02 s per token, less 1 s
        let model = ClusteringCost::fit(&iteration, &layer).unwrap();
        // Least squares by a line, and by a line through the origin.
        let sum = |points: &[(usize, f64); 3], f: fn(f64, f64) -> f64| -> f64 {
            points.iter().map(|&(n, t)| f(n as f64, t)).sum()
        };
        let (n, t) = (sum(&layer, |n, _| n / 3.0), sum(&layer, |_, t| t / 3.0));
        let slope = (sum(&layer, |n, t| n * t) - 3.0 * n * t) / (sum(&layer, |n, _| n * n) - 3.0 * n * n);
        let through_origin = sum(&iteration, |n, t| n * t) / sum(&iteration, |n, _| n * n);
        let expected = [t - slope * n, slope, 0.0, 0.0, through_origin];
        for (c, expected) in model.layer.into_iter().chain(model.iteration).zip(expected) {
            assert!((c - expected).abs() <= 1e-9 * expected, "{model:?}");
        }
        let negative = [(100, -1.0), (200, -2.0), (300, -3.0)];
        let model = ClusteringCost::fit(&negative, &negative).unwrap();
        assert_eq!((model.iteration, model.layer), ([0.0; 2], [0.0; 3]));
    }

    #[test]
    fn absurd_times_are_fitted_as_others_are() {
        for unit in [1e-300, 1.0, 1e300] {
            let times = [1, 2, 3, 4].map(|n| (n, n as f64 * unit));
            let model = ClusteringCost::fit(&times, &times).unwrap();
            assert!((model.iteration[1] / unit - 1.0).abs() < 1e-9, "{model:?}");
            assert!((model.layer[1] / unit - 1.0).abs() < 1e-6, "{model:?}");
        }
    }

    #[test]
    fn a_clustering_that_takes_no_time_is_bounded_by_the_caller() {
        let model = ClusteringCost { iteration: [0.0, 0.0], layer: [1.0, 0.0, 0.0] };
        assert_eq!(model.iterations(1000, 3..=300), 300);
        let model = ClusteringCost { iteration: [1.0, 0.0], layer: [-1.0, 0.0, 0.0] };
        assert_eq!(model.iterations(1000, 3..=300), 3);
    }
}
