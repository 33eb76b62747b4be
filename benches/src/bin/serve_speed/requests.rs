//! The requests of a run: when they come, and how long their prompts and answers are.

use clap::ValueEnum;
use kv_llama::Rng;

/// The lengths of the four traces of ZACK's evaluation (table 3). The paper states mean, least and most
/// tokens of each side, and Poisson arrivals; the traces themselves have other tokenizers. Between least and
/// most, lengths here are drawn so that they have the mean ([`Lengths::draw`]). `16.2K` is 16,200.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Profile {
    /// Classification of texts about films
    Imdb,
    /// Summaries of articles
    Arxiv,
    /// Answers from retrieved documents
    Cocktail,
    /// Completion of code
    Humaneval,
}

/// Tokens of one side of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lengths {
    mean: f64,
    least: f64,
    most: f64,
}

/// A request that has not come yet.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// Tokens of its answer.
    pub answer: usize,
    /// Time since the request before, in units of the mean time.
    pub gap: f64,
}

impl Profile {
    /// The lengths of prompts and of answers.
    pub const fn lengths(self) -> [Lengths; 2] {
        match self {
            Self::Imdb => [Lengths::new(315.0, 106.0, 821.0), Lengths::new(37.0, 16.0, 87.0)],
            Self::Arxiv => [Lengths::new(6300.0, 1600.0, 14_100.0), Lengths::new(243.0, 29.0, 464.0)],
            Self::Cocktail => [Lengths::new(16_200.0, 9400.0, 28_800.0), Lengths::new(159.0, 44.0, 246.0)],
            Self::Humaneval => [Lengths::new(204.0, 75.0, 697.0), Lengths::new(139.0, 11.0, 552.0)],
        }
    }

    /// Tokens of the longest request.
    pub fn most(self) -> usize {
        self.lengths().iter().map(|of| of.most as usize).sum()
    }

    /// Mean tokens of a request while it runs: its prompt and half of its answer.
    pub fn mean_held(self) -> f64 {
        let [prompt, answer] = self.lengths();
        prompt.mean + answer.mean / 2.0
    }

    /// Reproducible requests: the same for any rate and any method. `prompt` makes a prompt of so many
    /// tokens.
    pub fn requests(
        self,
        count: usize,
        seed: u64,
        mut prompt: impl FnMut(&mut Rng, usize) -> Vec<u32>,
    ) -> Vec<Planned> {
        let mut rng = Rng(seed);
        let [prompts, answers] = self.lengths();
        let request = |_| {
            let (length, answer, gap) =
                (prompts.draw(rng.uniform()), answers.draw(rng.uniform()), exponential(rng.uniform()));
            Planned { prompt: prompt(&mut rng, length), answer, gap }
        };
        (0..count).map(request).collect()
    }
}

impl Lengths {
    const fn new(mean: f64, least: f64, most: f64) -> Self {
        Self { mean, least, most }
    }

    /// A length from a number uniform in 0..1: `least + (most - least) u^a`, whose mean is
    /// `least + (most - least) / (a + 1)`.
    pub fn draw(&self, uniform: f64) -> usize {
        let Self { mean, least, most } = *self;
        let power = (most - least) / (mean - least) - 1.0;
        (least + (most - least) * uniform.powf(power)).round() as usize
    }
}

/// The time to the next event of a Poisson process of rate 1, from a number uniform in 0..1.
fn exponential(uniform: f64) -> f64 {
    -(1.0 - uniform).ln()
}

/// When requests come, in seconds since the start: a Poisson process of this rate.
pub fn arrivals(requests: &[Planned], per_second: f64) -> Vec<f64> {
    let times = requests.iter().scan(0.0, |time, request| {
        *time += request.gap / per_second;
        Some(*time)
    });
    times.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests(profile: Profile, count: usize) -> Vec<Planned> {
        profile.requests(count, 7, |_, length| vec![0; length])
    }

    #[test]
    fn lengths_have_the_mean_and_the_range_of_the_paper() {
        for profile in Profile::value_variants() {
            let all = requests(*profile, 5000);
            let [prompts, answers] = profile.lengths();
            let check = |of: Lengths, lengths: Vec<f64>| {
                let mean = lengths.iter().sum::<f64>() / lengths.len() as f64;
                assert!((mean / of.mean - 1.0).abs() < 0.03, "{profile:?}: {mean} for {of:?}");
                assert!(lengths.iter().all(|&n| (of.least..=of.most).contains(&n)));
            };
            check(prompts, all.iter().map(|request| request.prompt.len() as f64).collect());
            check(answers, all.iter().map(|request| request.answer as f64).collect());
            let longest = all.iter().map(|request| request.prompt.len() + request.answer).max();
            assert!(longest.unwrap() <= profile.most());
        }
    }

    /// Gaps of a Poisson process have a standard deviation as large as their mean, and counts in equal times
    /// a variance as large as theirs.
    #[test]
    fn arrivals_are_a_poisson_process_of_the_rate() {
        let all = requests(Profile::Imdb, 20_000);
        for rate in [0.5, 8.0] {
            let times = arrivals(&all, rate);
            assert!(times.is_sorted());
            let end = times.last().unwrap();
            assert!((times.len() as f64 / end / rate - 1.0).abs() < 0.03);
            let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
            let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
            let variance = gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64;
            assert!((variance.sqrt() / mean - 1.0).abs() < 0.05);
            let window = 10.0 / rate;
            let mut counts = vec![0.0; (end / window) as usize];
            for time in &times {
                counts.get_mut((time / window) as usize).into_iter().for_each(|count| *count += 1.0);
            }
            let mean = counts.iter().sum::<f64>() / counts.len() as f64;
            let variance = counts.iter().map(|n| (n - mean).powi(2)).sum::<f64>() / counts.len() as f64;
            assert!((mean - 10.0).abs() < 0.4 && (variance / mean - 1.0).abs() < 0.15, "{mean}, {variance}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_requests_at_any_rate() {
        let [few, many] = [10, 100].map(|count| requests(Profile::Humaneval, count));
        for (a, b) in few.iter().zip(&many) {
            assert_eq!((&a.prompt, a.answer, a.gap.to_bits()), (&b.prompt, b.answer, b.gap.to_bits()));
        }
    }
}
