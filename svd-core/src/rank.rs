//! Chooses how many components each head keeps.
//!
//! A spectrum contains the singular values of a head's [`Rotation`](crate::Rotation) in descending order. One
//! call over keys and values gives them a common budget; two calls give separate budgets.

use alloc::vec::Vec;

use crate::Error;

/// The components or bytes that all heads together may keep.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Budget {
    /// A fraction of all dimensions: 1 minus the paper's overall compression rate.
    Fraction(f64),
    /// Bytes per token over all heads.
    Bytes {
        /// Bytes per token.
        per_token: usize,
        /// Bytes per component.
        per_component: usize,
    },
}

impl Budget {
    /// The number of components, out of `all`, that the heads together may keep.
    fn components(self, all: usize) -> Result<usize, Error> {
        match self {
            Self::Fraction(fraction) if (0.0..=1.0).contains(&fraction) => {
                Ok((fraction * all as f64) as usize)
            }
            Self::Fraction(value) => Err(Error::Fraction { what: "kept fraction", value }),
            Self::Bytes { per_component: 0, .. } => Err(Error::Zero { what: "bytes per component" }),
            Self::Bytes { per_token, per_component } => Ok(per_token / per_component),
        }
    }
}

/// The smallest rank, at least 1, at which the removed singular values sum to at most the fraction `removal`
/// of the total.
///
/// # Errors
/// [`Error::Fraction`] for a `removal` outside 0..=1, [`Error::Zero`] for no values, [`Error::Spectrum`].
/// # Source
/// ZACK, 5.2, eq. 6.
/// # Examples
/// ```
/// assert_eq!(svd_core::rank_for_removal(&[5.0, 3.0, 1.0, 1.0], 0.2)?, 2);
/// assert_eq!(svd_core::rank_for_removal(&[5.0, 3.0, 1.0, 1.0], 0.0)?, 4);
/// # Ok::<(), svd_core::Error>(())
/// ```
pub fn rank_for_removal(sigma: &[f64], removal: f64) -> Result<usize, Error> {
    if !(0.0..=1.0).contains(&removal) {
        return Err(Error::Fraction { what: "removal rate", value: removal });
    }
    check_spectra(&[sigma])?;
    Ok(removed_to(sigma, removal))
}

/// The ranks of all heads at the smallest common removal rate that meets `budget`, found by bisection.
///
/// Ranks are rounded up to `multiple` (16 for tensor cores, 1 for no rounding), but not above a head's
/// dimension, and the rounded ranks meet the budget. A larger budget never lowers the rank of a head.
///
/// # Errors
/// [`Error::Fraction`]; [`Error::Zero`] for no heads, an empty spectrum, a multiple of 0 or components of 0
/// bytes; [`Error::Spectrum`]; [`Error::Budget`] if the smallest ranks do not fit.
/// # Cost
/// 60 passes over the spectra.
/// # Source
/// ZACK, 5.2: the function from the overall compression rate to the ranks; 6.1 for the rounding.
/// # Examples
/// ```
/// use svd_core::{Budget, ranks_by_removal};
/// let heads: [&[f64]; 2] = [&[9.0, 1.0, 0.5, 0.1], &[4.0, 3.0, 2.0, 1.0]];
/// assert_eq!(ranks_by_removal(&heads, Budget::Fraction(0.5), 1)?, [1, 3]);
/// assert_eq!(ranks_by_removal(&heads, Budget::Bytes { per_token: 12, per_component: 2 }, 2)?, [2, 4]);
/// # Ok::<(), svd_core::Error>(())
/// ```
pub fn ranks_by_removal(heads: &[&[f64]], budget: Budget, multiple: usize) -> Result<Vec<usize>, Error> {
    let components = check_budget(heads, budget, multiple)?;
    let ranks = |removal: f64| -> Vec<usize> {
        heads.iter().map(|sigma| rounded(removed_to(sigma, removal), multiple, sigma.len())).collect()
    };
    let fits = |ranks: &Vec<usize>| ranks.iter().sum::<usize>() <= components;
    let all = ranks(0.0);
    if fits(&all) {
        return Ok(all);
    }
    let (mut low, mut high) = (0.0, 1.0); // the ranks at `low` do not fit, those at `high` do
    for _ in 0..60 {
        let middle = 0.5 * (low + high);
        if fits(&ranks(middle)) { high = middle } else { low = middle }
    }
    Ok(ranks(high))
}

