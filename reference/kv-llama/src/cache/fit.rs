//! Whether codes that were fitted to a calibration text fit the tokens of a sequence.

use kv_attend::owner::Side;
use serde::Serialize;

/// The codes of one head's keys or values: their error on the tokens coded so far beside that on the
/// calibration text. Errors are sums of squares, relative to those of the rows in the space of the codes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fit {
    /// Layer.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Keys or values.
    pub side: Side,
    /// Error on the calibration text.
    pub expected: f64,
    /// Error on the tokens coded so far.
    pub found: f64,
    /// Tokens coded so far, truncated ones included.
    pub tokens: usize,
}

impl Fit {
    /// The error over that of the calibration.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        /// Expected errors below this one count as this one: no code needs to be so exact.
        const NEGLIGIBLE: f64 = 1e-4;
        self.found / self.expected.max(NEGLIGIBLE)
    }

    /// Whether the codes have more than 1.5 times the error of the calibration, over at least 64 tokens.
    #[must_use]
    pub fn is_misfit(&self) -> bool {
        const MOST: f64 = 1.5;
        const ENOUGH: usize = 64;
        self.tokens >= ENOUGH && self.ratio() > MOST
    }

    /// A line about the heads of `all` whose codes do not fit, with the worst; none if all fit.
    #[must_use]
    pub fn warning(method: &str, all: &[Self]) -> Option<String> {
        let misfits = all.iter().filter(|fit| fit.is_misfit());
        let worst = misfits.clone().max_by(|a, b| a.ratio().total_cmp(&b.ratio()))?;
        Some(format!(
            "{method}: {} of {} codes of a head's keys or values do not fit this text; the {} of layer {}, head {} \
             have {:.1} times the error of the calibration: calibrate on more kinds of text (kv calibrate)",
            misfits.count(),
            all.len(),
            worst.side.name(),
            worst.layer,
            worst.head,
            worst.ratio()
        ))
    }
}

/// The error to expect of a codebook on other tokens, given that on the `n` tokens that it was trained on: each
/// of its `ksub` centroids is the mean of some of them, which brings it as much nearer to these as it brings it
/// away from others. Without this, codes of 256 centroids trained on 4,096 tokens have a ratio of 1.2 to 1.5 on
/// more of the same text.
#[must_use]
pub fn unseen_error(error: f64, n: usize, ksub: usize) -> f64 {
    error * (n + ksub) as f64 / n.saturating_sub(ksub).max(1) as f64
}

/// Sums of squares over one head's coded rows: of the coding errors, and of the rows.
#[derive(Clone, Copy, Debug, Default)]
pub struct CodingError {
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
    pub fn fit(self, layer: usize, head: usize, side: Side, expected: f64) -> Fit {
        Fit { layer, head, side, expected, found: self.relative(), tokens: self.tokens }
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
    fn the_worst_misfit_is_named() {
        let fit =
            |head, found, tokens| Fit { layer: 3, head, side: Side::Values, expected: 0.01, found, tokens };
        let all = [fit(0, 0.015, 100), fit(1, 0.016, 100), fit(2, 0.03, 100), fit(4, 1.0, 63)];
        assert_eq!(all.map(|fit| fit.is_misfit()), [false, true, true, false]);
        let warning = Fit::warning("million", &all).unwrap();
        assert!(warning.starts_with("million: 2 of 4 codes"), "{warning}");
        assert!(warning.contains("the values of layer 3, head 2 have 3.0 times"), "{warning}");
        assert_eq!(Fit::warning("million", &all[..1]), None);
        let exact = Fit { expected: 0.0, found: 1e-4, ..all[1] };
        assert!(!exact.is_misfit());
    }

    #[test]
    fn errors_are_relative_to_the_rows() {
        let mut error = CodingError::default();
        assert_eq!(error.relative(), 0.0);
        error.add(2, [(3.0, 1.0), (4.0, 0.0)].into_iter());
        error.add(1, [(0.0, 0.5)].into_iter());
        let fit = error.fit(1, 2, Side::Keys, 0.1);
        assert_eq!((fit.found, fit.ratio(), fit.tokens), (0.05, 0.5, 3));
    }
}
