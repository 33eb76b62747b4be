//! Whether codes that were fitted to a calibration text fit the tokens of a sequence.

/// The codes of one head's keys or values: their error on the tokens coded so far beside that on the
/// calibration text. The unit of the errors is the method's: both have the same.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Fit {
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
}

#[cfg(feature = "serde")]
impl serde_core::Serialize for Fit {
    fn serialize<S: serde_core::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        use serde_core::ser::SerializeStruct;
        let mut fields = serializer.serialize_struct("Fit", 4)?;
        fields.serialize_field("expected", &self.expected)?;
        fields.serialize_field("found", &self.found)?;
        fields.serialize_field("tokens", &self.tokens)?;
        fields.serialize_field("added_bits", &self.added_bits)?;
        fields.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_tokens_and_negligible_errors_are_no_misfit() {
        let fit = |found, tokens| Fit { expected: 0.01, found, tokens, added_bits: 0.0 };
        let all = [fit(0.015, 100), fit(0.016, 100), fit(0.03, 64), fit(1.0, 63)];
        assert_eq!(all.map(|fit| fit.is_misfit()), [false, true, true, false]);
        assert!(!Fit { expected: 0.0, ..fit(1e-4, 100) }.is_misfit());
    }
}
