//! The manifest of a chunk: the object with its frames, their offsets and digests. It is written last, so a
//! chunk without a manifest does not exist for readers.
//!
//! | bytes | field |
//! | --- | --- |
//! | 4 | `KVSM` |
//! | 1 | version, 3 |
//! | 1 | levels, at least 1 and at most 16 |
//! | 2 | a bit for each level, the first lowest: whether its frame is lossless |
//! | 4 | tokens |
//! | 8 | position of the first token |
//! | 32 | name of the space, which stands for the model, the profile and the grid |
//! | 32 | name of the chunk |
//! | 32 | name of the previous chunk, or of the space |
//! | 16 | name of the object with the frames |
//! | 8 | length of that object |
//! | 16 per level | offset of its frame in the object, and its length |
//! | 16 per piece | XXH3 of every piece of every frame, the first level's first: 128 bits, seed 0 |
//! | 32 | SHA-256 of all preceding bytes |
//!
//! Integers are little-endian. A piece is 4 MiB of a frame, the last one the remainder: pieces are fetched,
//! verified and retried independently. Their digests guard against faults, as checksums do, not against
//! writers of the store, and cost far less than SHA-256.

use std::ops::Range;

use codec_core::{Chunk, ChunkEntry, chunk_head};
use sha2::{Digest as _, Sha256};
use twox_hash::XxHash3_128;

use crate::key::Digest;
use crate::{ChunkId, ChunkKey, Space};

const MAGIC: [u8; 4] = *b"KVSM";
const VERSION: u8 = 3;
const FIXED: usize = 140;
const LEVEL: usize = 16;
const DIGEST: usize = 32;
/// Bytes of a piece's digest.
const PIECE_DIGEST: usize = 16;
/// Bytes of a piece.
pub(crate) const PIECE: u64 = 4 << 20;
/// Maximum bytes of a manifest: 32 GiB of frames.
pub(crate) const MAX_MANIFEST: usize = 256 << 10;

pub(crate) type PieceDigest = [u8; PIECE_DIGEST];

/// The name of an object with frames. It is drawn at random for every write, so that no two writers ever
/// write one object, and deleting a chunk deletes exactly the object that its manifest names.
pub(crate) type DataId = [u8; 16];

/// The object that holds a chunk's frames, and the range of each level's frame in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    pub(crate) space: ChunkId,
    pub(crate) id: ChunkId,
    pub(crate) parent: ChunkId,
    pub(crate) tokens: Range<usize>,
    pub(crate) data: DataId,
    pub(crate) data_len: u64,
    pub(crate) levels: Vec<Level>, // at least one, in the order of their bytes
}

/// The frame of a level in the object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Level {
    pub bytes: Range<u64>,
    pub lossless: bool,
    pub pieces: Vec<PieceDigest>,
}

impl Level {
    /// The range of every piece in the object, and its digest.
    pub fn pieces(&self) -> impl Iterator<Item = (Range<u64>, PieceDigest)> + '_ {
        let starts = (self.bytes.start..self.bytes.end).step_by(PIECE as usize);
        starts.zip(&self.pieces).map(|(start, &digest)| (start..self.bytes.end.min(start + PIECE), digest))
    }
}

/// The digest of a piece.
pub(crate) fn digest(bytes: &[u8]) -> Digest {
    Sha256::digest(bytes).into()
}

/// The digest of a piece.
pub(crate) fn piece_digest(bytes: &[u8]) -> PieceDigest {
    XxHash3_128::oneshot(bytes).to_le_bytes()
}

