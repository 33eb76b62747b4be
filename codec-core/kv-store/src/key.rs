//! Names of chunks: a hash chain of tokens, rooted in the name of a space.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use codec_core::{FrameInfo, ModelInfo, Profile};
use sha2::{Digest as _, Sha256};

use crate::{Error, Result};

/// A SHA-256 digest.
pub(crate) type Digest = [u8; 32];

/// The name of a chunk: the digest of its tokens and of the previous chunk's name. It identifies all tokens
/// up to the chunk's end, the model, and the profile.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub(crate) Digest);

/// The name of a codec profile: the digest of its inputs. The store holds the profile, since calibration on
/// another machine differs in the last bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProfileId(pub(crate) Digest);

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

impl fmt::Display for ProfileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(f, &self.0)
    }
}

fn write_hex(f: &mut fmt::Formatter<'_>, digest: &Digest) -> fmt::Result {
    digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

impl fmt::Debug for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChunkId({self})")
    }
}

impl FromStr for ChunkId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        read_hex(text).map(Self)
    }
}

impl FromStr for ProfileId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        read_hex(text).map(Self)
    }
}

fn read_hex(text: &str) -> Result<Digest> {
    let bad = || Error::Argument("a name has 64 hexadecimal digits in lower case");
    let digit = |x: u8| match x {
        b'0'..=b'9' => Ok(x - b'0'),
        b'a'..=b'f' => Ok(x - b'a' + 10),
        _ => Err(bad()),
    };
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    let mut id = [0; 32];
    if pairs.len() != id.len() || !rest.is_empty() {
        return Err(bad());
    }
    for (byte, &[high, low]) in id.iter_mut().zip(pairs) {
        *byte = digit(high)? << 4 | digit(low)?;
    }
    Ok(id)
}

/// The division of tokens: chunks of `chunk` tokens from position 0, and after the last one a tail, a
/// multiple of `tail` tokens that is shorter than a chunk.
///
/// A reader finds the longest stored tail by looking up each of its possible lengths, without a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Tokens of a chunk.
    pub chunk: usize,
    /// Granule of a tail's length in tokens; a divisor of `chunk`.
    pub tail: usize,
}

/// CacheGen's chunks, and tails of whole groups of ten tokens.
impl Default for Grid {
    fn default() -> Self {
        Self { chunk: codec_core::CHUNK_TOKENS, tail: 100 }
    }
}

/// The common properties of the caches in one part of a store. Caches of another model, profile or grid have
/// other names and are never found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    name: ChunkId,
    info: ModelInfo,
    levels: usize,
    lossless: u16, // a bit for each level
    grid: Grid,
}

/// A range of a context's tokens with its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkKey {
    /// Its name.
    pub id: ChunkId,
    /// The name of the previous chunk, or of the space.
    pub parent: ChunkId,
    /// Positions of its tokens.
    pub tokens: Range<usize>,
}

impl Grid {
    /// # Errors
    /// [`Error::Argument`] unless the tail divides the chunk into at most 65 parts.
    pub fn check(&self) -> Result<()> {
        let fits = self.tail > 0 && self.chunk > 0 && self.chunk.is_multiple_of(self.tail);
        if !fits || self.chunk / self.tail > MAX_TAILS + 1 || self.chunk > MAX_CHUNK {
            return Err(Error::Argument(
                "a chunk must be a multiple of its tail, 1 to 65 times as long, and at most 1,048,576 tokens",
            ));
        }
        Ok(())
    }
}

/// Maximum tails after a chunk: a reader looks up all of them.
const MAX_TAILS: usize = 64;
/// Maximum tokens of a chunk.
const MAX_CHUNK: usize = 1 << 20;

impl Space {
    /// The space of a model's caches, coded by a profile, with the levels of the profile.
    ///
    /// `model` identifies the weights and the tokenizer, for example by a digest of the files. The same
    /// `model`, profile and grid give the same space on every machine; [`ProfileId`] says how machines get
    /// the same profile.
    ///
    /// # Errors
    /// [`Error::Limit`] for more than 16 levels; [`Error::Argument`] for a grid whose tail does not divide
    /// the chunk into 2 to 65 parts or 1.
    pub fn new(model: &str, profile: &Profile, grid: Grid) -> Result<Self> {
        let levels = profile.levels();
        if levels > codec_core::MAX_LEVELS {
            let limit = codec_core::MAX_LEVELS as u64;
            return Err(Error::Limit { what: "levels", actual: levels as u64, limit });
        }
        grid.check()?;
        let mut hash = Sha256::new();
        hash.update(b"kv-store-2");
        for size in [model.len(), grid.chunk, grid.tail] {
            hash.update((size as u64).to_le_bytes());
        }
        hash.update(model);
        hash.update(Sha256::digest(profile.to_bytes()));
        let is_lossless = |level: usize| profile.frame_info(level as u8, 0).lossless; // at most 16
        let lossless = (0..levels).fold(0, |bits, level| bits | u16::from(is_lossless(level)) << level);
        let name = ChunkId(hash.finalize().into());
        Ok(Self { name, info: *profile.info(), levels, lossless, grid })
    }

