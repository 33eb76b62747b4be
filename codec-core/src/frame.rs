//! Frames: one level of one chunk of tokens, all layers, keys and values. The bytes are in FORMAT.md, "Frame".

#[cfg(feature = "rayon")]
use rayon::prelude::*;

#[cfg(feature = "alloc")]
mod encode;

use core::ops::Range;

use crate::block::{self, BlockBytes, MAX_BLOCK_TOKENS};
use crate::error::check_len;
use crate::{Backend, Error, LosslessPlane, Plane, RopeTable};

#[cfg(feature = "alloc")]
pub use encode::{
    assemble_frame, encode_frame, encode_frame_with, encode_lossless_frame, encode_lossless_frame_with,
};

const MAGIC: [u8; 4] = *b"KVCC";
const VERSION: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const TOKEN_HEAD_COMPONENT: u8 = 0;
const HEADER: usize = 64;

/// What the numbers were before they were coded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// 32-bit floats.
    F32,
    /// 16-bit IEEE floats.
    F16,
    /// Floats with the exponent of 32 bits and 7 bits of mantissa.
    Bf16,
}

/// Keys or values of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Keys.
    Keys,
    /// Values.
    Values,
}

/// The position of a block in a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockIndex {
    /// Layer.
    pub layer: usize,
    /// Keys or values.
    pub side: Side,
    /// Block of the plane: it holds the tokens [`FrameInfo::tokens_of_block`].
    pub block: usize,
}

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameInfo {
    /// What the numbers were.
    pub element: ElementType,
    /// Whether keys are after RoPE; before it, they are rotated when they are decoded.
    pub keys_rotated: bool,
    /// Whether the bits of 16-bit numbers were coded, without loss.
    pub lossless: bool,
    /// The encoding level; what levels there are, their user decides.
    pub level: u8,
    /// Layers.
    pub layers: usize,
    /// Key/value heads of a layer.
    pub heads: usize,
    /// Components of a head.
    pub head_dim: usize,
    /// Position of the first token.
    pub first_token: u64,
    /// Tokens.
    pub tokens: usize,
    /// Tokens of a block, the unit of random access; the last one may have fewer. Up to [`MAX_BLOCK_TOKENS`].
    pub block_tokens: usize,
    /// What the user calls the model by, such as a hash of its weights.
    pub model_id: u64,
}

impl FrameInfo {
    /// A frame with loss of numbers that were f32, keys before RoPE, from position 0, in blocks of 256 tokens; level and model
    /// id are 0.
    #[must_use]
    pub const fn new(layers: usize, heads: usize, head_dim: usize, tokens: usize) -> Self {
        Self {
            element: ElementType::F32,
            keys_rotated: false,
            lossless: false,
            level: 0,
            layers,
            heads,
            head_dim,
            first_token: 0,
            tokens,
            block_tokens: 256,
            model_id: 0,
        }
    }

