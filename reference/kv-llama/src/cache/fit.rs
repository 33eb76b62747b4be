//! Whether codes that were fitted to a calibration text fit the tokens of a sequence.

use kv_attend::owner::Side;
use serde::Serialize;

/// The codes of one head's keys or values: their error on the tokens coded so far beside that on the
/// calibration text.
///
/// Errors of PQ codes are sums of squares, relative to those of the rows in the space of the codes. Errors of
/// `sq`'s keys are mean squares of the error of a score.
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
    /// Bits a component that were added to the codes of this head, since without them they did not fit the
    /// prompt.
    pub added_bits: f64,
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

    /// A line about the heads of `all` whose codes do not fit, with the worst, or to whose codes bits were added,
    /// with the most; none if all fit.
    #[must_use]
    pub fn warning(method: &str, all: &[Self]) -> Option<String> {
        let misfits = all.iter().filter(|fit| fit.is_misfit());
        let widened = all.iter().filter(|fit| fit.added_bits > 0.0);
        let codes = "codes of a head's keys or values do not fit this text";
        if let Some(worst) = misfits.clone().max_by(|a, b| a.ratio().total_cmp(&b.ratio())) {
            return Some(format!(
                "{method}: {} of {} {codes}; the {} of layer {}, head {} have {:.1} times the error of the \
                 calibration: calibrate on more kinds of text (kv calibrate)",
                misfits.count(),
                all.len(),
                worst.side.name(),
                worst.layer,
                worst.head,
                worst.ratio()
            ));
        }
        let most = widened.clone().max_by(|a, b| a.added_bits.total_cmp(&b.added_bits))?;
        Some(format!(
            "{method}: {} of {} {codes} and have more bits; the {} of layer {}, head {} have {} more a component",
            widened.count(),
            all.len(),
            most.side.name(),
            most.layer,
            most.head,
            most.added_bits
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_misfit_is_named() {
        let fit = |head, found, tokens| {
            let (side, expected, added_bits) = (Side::Values, 0.01, 0.0);
            Fit { layer: 3, head, side, expected, found, tokens, added_bits }
        };
        let all = [fit(0, 0.015, 100), fit(1, 0.016, 100), fit(2, 0.03, 100), fit(4, 1.0, 63)];
        assert_eq!(all.map(|fit| fit.is_misfit()), [false, true, true, false]);
        let warning = Fit::warning("million", &all).unwrap();
        assert!(warning.starts_with("million: 2 of 4 codes"), "{warning}");
        assert!(warning.contains("the values of layer 3, head 2 have 3.0 times"), "{warning}");
        assert_eq!(Fit::warning("million", &all[..1]), None);
        let widened = [all[0], Fit { added_bits: 0.5, ..all[0] }];
        let warning = Fit::warning("sq", &widened).unwrap();
        assert!(warning.starts_with("sq: 1 of 2 codes") && warning.ends_with("have 0.5 more a component"));
        let exact = Fit { expected: 0.0, found: 1e-4, ..all[1] };
        assert!(!exact.is_misfit());
    }
}