/// The ranks of all heads with the least weighted loss within `budget`. Greedy: the next `multiple`
/// components go to the head with the largest gain in weighted squared singular values per component, until
/// the next step does not fit.
///
/// Since spectra descend, the result is optimal whenever it exhausts the budget. `weights[h]` is the cost to
/// the model of a unit of squared error in head `h`: errors of different layers, or of keys and values, are
/// not comparable without weights.
///
/// # Errors
/// As for [`ranks_by_removal`]; [`Error::Length`] if there is not one weight per head, [`Error::NotFinite`]
/// for a weight that is negative, infinite or NaN.
/// # Cost
/// A sort of the steps of `multiple` components in all heads.
/// # Examples
/// ```
/// use svd_core::{Budget, ranks_by_loss};
/// let heads: [&[f64]; 2] = [&[3.0, 2.0, 1.0], &[3.0, 2.0, 1.0]];
/// assert_eq!(ranks_by_loss(&heads, &[1.0, 5.0], Budget::Fraction(0.67), 1)?, [1, 3]);
/// # Ok::<(), svd_core::Error>(())
/// ```
pub fn ranks_by_loss(
    heads: &[&[f64]],
    weights: &[f64],
    budget: Budget,
    multiple: usize,
) -> Result<Vec<usize>, Error> {
    let mut left = check_budget(heads, budget, multiple)?;
    crate::error::check_len("weights", weights.len(), heads.len())?;
    if weights.iter().any(|x| !(x.is_finite() && *x >= 0.0)) {
        return Err(Error::NotFinite { what: "weights" });
    }
    let mut ranks: Vec<usize> = heads.iter().map(|sigma| rounded(1, multiple, sigma.len())).collect();
    left -= ranks.iter().sum::<usize>();
    let sigma_scale = scale(&heads.iter().map(|sigma| sigma[0]).collect::<Vec<_>>());
    let weight_scale = scale(weights);
    // (gain per component, head, components)
    let mut steps: Vec<(f64, usize, usize)> = heads
        .iter()
        .zip(weights)
        .enumerate()
        .flat_map(|(h, (sigma, weight))| {
            let steps = sigma[ranks[h]..].chunks(multiple);
            let weight = weight * weight_scale;
            let square = move |x: &f64| (x * sigma_scale) * (x * sigma_scale);
            // Rounding must not reorder the steps of a head.
            steps.scan(f64::INFINITY, move |last, step| {
                *last = last.min(weight * step.iter().map(square).sum::<f64>() / step.len() as f64);
                Some((*last, h, step.len()))
            })
        })
        .collect();
    steps.sort_by(|a, b| b.0.total_cmp(&a.0));
    for (_, head, step) in steps {
        if step > left {
            break;
        }
        left -= step;
        ranks[head] += step;
    }
    Ok(ranks)
}

fn removed_to(sigma: &[f64], removal: f64) -> usize {
    let scale = scale(sigma);
    let allowed = removal * sigma.iter().map(|x| x * scale).sum::<f64>();
    let mut removed = 0.0;
    let mut rank = sigma.len();
    while rank > 1 {
        removed += sigma[rank - 1] * scale;
        if removed > allowed {
            break;
        }
        rank -= 1;
    }
    rank
}

/// The power of two that scales the largest of `values` to about 1, so that sums, squares and products
/// neither overflow nor all underflow. Multiplying by it is exact.
fn scale(values: &[f64]) -> f64 {
    let largest = values.iter().copied().fold(0.0, f64::max);
    libm::ldexp(1.0, -libm::frexp(largest).1.max(-1000))
}

fn rounded(rank: usize, multiple: usize, dim: usize) -> usize {
    rank.checked_next_multiple_of(multiple).map_or(dim, |rank| rank.min(dim))
}

fn check_spectra(heads: &[&[f64]]) -> Result<(), Error> {
    if heads.is_empty() {
        return Err(Error::Zero { what: "number of heads" });
    }
    for sigma in heads {
        if sigma.is_empty() {
            return Err(Error::Zero { what: "dim" });
        }
        let mut last = f64::MAX;
        for (component, &x) in sigma.iter().enumerate() {
            if !(0.0..=last).contains(&x) {
                return Err(Error::Spectrum { component });
            }
            last = x;
        }
    }
    Ok(())
}

/// Checks all arguments and returns the components of the budget.
fn check_budget(heads: &[&[f64]], budget: Budget, multiple: usize) -> Result<usize, Error> {
    if multiple == 0 {
        return Err(Error::Zero { what: "multiple" });
    }
    check_spectra(heads)?;
    let components = budget.components(heads.iter().map(|sigma| sigma.len()).sum())?;
    let least = heads.iter().map(|sigma| rounded(1, multiple, sigma.len())).sum();
    if components < least { Err(Error::Budget { least, components }) } else { Ok(components) }
}