    /// Numbers of a token in one plane.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.heads.saturating_mul(self.head_dim)
    }

    /// Blocks of one plane.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        if self.block_tokens == 0 { 0 } else { self.tokens.div_ceil(self.block_tokens) }
    }

    /// Tokens of a block, by their place in the frame.
    #[must_use]
    pub fn tokens_of_block(&self, block: usize) -> Range<usize> {
        let start = block.saturating_mul(self.block_tokens).min(self.tokens);
        start..start.saturating_add(self.block_tokens).min(self.tokens)
    }

    /// Elements of all planes.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.layers.saturating_mul(2).saturating_mul(self.tokens).saturating_mul(self.channels())
    }

    /// Checks that all sizes can be worked with: no product below overflows.
    fn check(&self) -> Result<(), Error> {
        for (what, size) in [
            ("layers", self.layers),
            ("heads", self.heads),
            ("head_dim", self.head_dim),
            ("block_tokens", self.block_tokens),
        ] {
            if size == 0 {
                return Err(Error::Zero { what });
            }
        }
        if self.block_tokens > MAX_BLOCK_TOKENS {
            return Err(Error::TooLarge);
        }
        let sizes = [self.layers, self.heads, self.head_dim, self.tokens.max(1)];
        let elements = sizes.iter().try_fold(64_usize, |product, &size| product.checked_mul(size));
        match elements {
            Some(_) if sizes.iter().all(|&size| u32::try_from(size).is_ok()) => Ok(()),
            _ => Err(Error::TooLarge),
        }
    }

    const fn entry_len(&self) -> usize {
        8 + 4 + 2 * block::tiles(self.channels())
    }

    fn index_len(&self) -> usize {
        2 * self.layers * (4 + self.blocks() * self.entry_len())
    }

    fn read(header: &[u8; HEADER]) -> Result<(Self, u64), Error> {
        if header[..4] != MAGIC {
            return Err(Error::BadMagic);
        }
        if header[4] != VERSION {
            return Err(Error::BadVersion { version: header[4] });
        }
        let (body, checksum) = header.split_at(HEADER - 4);
        if crc32fast::hash(body).to_le_bytes() != checksum {
            return Err(Error::BadChecksum);
        }
        if header[5] != LITTLE_ENDIAN {
            return Err(Error::BadField { what: "byte order" });
        }
        if header[8] != TOKEN_HEAD_COMPONENT || header[11] != 0 {
            return Err(Error::BadField { what: "layout" });
        }
        let flag = |at: usize, what| match header[at] {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(Error::BadField { what }),
        };
        let four =
            |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let eight = |at: usize| u64::from(four(at)) | u64::from(four(at + 4)) << 32;
        let info = Self {
            element: match header[6] {
                0 => ElementType::F32,
                1 => ElementType::F16,
                2 => ElementType::Bf16,
                _ => return Err(Error::BadField { what: "element type" }),
            },
            keys_rotated: flag(7, "position encoding of keys")?,
            lossless: flag(10, "lossless flag")?,
            level: header[9],
            layers: four(12) as usize,
            heads: four(16) as usize,
            head_dim: four(20) as usize,
            first_token: eight(24),
            tokens: four(32) as usize,
            block_tokens: four(36) as usize,
            model_id: eight(40),
        };
        info.check()?;
        Ok((info, eight(48)))
    }
}

