//! The errors of codes: those to expect of a calibration, and those found on a sequence.

use kv_attend::owner::{Fit, Pair, Side};
use kv_llama::HeadFit;

/// The fits of a layer, head after head, from those of the keys and values of each head.
pub(crate) fn head_fits(layer: usize, heads: impl Iterator<Item = Pair<Fit>>) -> Vec<HeadFit> {
    let of_head = |(head, fits): (usize, Pair<Fit>)| {
        Side::ALL.map(|side| HeadFit { layer, head, side, fit: fits[side] })
    };
    heads.enumerate().flat_map(of_head).collect()
}

/// Sums of squares over one head's coded rows: of the coding errors, and of the rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CodingError {
    lost: f64,
    of: f64,
    tokens: usize,
}

impl CodingError {
    /// Adds rows of `tokens` tokens: each element, with what its code lost of it.
    pub fn add(&mut self, tokens: usize, elements: impl Iterator<Item = (f32, f32)>) {
        for (x, lost) in elements {
            self.lost += f64::from(lost) * f64::from(lost);
            self.of += f64::from(x) * f64::from(x);
        }
        self.tokens += tokens;
    }

    /// Of rows (n, dim) of which codes left `residuals`.
    pub fn of(dim: usize, rows: &[f32], residuals: &[f32]) -> Self {
        let mut error = Self::default();
        error.add(rows.len() / dim, rows.iter().copied().zip(residuals.iter().copied()));
        error
    }

    /// These rows beside the calibration, on which codes had the relative error `expected`.
    pub fn fit(self, expected: f64) -> Fit {
        Fit { expected, found: self.relative(), tokens: self.tokens, added_bits: 0.0 }
    }

    /// The error relative to the rows; 0 for rows of zeros.
    pub fn relative(self) -> f64 {
        if self.of > 0.0 { self.lost / self.of } else { 0.0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative_to_the_rows() {
        let mut error = CodingError::default();
        assert_eq!(error.relative(), 0.0);
        error.add(2, [(3.0, 1.0), (4.0, 0.0)].into_iter());
        error.add(1, [(0.0, 0.5)].into_iter());
        let fit = error.fit(0.1);
        assert_eq!((fit.found, fit.ratio(), fit.tokens), (0.05, 0.5, 3));
    }
}
