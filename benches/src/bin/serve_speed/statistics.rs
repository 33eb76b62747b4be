//! What requests have got, in a few numbers.

use serde::Serialize;

/// Mean and percentiles of seconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    /// Mean.
    pub mean: f64,
    /// Half of all are at most this.
    pub p50: f64,
    /// 99 of 100 are at most this.
    pub p99: f64,
}

impl Summary {
    /// That of some numbers; none of none.
    pub fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_by(f64::total_cmp);
        let n = values.len();
        let percentile = |share: f64| values.get(((share * n as f64).ceil() as usize).max(1) - 1).copied();
        Some(Self {
            mean: values.iter().sum::<f64>() / n as f64,
            p50: percentile(0.5)?,
            p99: percentile(0.99)?,
        })
    }
}

/// What a request got, in seconds since the start of the run.
#[derive(Clone, Debug, Default)]
pub struct Record {
    /// When it came.
    pub came: f64,
    /// When its first token came.
    pub first: f64,
    /// When it ended with all of its tokens.
    pub end: Option<f64>,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// What went wrong.
    pub failure: Option<String>,
}

impl Record {
    /// Seconds per token of an answer that is whole, from its arrival on: vLLM's normalized latency.
    pub fn normalized(&self) -> Option<f64> {
        Some((self.end? - self.came) / self.tokens.len() as f64)
    }

    /// Seconds to the first token of an answer that is whole.
    pub fn first_token(&self) -> Option<f64> {
        self.end.map(|_| self.first - self.came)
    }

    /// Mean seconds between the tokens of an answer that is whole and has several.
    pub fn between_tokens(&self) -> Option<f64> {
        Some((self.end? - self.first) / self.tokens.len().checked_sub(1).filter(|&n| n > 0)? as f64)
    }
}

/// How far answers are the same.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Agreement {
    /// Share of tokens before the first that differs.
    pub share: f64,
    /// Fewest of them in an answer; at most its length.
    pub least: usize,
    /// Answers that differ within their first eight tokens.
    pub early: usize,
    /// Answers that both have.
    pub answers: usize,
}

impl Agreement {
    /// That of the same requests in two runs, where both are whole.
    pub fn of(one: &[Record], other: &[Record]) -> Option<Self> {
        let pairs = one.iter().zip(other).filter(|(a, b)| a.end.is_some() && b.end.is_some());
        let same = |(a, b): (&Record, &Record)| {
            (a.tokens.iter().zip(&b.tokens).take_while(|(a, b)| a == b).count(), a.tokens.len())
        };
        let same: Vec<(usize, usize)> = pairs.map(same).collect();
        let (alike, all) = same.iter().fold((0, 0), |sum, of| (sum.0 + of.0, sum.1 + of.1));
        Some(Self {
            share: alike as f64 / all as f64,
            least: same.iter().map(|of| of.0).min()?,
            early: same.iter().filter(|(alike, all)| *alike < 8.min(*all)).count(),
            answers: same.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_numbers() {
        assert_eq!(Summary::of(vec![]), None);
        assert_eq!(Summary::of(vec![3.0]), Some(Summary { mean: 3.0, p50: 3.0, p99: 3.0 }));
        let summary = Summary::of((1..=200).rev().map(f64::from).collect());
        assert_eq!(summary, Some(Summary { mean: 100.5, p50: 100.0, p99: 198.0 }));
    }

    fn record(tokens: &[u32], end: Option<f64>) -> Record {
        Record { came: 1.0, first: 2.0, end, tokens: tokens.to_vec(), failure: None }
    }

    #[test]
    fn times_are_of_whole_answers() {
        let whole = record(&[1, 2, 3, 4], Some(5.0));
        assert_eq!(
            (whole.normalized(), whole.first_token(), whole.between_tokens()),
            (Some(1.0), Some(1.0), Some(1.0))
        );
        let cut = record(&[1, 2], None);
        assert_eq!((cut.normalized(), cut.first_token(), cut.between_tokens()), (None, None, None));
        assert_eq!(record(&[1], Some(2.0)).between_tokens(), None);
    }

    #[test]
    fn answers_agree_up_to_the_first_difference() {
        let alone = [record(&[1, 2, 3, 4], Some(5.0)), record(&[1, 2], Some(5.0)), record(&[1], None)];
        let loaded = [record(&[1, 2, 9, 4], Some(5.0)), record(&[1, 2], Some(5.0)), record(&[2], Some(5.0))];
        let agreement = Agreement { share: 4.0 / 6.0, least: 2, early: 1, answers: 2 };
        assert_eq!(Agreement::of(&alone, &loaded), Some(agreement));
        assert_eq!(Agreement::of(&alone[2..], &loaded[2..]), None);
    }
}
