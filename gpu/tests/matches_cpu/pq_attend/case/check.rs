//! Expected outputs of a case, computed on the CPU.

use kv_gpu::Element;
use kv_gpu::pq::Side;
use pq_core::{
    Attention, Backend, CodedTokens, Codes, Rows, SoftmaxStats, attend_exact_into, attend_into_with,
    attend_scratch_len, lut_into,
};

use super::{Case, Expected, Inputs, Outputs};
use crate::common::{SIDES, from_element, relative_error};

/// Maximum relative error of an output vector, by element type: the rounding of weights to f16 (2^-11) and of
/// the output.
const TOLERANCES: [(Element, f64); 2] = [(Element::F16, 2e-3), (Element::Bf16, 6e-3)];
/// Maximum absolute error of the log-sum-exp.
const LOG_SUM_EXP: f32 = 2e-3;

impl Case {
    pub(super) fn run_on_cpu(&self, inputs: &Inputs) -> Expected {
        let Self { shape, heads, .. } = *self;
        let (group, dim) = (shape.group, shape.keys.dim());
        let mut scratch = vec![0.0; attend_scratch_len(shape.values, group)];
        let mut out = vec![0.0; inputs.queries.len()];
        let mut stats = vec![SoftmaxStats::EMPTY; inputs.queries.len() / dim];
        let of_heads = out.chunks_exact_mut(group * dim).zip(stats.chunks_exact_mut(group));
        for (i, (out, stats)) in of_heads.enumerate() {
            let (sequence, books) = (i / heads, &inputs.books[i % heads]);
            let n = self.lengths[sequence] as usize;
            let [keys, values] = SIDES.map(|side| {
                let shape = [shape.keys, shape.values][side as usize];
                Codes::new(shape, n, &inputs.codes[i][side as usize][..shape.codes_len(n)]).unwrap()
            });
            let queries: Vec<f32> =
                inputs.queries[i * group * dim..][..group * dim].iter().map(|x| x * self.scale()).collect();
            let mut luts = vec![0.0; group * shape.keys.lut_len()];
            let luts = lut_into(&books[Side::Keys as usize].view(), &queries, &mut luts).unwrap();
            let tokens = CodedTokens::new(keys, values, books[Side::Values as usize].view()).unwrap();
            let of_shape = |has: bool, of_head: usize, all: &[f32]| -> Option<Vec<f32>> {
                let rows = all[i * of_head..][..of_head].chunks_exact(self.capacity);
                has.then(|| rows.flat_map(|row| row[..n].iter().copied()).collect())
            };
            let norms = inputs.norms.each_ref().map(|norms| of_shape(shape.norms, self.capacity, norms));
            let addends = of_shape(shape.addends, group * self.capacity, &inputs.addends);
            let tokens = tokens.with_key_scales(norms[0].as_deref()).unwrap();
            let tokens = tokens.with_value_scales(norms[1].as_deref()).unwrap();
            let tokens = tokens.with_bias(addends.as_deref());
            attend_into_with(Backend::Scalar, &luts, &tokens, &mut scratch, out, stats).unwrap();
            let m = self.exact_lengths[sequence] as usize;
            if m > 0 {
                let [keys, values] = SIDES.map(|side| -> Vec<f32> {
                    let rows = &inputs.exact[side as usize][i * self.exact_capacity * dim..][..m * dim];
                    rows.iter().map(|x| x * inputs.exact_factors[i % heads][side as usize]).collect()
                });
                let tokens = pq_core::ExactTokens::contiguous(&keys, dim, &values, dim).unwrap();
                let (attention, mut scratch) = (Attention::default(), vec![0.0; queries.len()]);
                let queries = Rows::from(&queries[..]);
                attend_exact_into(&attention, queries, &tokens, &mut scratch, out, stats).unwrap();
            }
            out.chunks_exact_mut(dim).zip(stats).for_each(|(out, stats)| stats.normalize(out));
        }
        Expected { out, stats }
    }

    pub(super) fn compare(&self, inputs: &Inputs, got: &Outputs, expected: &Expected) {
        let (shape, group, dim) = (self.shape, self.shape.group, self.shape.keys.dim());
        let tolerance = TOLERANCES.iter().find(|(element, _)| *element == shape.element).unwrap().1;
        for (i, stats) in expected.stats.iter().enumerate() {
            let (sequence, vector) = (i / group / self.heads, i * dim..(i + 1) * dim);
            let is_empty = self.lengths[sequence] + self.exact_lengths[sequence] == 0;
            let out: Vec<f32> =
                got.out[vector.clone()].iter().map(|&bits| from_element(shape.element, bits)).collect();
            let log = f32::from_bits(got.log_sum_exp[i]);
            let place = format!(
                "{shape:?} lengths {:?} {:?} head {} query {}",
                self.lengths,
                self.exact_lengths,
                i / group,
                i % group
            );
            if inputs.queries[vector.clone()].iter().any(|x| !x.is_finite()) {
                let spoiled = is_empty || out.iter().all(|x| x.is_nan());
                assert!(spoiled, "{place}: a query that is not finite gives {out:?}");
                continue;
            }
            let expected = &expected.out[vector];
            let error = relative_error(&out, expected);
            assert!(error <= tolerance, "{place}: error {error}\n{out:?}\n{expected:?}");
            if is_empty {
                assert_eq!(log, f32::NEG_INFINITY, "{place}");
            } else {
                let error = (log - stats.log_sum_exp()).abs();
                assert!(error <= LOG_SUM_EXP, "{place}: log-sum-exp {log} for {}", stats.log_sum_exp());
            }
        }
    }
}
