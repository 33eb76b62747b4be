#![doc = include_str!("../README.md")]

mod checkpoint;
mod config;
mod error;
mod family;
pub mod files;
#[cfg_attr(not(feature = "tokenizers"), allow(dead_code))] // the parts that describe a tokenizer
mod gguf;
mod json;
mod matrix;
mod message;
mod model;
mod rope;
mod source;
mod tensors;
#[cfg_attr(not(feature = "tokenizers"), path = "no_tokenizer.rs")]
mod tokenizer;

pub use checkpoint::Checkpoint;
pub use config::{Config, LayerAttention, RopeScaling, Yarn};
pub use error::{Error, Result};
pub use gguf::{FixedPoint, decode_q4_0, decode_q8_0};
pub use matrix::{CodedRows, Matrix};
pub use message::Message;
pub use model::{AttentionWeights, FeedForwardWeights, Layer, Linear, Model};
pub use rope::{Rope, frequencies as rope_frequencies};
pub use tokenizer::{ChatTemplate, TextStream, Tokenizer};
