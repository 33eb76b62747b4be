//! KV caches in object stores: memory, folders, S3 and S3-compatible servers.
//!
//! A context is stored in chunks of 1,500 tokens (CacheGen, 5.3), each at every level of a codec profile. The
//! name of a chunk is a hash of its tokens and of the previous chunk, so that contexts with the same
//! beginning share chunks, and the longest stored prefix of a prompt is found by looking up names. Below the
//! root of the store:
//!
//! | object | content |
//! | --- | --- |
//! | `SPACE/chunks/ID` | the manifest of a chunk: tokens, levels, digests, the object with the frames |
//! | `SPACE/data/ID/RANDOM` | the frames: a chunk of `codec-core`; a reader fetches one level by ranges |
//! | `SPACE/about` | a human-readable line: the model, its levels and the grid |
//! | `profiles/ID` | the codec profile of a calibration, after its name and digest |
//!
//! `SPACE` stands for the model, the profile and the grid of chunks ([`Space`]).
//!
//! The rules that protect readers from wrong data:
//!
//! * The manifest is written last, and only if there is none. A writer that dies leaves an orphan object,
//!   which no manifest names.
//! * No two writers write the same data object. A manifest names only an object that its own writer has
//!   written before.
//! * Every object names its place, under a digest: a profile its model, levels and calibration, a manifest its
//!   space, which is named by the profile's digest, its chunk and the previous one. Every byte that is decoded
//!   has been compared with a digest in the manifest. Stale, truncated, swapped or foreign bytes are an error
//!   or a missing chunk.
//! * What was written is read back before it counts as stored: a store may acknowledge and not keep it.
//!
//! This guards against faults, not against malicious writers: anybody with write access to manifests can
//! write a false one.
//!
//! [`KvStore`] blocks, [`AsyncStore`] is for callers that run tokio. Requests and transfers are reported
//! through `tracing`. Nothing here needs a model: [`encode_chunk`] takes rows, and
//! [`ChunkFrame`](crate::stream::frame::ChunkFrame) returns those of an [`Arrival`].

mod backend_text;
mod blocking;
mod client;
mod error;
mod folder;
mod inspect;
mod key;
mod link;
mod load;
mod manifest;
mod open;
mod outage;
mod profiles;
#[path = "../../../reference/src/stream/prompt.rs"]
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
pub use open::{check_writable, folder_of, open, sweep_unfinished, unfinished};
pub use prompt::{Calculated, FillOptions, Filled, PromptStore};
pub use remote::Options;
