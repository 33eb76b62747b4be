//! A store whose objects differ from those written. Shared by the tests and the fuzz target `store_objects`.

use std::collections::HashSet;
use std::sync::Arc;

use codec_core::{Chunk, ElementType, Encoding, FitOptions, LayerRows, ModelInfo, Place, PlaneBuf, Profile};
use futures_util::StreamExt;
use kv_store::{AsyncStore, ChunkId, Error, Grid, Options, ProfileId, Space, encode_chunk};
use kv_stream::ChunkFrame;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use sha2::{Digest, Sha256};
use twox_hash::XxHash3_128;

/// One without loss, one with.
const LEVELS: usize = 2;
/// Bytes of a manifest before its table of levels, of an entry of the table, and of a digest.
const FIXED: usize = 140;
const LEVEL: usize = 16;
const DIGEST: usize = 32;
/// Bytes of a piece's digest.
const PIECE_DIGEST: usize = 16;
/// Bytes of a stored profile before its digest.
const NAMED: usize = 40;

/// A change of one object. Its numbers are taken modulo their ranges.
#[derive(Clone, Copy, Debug)]
pub struct Change {
    /// The kind of change: see [`Written::changed`].
    pub kind: u8,
    /// The object.
    pub object: u8,
    /// The position.
    pub at: u16,
    /// The new value.
    pub value: u64,
}

/// The digests that are recomputed after the changes, as anybody with write access to the store can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forged {
    /// None.
    Nothing,
    /// Those of manifests and profiles over themselves.
    Objects,
    /// Also those of frames in manifests.
    Frames,
}

/// The contents of a store: the chunks of two contexts, and a profile.
pub struct Written {
    profile: Profile,
    id: ProfileId,
    space: Space,
    contexts: [Vec<u32>; 2],
    chunks: Vec<(ChunkId, Vec<u8>)>,
    objects: Vec<(Path, Vec<u8>)>,
}

fn store(objects: Arc<dyn ObjectStore>) -> AsyncStore {
    AsyncStore::new(objects, Path::from("root"), Options { attempts: 1, ..Options::default() })
}

