#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod cache;
mod dense;
mod error;
mod kv;
pub mod llama;
mod record;
mod view;

pub use cache::{KvCache, PqCache, SqCache};
pub use dense::Dense;
pub use error::{Error, Result};
pub use kv::Kv;
pub use record::Recorder;
