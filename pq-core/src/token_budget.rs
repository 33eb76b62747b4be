//! How many tokens a step retrieves by their codes.

/// The tokens that a step retrieves, of those that are neither sinks nor in the window.
///
/// # Examples
/// ```
/// use pq_core::TokenBudget;
/// let fifth = TokenBudget::Ratio(0.2);
/// assert_eq!(fifth.k(932, 68), 132); // a fifth of 1,000 tokens, of which 68 are exact anyway
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum TokenBudget {
    /// A fraction of all tokens, sinks and window included, and at least one token.
    Ratio(f64),
    /// A fraction of the tokens outside sinks and window.
    Share(f64),
    /// A number of tokens outside sinks and window.
    Tokens(usize),
}

impl TokenBudget {
    /// The factor of a number of tokens that, rounded up, gives what the decimal `fraction` stands for: 0.07
    /// of 100 is 7, although the product of the nearest `f64` is larger.
    #[must_use]
    pub fn factor(fraction: f64) -> f64 {
        fraction * (1.0 - 2.0 * f64::EPSILON)
    }

    /// Tokens to retrieve of `n`, with `reserved` tokens in sinks and window.
    #[must_use]
    pub fn k(self, n: usize, reserved: usize) -> usize {
        let k = match self {
            Self::Ratio(ratio) => part(ratio, n.saturating_add(reserved)).saturating_sub(reserved).max(1),
            Self::Share(share) => part(share, n),
            Self::Tokens(tokens) => tokens,
        };
        k.min(n)
    }
}

/// A fraction of `n`, rounded up.
fn part(fraction: f64, n: usize) -> usize {
    libm::ceil(TokenBudget::factor(fraction) * n as f64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_count_what_they_say() {
        let fifth = TokenBudget::Ratio(0.2);
        let of_all = [(0, 0), (1, 1), (272, 1), (432, 32), (932, 132)];
        assert_eq!(of_all.map(|(n, _)| fifth.k(n, 68)), of_all.map(|(_, k)| k));
        let many = [(0, 0), (1, 1), (2047, 2047), (2048, 2048), (1 << 20, 2048)];
        assert_eq!(many.map(|(n, _)| TokenBudget::Tokens(2048).k(n, 68)), many.map(|(_, k)| k));
        assert_eq!(TokenBudget::Ratio(1.0).k(1000, 68), 1000);
        let shares = [(0, 0.5, 0), (1, 0.01, 1), (101, 0.01, 2), (1000, 0.0, 0), (1000, 1.0, 1000)];
        assert_eq!(shares.map(|(n, share, _)| TokenBudget::Share(share).k(n, 68)), shares.map(|(_, _, k)| k));
    }

    #[test]
    fn fractions_are_those_of_their_decimals() {
        for thousandths in 0..=1000_usize {
            let fraction = thousandths as f64 / 1000.0;
            for n in [0, 1, 10, 100, 999, 1000, 1300, 4096, 131_072, 1 << 32] {
                assert_eq!(part(fraction, n), (thousandths * n).div_ceil(1000), "{fraction} of {n}");
            }
        }
    }
}
