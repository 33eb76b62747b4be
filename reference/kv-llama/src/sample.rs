//! Sampling of the next token.

use std::borrow::Cow;
use std::collections::BTreeSet;

use crate::ops::{argmax, log_softmax};
use crate::rng::Rng;
use crate::{Error, Result};

/// Sampling parameters: greedy at temperature 0, else a draw from the most likely tokens.
///
/// What changes the distribution comes in the order of transformers: the repetition penalty on logits, the
/// temperature, then the filters top-k, top-p and min-p, each of which leaves at least one token and sees the
/// probabilities of those that the filters before it have left.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    temperature: f64,
    top_p: f64,
    top_k: usize, // 0 for all
    min_p: f64,
    repetition_penalty: f64,
    seed: u64,
}

impl Sampling {
    /// The most likely token.
    pub const GREEDY: Self =
        Self { temperature: 0.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0, seed: 0 };

    /// Checks the parameters. `top_p` keeps the smallest set of most likely tokens with this probability.
    /// Equal seeds draw equal tokens, but the CPU and a device draw different ones.
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
        Ok(Self { temperature, top_p, seed, ..Self::GREEDY })
    }

    /// Keeps the `k` most likely tokens; 0 keeps all.
    #[must_use]
    pub const fn with_top_k(self, k: usize) -> Self {
        Self { top_k: k, ..self }
    }

    /// Keeps tokens that are at least `min_p` times as likely as the most likely one (Nguyen et al.,
    /// arXiv 2407.01082); 0 keeps all.
    ///
    /// # Errors
    /// [`Error::Argument`] for a number outside 0 to 1.
    pub fn with_min_p(self, min_p: f64) -> Result<Self> {
        match (0.0..=1.0).contains(&min_p) {
            true => Ok(Self { min_p, ..self }),
            false => Err(Error::Argument(format!("min-p {min_p} is not a number from 0 to 1"))),
        }
    }

    /// Divides positive logits of tokens that the prompt or the text after it has by `penalty`, and multiplies
    /// negative ones by it (Keskar et al., arXiv 1909.05858, as transformers and vLLM have it); 1 changes
    /// nothing.
    ///
    /// # Errors
    /// [`Error::Argument`] for a number that is not above 0 or is infinite.
    pub fn with_repetition_penalty(self, penalty: f64) -> Result<Self> {
        match penalty.is_finite() && penalty > 0.0 {
            true => Ok(Self { repetition_penalty: penalty, ..self }),
            false => Err(Error::Argument(format!("repetition penalty {penalty} is not a number above 0"))),
        }
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

    /// Whether the temperature and `top_p` are all there is: what a device draws without the host.
    #[must_use]
    pub const fn is_plain(&self) -> bool {
        self.top_k == 0 && self.min_p == 0.0 && self.repetition_penalty == 1.0
    }

    /// Whether the next token is the largest logit's.
    #[must_use]
    pub const fn is_greedy(&self) -> bool {
        self.temperature == 0.0 && self.repetition_penalty == 1.0
    }
}

/// Draws tokens from logits on the host.
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
    seen: BTreeSet<u32>, // tokens of the text, if they are penalized
}

impl Sampler {
    /// A sampler at the beginning of a text.
    #[must_use]
    pub const fn new(sampling: Sampling) -> Self {
        Self { sampling, rng: Rng(sampling.seed), seen: BTreeSet::new() }
    }

    /// A sampler after a prompt, whose tokens the repetition penalty counts.
    #[must_use]
    pub fn after(sampling: Sampling, prompt: &[u32]) -> Self {
        let mut sampler = Self::new(sampling);
        sampler.see(prompt);
        sampler
    }

    /// The parameters.
    #[must_use]
    pub const fn sampling(&self) -> &Sampling {
        &self.sampling
    }

    fn see(&mut self, tokens: &[u32]) {
        if self.sampling.repetition_penalty != 1.0 {
            self.seen.extend(tokens);
        }
    }

    /// The next token, given finite logits.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let logits = self.penalized(logits);
        let token = match self.sampling.temperature == 0.0 {
            true => argmax(&logits) as u32,
            false => {
                let candidates = candidates(&self.sampling, &logits);
                let total: f64 = candidates.iter().map(|(_, p)| p).sum();
                let mut left = self.rng.uniform() * total;
                let drawn = candidates.iter().find(|(_, p)| {
                    left -= p;
                    left <= 0.0
                });
                drawn.or(candidates.last()).map_or(0, |(token, _)| *token)
            }
        };
        self.see(&[token]);
        token
    }

    /// The logits after the repetition penalty.
    fn penalized<'a>(&self, logits: &'a [f32]) -> Cow<'a, [f32]> {
        let mut logits = Cow::Borrowed(logits);
        let penalty = self.sampling.repetition_penalty as f32;
        for &token in &self.seen {
            if let Some(x) = logits.to_mut().get_mut(token as usize) {
                let penalized = if *x > 0.0 { *x / penalty } else { *x * penalty };
                *x = penalized.clamp(f32::MIN, f32::MAX);
            }
        }
        logits
    }
}