    /// Its name.
    #[must_use]
    pub const fn name(&self) -> ChunkId {
        self.name
    }

    /// The space of other caches of the same model, profile and grid: rows that differ though their tokens do
    /// not, as those of an adapter, of a shard of the model, or of a tenant that shares no caches. `salt`
    /// says what they differ by; without it they are never found.
    #[must_use]
    pub fn salted(&self, salt: &[u8]) -> Self {
        Self { name: self.derived(b"kv-store-salted", salt), ..*self }
    }

    /// The first chunk under a name that an engine has made, instead of one that is made of its tokens: see
    /// [`Pages`](crate::Pages).
    pub(crate) fn named(&self, name: &[u8]) -> ChunkKey {
        let id = self.derived(b"kv-store-named", name);
        ChunkKey { id, parent: self.name, tokens: 0..self.grid.chunk }
    }

    /// A digest of its name and `of`, in a domain of its own.
    fn derived(&self, domain: &[u8], of: &[u8]) -> ChunkId {
        let hash = Sha256::new().chain_update(domain).chain_update(self.name.0).chain_update(of);
        ChunkId(hash.finalize().into())
    }

    /// Levels of every chunk, the least lossy first.
    #[must_use]
    pub const fn levels(&self) -> usize {
        self.levels
    }

    /// Whether the frames of a level are lossless.
    pub(crate) const fn is_lossless(&self, level: usize) -> bool {
        self.lossless >> level & 1 == 1
    }

    /// How tokens are divided.
    #[must_use]
    pub const fn grid(&self) -> Grid {
        self.grid
    }

    /// Elements in the keys and values of a token.
    pub(crate) const fn values_per_token(&self) -> usize {
        2 * self.info.layers * self.info.channels()
    }

    /// Maximum bytes of a frame of `tokens` tokens.
    pub(crate) const fn max_frame_len(&self, tokens: usize) -> usize {
        let ModelInfo { layers, heads, head_dim, .. } = self.info;
        FrameInfo::new(layers, heads, head_dim, tokens).max_frame_len()
    }

    /// The chunks that cover as much of `tokens` as can be stored: whole ones, and the longest tail.
    #[must_use]
    pub fn chunks(&self, tokens: &[u32]) -> Vec<ChunkKey> {
        let mut chunks = self.whole_chunks(tokens);
        chunks.extend(self.tails(chunks.last(), tokens).into_iter().next());
        chunks
    }

    /// The whole chunks of `tokens`.
    pub(crate) fn whole_chunks(&self, tokens: &[u32]) -> Vec<ChunkKey> {
        let mut chunks: Vec<ChunkKey> = vec![];
        for _ in tokens.chunks_exact(self.grid.chunk) {
            chunks.push(self.next(chunks.last(), self.grid.chunk, tokens));
        }
        chunks
    }

    /// The tails of `tokens` after a whole chunk, the longest first.
    pub(crate) fn tails(&self, last: Option<&ChunkKey>, tokens: &[u32]) -> Vec<ChunkKey> {
        let left = tokens.len().saturating_sub(last.map_or(0, |last| last.tokens.end));
        let longest = left.min(self.grid.chunk - 1) / self.grid.tail;
        (1..=longest).rev().map(|n| self.next(last, n * self.grid.tail, tokens)).collect()
    }

    /// The `n` tokens after a chunk.
    fn next(&self, last: Option<&ChunkKey>, n: usize, tokens: &[u32]) -> ChunkKey {
        let (parent, start) = last.map_or((self.name, 0), |last| (last.id, last.tokens.end));
        let mut hash = Sha256::new();
        hash.update(parent.0);
        hash.update((n as u64).to_le_bytes());
        for token in &tokens[start..start + n] {
            hash.update(token.to_le_bytes());
        }
        ChunkKey { id: ChunkId(hash.finalize().into()), parent, tokens: start..start + n }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use codec_core::{FitOptions, PlaneBuf};

    use super::*;

    /// A profile of one layer with two heads of four components.
    pub(crate) fn profile(levels: usize) -> Profile {
        let rows: Vec<f32> = (0..80).map(|i| (i as f32).sin()).collect();
        let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default()).unwrap();
        let info = ModelInfo { model_id: 0, layers: 1, heads: 2, head_dim: 4, keys_rotated: false };
        Profile::new(info, vec![plane; 2 * levels]).unwrap()
    }

