//! Metrics of logits. Everything is summed in `f64`.

use kv_llama::ops::log_softmax;

/// Kullback-Leibler divergence of `q` from `p` in nats, both given as logarithms of probabilities. Never
/// negative; NaN for logarithms of NaN.
#[must_use]
pub fn kl_divergence(p: &[f64], q: &[f64]) -> f64 {
    let terms = p.iter().zip(q).filter(|(p, _)| **p != f64::NEG_INFINITY).map(|(p, q)| p.exp() * (p - q));
    let sum: f64 = terms.sum();
    if sum < 0.0 { 0.0 } else { sum }
}

/// The quality of a sequence of predictions relative to a reference's, position by position.
#[derive(Clone, Debug, Default)]
pub struct Divergence {
    nll: Vec<f64>, // nats, of the true next token
    kl: Vec<f64>,  // nats, from the reference
    agree: usize,  // positions where both have the same most likely token
}

impl Divergence {
    /// Adds a position: the logits under test, the reference's, and the true next token.
    ///
    /// # Panics
    /// When `next` is outside the logits.
    pub fn add(&mut self, logits: &[f32], reference: &[f32], next: u32) {
        let (p, q) = (log_softmax(reference), log_softmax(logits));
        self.nll.push(-q[next as usize]);
        let kl = kl_divergence(&p, &q);
        self.kl.push(kl);
        // Among NaNs no token is the most likely one.
        let agree = !kl.is_nan() && kv_llama::ops::argmax(logits) == kv_llama::ops::argmax(reference);
        self.agree += usize::from(agree);
    }

    /// `exp` of the mean negative log-likelihood.
    #[must_use]
    pub fn perplexity(&self) -> f64 {
        mean(&self.nll).exp()
    }

    /// Mean divergence from the reference, in nats.
    #[must_use]
    pub fn kl(&self) -> f64 {
        mean(&self.kl)
    }

    /// Fraction of positions where the most likely token is the reference's.
    #[must_use]
    pub fn top1(&self) -> f64 {
        self.agree as f64 / self.nll.len() as f64
    }

    /// Divergence at every position, in nats.
    #[must_use]
    pub fn kl_by_position(&self) -> &[f64] {
        &self.kl
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fair_coin_has_perplexity_two() {
        let mut divergence = Divergence::default();
        for next in [0, 1, 1, 0] {
            divergence.add(&[3.0, 3.0], &[3.0, 3.0], next);
        }
        assert!((divergence.perplexity() - 2.0).abs() < 1e-12);
        assert_eq!((divergence.kl(), divergence.top1()), (0.0, 1.0));
    }

    #[test]
    fn divergence_of_two_coins() {
        // p = (1/2, 1/2), q = (3/4, 1/4): KL = ln 2 - (ln 3) / 2.
        let q = [3.0_f32.ln(), 0.0];
        let mut divergence = Divergence::default();
        divergence.add(&q, &[1.0, 1.0], 1);
        divergence.add(&[0.0, 1.0], &[1.0, 0.0], 0);
        assert!((divergence.kl_by_position()[0] - (2.0_f64.ln() - 3.0_f64.ln() / 2.0)).abs() < 1e-7);
        // Ties go to the first, so (1, 1) agrees with q and (0, 1) does not.
        assert_eq!(divergence.top1(), 0.5);
        assert!(
            (kl_divergence(&log_softmax(&[f32::NEG_INFINITY, 0.0]), &log_softmax(&[0.0, 0.0]))
                - 2.0_f64.ln())
            .abs()
                < 1e-12
        );
    }

    #[test]
    fn nan_is_no_agreement() {
        for (logits, reference) in
            [([f32::NAN; 2], [0.0; 2]), ([0.0; 2], [f32::NAN; 2]), ([f32::NAN; 2], [f32::NAN; 2])]
        {
            let mut divergence = Divergence::default();
            divergence.add(&logits, &reference, 0);
            assert!(divergence.kl().is_nan() && divergence.top1() == 0.0, "{logits:?}, {reference:?}");
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let log_p = log_softmax(&[1e30, 1e30, -1e30]);
        assert!((log_p[0] + 2.0_f64.ln()).abs() < 1e-12 && log_p[2] < -1e20);
    }
}
