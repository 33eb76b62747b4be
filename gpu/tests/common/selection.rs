//! Whether selected tokens are those of the largest weight, but for the rounding of scores on a device.

use pq_core::GroupRule;

/// Maximum error of a coded score, and the same relative to the spread of the scores: table entries are f16.
const SCORE: f64 = 2e-3;
const SCORE_OF_SPREAD: f64 = 1e-3;

/// Checks that no token that was left out has a larger weight than a selected one, but for rounding.
///
/// # Shapes
/// `scores` (group, n): the CPU's; queries with scores that are not finite have no say.
pub fn check_selection(rule: GroupRule, scores: &[f32], n: usize, selected: &[u32], place: &str) {
    if selected.is_empty() || selected.len() == n {
        return;
    }
    let queries: Vec<Vec<f64>> = scores
        .chunks_exact(n)
        .filter(|scores| scores.iter().all(|x| x.is_finite()))
        .map(|scores| {
            let max = scores.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = scores.iter().map(|&x| f64::from(x - max).exp()).sum();
            scores.iter().map(|&x| f64::from(x - max) - sum.ln()).collect()
        })
        .collect();
    let weight = |t: usize| {
        let logs = queries.iter().map(|logs| logs[t]);
        let max = logs.clone().fold(f64::NEG_INFINITY, f64::max);
        match rule {
            GroupRule::MaxOfSoftmax => max,
            GroupRule::SumOfSoftmax => max + logs.map(|log| (log - max).exp()).sum::<f64>().ln(),
        }
    };
    let mut is_in = vec![false; n];
    selected.iter().for_each(|&t| is_in[t as usize] = true);
    let of = |wanted: bool| (0..n).filter(|&t| is_in[t] == wanted).map(weight).collect::<Vec<_>>();
    let least = of(true).into_iter().fold(f64::INFINITY, f64::min);
    let most = of(false).into_iter().fold(f64::NEG_INFINITY, f64::max);
    let spread = queries.iter().flatten().fold(0.0, |spread: f64, log| spread.max(-log));
    let tolerance = SCORE + SCORE_OF_SPREAD * spread;
    assert!(queries.is_empty() || least >= most - tolerance, "{place}: {least} {most}, spread {spread}");
}