    fn space(model: &str, grid: Grid) -> Space {
        Space::new(model, &profile(2), grid).unwrap()
    }

    const GRID: Grid = Grid { chunk: 10, tail: 5 };

    #[test]
    fn names_stand_for_the_whole_prefix() {
        let space = space("model", GRID);
        let tokens: Vec<u32> = (0..37).collect();
        let chunks = space.chunks(&tokens);
        let ranges: Vec<_> = chunks.iter().map(|chunk| chunk.tokens.clone()).collect();
        assert_eq!(ranges, [0..10, 10..20, 20..30, 30..35]);
        assert!(chunks.windows(2).all(|pair| pair[1].parent == pair[0].id));
        // Later tokens do not change a name; an earlier token changes all of them.
        assert_eq!(space.chunks(&tokens[..20]), chunks[..2]);
        for changed in 0..35 {
            let mut other = tokens.clone();
            other[changed] += 1;
            let same = space.chunks(&other).iter().zip(&chunks).take_while(|(a, b)| a.id == b.id).count();
            assert_eq!(same, changed / 10, "token {changed}");
        }
    }

    #[test]
    fn tails_are_multiples_and_shorter_than_a_chunk() {
        let space = space("model", Grid { chunk: 10, tail: 2 });
        let tokens: Vec<u32> = (0..100).collect();
        let lengths = |n: usize| {
            let tails = space.tails(None, &tokens[..n]);
            tails.iter().map(|tail| tail.tokens.end).collect::<Vec<_>>()
        };
        assert!(lengths(0).is_empty() && lengths(1).is_empty());
        assert_eq!(lengths(2), [2]);
        assert_eq!(lengths(9), [8, 6, 4, 2]);
        assert_eq!(lengths(10), [8, 6, 4, 2]);
        assert_eq!(lengths(100), [8, 6, 4, 2]);
        assert!(space.chunks(&tokens[..1]).is_empty());
    }

    #[test]
    fn spaces_differ_by_model_profile_and_grid() {
        let base = space("model", GRID);
        assert_eq!(base, space("model", GRID));
        for other in [
            space("model2", GRID),
            space("model", Grid { chunk: 10, tail: 10 }),
            Space::new("model", &profile(1), GRID).unwrap(),
            base.salted(b""),
            base.salted(b"a"),
            base.salted(b"a").salted(b"b"),
            base.salted(b"ab"),
        ] {
            assert_ne!(base.name(), other.name());
        }
        assert_eq!(base.salted(b"a"), base.salted(b"a"));
        assert_ne!(base.salted(b"a").salted(b"b"), base.salted(b"ab"));
    }

    #[test]
    fn chunks_that_engines_name_differ_by_space_and_name() {
        let base = space("model", GRID);
        let key = base.named(b"x");
        assert_eq!((key.parent, key.tokens.clone()), (base.name(), 0..10));
        assert_eq!(key, base.named(b"x"));
        for other in [base.named(b"y"), base.named(b""), base.salted(b"x").named(b"x")] {
            assert_ne!(key.id, other.id);
        }
        assert_ne!(key.id, base.salted(b"x").name());
    }

    #[test]
    fn wrong_grids_are_errors() {
        for (chunk, tail) in [(0, 1), (1, 0), (10, 3), (1000, 1), (usize::MAX, usize::MAX)] {
            assert!(Space::new("m", &profile(1), Grid { chunk, tail }).is_err(), "{chunk}, {tail}");
        }
        assert!(matches!(Space::new("m", &profile(17), GRID), Err(Error::Limit { .. })));
    }

    #[test]
    fn names_parse_again() {
        let id = space("model", GRID).name();
        assert_eq!(id.to_string().parse::<ChunkId>().unwrap(), id);
        for text in ["", "00", &"G".repeat(64), &"A".repeat(64), &"0".repeat(65), &"0".repeat(66)] {
            assert!(text.parse::<ChunkId>().is_err(), "{text}");
        }
    }
}
