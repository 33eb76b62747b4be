#![doc = include_str!("../README.md")]

mod cache;
mod error;
mod forward;
pub mod ops;
mod rng;
mod sample;
pub mod serve;

pub use cache::{ExactCache, Fetched, FetchedPerStep, HeadFit, KvCache, PromptRows};
pub use error::{BoxError, Error, Result};
pub use forward::{Activations, Decoder, WATCHED, logits, prefill};
pub use kv_attend::owner::{Footprint, Side};
pub use rng::Rng;
pub use sample::{LogProbabilities, Sampler, Sampling};
