/// An online softmax: what has been attended to so far by one query head.
#[derive(Clone, Debug)]
pub(crate) struct Accumulator {
    max: f32,
    sum: f32,
    out: Vec<f32>, // (head_dim,) sum of exp(score - max) * value
}

impl Accumulator {
    pub fn new(head_dim: usize) -> Self {
        Self { max: f32::NEG_INFINITY, sum: 0.0, out: vec![0.0; head_dim] }
    }

    /// Adds tokens whose scores had maximum `max` and sum `sum` of `exp(score - max)`, and whose values add up to `out`. An
    /// `out` shorter than the head stands for zeros in the rest.
    pub fn merge(&mut self, max: f32, sum: f32, out: &[f32]) {
        if max == f32::NEG_INFINITY {
            return;
        }
        let top = self.max.max(max);
        let (old, new) = ((self.max - top).exp(), (max - top).exp());
        self.sum = self.sum * old + sum * new;
        for x in &mut self.out {
            *x *= old;
        }
        for (x, y) in self.out.iter_mut().zip(out) {
            *x += new * y;
        }
        self.max = top;
    }

    /// Adds what another one has attended to.
    pub fn merge_with(&mut self, other: &Self) {
        self.merge(other.max, other.sum, &other.out);
    }

    /// The sum of values, for a change of basis.
    pub fn values_mut(&mut self) -> &mut [f32] {
        &mut self.out
    }

    /// The sum of the softmax weights that the values have been multiplied with.
    pub fn weight(&self) -> f32 {
        self.sum
    }

    /// Whether nothing has been attended to.
    pub fn is_empty(&self) -> bool {
        self.max == f32::NEG_INFINITY
    }

    /// Writes the mean of the values under the softmax. It must not be empty.
    pub fn finish(&self, out: &mut [f32]) {
        for (out, x) in out.iter_mut().zip(&self.out) {
            *out = x / self.sum;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_merge_to_the_whole() {
        let (scores, values) = ([1.0_f32, -50.0, 90.0, 89.0], [1.0, 2.0, 3.0, 4.0]);
        let mut accumulator = Accumulator::new(1);
        accumulator.merge(f32::NEG_INFINITY, 0.0, &[0.0]); // a part without tokens
        for (s, v) in scores.iter().zip(values) {
            accumulator.merge(*s, 1.0, &[v]);
        }
        let mut out = [0.0];
        accumulator.finish(&mut out);
        let expected = (3.0 * 1.0 + 4.0 * (-1.0_f32).exp()) / (1.0 + (-1.0_f32).exp());
        assert!((out[0] - expected).abs() < 1e-6);
    }
}