impl Manifest {
    /// Describes `object`, a chunk of codec-core with one frame per level.
    ///
    /// # Errors
    /// The reason why the object is invalid.
    pub(crate) fn describe(
        key: &ChunkKey,
        space: &Space,
        data: DataId,
        object: &[u8],
    ) -> crate::Result<Self> {
        let chunk = Chunk::parse(object)?;
        let wrong = |what| Err(crate::Error::Argument(what));
        if chunk.len() != space.levels() {
            return wrong("a chunk needs a frame for every level of the space");
        }
        let mut levels = vec![];
        let mut start = object.len() as u64;
        for level in (0..chunk.len()).rev() {
            let (entry, frame) = (chunk.entry(level)?, chunk.frame(level)?);
            if entry.first_token != key.tokens.start as u64 || entry.tokens != key.tokens.len() {
                return wrong("a frame holds other tokens than its chunk");
            }
            if usize::from(entry.level) != level {
                return wrong("the frames of a chunk must be in the order of their levels");
            }
            if entry.lossless != space.is_lossless(level) {
                return wrong("a frame is lossless at a level with loss, or the reverse");
            }
            let bytes = start - frame.len() as u64..start;
            start = bytes.start;
            let pieces = frame.chunks(PIECE as usize).map(piece_digest).collect();
            levels.push(Level { bytes, lossless: entry.lossless, pieces });
        }
        levels.reverse();
        let (space, tokens) = (space.name(), key.tokens.clone());
        let data_len = object.len() as u64;
        Ok(Self { space, id: key.id, parent: key.parent, tokens, data, data_len, levels })
    }

