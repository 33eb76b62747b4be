//! How well the codes of a cache's heads fit its tokens.

use kv_attend::owner::{Fit, Side};
use serde::Serialize;

/// The [`Fit`] of the codes of one head's keys or values.
///
/// Errors of PQ codes, and of `sq`'s values, are sums of squares, relative to those of the rows in the space
/// of the codes. Errors of `sq`'s keys are mean squares of the error of a score.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HeadFit {
    /// Layer.
    pub layer: usize,
    /// KV head.
    pub head: usize,
    /// Keys or values.
    pub side: Side,
    /// The errors of their codes.
    #[serde(flatten)]
    pub fit: Fit,
}

impl HeadFit {
    /// A line about the heads of `all` whose codes do not fit, with the worst, or to whose codes bits were
    /// added, with the most; none if all fit.
    #[must_use]
    pub fn warning(method: &str, all: &[Self]) -> Option<String> {
        let misfits = all.iter().filter(|head| head.fit.is_misfit());
        let widened = all.iter().filter(|head| head.fit.added_bits > 0.0);
        let codes = "codes of a head's keys or values do not fit this text";
        if let Some(worst) = misfits.clone().max_by(|a, b| a.fit.ratio().total_cmp(&b.fit.ratio())) {
            return Some(format!(
                "{method}: {} of {} {codes}; the {} of layer {}, head {} have {:.1} times the error of the \
                 calibration: calibrate on more kinds of text (kv calibrate)",
                misfits.count(),
                all.len(),
                worst.side.name(),
                worst.layer,
                worst.head,
                worst.fit.ratio()
            ));
        }
        let most = widened.clone().max_by(|a, b| a.fit.added_bits.total_cmp(&b.fit.added_bits))?;
        Some(format!(
            "{method}: {} of {} {codes} and have more bits; the {} of layer {}, head {} have {} more a component",
            widened.count(),
            all.len(),
            most.side.name(),
            most.layer,
            most.head,
            most.fit.added_bits
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_misfit_is_named() {
        let of_head = |head, found| {
            let fit = Fit { expected: 0.01, found, tokens: 100, added_bits: 0.0 };
            HeadFit { layer: 3, head, side: Side::Values, fit }
        };
        let all = [of_head(0, 0.015), of_head(1, 0.016), of_head(2, 0.03)];
        let warning = HeadFit::warning("million", &all).unwrap();
        assert!(warning.starts_with("million: 2 of 3 codes"), "{warning}");
        assert!(warning.contains("the values of layer 3, head 2 have 3.0 times"), "{warning}");
        assert_eq!(HeadFit::warning("million", &all[..1]), None);
        let more = HeadFit { fit: Fit { added_bits: 0.5, ..all[0].fit }, ..all[0] };
        let warning = HeadFit::warning("sq", &[all[0], more]).unwrap();
        assert!(warning.starts_with("sq: 1 of 2 codes") && warning.ends_with("have 0.5 more a component"));
    }
}
