//! The contents of a store: listing, describing, removing.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, SystemTime};

use futures_util::{StreamExt, stream};
use object_store::path::Path;
use object_store::{ObjectMeta, PutMode};

use crate::manifest::{MAX_MANIFEST, Manifest, digest};
use crate::verify::check_len;
use crate::{AsyncStore, Check, ChunkId, Error, Result};

/// The contents of a space.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Listing {
    /// Its chunks, in the order of their names.
    pub chunks: Vec<ListedChunk>,
    /// Chunks that no reader can use.
    pub damaged: Vec<(ChunkId, Error)>,
    /// Objects that could not be read. Nothing is known about them.
    pub unreadable: Vec<Error>,
    /// Objects that no manifest names: of a writer at work, of one that has died, of a chunk that was
    /// replaced, or of another program. Frames of an unreadable manifest are not among them.
    pub orphans: Vec<Orphan>,
}

impl Listing {
    /// Whether the space is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.chunks.is_empty()
            && self.damaged.is_empty()
            && self.unreadable.is_empty()
            && self.orphans.is_empty()
    }

    /// The number of stored contexts that are not the beginning of another one. A chunk without its previous
    /// chunk belongs to none: no reader finds it.
    #[must_use]
    pub fn contexts(&self) -> usize {
        let mut manifests: Vec<&Manifest> = self.chunks.iter().map(|chunk| &chunk.manifest).collect();
        manifests.sort_by_key(|manifest| manifest.tokens.start); // each after its previous chunk
        let (mut found, mut continued) = (HashSet::new(), HashSet::new());
        for manifest in manifests {
            if manifest.tokens.start == 0 || found.contains(&manifest.parent) {
                found.insert(manifest.id);
                continued.insert(manifest.parent);
            }
        }
        found.difference(&continued).count()
    }
}

/// A chunk in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedChunk {
    manifest: Manifest,
}

/// An object that no manifest names, or a file of an interrupted write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    pub(crate) path: Path,
    /// Length in bytes.
    pub bytes: u64,
    /// Time of the write, by the store's clock.
    pub written: SystemTime,
}

impl Orphan {
    /// Its path in the store.
    #[must_use]
    pub fn path(&self) -> &str {
        self.path.as_ref()
    }

    /// Whether it was written at least this long ago. A time in the future counts as now.
    pub(crate) fn is_older(&self, age: Duration) -> bool {
        SystemTime::now().duration_since(self.written).unwrap_or_default() >= age
    }
}

impl ListedChunk {
    /// Its name.
    #[must_use]
    pub const fn id(&self) -> ChunkId {
        self.manifest.id
    }

    /// Tokens of the chunk.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.manifest.tokens.end - self.manifest.tokens.start
    }

    /// Bytes of its object.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.manifest.data_len
    }
}

/// Maximum bytes of the description of a space.
const MAX_ABOUT: usize = 1 << 12;
/// Maximum objects in a listing.
const MAX_OBJECTS: usize = 10_000_000;

impl AsyncStore {
    /// The names of the spaces.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`].
    pub async fn spaces(&self) -> Result<Vec<ChunkId>> {
        let folders = self.remote().folders().await?;
        Ok(folders.iter().filter_map(|name| name.parse().ok()).collect())
    }

    fn about_path(&self, space: ChunkId) -> Path {
        self.remote().path([&*space.to_string(), "about"])
    }

    /// Writes the description of a space, a human-readable line. An existing one is kept, unless it is
    /// damaged, so that nothing is written to a space that has its line.
    ///
    /// # Errors
    /// [`Error::Backend`], [`Error::Timeout`], [`Error::NoConditions`] and [`Error::NotKept`].
    pub async fn describe(&self, space: ChunkId, about: &str) -> Result<()> {
        let mode = match self.about(space).await {
            Ok(Some(_)) => return Ok(()),
            Ok(None) => PutMode::Create,
            Err(e) if e.is_damage() => PutMode::Overwrite,
            Err(e) => return Err(e),
        };
        let path = self.about_path(space);
        self.remote().put(&path, sealed(space, about).into_bytes().into(), mode).await?;
        self.remote().kept(&path, || self.about(space)).await.map(drop)
    }

    /// The description of a space; none if there is none.
    ///
    /// # Errors
    /// [`Error::Object`] and [`Error::TooLong`] if the object is not what was written; [`Error::Backend`] and
    /// [`Error::Timeout`].
    pub async fn about(&self, space: ChunkId) -> Result<Option<String>> {
        let line = |bytes: &[u8]| {
            let text = std::str::from_utf8(bytes).ok();
            let line = text.and_then(|text| Some((text, text.split_once('\n')?.0)));
            let is_own =
                |text: &str, line: &str| sealed(space, line) == text && !line.contains(char::is_control);
            let line = line.filter(|(text, line)| is_own(text, line));
            line.map(|(_, line)| line.to_owned()).ok_or("is not the line that was written for this space")
        };
        self.remote().get(&self.about_path(space), MAX_ABOUT, line).await
    }

    /// Deletes the description of a space.
    ///
    /// # Errors
    /// [`Error::Backend`], [`Error::Timeout`] and [`Error::NotDeleted`].
    pub async fn delete_about(&self, space: ChunkId) -> Result<()> {
        self.remote().delete(&self.about_path(space)).await
    }

