//! Sampling of the next token.

use crate::ops::{argmax, log_softmax};
use crate::rng::Rng;
use crate::{Error, Result};

/// Sampling parameters: greedy at temperature 0, else nucleus sampling from the smallest set of most likely
/// tokens with probability `top_p`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    temperature: f64,
    top_p: f64,
    seed: u64,
}

impl Sampling {
    /// The most likely token.
    pub const GREEDY: Self = Self { temperature: 0.0, top_p: 1.0, seed: 0 };

    /// Checks the parameters. Equal seeds draw equal tokens, but the CPU and a device draw different ones.
    ///
    /// # Errors
    /// [`Error::Argument`] for a negative or infinite temperature or a `top_p` that is not above 0 and at most
    /// 1.
    pub fn new(temperature: f64, top_p: f64, seed: u64) -> Result<Self> {
        if !(temperature.is_finite() && temperature >= 0.0) {
            return Err(Error::Argument(format!("temperature {temperature} is not a number from 0 on")));
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(Error::Argument(format!("top-p {top_p} is not above 0 and at most 1")));
        }
        Ok(Self { temperature, top_p, seed })
    }

    /// 0 for the most likely token.
    #[must_use]
    pub const fn temperature(&self) -> f64 {
        self.temperature
    }

    /// Probability of the tokens drawn from.
    #[must_use]
    pub const fn top_p(&self) -> f64 {
        self.top_p
    }

    /// Seed of the draws.
    #[must_use]
    pub const fn seed(&self) -> u64 {
        self.seed
    }
}

/// Draws tokens from logits on the host.
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
}

impl Sampler {
    /// A sampler in its initial state.
    #[must_use]
    pub const fn new(sampling: Sampling) -> Self {
        Self { sampling, rng: Rng(sampling.seed) }
    }

    /// The next token, given finite logits.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let Sampling { temperature, top_p, .. } = self.sampling;
        if temperature == 0.0 {
            return argmax(logits) as u32;
        }
        // The maximum is subtracted first: dividing the logits themselves by a low temperature would
        // overflow.
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let scale = |&x: &f32| (f64::from(x - largest) / temperature) as f32;
        let scaled: Vec<f32> = logits.iter().map(scale).collect();
        let mut candidates: Vec<(u32, f64)> =
            (0..).zip(log_softmax(&scaled).iter().map(|x| x.exp())).collect();
        candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
        let mut mass = 0.0;
        let nucleus = candidates.iter().take_while(|(_, p)| {
            let inside = mass < top_p;
            mass += p;
            inside
        });
        let nucleus = nucleus.count();
        let total: f64 = candidates[..nucleus].iter().map(|(_, p)| p).sum();
        let mut left = self.rng.uniform() * total;
        for &(token, p) in &candidates[..nucleus] {
            left -= p;
            if left <= 0.0 {
                return token;
            }
        }
        candidates[nucleus - 1].0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_follow_the_probabilities_inside_the_nucleus() {
        let logits = [2.0_f32.ln(), 0.0, -1.0e9, 1.0_f32.ln()]; // 1/2, 1/4, 0, 1/4
        let sampler = |temperature, top_p| Sampler::new(Sampling::new(temperature, top_p, 1).unwrap());
        assert_eq!(sampler(0.0, 1.0).sample(&logits), 0);
        let mut cold = sampler(1e-45, 1.0);
        assert!((0..100).all(|_| cold.sample(&[-7.0, 3.0, 2.9, 3.0e-4]) == 1));
        let mut half = sampler(1.0, 0.5);
        assert!((0..100).all(|_| half.sample(&logits) == 0));
        let mut all = sampler(1.0, 1.0);
        let mut counts = [0; 4];
        (0..4000).for_each(|_| counts[all.sample(&logits) as usize] += 1);
        assert!(counts[2] == 0 && (1900..2100).contains(&counts[0]), "{counts:?}");
        assert!(Sampling::new(-1.0, 1.0, 0).is_err() && Sampling::new(1.0, 0.0, 0).is_err());
    }
}
