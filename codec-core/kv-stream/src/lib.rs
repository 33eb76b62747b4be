#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod bandwidth;
mod caches;
mod chunk;
mod clock;
mod error;
mod frame;
mod link;
mod meter;
mod options;
mod receiver;
mod serve;
mod shaped;
mod simulated;
mod speeds;
mod trace;
mod waiting;

pub use bandwidth::{Bandwidth, GBPS};
pub use bytes::Bytes;
pub use caches::{Caches, serve_into};
pub use chunk::{ChunkCost, Payload, RequestChunk};
pub use clock::{Clock, RealClock, SimulatedClock};
pub use error::{BoxError, Error, Result};
pub use frame::{ChunkFrame, LayerKv, check_tokens, encode_frames};
pub use link::Link;
pub use options::{Choice, MOST_SECONDS, Options, RESERVE, first_level};
pub use receiver::{Computed, Receiver};
pub use serve::{MOST_CHUNKS, serve};
pub use shaped::{ShapedLink, Source};
pub use simulated::{Machine, simulate};
pub use speeds::{GPU_DECODE_RATE, PrefillTime, Speeds};
pub use trace::{Event, Outcome, Trace};