impl Written {
    /// Writes them.
    pub async fn new() -> Self {
        let rows: Vec<f32> = (0..35 * 8).map(|i| (i as f32).sin()).collect();
        let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default()).unwrap();
        let info = ModelInfo { model_id: 0, layers: 1, heads: 2, head_dim: 4, keys_rotated: false };
        let layers = [LayerRows { keys: &rows[..], values: &rows }];
        let lossless = Profile::fit_lossless(info, ElementType::F16, 35, &layers, &Place::nhd(2, 4)).unwrap();
        let lossy = Profile::new(info, vec![plane; 2]).unwrap();
        let profile = Profile::join([lossless, lossy]).unwrap();
        let space = Space::new("model", &profile, Grid { chunk: 10, tail: 5 }).unwrap();
        let id = ProfileId::new("model", "levels", &[]);
        let contexts = [(0..25).collect(), (0..10).chain(20..35).collect()];
        let memory = Arc::new(InMemory::new());
        let store = store(memory.clone());
        store.put_profile(id, &profile).await.unwrap();
        let mut chunks = vec![];
        for key in contexts.iter().flat_map(|tokens: &Vec<u32>| space.chunks(tokens)) {
            let place = Place { first_token: key.tokens.start, ..Place::nhd(2, 4) };
            let object = encode_chunk(&profile, &key, &layers, &place).unwrap();
            store.put_chunk(&space, &key, object.clone().into()).await.unwrap();
            chunks.push((key.id, object));
        }
        let mut objects = vec![];
        let mut listed = memory.list(None);
        while let Some(meta) = listed.next().await {
            let path = meta.unwrap().location;
            let bytes = memory.get(&path).await.unwrap().bytes().await.unwrap();
            objects.push((path, bytes.to_vec()));
        }
        Self { profile, id, space, contexts, chunks, objects }
    }

    /// The objects after these changes. `bytes` are inserted by some changes.
    pub fn changed(&self, changes: &[Change], bytes: &[u8], forged: Forged) -> Vec<(Path, Vec<u8>)> {
        let mut objects = self.objects.clone();
        for &Change { kind, object, at, value } in changes {
            let n = objects.len();
            let Some((_, old)) = objects.get(usize::from(object) % n.max(1)) else { break };
            let mut new = old.clone();
            let at = usize::from(at) % (new.len() + 1);
            match kind % 8 {
                0 => new.clone_from(&self.objects[value as usize % self.objects.len()].1),
                1 => new.truncate(at),
                2 => new.extend_from_within(at..),
                3 => drop(new.splice(at..at, bytes.iter().copied())),
                4 => new.iter_mut().skip(at).take(1).for_each(|byte| *byte ^= 1 << (value % 8)),
                5 => new.iter_mut().skip(at).zip(value.to_le_bytes()).for_each(|(byte, value)| *byte = value),
                6 => new = bytes.to_vec(),
                _ => {
                    objects.swap_remove(usize::from(object) % n);
                    continue;
                }
            }
            objects[usize::from(object) % n].1 = new;
        }
        if forged == Forged::Frames {
            self.name_frames(&mut objects);
        }
        for (path, object) in objects.iter_mut().filter(|_| forged != Forged::Nothing) {
            let at = match path.as_ref() {
                manifest if manifest.contains("/chunks/") => object.len().checked_sub(DIGEST),
                profile if profile.contains("/profiles/") => Some(NAMED),
                _ => None,
            };
            let Some((before, after)) = at.and_then(|at| object.split_at_checked(at)) else { continue };
            let Some((_, after)) = after.split_at_checked(DIGEST) else { continue };
            let (at, digest) =
                (before.len(), Sha256::new().chain_update(before).chain_update(after).finalize());
            object[at..at + DIGEST].copy_from_slice(&digest);
        }
        objects
    }

    /// Updates the digests of frames in manifests to match the bytes at their offsets.
    fn name_frames(&self, objects: &mut [(Path, Vec<u8>)]) {
        let old = objects.to_vec();
        for (path, manifest) in objects {
            let Some(id) = path.as_ref().split_once("/chunks/").map(|(_, id)| id.to_owned()) else {
                continue;
            };
            let Some((_, data)) =
                old.iter().find(|(path, _)| path.as_ref().contains(&format!("/data/{id}/")))
            else {
                continue;
            };
            for level in 0..LEVELS {
                let entry = FIXED + LEVEL * level;
                let digest = FIXED + LEVEL * LEVELS + PIECE_DIGEST * level;
                let number = |at: usize| {
                    let bytes = manifest.get(at..at + 8)?.try_into().ok()?;
                    usize::try_from(u64::from_le_bytes(bytes)).ok()
                };
                let frame = || {
                    let (start, len) = (number(entry)?, number(entry + 8)?);
                    data.get(start..start.checked_add(len)?)
                };
                let Some(computed) = frame().map(XxHash3_128::oneshot) else { continue };
                if let Some(digest) = manifest.get_mut(digest..digest + PIECE_DIGEST) {
                    digest.copy_from_slice(&computed.to_le_bytes());
                }
            }
        }
    }

    /// Finds, loads, decodes, lists, verifies and deletes over these objects. Without forged digests,
    /// returned data is what was written; every error is damage, described in one short line.
    pub async fn check(&self, objects: &[(Path, Vec<u8>)], forged: Forged) {
        let memory = Arc::new(InMemory::new());
        for (path, object) in objects {
            memory.put(path, object.clone().into()).await.unwrap();
        }
        let store = store(memory);
        let mut damaged = HashSet::new();
        for (tokens, level) in self.contexts.iter().flat_map(|tokens| [(tokens, 0), (tokens, 1)]) {
            let found = store.find(&self.space, tokens).await.unwrap();
            for (i, chunk) in found.iter().enumerate() {
                let arrivals = store.load(&self.space, &found[i..=i], 1, |_| Encoding::Level(level));
                let mut arrivals = std::pin::pin!(arrivals);
                let arrival = match arrivals.next().await.unwrap() {
                    Ok(arrival) => arrival,
                    Err(e) => {
                        is_damage(&e);
                        damaged.insert(chunk.key().id);
                        continue;
                    }
                };
                let decoded = ChunkFrame::parse(&self.profile, &arrival.frame, &arrival.tokens, level)
                    .and_then(|frame| frame.layer(0));
                if forged == Forged::Nothing {
                    decoded.unwrap();
                    assert!(self.frame(chunk.key().id, level) == arrival.frame);
                } else if let Err(e) = decoded {
                    is_short(&e);
                }
            }
        }
        match store.profile(self.id).await {
            Ok(Some(profile)) => assert!(forged != Forged::Nothing || profile == self.profile),
            Ok(None) => {}
            Err(e) => is_damage(&e),
        }
        for (id, e) in store.faulty_profiles().await.unwrap() {
            assert_eq!(id, self.id);
            is_damage(&e);
        }
        let space = self.space.name();
        let listing = store.list(space).await.unwrap();
        listing.damaged.iter().for_each(|(_, e)| is_damage(e));
        for chunk in &listing.chunks {
            match store.verify(space, chunk).await {
                Ok(()) => assert!(forged != Forged::Nothing || !damaged.contains(&chunk.id())),
                Err(e) => is_damage(&e),
            }
        }
        for (id, _) in &self.chunks {
            store.delete(space, *id).await.unwrap();
        }
        assert!(store.find(&self.space, &self.contexts[0]).await.unwrap().is_empty());
    }

    fn frame(&self, id: ChunkId, level: usize) -> &[u8] {
        let (_, object) = self.chunks.iter().find(|(chunk, _)| *chunk == id).unwrap();
        Chunk::parse(object).unwrap().frame(level).unwrap()
    }
}

/// Checks that the error is damage, described in one short line.
fn is_damage(e: &Error) {
    assert!(e.is_damage(), "{e:?}");
    is_short(e);
}

/// Checks that the error is one short line.
fn is_short(e: &dyn std::fmt::Display) {
    let line = e.to_string();
    assert!(line.lines().count() == 1 && line.len() < 400, "{line}");
}
