//! KV caches in object stores: memory, folders, S3 and what speaks its protocol.
//!
//! A context is stored in chunks of 1,500 tokens (CacheGen, 5.3), each at every level of a codec profile. The
//! name of a chunk is a hash of its tokens and of the chunk before it, so that contexts with the same
//! beginning share chunks, and the longest stored prefix of a prompt is found by asking for names. Below the
//! root of the store:
//!
//! | object | what |
//! | --- | --- |
//! | `SPACE/chunks/ID` | the manifest of a chunk: tokens, levels, digests, the object with the frames |
//! | `SPACE/data/ID/RANDOM` | the frames: a chunk of `codec-core`; a reader fetches one level by ranges |
//! | `SPACE/about` | a line for people: the model, its levels and the grid |
//! | `profiles/ID` | the codec profile of a calibration, after its digest |
//!
//! `SPACE` stands for the model, the profile and the grid of chunks ([`Space`]).
//!
//! The rules that keep readers from wrong numbers:
//!
//! * The manifest is written last, and only where there is none. A writer that dies leaves an object that
//!   nothing names.
//! * No two writers write the same object of frames. What a manifest names was written before it, by its
//!   writer.
//! * Every byte that is decoded has been compared with a digest in the manifest, and the manifest holds its
//!   own digest and the chunk's name. Old, cut, swapped or foreign bytes are an error or a chunk that is not
//!   there.
//!
//! This guards against faults, not against somebody who may write to the store: who can write a manifest can
//! write a false one.
//!
//! [`KvStore`] waits for results, [`AsyncStore`] is for callers that run tokio. Requests and transfers are
//! reported through `tracing`. Nothing here needs a model: [`encode_chunk`] takes rows, and
//! [`ChunkFrame`](crate::stream::frame::ChunkFrame) gives those of an [`Arrival`].

mod backend_text;
mod blocking;
mod client;
mod error;
mod inspect;
mod key;
mod link;
mod load;
mod manifest;
mod open;
mod profiles;
mod prompt;
mod remote;

pub use blocking::{Cancel, KvStore};
pub use client::{AsyncStore, Put, StoredChunk, encode_chunk};
pub use error::{Error, Result};
pub use inspect::{Check, ListedChunk, Listing, Orphan};
pub use key::{ChunkId, ChunkKey, Grid, ProfileId, Space};
pub use link::StoreLink;
pub use load::{Arrival, LoadProgress, Transfer};
pub use manifest::Manifest;
pub use open::{open, sweep_unfinished};
pub use prompt::{Calculated, FillOptions, Filled, PromptStore};
pub use remote::Options;