/// The tokens to draw from, most likely ones first, with their probabilities before the filters.
fn candidates(sampling: &Sampling, logits: &[f32]) -> Vec<(u32, f64)> {
    let &Sampling { temperature, top_p, top_k, min_p, .. } = sampling;
    // The maximum is subtracted first: dividing the logits themselves by a low temperature would overflow.
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scale = |&x: &f32| (f64::from(x - largest) / temperature) as f32;
    let scaled: Vec<f32> = logits.iter().map(scale).collect();
    let mut candidates: Vec<(u32, f64)> = (0..).zip(log_softmax(&scaled).iter().map(|x| x.exp())).collect();
    candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
    let mut total = 1.0;
    if (1..candidates.len()).contains(&top_k) {
        candidates.truncate(top_k);
        total = candidates.iter().map(|(_, p)| p).sum();
    }
    let mut mass = 0.0;
    let nucleus = candidates.iter().take_while(|(_, p)| {
        let inside = mass < top_p * total;
        mass += p;
        inside
    });
    candidates.truncate(nucleus.count());
    let least = candidates.first().map_or(0.0, |(_, p)| min_p * p);
    candidates.retain(|(_, p)| *p >= least);
    candidates
}

/// The logarithms of the probabilities that a model gives a token and the most likely ones, before sampling
/// changes them.
#[derive(Clone, Debug, PartialEq)]
pub struct LogProbabilities {
    /// Of the token.
    pub token: f64,
    /// The most likely tokens, with theirs.
    pub top: Vec<(u32, f64)>,
}

impl LogProbabilities {
    /// Those of `token`, and of the `n` most likely tokens, given finite logits. A token without a logit has
    /// probability 0.
    #[must_use]
    pub fn of(logits: &[f32], token: u32, n: usize) -> Self {
        let all = log_softmax(logits);
        let own = all.get(token as usize).copied().unwrap_or(f64::NEG_INFINITY);
        let mut top: Vec<(u32, f64)> = (0..).zip(all).collect();
        let n = n.min(top.len());
        if n < top.len() {
            top.select_nth_unstable_by(n, |a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            top.truncate(n);
        }
        top.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        Self { token: own, top }
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

    const LOGITS: [f32; 6] = [1.0, -0.5, 2.0, 0.3, 2.0, -3.0];

    /// The tokens that each filter alone leaves are those of its formula, over softmax probabilities.
    #[test]
    fn filters_keep_what_their_formulas_keep() {
        let temperature = 0.7;
        let weights: Vec<f64> = LOGITS.iter().map(|&x| (f64::from(x) / temperature).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let p: Vec<f64> = weights.iter().map(|w| w / sum).collect();
        let larger =
            |i: usize| (0..6).filter(|&j| p[j] > p[i] || (p[j] == p[i] && j < i)).collect::<Vec<_>>();
        let warm = Sampling::new(temperature, 1.0, 0).unwrap();
        let kept = |sampling: &Sampling| {
            let mut kept: Vec<u32> =
                candidates(sampling, &LOGITS).into_iter().map(|(token, _)| token).collect();
            kept.sort_unstable();
            kept
        };
        let those = |keeps: &dyn Fn(usize) -> bool| {
            (0..6).filter(|&i| keeps(i)).map(|i| i as u32).collect::<Vec<_>>()
        };
        for k in 1..8 {
            assert_eq!(kept(&warm.with_top_k(k)), those(&|i| larger(i).len() < k), "top-k {k}");
        }
        for min_p in [0.0, 0.05, 0.2, 0.9, 1.0] {
            let keeps = |i: usize| p[i] >= min_p * p[2];
            assert_eq!(kept(&warm.with_min_p(min_p).unwrap()), those(&keeps), "min-p {min_p}");
        }
        for top_p in [0.01, 0.5, 0.8, 0.99, 1.0] {
            let keeps = |i: usize| larger(i).iter().map(|&j| p[j]).sum::<f64>() < top_p;
            assert_eq!(kept(&Sampling::new(temperature, top_p, 0).unwrap()), those(&keeps), "top-p {top_p}");
        }
        // The two largest have half of what top-k leaves each, so 0.4 of it is one token.
        assert_eq!(kept(&Sampling::new(temperature, 0.4, 0).unwrap().with_top_k(2)), [2]);
        assert!(warm.with_min_p(-0.1).is_err() && warm.with_min_p(f64::NAN).is_err());
    }

    #[test]
    fn tokens_of_the_text_are_penalized_once() {
        let greedy = Sampling::GREEDY.with_repetition_penalty(1.5).unwrap();
        let mut sampler = Sampler::after(greedy, &[1, 2, 2]);
        assert_eq!(*sampler.penalized(&LOGITS), [1.0, -0.5 * 1.5, 2.0 / 1.5, 0.3, 2.0, -3.0]);
        let drawn: Vec<u32> = (0..3).map(|_| sampler.sample(&LOGITS)).collect();
        assert_eq!(drawn, [4, 2, 2], "1.33 each, then 1.0");
        assert_eq!(*Sampler::new(Sampling::GREEDY).penalized(&LOGITS), LOGITS);
        assert!(!greedy.is_greedy() && !greedy.is_plain() && Sampling::GREEDY.is_greedy());
        assert!(greedy.with_repetition_penalty(0.0).is_err());
    }

    #[test]
    fn log_probabilities_are_those_of_the_softmax() {
        let sum: f64 = LOGITS.iter().map(|&x| f64::from(x).exp()).sum();
        let log_p = |i: u32| f64::from(LOGITS[i as usize]) - sum.ln();
        let found = LogProbabilities::of(&LOGITS, 3, 4);
        assert!((found.token - log_p(3)).abs() < 1e-6);
        assert_eq!(found.top.iter().map(|top| top.0).collect::<Vec<_>>(), [2, 4, 0, 3]);
        assert!(found.top.iter().all(|&(i, x)| (x - log_p(i)).abs() < 1e-6));
        assert_eq!(LogProbabilities::of(&LOGITS, 0, 9).top.len(), 6);
        assert!(LogProbabilities::of(&LOGITS, 0, 0).top.is_empty());
        assert_eq!(LogProbabilities::of(&LOGITS, 6, 0).token, f64::NEG_INFINITY);
    }
}
