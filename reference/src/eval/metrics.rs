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