    /// The bytes of the object before its frames, and their range; none for a manifest of frames that no
    /// chunk holds in this way.
    pub(crate) fn head(&self) -> Option<(Range<u64>, Vec<u8>)> {
        let entry = |(level, &Level { ref bytes, lossless, .. }): (usize, &Level)| ChunkEntry {
            first_token: self.tokens.start as u64,
            tokens: self.tokens.len(),
            level: level as u8, // at most 16
            lossless,
            len: (bytes.end - bytes.start) as usize,
        };
        let entries: Vec<_> = self.levels.iter().enumerate().map(entry).collect();
        let head = chunk_head(&entries).ok()?;
        let range = 0..self.levels.first()?.bytes.start;
        (range.end == head.len() as u64).then_some((range, head))
    }

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.extend([VERSION, self.levels.len() as u8]);
        let lossless =
            self.levels.iter().rev().fold(0_u16, |bits, level| bits << 1 | u16::from(level.lossless));
        out.extend(lossless.to_le_bytes());
        out.extend((self.tokens.len() as u32).to_le_bytes());
        out.extend((self.tokens.start as u64).to_le_bytes());
        [self.space, self.id, self.parent].iter().for_each(|name| out.extend(name.0));
        out.extend(self.data);
        out.extend(self.data_len.to_le_bytes());
        for Level { bytes, .. } in &self.levels {
            out.extend(bytes.start.to_le_bytes());
            out.extend((bytes.end - bytes.start).to_le_bytes());
        }
        self.levels.iter().flat_map(|level| &level.pieces).for_each(|digest| out.extend(digest));
        let digest = digest(&out);
        out.extend(digest);
        out
    }

    /// Reads a manifest from untrusted bytes.
    ///
    /// # Errors
    /// The reason why they are invalid.
    pub fn parse(bytes: &[u8]) -> Result<Self, &'static str> {
        if bytes.len() > MAX_MANIFEST {
            return Err("is too long for a manifest");
        }
        let (bytes, check) = bytes.split_last_chunk::<DIGEST>().ok_or("is truncated")?;
        let (fixed, rest) = bytes.split_first_chunk::<FIXED>().ok_or("is truncated")?;
        if fixed[..4] != MAGIC {
            return Err("is no manifest");
        }
        if digest(bytes) != *check {
            return Err("is a damaged manifest");
        }
        if fixed[4] != VERSION {
            return Err("is a manifest of another version of the format, which is not read");
        }
        let n_levels = usize::from(fixed[5]);
        let lossless = u32::from(u16::from_le_bytes([fixed[6], fixed[7]]));
        if !(1..=codec_core::MAX_LEVELS).contains(&n_levels) || lossless >> n_levels != 0 {
            return Err("is a manifest with unknown fields");
        }
        let eight = |bytes: &[u8], at: usize| {
            let mut field = [0; 8];
            field.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(field)
        };
        let mut four = [0; 4];
        four.copy_from_slice(&fixed[8..12]);
        let n_tokens = u32::from_le_bytes(four) as usize;
        let first =
            usize::try_from(eight(fixed, 12)).map_err(|_| "is a manifest of a position out of range")?;
        let end = first.checked_add(n_tokens).ok_or("is a manifest of a position out of range")?;
        let name = |at: usize| {
            let mut id = [0; 32];
            id.copy_from_slice(&fixed[at..at + 32]);
            ChunkId(id)
        };
        let mut data = [0; 16];
        data.copy_from_slice(&fixed[116..132]);
        let data_len = eight(fixed, 132);
        let (table, mut digests) =
            rest.split_at_checked(LEVEL * n_levels).ok_or("is a manifest that is truncated")?;
        let mut levels = Vec::with_capacity(n_levels);
        let mut last = 0;
        for entry in table.chunks_exact(LEVEL) {
            let (start, len) = (eight(entry, 0), eight(entry, 8));
            let end = start.checked_add(len).filter(|&end| end <= data_len && start >= last && len > 0);
            let end = end.ok_or("is a manifest of frames that overlap or are outside of the object")?;
            last = end;
            let n_pieces = usize::try_from(len.div_ceil(PIECE)).unwrap_or(usize::MAX);
            let (pieces, rest) = n_pieces
                .checked_mul(PIECE_DIGEST)
                .and_then(|len| digests.split_at_checked(len))
                .ok_or("is a manifest that is truncated")?;
            digests = rest;
            let pieces = pieces.as_chunks::<PIECE_DIGEST>().0.to_vec();
            levels.push(Level { bytes: start..end, lossless: lossless >> levels.len() & 1 == 1, pieces });
        }
        if !digests.is_empty() {
            return Err("is a manifest with bytes after its end");
        }
        let [space, id, parent] = [20, 52, 84].map(name);
        Ok(Self { space, id, parent, tokens: first..end, data, data_len, levels })
    }

    /// Rejects a manifest that stands in the place of that of chunk `id` of `space`.
    ///
    /// # Errors
    /// The reason why it is rejected.
    pub(crate) fn check_names(&self, space: ChunkId, id: ChunkId) -> Result<(), &'static str> {
        if self.space != space {
            return Err("is the manifest of a chunk of another model, profile or grid");
        }
        if self.id == id { Ok(()) } else { Err("is the manifest of another chunk") }
    }

    /// Rejects the manifest of another chunk, and frames that are longer than any of their shape.
    ///
    /// # Errors
    /// The reason why it is rejected.
    pub(crate) fn check(&self, key: &ChunkKey, space: &Space) -> Result<(), &'static str> {
        self.check_names(space.name(), key.id)?;
        if (self.parent, &self.tokens) != (key.parent, &key.tokens) {
            return Err("is the manifest of another chunk");
        }
        let is_lossless = self.levels.iter().map(|level| level.lossless);
        if !is_lossless.eq((0..space.levels()).map(|level| space.is_lossless(level))) {
            return Err("is a manifest of other levels");
        }
        let limit = space.max_frame_len(key.tokens.len()) as u64;
        match self.levels.iter().all(|level| level.bytes.end - level.bytes.start <= limit) {
            true => Ok(()),
            false => Err("is a manifest of frames that are too long for their shape"),
        }
    }
}

#[cfg(test)]
mod tests {
    use codec_core::{ElementType, LayerRows, Place, Profile, write_chunk};
    use kv_stream::encode_frames;

    use super::*;
    use crate::Grid;
    use crate::key::tests::profile;

    fn space(profile: &Profile) -> Space {
        Space::new("model", profile, Grid { chunk: 10, tail: 5 }).unwrap()
    }

    /// Three levels, the first one lossless.
    fn levels() -> Profile {
        let (lossy, rows) = (profile(2), [0.5_f32; 80]);
        let layer = [LayerRows { keys: &rows, values: &rows }];
        let lossless =
            Profile::fit_lossless(*lossy.info(), ElementType::Bf16, 10, &layer, &Place::nhd(2, 4)).unwrap();
        Profile::join([lossless, lossy]).unwrap()
    }

