//! The store of chunks: find, put, load, delete, list, verify.

use std::sync::Arc;

use bytes::Bytes;
use codec_core::{Profile, write_chunk};
use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectStore, PutMode};
use tracing::{info, warn};

use super::manifest::{DataId, MAX_MANIFEST, Manifest};
use super::remote::Remote;
use super::{Check, ChunkId, ChunkKey, Error, Options, Result, Space};
use crate::stream::frame::{LayerKv, encode_frames};

/// Caches in an object store, for callers that run tokio.
///
/// A call that is dropped leaves nothing incomplete that a reader sees. Clones share the limit of parallel
/// requests.
#[derive(Clone, Debug)]
pub struct AsyncStore {
    remote: Remote,
}

/// A chunk that the store holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredChunk {
    key: ChunkKey,
    manifest: Manifest,
}

impl StoredChunk {
    /// Its name and its tokens.
    #[must_use]
    pub const fn key(&self) -> &ChunkKey {
        &self.key
    }

    /// Bytes of its levels, the least lossy first.
    pub fn sizes(&self) -> impl Iterator<Item = u64> + '_ {
        self.manifest.levels.iter().map(|level| level.bytes.end - level.bytes.start)
    }

    /// Bytes of the object.
    #[must_use]
    pub const fn object_len(&self) -> u64 {
        self.manifest.data_len
    }

    pub(super) const fn manifest(&self) -> &Manifest {
        &self.manifest
    }
}

/// The outcome of storing a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Put {
    /// It is stored.
    Stored,
    /// It existed, but its frames were lost or truncated; it is stored again.
    Repaired,
    /// It existed, or another writer was first.
    Present,
}

