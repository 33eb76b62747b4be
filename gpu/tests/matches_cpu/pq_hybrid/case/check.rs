//! Expected results of a step of a case, computed on the CPU.

use kv_gpu::Element;
use kv_gpu::pq::{MEAN_TOKENS, Side};
use pq_core::{
    Attention, CodedTokens, Codes, HybridScratch, Lut, RowBudget, Rows, SoftmaxStats, attend_exact_into,
    hybrid_attend_into, hybrid_select_into, lut_into,
};

use super::{Case, Inputs, Outputs};
use crate::common::selection::check_selection;
use crate::common::{SIDES, from_element, relative_error};

/// Maximum relative error of an output vector, by element type: the rounding of weights to f16 (2^-11) and of
/// the output.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 2e-3), (Element::Bf16, 6e-3)];
/// Maximum absolute error of the log-sum-exp.
const LOG_SUM_EXP: f32 = 2e-3;
/// How much larger or smaller a bound may be for which the CPU finds as many rows, or one more or less:
/// rounding moves weights between buckets, whose mean squares differ by up to a quarter.
const BOUND: f32 = 0.15;

impl Case {
    /// Checks a step against the CPU, which attends to the rows that the device has selected.
    pub fn check(&self, inputs: &Inputs, got: &Outputs) {
        let Self { shape, heads, capacity, .. } = *self;
        let (group, dim) = (shape.group, shape.keys.dim());
        let tolerance = TOLERANCES.iter().find(|(element, _)| *element == shape.element).unwrap().1;
        for i in 0..self.batch * heads {
            let (sequence, books) = (i / heads, &inputs.books[i % heads]);
            let (n, found) = (self.lengths[sequence] as usize, got.found[i] as usize);
            let [keys, values] = SIDES.map(|side| {
                let shape = [shape.keys, shape.values][side as usize];
                Codes::new(shape, n, &inputs.codes[i][side as usize][..shape.codes_len(n)]).unwrap()
            });
            let scaled = |queries: &[f32]| -> Vec<f32> {
                queries[i * group * dim..][..group * dim].iter().map(|x| x * self.scale()).collect()
            };
            let (queries, code_queries) = (scaled(&inputs.queries), scaled(&inputs.code_queries));
            let mut luts = vec![0.0; group * shape.keys.lut_len()];
            let luts = lut_into(&books[Side::Keys as usize].view(), &code_queries, &mut luts).unwrap();
            let [key_norms, value_norms] = inputs.norms.each_ref().map(|norms| &norms[i * capacity..][..n]);
            let bias: Vec<f32> = inputs
                .addends
                .chunks_exact(capacity)
                .skip(i * group)
                .take(group)
                .flat_map(|query| &query[..n])
                .copied()
                .collect();
            let tokens = CodedTokens::new(keys, values, books[Side::Values as usize].view())
                .unwrap()
                .with_key_scales(key_norms)
                .unwrap()
                .with_value_scales(value_norms)
                .unwrap()
                .with_bias(shape.addends.then_some(&bias[..]));
            let variance = |query: &[f32]| {
                let errors = &inputs.errors[i % heads * dim..][..dim];
                let variance: f32 = query.iter().zip(errors).map(|(q, e)| q * q * e).sum();
                if variance.is_finite() { variance } else { 0.0 }
            };
            let variances: Vec<f32> = code_queries.chunks_exact(dim).map(variance).collect();
            let hybrid = pq_core::Hybrid {
                rows: RowBudget::Count(found),
                rule: shape.rule,
                score_variances: if self.has_errors { &variances } else { &[] },
                others: &[],
            };
            let mut floats = vec![0.0; HybridScratch::len(shape.values, group, n)];
            let mut coded = vec![SoftmaxStats::EMPTY; group];
            let mut scratch = HybridScratch::new(shape.values, n, &mut floats, &mut coded).unwrap();
            let mut best = vec![0; n];
            let of_head = |x: &[Vec<f32>; 2], capacity: usize| {
                x.each_ref().map(|x| x[i * capacity * dim..][..capacity * dim].to_vec())
            };
            let exact = of_head(&inputs.exact, self.exact_capacity);
            let m = self.exact_lengths[sequence] as usize;
            let exact = exact.each_ref().map(|rows| &rows[..m * dim]);
            let exact =
                (m > 0).then(|| pq_core::ExactTokens::contiguous(exact[0], dim, exact[1], dim).unwrap());
            let add = |rows: &pq_core::ExactTokens<'_, f32>, out: &mut [f32], stats: &mut [SoftmaxStats]| {
                let (attention, mut scratch) = (Attention::default(), vec![0.0; queries.len()]);
                let queries = Rows::from(&queries[..]);
                attend_exact_into(&attention, queries, rows, &mut scratch, out, stats).unwrap();
            };
            let is_finite = |query: &[f32]| query.iter().all(|x| x.is_finite());
            // The CPU gives infinite scores all weight, the device leaves their query out of the choice.
            if shape.adaptive && queries.chunks_exact(dim).all(is_finite) {
                let mut others = vec![SoftmaxStats::EMPTY; group];
                exact.iter().for_each(|exact| add(exact, &mut vec![0.0; group * dim], &mut others));
                let mut count = |factor: f32| {
                    let rows = RowBudget::Error {
                        bound: self.bound * factor,
                        value_error: inputs.value_errors[i % heads],
                        most: self.most(sequence),
                    };
                    let hybrid = pq_core::Hybrid { rows, others: &others, ..hybrid };
                    hybrid_select_into(&luts, &tokens, &hybrid, &mut scratch, &mut best).unwrap()
                };
                let (least, most) = (count(1.0 + BOUND), count(1.0 - BOUND));
                assert!((least..=most + 1).contains(&found) || found + 1 == least, "{self:?}: {found} rows");
            }
            hybrid_select_into(&luts, &tokens, &hybrid, &mut scratch, &mut best).unwrap();

            let selected = &got.selected[i * self.selected_len..][..self.selected_len];
            assert!(selected[found..].iter().all(|&t| t == u32::MAX), "{self:?}: behind the selected");
            let selected = &selected[..found];
            assert!(selected.is_sorted_by(|a, b| a < b) && selected.iter().all(|&t| (t as usize) < n));
            check_selection(
                shape.rule,
                scratch.search().scores(),
                n,
                selected,
                &format!("{self:?} head {i}"),
            );
            let rounding = |g: usize| {
                if !(shape.addends || shape.key_norms) || n == 0 {
                    return 0.0;
                }
                let variance = if self.has_errors { variances[g] } else { 0.0 };
                let (highest, bias) = (highest_score(&luts.lut(g)), bias.get(g * n..).unwrap_or_default());
                let addends = bias.iter().copied().chain(std::iter::repeat(0.0));
                let most = key_norms
                    .iter()
                    .zip(addends)
                    .map(|(norm, addend)| norm * highest + addend + variance / 2.0);
                score_rounding(most, &scratch.search().scores()[g * n..][..n])
            };
            let roundings: Vec<f32> = (0..group).map(rounding).collect();

            let (mut out, mut stats) = (vec![0.0; group * dim], vec![SoftmaxStats::EMPTY; group]);
            hybrid_attend_into(&tokens, selected, &mut scratch, &mut out, &mut stats).unwrap();
            if shape.mean_errors {
                let means = &inputs.means[i * self.blocks() * dim..];
                add_means(scratch.search().scores(), n, &stats, means, &mut out);
            }
            let [keys, values] = of_head(&inputs.rows, capacity);
            let rows = pq_core::ExactTokens::contiguous(&keys, dim, &values, dim).unwrap();
            let rows = rows.chosen(selected).unwrap();
            for rows in [(found > 0).then_some(rows), exact].into_iter().flatten() {
                add(&rows, &mut out, &mut stats);
            }
            for (g, (out, stats)) in out.chunks_exact_mut(dim).zip(&stats).enumerate() {
                stats.normalize(out);
                let query = i * group + g;
                let place = format!("{self:?} head {i} query {g}");
                let got_out: Vec<f32> = got.out[query * dim..][..dim]
                    .iter()
                    .map(|&bits| from_element(shape.element, bits))
                    .collect();
                let log = f32::from_bits(got.log_sum_exp[query]);
                let is_empty = n + m == 0;
                if !is_finite(&queries[g * dim..][..dim]) {
                    assert!(is_empty || got_out.iter().all(|x| x.is_nan()), "{place}: {got_out:?}");
                    continue;
                }
                let error = relative_error(&got_out, out);
                let most = tolerance + f64::from(roundings[g]);
                assert!(error <= most, "{place}: error {error} of {most}\n{got_out:?}\n{out:?}");
                if is_empty {
                    assert_eq!(log, f32::NEG_INFINITY, "{place}");
                } else {
                    let error = (log - stats.log_sum_exp()).abs();
                    let most = LOG_SUM_EXP + roundings[g];
                    let expected = stats.log_sum_exp();
                    assert!(error <= most, "{place}: log-sum-exp {log} for {expected}, {error} of {most}");
                }
            }
        }
    }
}

