//! Whether the frames in the store are those that were written.

use std::sync::atomic::AtomicU64;

use futures_util::{StreamExt, stream};
use object_store::path::Path;
use tracing::warn;

use crate::manifest::{Manifest, piece_digest};
use crate::{AsyncStore, ChunkId, Error, Result, Space, StoredChunk};

/// How the frames of a chunk are checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// They exist and have their length: one small request per chunk.
    Length,
    /// They match their digests: they are read.
    Digests,
}

impl AsyncStore {
    /// The indices of the chunks whose frames differ from those written, in order.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`].
    pub async fn damaged(&self, space: &Space, chunks: &[StoredChunk], check: Check) -> Result<Vec<usize>> {
        let manifests: Vec<Manifest> = chunks.iter().map(|chunk| chunk.manifest().clone()).collect();
        let checks = stream::iter(manifests)
            .map(async |manifest| self.check(space.name(), &manifest, check).await)
            .buffered(self.remote().options().parallel.max(1));
        let mut checks = std::pin::pin!(checks.enumerate());
        let mut damaged = vec![];
        while let Some((i, checked)) = checks.next().await {
            match checked {
                Err(e) if e.is_damage() => {
                    warn!(error = %e, "the chunk is damaged");
                    damaged.push(i);
                }
                checked => checked?,
            }
        }
        Ok(damaged)
    }

    /// Checks the frames that a manifest names.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Length`] and [`Error::Digest`] for bytes that differ from those written,
    /// [`Error::Object`] for a manifest that no writer writes; [`Error::Backend`] and [`Error::Timeout`].
    pub(crate) async fn check(&self, space: ChunkId, manifest: &Manifest, check: Check) -> Result<()> {
        let (remote, path) = (self.remote(), self.data_path(space, manifest));
        if check == Check::Length {
            return check_len(&path, remote.size(&path).await?, manifest);
        }
        let (head, expected) = manifest.head().ok_or_else(|| Error::Object {
            path: self.manifest_path(space, manifest.id).to_string(),
            what: "is a manifest of frames that are not those of a chunk",
        })?;
        remote.get_range(&path, &head, &AtomicU64::new(0), |bytes: &[u8]| bytes == expected).await?;
        let pieces: Vec<_> = manifest.levels.iter().flat_map(|level| level.pieces()).collect();
        let mut checks = stream::iter(pieces)
            .map(|(range, expected)| {
                let path = &path;
                let verified = move |bytes: &[u8]| piece_digest(bytes) == expected;
                async move { remote.get_range(path, &range, &AtomicU64::new(0), verified).await }
            })
            .buffer_unordered(remote.options().parallel.max(1));
        while let Some(check) = checks.next().await {
            check?;
        }
        Ok(())
    }
}

/// Compares the size of the data object, if it exists, with its manifest.
pub(crate) fn check_len(path: &Path, size: Option<u64>, manifest: &Manifest) -> Result<()> {
    match size {
        Some(size) if size == manifest.data_len => Ok(()),
        Some(actual) => Err(Error::Length { path: path.to_string(), expected: manifest.data_len, actual }),
        None => Err(Error::Missing { path: path.to_string() }),
    }
}
