//! Writing chunks: the frames first, the manifest that names them last.

use bytes::Bytes;
use codec_core::{Element, LayerRows, Place, Profile, write_chunk};
use kv_stream::encode_frames;
use object_store::PutMode;

use crate::manifest::{DataId, MAX_MANIFEST, Manifest};
use crate::{AsyncStore, Check, ChunkId, ChunkKey, Error, Result, Space};

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
    /// Stores a chunk: `object` is [`codec_core::write_chunk`] of a frame per level, in their order. The
    /// previous chunk must be stored, or a reader will not find this one.
    ///
    /// The frames are written first, the manifest last and only if there is none. Both are then read back,
    /// the frames by their length. When this returns, the chunk can be read; before, no reader sees any of
    /// it. A chunk whose frames are lost or truncated is stored again; wrong bits in them are found by
    /// [`Self::damaged`] and repaired by [`Self::replace_chunk`].
    ///
    /// # Errors
    /// [`Error::Codec`] and [`Error::Argument`] for an object that is not the chunk's; [`Error::Backend`],
    /// [`Error::Timeout`] and [`Error::NoConditions`]; [`Error::NotKept`] if the store does not hold what it
    /// has acknowledged. After an error, or when the call is dropped, an object may remain that no manifest
    /// names: [`Listing::orphans`](crate::Listing::orphans).
    pub async fn put_chunk(&self, space: &Space, key: &ChunkKey, object: Bytes) -> Result<Put> {
        let path = self.manifest_path(space.name(), key.id);
        if let Some(stored) = self.stat(space, key.clone()).await? {
            if self.damaged(space, &[stored], Check::Length).await?.is_empty() {
                return Ok(Put::Present);
            }
            return self.replace_chunk(space, key, object).await.map(|()| Put::Repaired);
        }
        let (manifest, bytes) = self.put_data(space, key, object).await?;
        if !self.remote().put(&path, bytes.clone(), PutMode::Create).await? {
            // A manifest exists: of a faster writer, of our own attempt whose answer was lost, or a damaged
            // one.
            match self.stat(space, key.clone()).await? {
                Some(stored) if *stored.manifest() == manifest => {}
                Some(_) => {
                    self.remote().delete(&self.data_path(space.name(), &manifest)).await?;
                    return Ok(Put::Present);
                }
                None => drop(self.remote().put(&path, bytes, PutMode::Overwrite).await?),
            }
        }
        self.remote().kept(&path, || self.stat(space, key.clone())).await?;
        Ok(Put::Stored)
    }

    /// Stores a chunk over one that a reader has found to be damaged. The old frames remain as an orphan.
    ///
    /// # Errors
    /// As [`Self::put_chunk`].
    pub async fn replace_chunk(&self, space: &Space, key: &ChunkKey, object: Bytes) -> Result<()> {
        let (_, bytes) = self.put_data(space, key, object).await?;
        let path = self.manifest_path(space.name(), key.id);
        self.remote().put(&path, bytes, PutMode::Overwrite).await?;
        self.remote().kept(&path, || self.stat(space, key.clone())).await.map(drop)
    }

    /// Writes the frames of a chunk, and returns the manifest that names them and its bytes.
    async fn put_data(&self, space: &Space, key: &ChunkKey, object: Bytes) -> Result<(Manifest, Bytes)> {
        let manifest = Manifest::describe(key, space, random()?, &object)?;
        manifest.check(key, space).map_err(Error::Argument)?;
        let path = self.data_path(space.name(), &manifest);
        self.remote().put(&path, object, PutMode::Overwrite).await?;
        let is_whole = async || Ok(self.remote().size(&path).await?.filter(|&len| len == manifest.data_len));
        self.remote().kept(&path, is_whole).await?;
        let bytes = manifest.to_bytes().into();
        Ok((manifest, bytes))
    }

    /// Deletes a chunk: its manifest first, then the frames that it names. Chunks after it are no longer
    /// found. Deleting a missing chunk is not an error.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`]; [`Error::NotDeleted`] if the store holds an object that it
    /// said is deleted, or a writer has written it again.
    pub async fn delete(&self, space: ChunkId, id: ChunkId) -> Result<()> {
        let path = self.manifest_path(space, id);
        let manifest = match self.remote().get(&path, MAX_MANIFEST, Manifest::parse).await {
            Err(e) if e.is_damage() => None,
            manifest => manifest?,
        };
        self.remote().delete(&path).await?;
        match manifest {
            Some(manifest) if manifest.id == id => {
                self.remote().delete(&self.data_path(space, &manifest)).await
            }
            _ => Ok(()),
        }
    }
}

/// Encodes a chunk at every level of `profile`: the object that [`AsyncStore::put_chunk`] stores.
///
/// # Shapes
/// `layers` (layers,): rows in the engine's memory, of any element type, in the layout of `place`, whose
/// `first_token` is the row of the chunk's first token.
/// # Errors
/// Those of [`encode_frames`].
/// # Cost
/// The chunk is encoded once per level. Nothing is copied before.
pub fn encode_chunk<E: Element>(
    profile: &Profile,
    key: &ChunkKey,
    layers: &[LayerRows<'_, E>],
    place: &Place<'_>,
) -> Result<Vec<u8>> {
    let frames = encode_frames(profile, &key.tokens, layers, place)?;
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