    /// A chunk of ten tokens, and its manifest.
    fn described() -> (Space, ChunkKey, Vec<u8>, Manifest) {
        let profile = levels();
        let space = space(&profile);
        let key = space.chunks(&(0..20).collect::<Vec<u32>>())[1].clone();
        let rows: Vec<f32> = (0..80).map(|i| (i as f32 * 0.3).cos()).collect();
        let layers = [LayerRows { keys: &rows, values: &rows }];
        let frames = encode_frames(&profile, &key.tokens, &layers, &Place::nhd(2, 4)).unwrap();
        let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
        let mut object = vec![];
        write_chunk(&frames, &mut object).unwrap();
        let manifest = Manifest::describe(&key, &space, [7; 16], &object).unwrap();
        (space, key, object, manifest)
    }

    #[test]
    fn manifests_name_the_frames_and_parse_again() {
        let (space, key, object, manifest) = described();
        let chunk = Chunk::parse(&object).unwrap();
        for (i, level) in manifest.levels.iter().enumerate() {
            let bytes = &object[level.bytes.start as usize..level.bytes.end as usize];
            assert_eq!(bytes, chunk.frame(i).unwrap());
            assert_eq!(level.pieces, [piece_digest(bytes)]);
        }
        let (range, head) = manifest.head().unwrap();
        assert_eq!(head, object[range.start as usize..range.end as usize]);
        let bytes = manifest.to_bytes();
        assert_eq!(Manifest::parse(&bytes).unwrap(), manifest);
        manifest.check(&key, &space).unwrap();
        let other = space.chunks(&(1..21).collect::<Vec<u32>>())[1].clone();
        assert!(manifest.check(&other, &space).is_err());
    }

    #[test]
    fn frames_of_another_chunk_are_refused() {
        let (space, key, object, _) = described();
        let first = space.chunks(&(0..20).collect::<Vec<u32>>())[0].clone();
        assert!(Manifest::describe(&first, &space, [0; 16], &object).is_err());
        assert!(Manifest::describe(&key, &space, [0; 16], &object[..40]).is_err());
        let two = Space::new("model", &profile(2), Grid { chunk: 10, tail: 5 }).unwrap();
        assert!(Manifest::describe(&key, &two, [0; 16], &object).is_err());
        // As many levels, but with loss.
        let lossy = Space::new("model", &profile(3), Grid { chunk: 10, tail: 5 }).unwrap();
        assert!(Manifest::describe(&key, &lossy, [0; 16], &object).is_err());
        let named = Manifest { space: lossy.name(), ..described().3 };
        assert_eq!(named.check(&key, &lossy), Err("is a manifest of other levels"));
    }

    /// Any value of a field, under a correct digest, gives an error, or a manifest whose frames are inside
    /// its object.
    #[test]
    fn hostile_manifests_are_errors_or_consistent() {
        let bytes = described().3.to_bytes();
        let sealed = |body: &[u8]| [body, &digest(body)].concat();
        let body = &bytes[..bytes.len() - DIGEST];
        let mut parsed = 0;
        let mut check = |bytes: Vec<u8>| {
            let Ok(manifest) = Manifest::parse(&bytes) else { return };
            parsed += 1;
            assert_eq!(manifest.to_bytes(), bytes);
            for level in &manifest.levels {
                assert!(level.bytes.start < level.bytes.end && level.bytes.end <= manifest.data_len);
                let covered: u64 = level.pieces().map(|(range, _)| range.end - range.start).sum();
                assert_eq!(covered, level.bytes.end - level.bytes.start);
            }
        };
        for at in 0..body.len() {
            for value in [0, 1, 2, 3, 0x7f, 0x80, 0xff, body[at] ^ 1, body[at].wrapping_add(1)] {
                let mut changed = body.to_vec();
                changed[at] = value;
                check(changed.clone());
                check(sealed(&changed));
                changed[at..].iter_mut().take(8).for_each(|byte| *byte = value);
                check(sealed(&changed));
            }
            check(body[..at].to_vec());
            check(sealed(&body[..at]));
            check(sealed(&[body, &body[..at]].concat()));
        }
        check(vec![0; MAX_MANIFEST + 1]);
        // Names and digests may be anything.
        assert!(parsed > 100, "{parsed}");
    }
}
