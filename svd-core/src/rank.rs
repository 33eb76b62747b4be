use alloc::vec::Vec;

use crate::Error;

/// The rank that is left when the largest number of trailing singular values is removed whose sum is at most the part
/// `removal` of the total. Never below 1.
///
/// # Errors
/// [`Error::Fraction`] for a `removal` outside 0..=1, [`Error::Zero`] for no values.
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
    if sigma.is_empty() {
        return Err(Error::Zero { what: "dim" });
    }
    let allowed = removal * sigma.iter().sum::<f64>();
    let mut removed = 0.0;
    let mut rank = sigma.len();
    while rank > 1 {
        removed += sigma[rank - 1];
        if removed > allowed {
            break;
        }
        rank -= 1;
    }
    Ok(rank)
}

/// The removal rate, shared by all heads, that keeps at most the part `keep` of all dimensions (and as near to it as
/// bisection gets); then each head's rank follows from [`rank_for_removal`].
///
/// # Errors
/// [`Error::Fraction`] for a `keep` outside 0..=1, [`Error::Zero`] for no heads or an empty head.
/// # Source
/// ZACK, 5.2: the function from the overall compression rate to the ranks.
pub fn removal_for_keep(heads: &[&[f64]], keep: f64) -> Result<f64, Error> {
    if !(0.0..=1.0).contains(&keep) {
        return Err(Error::Fraction { what: "kept part", value: keep });
    }
    if heads.is_empty() {
        return Err(Error::Zero { what: "number of heads" });
    }
    let all: usize = heads.iter().map(|sigma| sigma.len()).sum();
    let kept = |removal: f64| -> Result<f64, Error> {
        let ranks =
            heads.iter().map(|sigma| rank_for_removal(sigma, removal)).collect::<Result<Vec<_>, _>>()?;
        Ok(ranks.iter().sum::<usize>() as f64 / all as f64)
    };
    if kept(0.0)? <= keep {
        return Ok(0.0);
    }
    let (mut low, mut high) = (0.0, 1.0); // kept(low) > keep
    for _ in 0..50 {
        let middle = 0.5 * (low + high);
        if kept(middle)? <= keep { high = middle } else { low = middle }
    }
    Ok(high)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_nested_and_meet_the_budget() {
        let heads: [&[f64]; 2] = [&[10.0, 1.0, 0.1, 0.01], &[4.0, 3.0, 2.0, 1.0]];
        let mut last = 0;
        for keep in [0.25, 0.5, 0.75, 1.0] {
            let removal = removal_for_keep(&heads, keep).unwrap();
            let ranks: Vec<usize> = heads.iter().map(|s| rank_for_removal(s, removal).unwrap()).collect();
            let total = ranks.iter().sum::<usize>();
            assert!(
                total <= (8.0 * keep) as usize && total >= last && ranks[1] >= ranks[0],
                "{keep}: {ranks:?}"
            );
            last = total;
        }
        assert_eq!(removal_for_keep(&heads, 1.0), Ok(0.0));
        assert!(rank_for_removal(&[1.0], f64::NAN).is_err());
    }
}
