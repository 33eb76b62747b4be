//! Frames: keys and values of all layers for a range of tokens, at one level. FORMAT.md, "Frame", specifies
//! the bytes.

mod decode;
#[cfg(feature = "alloc")]
mod encode;
mod info;

use core::ops::Range;

#[cfg(feature = "alloc")]
use crate::Element;
use crate::Error;
use crate::block::BlockBytes;

use info::HEADER;

#[cfg(feature = "alloc")]
pub(crate) use encode::encode_elements_into;
#[cfg(feature = "alloc")]
pub use encode::{
    assemble_frame, encode_frame, encode_frame_into, encode_frame_into_with, encode_frame_with,
    encode_lossless_frame, encode_lossless_frame_into, encode_lossless_frame_into_with,
    encode_lossless_frame_with,
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
    /// # Examples
    /// ```
    /// # use codec_core::*;
    /// # let rows: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() * (1 + i % 8) as f32).collect();
    /// # let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default())?;
    /// # let (info, mut bytes) = (FrameInfo { block_tokens: 64, ..FrameInfo::new(1, 2, 4, 100) }, vec![]);
    /// # encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut bytes)?;
    /// // The limit is what the receiver has memory for.
    /// let frame = Frame::parse(&bytes, 1_000_000)?;
    /// assert_eq!((frame.info().tokens, frame.info().blocks()), (100, 2));
    /// assert_eq!(Frame::parse(&bytes, 1_000).err(), Some(Error::Limit { needed: 1_600, limit: 1_000 }));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn parse(bytes: &'a [u8], max_elements: usize) -> Result<Self, Error> {
        let (frame, payload_len) = Self::parse_head(bytes, max_elements)?;
        match (frame.payload.len() as u64).cmp(&payload_len) {
            core::cmp::Ordering::Less => Err(Error::Truncated),
            core::cmp::Ordering::Greater => Err(Error::TrailingBytes),
            core::cmp::Ordering::Equal => Ok(frame),
        }
    }

    /// As [`parse`](Self::parse), for a frame whose payload has not fully arrived: `bytes` holds the whole
    /// index and any prefix of the payload. A block beyond it is [`Error::Truncated`].
    ///
    /// # Errors
    /// As there.
    pub fn parse_start(bytes: &'a [u8], max_elements: usize) -> Result<Self, Error> {
        let (frame, payload_len) = Self::parse_head(bytes, max_elements)?;
        if frame.payload.len() as u64 > payload_len { Err(Error::TrailingBytes) } else { Ok(frame) }
    }

    /// The frame with the prefix of its payload in `bytes`, and the length of the whole payload.
    fn parse_head(bytes: &'a [u8], max_elements: usize) -> Result<(Self, u64), Error> {
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
        let frame = Self { info, index, payload };
        let mut end = 0;
        for entry in 0..2 * info.layers * info.blocks() {
            let (start, next) = (end, frame.end_of(entry));
            if next < start {
                return Err(Error::Corrupt);
            }
            end = next;
        }
        if end == payload_len { Ok((frame, payload_len)) } else { Err(Error::Corrupt) }
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
        let (_, Range { start, end }) = self.locate(index)?;
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

    /// The id ([`Plane::id`](crate::Plane::id)) of the plane that a layer's keys or values were encoded with.
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

    /// The position of a block's entry in the index, and of its bytes in the payload.
    fn locate(&self, BlockIndex { layer, side, block }: BlockIndex) -> Result<(usize, Range<usize>), Error> {
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
        let (entry, range) = self.locate(index)?;
        let (_, rest) = self.entry(entry).split_at(8);
        let (checksum, lengths) = rest.split_first_chunk::<4>().ok_or(Error::Truncated)?;
        let bytes = self.payload.get(range).ok_or(Error::Truncated)?;
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

/// Checks that elements of this type become those of a lossless frame, and back: `f32`, or the same type.
#[cfg(feature = "alloc")]
pub(crate) fn check_element<E: Element>(of_frame: ElementType) -> Result<(), Error> {
    if E::TYPE == ElementType::F32 || E::TYPE == of_frame { Ok(()) } else { Err(Error::WrongPlane) }
}

fn check_payload(checksum: u32, block: &BlockBytes<'_>) -> Result<(), Error> {
    if crc32fast::hash(block.bytes) == checksum { Ok(()) } else { Err(Error::BadChecksum) }
}

const fn plane_index(layer: usize, side: Side) -> usize {
    2 * layer + matches!(side, Side::Values) as usize
}