/// A frame whose header and index have been verified; blocks are verified when they are decoded.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    info: FrameInfo,
    index: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Reads header and index. Allocates nothing.
    ///
    /// # Errors
    /// [`Error::Limit`] when it holds more than `max_elements` numbers; [`Error::Truncated`], [`Error::TrailingBytes`],
    /// [`Error::BadMagic`], [`Error::BadVersion`], [`Error::BadChecksum`], [`Error::BadField`], [`Error::Zero`],
    /// [`Error::TooLarge`], or [`Error::Corrupt`] for an index whose blocks do not follow each other.
    pub fn parse(bytes: &'a [u8], max_elements: usize) -> Result<Self, Error> {
        let (header, rest) = bytes.split_first_chunk::<HEADER>().ok_or(Error::Truncated)?;
        let (info, payload_len) = FrameInfo::read(header)?;
        if info.elements() > max_elements {
            return Err(Error::Limit { needed: info.elements(), limit: max_elements });
        }
        let (index, rest) = rest.split_at_checked(info.index_len()).ok_or(Error::Truncated)?;
        let (checksum, payload) = rest.split_first_chunk::<4>().ok_or(Error::Truncated)?;
        if crc32fast::hash(index) != u32::from_le_bytes(*checksum) {
            return Err(Error::BadChecksum);
        }
        match (payload.len() as u64).cmp(&payload_len) {
            core::cmp::Ordering::Less => return Err(Error::Truncated),
            core::cmp::Ordering::Greater => return Err(Error::TrailingBytes),
            core::cmp::Ordering::Equal => {}
        }
        let frame = Self { info, index, payload };
        let mut end = 0;
        for entry in 0..2 * info.layers * info.blocks() {
            let (start, next) = (end, frame.end_of(entry));
            if next < start {
                return Err(Error::Corrupt);
            }
            end = next;
        }
        if end == payload_len { Ok(frame) } else { Err(Error::Corrupt) }
    }

    /// What the frame says about its content.
    #[must_use]
    pub const fn info(&self) -> &FrameInfo {
        &self.info
    }

    /// Where a block's bytes lie in the frame.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn block_range(&self, index: BlockIndex) -> Result<Range<usize>, Error> {
        let (_, Range { start, end }) = self.place(index)?;
        let payload = HEADER + self.index.len() + 4;
        Ok(payload + start..payload + end)
    }

    /// Compares a block with its checksum, for who decodes it elsewhere.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::BadChecksum`].
    pub fn check_block(&self, index: BlockIndex) -> Result<(), Error> {
        let (checksum, bytes) = self.block(index)?;
        check_payload(checksum, &bytes)
    }

    /// The id of the plane that a layer's keys or values were coded under ([`Plane::id`]).
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn plane_id(&self, layer: usize, side: Side) -> Result<u32, Error> {
        if layer >= self.info.layers {
            return Err(Error::OutOfBounds { what: "layer" });
        }
        let mut id = [0; 4];
        id.copy_from_slice(&self.index[4 * plane_index(layer, side)..][..4]);
        Ok(u32::from_le_bytes(id))
    }

    /// Decodes a block: the tokens [`FrameInfo::tokens_of_block`] of one plane.
    ///
    /// `rope` rotates keys that were coded before RoPE to their positions; none leaves them as they are.
    ///
    /// # Shapes
    /// `out` (tokens of the block, heads, head_dim), fully written.
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::WrongProfile`], [`Error::Length`], [`Error::BadField`] for a lossless frame,
    /// [`Error::NotBeforeRope`], [`Error::BackendUnavailable`], [`Error::BadChecksum`]: `out` is then untouched.
    /// [`Error::Truncated`], [`Error::Corrupt`]
    /// or [`Error::TrailingBytes`], which need a forged checksum, and [`Error::NotFinite`] where numbers too large for the
    /// transform give a NaN: `out` then holds numbers without meaning.
    /// # Cost
    /// No allocation. With a transform, head_dim multiply-adds a number for coefficients that are not zero.
    pub fn decode_block_into(
        &self,
        plane: &Plane<'_>,
        index: BlockIndex,
        rope: Option<&RopeTable<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.decode_block_into_with(Backend::detect(), plane, index, rope, out)
    }

    /// [`Self::decode_block_into`] on the given backend.
    ///
    /// # Errors
    /// As there; [`Error::BackendUnavailable`].
    pub fn decode_block_into_with(
        &self,
        backend: Backend,
        plane: &Plane<'_>,
        index: BlockIndex,
        rope: Option<&RopeTable<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        backend.check()?;
        self.check_plane(plane.into(), index.layer, index.side)?;
        self.check_rope(rope, index.side, self.info.tokens_of_block(index.block).len())?;
        let bytes = self.verified(index, out.len())?;
        block::decode_into(plane, backend, &bytes, rope, out)
    }

    /// Decodes a block of a lossless frame: the bits of its 16-bit numbers.
    ///
    /// # Shapes
    /// `out` (tokens of the block, heads, head_dim), fully written.
    /// # Errors
    /// As [`Self::decode_block_into`].
    pub fn decode_lossless_block_into(
        &self,
        plane: &LosslessPlane<'_>,
        index: BlockIndex,
        out: &mut [u16],
    ) -> Result<(), Error> {
        self.decode_lossless_block_into_with(Backend::detect(), plane, index, out)
    }

    /// [`Self::decode_lossless_block_into`] on the given backend.
    ///
    /// # Errors
    /// As there; [`Error::BackendUnavailable`].
    pub fn decode_lossless_block_into_with(
        &self,
        backend: Backend,
        plane: &LosslessPlane<'_>,
        index: BlockIndex,
        out: &mut [u16],
    ) -> Result<(), Error> {
        backend.check()?;
        self.check_plane(plane.into(), index.layer, index.side)?;
        let bytes = self.verified(index, out.len())?;
        crate::lossless::decode_into(plane, backend, &bytes, out)
    }

    fn check_plane(&self, plane: PlaneIdentity, layer: usize, side: Side) -> Result<(), Error> {
        if plane.lossless != self.info.lossless {
            return Err(Error::WrongCoding { lossless: self.info.lossless });
        }
        if plane.id != self.plane_id(layer, side)? || plane.channels != self.info.channels() {
            return Err(Error::WrongProfile);
        }
        Ok(())
    }

    fn check_rope(&self, rope: Option<&RopeTable<'_>>, side: Side, tokens: usize) -> Result<(), Error> {
        let Some(rope) = rope else { return Ok(()) };
        if self.info.keys_rotated || side == Side::Values {
            return Err(Error::NotBeforeRope);
        }
        check_len("rope", rope.tokens(), tokens)?;
        check_len("head of rope", rope.head_dim(), self.info.head_dim)
    }

    /// The bytes of a block of `len` elements, compared with their checksum.
    fn verified(&self, index: BlockIndex, len: usize) -> Result<BlockBytes<'a>, Error> {
        let (checksum, bytes) = self.block(index)?;
        check_len("out", len, self.info.tokens_of_block(index.block).len() * self.info.channels())?;
        check_payload(checksum, &bytes)?;
        Ok(bytes)
    }

    /// The position of a block's entry in the index, and of its bytes in the payload.
    fn place(&self, BlockIndex { layer, side, block }: BlockIndex) -> Result<(usize, Range<usize>), Error> {
        if layer >= self.info.layers {
            return Err(Error::OutOfBounds { what: "layer" });
        }
        if block >= self.info.blocks() {
            return Err(Error::OutOfBounds { what: "block" });
        }
        let entry = plane_index(layer, side) * self.info.blocks() + block;
        let start = if entry == 0 { 0 } else { self.end_of(entry - 1) };
        Ok((entry, start as usize..self.end_of(entry) as usize))
    }

    fn block(&self, index: BlockIndex) -> Result<(u32, BlockBytes<'a>), Error> {
        let (entry, place) = self.place(index)?;
        let (_, rest) = self.entry(entry).split_at(8);
        let (checksum, lengths) = rest.split_first_chunk::<4>().ok_or(Error::Truncated)?;
        let bytes = &self.payload[place]; // `parse` has checked that ends rise up to the payload's length
        Ok((u32::from_le_bytes(*checksum), BlockBytes { bytes, lengths }))
    }

    fn entry(&self, entry: usize) -> &'a [u8] {
        let len = self.info.entry_len();
        &self.index[8 * self.info.layers + entry * len..][..len]
    }

    fn end_of(&self, entry: usize) -> u64 {
        let mut end = [0; 8];
        end.copy_from_slice(&self.entry(entry)[..8]);
        u64::from_le_bytes(end)
    }
}

/// The properties of a plane that must match those of the frame.
struct PlaneIdentity {
    id: u32,
    channels: usize,
    lossless: bool,
}

impl From<&Plane<'_>> for PlaneIdentity {
    fn from(plane: &Plane<'_>) -> Self {
        Self { id: plane.id(), channels: plane.channels(), lossless: false }
    }
}

impl From<&LosslessPlane<'_>> for PlaneIdentity {
    fn from(plane: &LosslessPlane<'_>) -> Self {
        Self { id: plane.id(), channels: plane.channels(), lossless: true }
    }
}

fn check_payload(checksum: u32, block: &BlockBytes<'_>) -> Result<(), Error> {
    if crc32fast::hash(block.bytes) == checksum { Ok(()) } else { Err(Error::BadChecksum) }
}

const fn plane_index(layer: usize, side: Side) -> usize {
    2 * layer + matches!(side, Side::Values) as usize
}

impl Frame<'_> {
    /// Decodes one plane of all tokens. With feature `rayon`, blocks are decoded in parallel.
    ///
    /// # Shapes
    /// `out` (tokens, heads, head_dim); `rope`, if any, has all of the frame's positions.
    /// # Errors
    /// As [`Self::decode_block_into`]; `out` then holds blocks of which some are not decoded.
    pub fn decode_plane_into(
        &self,
        plane: &Plane<'_>,
        layer: usize,
        side: Side,
        rope: Option<&RopeTable<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        self.decode_plane_into_with(Backend::detect(), plane, layer, side, rope, out)
    }

    /// [`Self::decode_plane_into`] on the given backend.
    ///
    /// # Errors
    /// As there; [`Error::BackendUnavailable`].
    pub fn decode_plane_into_with(
        &self,
        backend: Backend,
        plane: &Plane<'_>,
        layer: usize,
        side: Side,
        rope: Option<&RopeTable<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        let info = &self.info;
        backend.check()?;
        self.check_plane(plane.into(), layer, side)?;
        self.check_rope(rope, side, info.tokens)?;
        check_len("out", out.len(), info.tokens * info.channels())?;
        let block_len = info.block_tokens * info.channels();
        let decode = |(block, out): (usize, &mut [f32])| {
            let rope = rope.map(|rope| rope.tokens_of(info.tokens_of_block(block)));
            self.decode_block_into_with(backend, plane, BlockIndex { layer, side, block }, rope.as_ref(), out)
        };
        #[cfg(feature = "rayon")]
        return out.par_chunks_mut(block_len).enumerate().try_for_each(decode);
        #[cfg(not(feature = "rayon"))]
        out.chunks_mut(block_len).enumerate().try_for_each(decode)
    }
}
