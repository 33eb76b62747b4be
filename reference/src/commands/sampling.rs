//! The options that choose the next token.

use clap::Args;
use kv_llama::Sampling;
use kv_reference::Result;

use super::no_effect;

#[derive(Args)]
pub struct SamplingArgs {
    /// Sampling temperature; 0 is greedy
    #[arg(long, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from the most likely tokens with this total probability
    #[arg(long, default_value_t = 1.0)]
    top_p: f64,
    /// Sample from this many most likely tokens; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: usize,
    /// Sample from tokens that are at least this many times as likely as the most likely one
    #[arg(long, default_value_t = 0.0)]
    min_p: f64,
    /// Divide positive logits of tokens that the text has by this number, and multiply negative ones by it
    #[arg(long, value_name = "PENALTY", default_value_t = 1.0)]
    repetition_penalty: f64,
    /// Seed of the sampling
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl SamplingArgs {
    /// The checked parameters; options that greedy sampling leaves without effect are rejected.
    pub fn sampling(&self) -> Result<Sampling> {
        let &Self { temperature, top_p, top_k, min_p, repetition_penalty, seed } = self;
        let sampling = Sampling::new(temperature, top_p, seed)?
            .with_top_k(top_k)
            .with_min_p(min_p)?
            .with_repetition_penalty(repetition_penalty)?;
        let of_draws = [
            ("--top-p", top_p != 1.0),
            ("--top-k", top_k != 0),
            ("--min-p", min_p != 0.0),
            ("--seed", seed != 0),
        ];
        match of_draws.iter().find(|(_, is_given)| temperature == 0.0 && *is_given) {
            Some((option, _)) => Err(no_effect(option, "without --temperature")),
            None => Ok(sampling),
        }
    }
}
