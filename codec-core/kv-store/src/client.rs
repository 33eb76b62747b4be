//! The store of chunks: where its objects are, and the longest stored prefix.

use std::sync::Arc;

use futures_util::{StreamExt, stream};
use object_store::ObjectStore;
use object_store::path::Path;
use tracing::{info, warn};

use crate::manifest::{MAX_MANIFEST, Manifest};
use crate::remote::Remote;
use crate::{ChunkId, ChunkKey, Error, Options, Result, Space};

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

    pub(crate) const fn manifest(&self) -> &Manifest {
        &self.manifest
    }
}

impl AsyncStore {
    /// A store below `root` of an object store.
    #[must_use]
    pub fn new(store: Arc<dyn ObjectStore>, root: Path, options: Options) -> Self {
        Self { remote: Remote::new(store, root, options) }
    }

    pub(crate) const fn remote(&self) -> &Remote {
        &self.remote
    }

    pub(crate) fn manifest_path(&self, space: ChunkId, id: ChunkId) -> Path {
        self.remote.path([&*space.to_string(), "chunks", &id.to_string()])
    }

    pub(crate) fn data_path(&self, space: ChunkId, manifest: &Manifest) -> Path {
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
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