/// Adds to the sums of values the mean error of each block times the sum of its weights, given scores (group,
/// n), of selected tokens minus infinity.
fn add_means(scores: &[f32], n: usize, stats: &[SoftmaxStats], means: &[f32], out: &mut [f32]) {
    let dim = out.len() / stats.len();
    let of_query = scores.chunks_exact(n.max(1)).zip(stats).zip(out.chunks_exact_mut(dim));
    for ((scores, stats), out) in of_query.filter(|((_, stats), _)| stats.max > f32::NEG_INFINITY) {
        for (scores, mean) in scores.chunks(MEAN_TOKENS).zip(means.chunks_exact(dim)) {
            let weight: f64 = scores.iter().map(|score| f64::from(score - stats.max).exp()).sum();
            out.iter_mut().zip(mean).for_each(|(out, mean)| *out += weight as f32 * mean);
        }
    }
}

/// The highest score that codes can have.
fn highest_score(lut: &Lut<'_>) -> f32 {
    (0..lut.shape().m()).map(|j| lut.row(j).iter().copied().fold(f32::MIN, f32::max)).sum()
}

/// How much the rounding of table entries may change the scores, on average over the weights. An entry is a
/// half less the highest of its subspace, so its rounding is 2^-11 of what its token loses by it. Tokens of
/// large weight have lost little, unless addends or norms have made up for it. `most` are the scores of
/// tokens with the best codes.
fn score_rounding(most: impl Iterator<Item = f32>, scores: &[f32]) -> f32 {
    let max = scores.iter().copied().fold(f32::MIN, f32::max);
    let weights = scores.iter().map(|score| (score - max).exp());
    let lost = most.zip(scores).map(|(most, score)| most - score);
    let (sum, all) =
        weights.zip(lost).fold((0.0, 0.0), |(sum, all), (weight, lost)| (sum + weight * lost, all + weight));
    sum / all / 2048.0
}