impl AsyncStore {
    /// A store below `root` of an object store.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>, root: Path, options: Options) -> Self {
        Self { remote: Remote::new(store, root, options) }
    }

    pub(super) const fn remote(&self) -> &Remote {
        &self.remote
    }

    pub(super) fn manifest_path(&self, space: ChunkId, id: ChunkId) -> Path {
        self.remote.path([&*space.to_string(), "chunks", &id.to_string()])
    }

    pub(super) fn data_path(&self, space: ChunkId, manifest: &Manifest) -> Path {
        self.remote.path([&*space.to_string(), "data", &manifest.id.to_string(), &hex(&manifest.data)])
    }

    /// The longest stored prefix of `tokens`: whole chunks, then a tail.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`] if the store does not answer. A chunk with a damaged
    /// manifest counts as not stored.
    /// # Cost
    /// One small read per chunk up to the first missing one, several at once, and one for each length that a
    /// tail may have.
    pub async fn find(&self, space: &Space, tokens: &[u32]) -> Result<Vec<StoredChunk>> {
        Ok(self.find_or_damage(space, tokens).await?.0)
    }

    /// As [`Self::find`], with the first damaged manifest on the way, which may shorten the prefix.
    ///
    /// # Errors
    /// As there.
    pub async fn find_or_damage(
        &self,
        space: &Space,
        tokens: &[u32],
    ) -> Result<(Vec<StoredChunk>, Option<Error>)> {
        let parallel = self.remote.options().parallel.max(1);
        let (mut found, mut damage) = (vec![], None);
        let mut sound = |chunk: Result<Option<StoredChunk>>| match chunk {
            Err(e) if e.is_damage() => {
                warn!(error = %e, "the chunk counts as not stored");
                damage.get_or_insert(e);
                Ok(None)
            }
            chunk => chunk,
        };
        let whole = stream::iter(space.whole_chunks(tokens));
        let mut whole = whole.map(|key| self.stored(space, key)).buffered(parallel);
        while let Some(chunk) = whole.next().await {
            let Some(chunk) = sound(chunk)? else { break };
            found.push(chunk);
        }
        // Reads beyond the end would block for ever, and may hold permits that the reads of tails wait for.
        drop(whole);
        let tails = stream::iter(space.tails(found.last().map(StoredChunk::key), tokens));
        let mut tails = tails.map(|key| self.stored(space, key)).buffered(parallel);
        while let Some(tail) = tails.next().await {
            if let Some(tail) = sound(tail)? {
                found.push(tail);
                break;
            }
        }
        info!(chunks = found.len(), tokens = found.last().map_or(0, |chunk| chunk.key.tokens.end), "found");
        Ok((found, damage))
    }

    /// A chunk, if it is stored.
    ///
    /// # Errors
    /// As [`Self::find`].
    pub async fn stat(&self, space: &Space, key: ChunkKey) -> Result<Option<StoredChunk>> {
        match self.stored(space, key).await {
            Err(e) if e.is_damage() => {
                warn!(error = %e, "the chunk counts as not stored");
                Ok(None)
            }
            chunk => chunk,
        }
    }

    /// As [`Self::stat`], with damage as an error.
    async fn stored(&self, space: &Space, key: ChunkKey) -> Result<Option<StoredChunk>> {
        let path = self.manifest_path(space.name(), key.id);
        let parse = |bytes: &[u8]| {
            let manifest = Manifest::parse(bytes)?;
            manifest.check(&key, space).map(|()| manifest)
        };
        let manifest = self.remote.get(&path, MAX_MANIFEST, parse).await?;
        Ok(manifest.map(|manifest| StoredChunk { key, manifest }))
    }

    /// Stores a chunk: `object` is [`codec_core::write_chunk`] of a frame per level, in their order. The
    /// previous chunk must be stored, or a reader will not find this one.
    ///
    /// The frames are written first, the manifest last and only if there is none. Both are then read back, the
    /// frames by their length. When this returns, the chunk can be read; before, no reader sees any of it. A
    /// chunk whose frames are lost or truncated is stored again; wrong bits in them are found by
    /// [`Self::damaged`] and repaired by [`Self::replace_chunk`].
    ///
    /// # Errors
    /// [`Error::Codec`] and [`Error::Argument`] for an object that is not the chunk's; [`Error::Backend`],
    /// [`Error::Timeout`] and [`Error::NoConditions`]; [`Error::NotKept`] if the store does not hold what it
    /// has acknowledged. After an error, or when the call is dropped, an object may remain that no manifest
    /// names: [`Listing::orphans`](super::Listing::orphans).
    pub async fn put_chunk(&self, space: &Space, key: &ChunkKey, object: Bytes) -> Result<Put> {
        let path = self.manifest_path(space.name(), key.id);
        if let Some(stored) = self.stat(space, key.clone()).await? {
            if self.damaged(space, &[stored], Check::Length).await?.is_empty() {
                return Ok(Put::Present);
            }
            return self.replace_chunk(space, key, object).await.map(|()| Put::Repaired);
        }
        let (manifest, bytes) = self.put_data(space, key, object).await?;
        if !self.remote.put(&path, bytes.clone(), PutMode::Create).await? {
            // A manifest exists: of a faster writer, of our own attempt whose answer was lost, or a damaged one.
            match self.stat(space, key.clone()).await? {
                Some(stored) if stored.manifest == manifest => {}
                Some(_) => {
                    self.remote.delete(&self.data_path(space.name(), &manifest)).await?;
                    return Ok(Put::Present);
                }
                None => drop(self.remote.put(&path, bytes, PutMode::Overwrite).await?),
            }
        }
        self.remote.kept(&path, || self.stat(space, key.clone())).await?;
        Ok(Put::Stored)
    }

    /// Stores a chunk over one that a reader has found to be damaged. The old frames remain as an orphan.
    ///
    /// # Errors
    /// As [`Self::put_chunk`].
    pub async fn replace_chunk(&self, space: &Space, key: &ChunkKey, object: Bytes) -> Result<()> {
        let (_, bytes) = self.put_data(space, key, object).await?;
        let path = self.manifest_path(space.name(), key.id);
        self.remote.put(&path, bytes, PutMode::Overwrite).await?;
        self.remote.kept(&path, || self.stat(space, key.clone())).await.map(drop)
    }

    /// Writes the frames of a chunk, and returns the manifest that names them and its bytes.
    async fn put_data(&self, space: &Space, key: &ChunkKey, object: Bytes) -> Result<(Manifest, Bytes)> {
        let manifest = Manifest::describe(key, space, random()?, &object)?;
        manifest.check(key, space).map_err(Error::Argument)?;
        let path = self.data_path(space.name(), &manifest);
        self.remote.put(&path, object, PutMode::Overwrite).await?;
        let is_whole = async || Ok(self.remote.size(&path).await?.filter(|&len| len == manifest.data_len));
        self.remote.kept(&path, is_whole).await?;
        let bytes = manifest.to_bytes().into();
        Ok((manifest, bytes))
    }

    /// Deletes a chunk: its manifest first, then the frames that it names. Chunks after it are no longer
    /// found. Deleting a missing chunk is not an error.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`].
    pub async fn delete(&self, space: ChunkId, id: ChunkId) -> Result<()> {
        let path = self.manifest_path(space, id);
        let manifest = match self.remote.get(&path, MAX_MANIFEST, Manifest::parse).await {
            Err(e) if e.is_damage() => None,
            manifest => manifest?,
        };
        self.remote.delete(&path).await?;
        match manifest {
            Some(manifest) if manifest.id == id => {
                self.remote.delete(&self.data_path(space, &manifest)).await
            }
            _ => Ok(()),
        }
    }
}

/// Encodes a chunk at every level of `profile`, from the rows of a context whose first token is at position
/// `first`: the object that [`AsyncStore::put_chunk`] stores.
///
/// # Errors
/// Those of [`encode_frames`].
pub fn encode_chunk(profile: &Profile, key: &ChunkKey, first: usize, layers: &[LayerKv]) -> Result<Vec<u8>> {
    let frames = encode_frames(profile, &key.tokens, first, layers)?;
    let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
    let mut object = vec![];
    write_chunk(&frames, &mut object)?;
    Ok(object)
}

/// A name that no other writer draws, at random.
fn random() -> Result<DataId> {
    let mut id = [0; 16];
    let drawn = getrandom::fill(&mut id);
    drawn.map_err(|e| Error::System { what: "random numbers", source: e.into() })?;
    Ok(id)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
