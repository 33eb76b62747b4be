//! Frames: keys and values of all layers for a range of tokens, at one level. FORMAT.md, "Frame", specifies
//! the bytes.

#[cfg(feature = "rayon")]
use rayon::prelude::*;

#[cfg(feature = "alloc")]
mod encode;
mod info;

use core::ops::Range;

use crate::block::{self, BlockBytes};
use crate::error::check_len;
use crate::{Backend, Error, LosslessPlane, Plane, RopeTable};

use info::HEADER;

#[cfg(feature = "alloc")]
pub use encode::{
    assemble_frame, encode_frame, encode_frame_with, encode_lossless_frame, encode_lossless_frame_with,
};
pub use info::{BlockIndex, ElementType, FrameInfo, Side};

/// A frame whose header and index are verified. Blocks are verified when they are decoded.
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    info: FrameInfo,
    index: &'a [u8],
    payload: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Parses header and index, without allocation.
    ///
    /// # Errors
    /// [`Error::Limit`] for a frame of more than `max_elements` elements; [`Error::Truncated`],
    /// [`Error::TrailingBytes`], [`Error::BadMagic`], [`Error::BadVersion`], [`Error::BadChecksum`],
    /// [`Error::BadField`], [`Error::Zero`], [`Error::TooLarge`]; [`Error::Corrupt`] for an index whose
    /// blocks are not consecutive.
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

    /// The header of the frame.
    #[must_use]
    pub const fn info(&self) -> &FrameInfo {
        &self.info
    }

    /// The range of a block's bytes in the frame.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`].
    pub fn block_range(&self, index: BlockIndex) -> Result<Range<usize>, Error> {
        let (_, Range { start, end }) = self.place(index)?;
        let payload = HEADER + self.index.len() + 4;
        Ok(payload + start..payload + end)
    }

    /// Verifies a block's checksum without decoding it, for example before the block is decoded on another
    /// device.
    ///
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::BadChecksum`].
    pub fn check_block(&self, index: BlockIndex) -> Result<(), Error> {
        let (checksum, bytes) = self.block(index)?;
        check_payload(checksum, &bytes)
    }

    /// The id ([`Plane::id`]) of the plane that a layer's keys or values were encoded with.
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
    /// `rope` rotates keys that were stored before RoPE to their positions. Without it they stay unrotated.
    ///
    /// # Shapes
    /// `out` (tokens of the block, heads, head_dim), fully written.
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::WrongProfile`], [`Error::Length`], [`Error::WrongCoding`] for a
    /// lossless frame, [`Error::NotBeforeRope`], [`Error::BadChecksum`]: `out` is then unchanged.
    /// [`Error::Truncated`], [`Error::Corrupt`] and [`Error::TrailingBytes`], which need a forged checksum,
    /// and [`Error::NotFinite`] if the transform of very large values produces a NaN: the contents of `out`
    /// are then unspecified.
    /// # Cost
    /// No allocation. A transform costs head_dim multiply-adds for each coefficient that is not zero.
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

    /// Decodes a block of a lossless frame to the bits of its 16-bit elements.
    ///
    /// # Shapes
    /// `out` (tokens of the block, heads, head_dim), fully written.
    /// # Errors
    /// As [`Self::decode_block_into`], with [`Error::WrongCoding`] for a lossy frame.
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
    /// Decodes a plane: all tokens of a layer's keys or values. Feature `rayon` decodes blocks in parallel.
    ///
    /// # Shapes
    /// `out` (tokens, heads, head_dim); `rope`, if any, covers all tokens of the frame.
    /// # Errors
    /// As [`Self::decode_block_into`]. If a block fails, some blocks of `out` may be decoded and others not.
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
