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
}
