//! Arbitrary scores of a group of query heads: no result is NaN, and the group selects the tokens with the
//! highest weights by the definition in f64.
#![no_main]

use libfuzzer_sys::fuzz_target;
use pq_core::*;

/// The score that the softmax substitutes for any `f32`.
fn clean(score: f32) -> f64 {
    if score.is_nan() { f64::NEG_INFINITY } else { f64::from(score.min(f32::MAX)) }
}

fn log_sum_exp(values: impl Iterator<Item = f64> + Clone) -> f64 {
    let max = values.clone().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY { max } else { max + values.map(|x| (x - max).exp()).sum::<f64>().ln() }
}

fuzz_target!(|input: (u8, bool, u16, u8, Vec<f32>)| {
    let (group, max_rule, k, spread, mut scores) = input;
    let group = 1 + usize::from(group % 8);
    let n = scores.len() / group;
    scores.truncate(group * n);
    // Arbitrary bits are mostly huge or tiny: half of the inputs are spread over 1e-1 to 1e6 instead.
    if spread < 128 {
        let width = 10_f32.powi(i32::from(spread % 8) - 1);
        scores
            .iter_mut()
            .filter(|s| s.is_finite())
            .for_each(|s| *s = (s.to_bits() % 65_537) as f32 / 65_537.0 * width);
    }
    let rule = if max_rule { GroupRule::MaxOfSoftmax } else { GroupRule::SumOfSoftmax };
    let (mut stats, mut combined) = (vec![SoftmaxStats::EMPTY; group], vec![f32::NAN; n]);
    combine_group_into(&scores, rule, &mut stats, &mut combined).unwrap();
    assert!(combined.iter().all(|x| !x.is_nan()));
    let mut tokens = vec![0; n.min(k.into())];
    let found = top_k_into(&combined, k.into(), &mut tokens).unwrap();

    let heads = scores.chunks_exact(n.max(1)).map(|scores| {
        let max = scores.iter().map(|&s| clean(s)).fold(f64::NEG_INFINITY, f64::max);
        (max, log_sum_exp(scores.iter().map(|&s| clean(s) - max)))
    });
    let heads: Vec<(f64, f64)> = heads.collect();
    let weight = |t: usize| {
        if group == 1 {
            return if scores[t].is_nan() { f64::NEG_INFINITY } else { f64::from(scores[t]) };
        }
        let weights = heads.iter().enumerate().map(|(g, &(max, total))| {
            if max == f64::NEG_INFINITY { max } else { clean(scores[g * n + t]) - max - total }
        });
        let weight = if max_rule { weights.fold(f64::NEG_INFINITY, f64::max) } else { log_sum_exp(weights) };
        // Logarithms are f32.
        if weight < f64::from(f32::MIN) { f64::NEG_INFINITY } else { weight }
    };
    let chosen = |t: usize| tokens[..found].binary_search(&(t as u32)).is_ok();
    let worst_in = (0..n).filter(|&t| chosen(t)).map(weight).fold(f64::INFINITY, f64::min);
    let best_out = (0..n).filter(|&t| !chosen(t)).map(weight).fold(f64::NEG_INFINITY, f64::max);
    // The order of one head is exact. Logarithms of a group are rounded, and at least f32::MIN.
    let tolerance = if group > 1 && worst_in.is_finite() { 1e-4 + 1e-6 * worst_in.abs() } else { 0.0 };
    let at_the_end = group > 1 && best_out < 0.999_999 * f64::from(f32::MIN);
    assert!(best_out <= worst_in + tolerance || at_the_end, "{best_out} is out, {worst_in} is in");
});
