//! How many tokens a method retrieves per step.

use pq_core::TokenBudget;

use super::settings::Settings;
use crate::Result;

/// Takes the setting `tokens`, or `ratio` if it is not given.
pub(super) fn take_budget(s: &mut Settings<'_>) -> Result<TokenBudget> {
    Ok(match s.is_first(["tokens", "ratio"])? {
        true => TokenBudget::Tokens(s.some_tokens("tokens", 1)?),
        false => TokenBudget::Ratio(s.fraction("ratio", 0.2)?),
    })
}

/// A fraction of `n`, rounded up.
pub(super) fn part(fraction: f64, n: usize) -> usize {
    TokenBudget::Share(fraction).k(n, 0)
}
