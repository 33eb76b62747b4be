#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod backend_text;
mod blocking;
mod client;
mod error;
mod folder;
mod inspect;
mod key;
mod layout;
mod link;
mod load;
mod manifest;
mod open;
mod outage;
mod pages;
mod profiles;
mod put;
mod remote;
mod verify;

pub use blocking::{Cancel, KvStore};
pub use client::{AsyncStore, StoredChunk};
pub use error::{Error, Result};
pub use inspect::{ListedChunk, Listing, Orphan};
pub use key::{ChunkId, ChunkKey, Grid, ProfileId, Space};
pub use layout::PageLayout;
pub use link::StoreLink;
pub use load::{Arrival, LoadProgress, Transfer};
pub use manifest::Manifest;
pub use object_store;
pub use open::{check_writable, folder_of, open, open_with, sweep_unfinished, unfinished};
pub use pages::{EncodedPage, FetchedPage, PageModel, Pages};
pub use put::{Put, encode_chunk};
pub use remote::Options;
pub use verify::Check;