    /// Returns `e` if it is a failure of one request and the store serves others, so that a caller may go on
    /// with other objects. Requests to a store that is gone would each use up their time limit.
    ///
    /// # Errors
    /// `e` if it is no failure of a request; [`Error::Backend`] and [`Error::Timeout`] of the other request.
    pub async fn isolate(&self, e: Error) -> Result<Error> {
        match e.is_failure() {
            true => self.remote().folders().await.map(|_| e),
            false => Err(e),
        }
    }

    /// The contents of a space. Reads every manifest and no frames.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`] if the store is gone, not for single objects;
    /// [`Error::Limit`] for more than ten million objects.
    pub async fn list(&self, space: ChunkId) -> Result<Listing> {
        let remote = self.remote();
        let name = space.to_string();
        let mut listing = Listing::default();
        // Frames first: a concurrent writer then adds an orphan at worst, not a chunk without frames.
        let mut others = BTreeMap::new();
        match remote.list(&remote.path([&*name, "data"]), MAX_OBJECTS).await {
            Ok(data) => others.extend(data.into_iter().map(|meta| (meta.location.clone(), meta))),
            Err(e) => listing.unreadable.push(self.isolate(e).await?),
        }
        let manifests = match remote.list(&remote.path([&*name, "chunks"]), MAX_OBJECTS).await {
            Ok(manifests) => manifests,
            Err(e) => {
                listing.unreadable.push(self.isolate(e).await?);
                return Ok(listing);
            }
        };
        let mut ids: Vec<ChunkId> = vec![];
        for meta in manifests {
            let id = meta.location.filename().and_then(|name| name.parse().ok());
            match id.filter(|&id| self.manifest_path(space, id) == meta.location) {
                Some(id) => ids.push(id),
                None => drop(others.insert(meta.location.clone(), meta)),
            }
        }
        let mut unknown = HashSet::new(); // folders of the frames of unreadable manifests
        let mut read = stream::iter(ids)
            .map(async |id| {
                let path = self.manifest_path(space, id);
                let parse = |bytes: &[u8]| {
                    let manifest = Manifest::parse(bytes)?;
                    manifest.check_names(space, id).map(|()| manifest)
                };
                (id, remote.get(&path, MAX_MANIFEST, parse).await)
            })
            .buffered(remote.options().parallel.max(1));
        while let Some((id, manifest)) = read.next().await {
            let manifest = match manifest {
                Ok(Some(manifest)) => manifest,
                Ok(None) => continue, // deleted since it was listed
                Err(e) if e.is_damage() => {
                    listing.damaged.push((id, e));
                    continue;
                }
                Err(e) => {
                    listing.unreadable.push(self.isolate(e).await?);
                    unknown.insert(remote.path([&*name, "data", &id.to_string()]).to_string());
                    continue;
                }
            };
            let path = self.data_path(space, &manifest);
            let size = match others.remove(&path) {
                Some(object) => Ok(Some(object.size)),
                // Written since the frames were listed, or the listing failed.
                None => remote.size(&path).await,
            };
            match size.and_then(|size| check_len(&path, size, &manifest)) {
                Ok(()) => listing.chunks.push(ListedChunk { manifest }),
                Err(e) if e.is_damage() => listing.damaged.push((id, e)),
                Err(e) => listing.unreadable.push(self.isolate(e).await?),
            }
        }
        let is_unknown = |object: &ObjectMeta| {
            let folder = object.location.as_ref().rsplit_once('/');
            folder.is_some_and(|(folder, _)| unknown.contains(folder))
        };
        listing.orphans = others
            .into_values()
            .filter(|object| !is_unknown(object))
            .map(|meta| Orphan { path: meta.location, bytes: meta.size, written: meta.last_modified.into() })
            .collect();
        Ok(listing)
    }

    /// Reads the object of a chunk, and compares its frames with their digests and the bytes before them with
    /// the manifest.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Length`] and [`Error::Digest`] for bytes that differ from those written,
    /// [`Error::Object`] for a manifest that no writer writes; [`Error::Backend`] and [`Error::Timeout`].
    pub async fn verify(&self, space: ChunkId, chunk: &ListedChunk) -> Result<()> {
        self.check(space, &chunk.manifest, Check::Digests).await
    }

    /// Deletes the contents of a space, manifests first.
    ///
    /// # Errors
    /// [`Error::Backend`] and [`Error::Timeout`]; the remaining objects are then still stored.
    /// [`Error::NotDeleted`] if the store holds an object that it said is deleted, or a writer has written it
    /// again.
    pub async fn delete_space(&self, space: ChunkId) -> Result<()> {
        let name = space.to_string();
        for folder in ["chunks", "data"] {
            let remote = self.remote();
            let objects = remote.list(&remote.path([&*name, folder]), MAX_OBJECTS).await?;
            remote.delete_all(objects.into_iter().map(|meta| meta.location).collect(), MAX_OBJECTS).await?;
        }
        self.delete_about(space).await
    }

    /// Deletes orphans older than `age`, which must exceed the time of any write of a chunk. Returns their
    /// number.
    ///
    /// # Errors
    /// As [`Self::delete_space`].
    pub async fn sweep(&self, orphans: &[Orphan], age: Duration) -> Result<usize> {
        let old = orphans.iter().filter(|orphan| orphan.is_older(age));
        let paths: HashSet<Path> = old.map(|orphan| orphan.path.clone()).collect();
        let n = paths.len();
        self.remote().delete_all(paths, MAX_OBJECTS).await.map(|()| n)
    }
}

/// The line of a space, and in a second line the digest of the space's name and the line.
fn sealed(space: ChunkId, line: &str) -> String {
    format!("{line}\n{}\n", ChunkId(digest(&[&space.0, line.as_bytes()].concat())))
}
