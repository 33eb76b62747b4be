//! Writing a frame.

use alloc::vec::Vec;

#[cfg(feature = "rayon")]
use rayon::prelude::*;

use super::{ElementType, FrameInfo, LITTLE_ENDIAN, MAGIC, TOKEN_HEAD_COMPONENT, VERSION};
use crate::error::check_len;
use crate::{Backend, Error, LosslessPlane, Plane, block, lossless};

/// A block before it is part of a frame.
#[derive(Default)]
struct CodedBlock {
    bytes: Vec<u8>,
    lengths: Vec<u16>,
}

impl CodedBlock {
    fn parts(&self) -> (&[u8], &[u16]) {
        (&self.bytes, &self.lengths)
    }
}

/// Codes all planes of a chunk and appends the frame to `out`. With feature `rayon`, blocks are coded in parallel.
///
/// # Shapes
/// `planes` and `rows` (layers, 2): keys, then values, of each layer; each of `rows` (tokens, heads, head_dim).
/// # Errors
/// [`Error::Length`], [`Error::NotFinite`], [`Error::OutOfRange`], [`Error::TooLarge`], [`Error::Zero`],
/// [`Error::BadField`] when `info` says lossless, [`Error::BackendUnavailable`]; `out` is then unchanged.
pub fn encode_frame(
    info: &FrameInfo,
    planes: &[Plane<'_>],
    rows: &[&[f32]],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    encode_frame_with(Backend::detect(), info, planes, rows, out)
}

/// [`encode_frame`] on the given backend.
///
/// # Errors
/// As there; [`Error::BackendUnavailable`].
pub fn encode_frame_with(
    backend: Backend,
    info: &FrameInfo,
    planes: &[Plane<'_>],
    rows: &[&[f32]],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    backend.check()?;
    if info.lossless {
        return Err(Error::WrongCoding { lossless: true });
    }
    check_planes(info, planes.len(), rows)?;
    for plane in planes {
        check_len("channels of a plane", plane.channels(), info.channels())?;
    }
    let blocks = code_blocks(info, rows, |plane, rows| {
        let mut coded = CodedBlock::default();
        block::encode::encode(&planes[plane], backend, rows, &mut coded.bytes, &mut coded.lengths)?;
        Ok(coded)
    })?;
    let ids = planes.iter().map(Plane::id);
    write_frame(info, ids, blocks.iter().map(CodedBlock::parts), out);
    Ok(())
}

/// Makes a frame of tiles that were coded elsewhere, as by a GPU, and appends it to `out`. Only of planes whose blocks hold nothing
/// but tiles: those with steps for each channel and without anchors.
///
/// # Shapes
/// `ids` (layers, 2), of the planes; `lengths` (layers, 2, blocks, tiles) in units of two bytes; `payload`: the tiles, one after the
/// other.
/// # Errors
/// [`Error::Length`], [`Error::TooLarge`], [`Error::Zero`]; `out` is then unchanged.
pub fn assemble_frame(
    info: &FrameInfo,
    ids: &[u32],
    lengths: &[u16],
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    info.check()?;
    check_len("ids", ids.len(), 2 * info.layers)?;
    let tiles = block::tiles(info.channels());
    let blocks = info.layers.saturating_mul(2).saturating_mul(info.blocks());
    check_len("lengths", lengths.len(), blocks.saturating_mul(tiles))?;
    let bytes = |lengths: &[u16]| lengths.iter().map(|&length| 2 * usize::from(length)).sum::<usize>();
    check_len("payload", payload.len(), bytes(lengths))?;
    let mut rest = payload;
    let blocks = lengths.chunks_exact(tiles).map(|lengths| {
        let (block, after) = rest.split_at(bytes(lengths));
        rest = after;
        (block, lengths)
    });
    let blocks: Vec<_> = blocks.collect();
    write_frame(info, ids.iter().copied(), blocks.into_iter(), out);
    Ok(())
}

/// The same for 16-bit numbers, whose bits come back as they were.
///
/// # Shapes
/// As [`encode_frame`].
/// # Errors
/// As [`encode_frame`]; [`Error::BadField`] when `info` does not say lossless, [`Error::WrongProfile`] for another element type.
pub fn encode_lossless_frame(
    info: &FrameInfo,
    planes: &[LosslessPlane<'_>],
    rows: &[&[u16]],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    encode_lossless_frame_with(Backend::detect(), info, planes, rows, out)
}

/// [`encode_lossless_frame`] on the given backend.
///
/// # Errors
/// As there; [`Error::BackendUnavailable`].
pub fn encode_lossless_frame_with(
    backend: Backend,
    info: &FrameInfo,
    planes: &[LosslessPlane<'_>],
    rows: &[&[u16]],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    backend.check()?;
    if !info.lossless {
        return Err(Error::WrongCoding { lossless: false });
    }
    check_planes(info, planes.len(), rows)?;
    for plane in planes {
        check_len("channels of a plane", plane.channels(), info.channels())?;
        if plane.element() != info.element {
            return Err(Error::WrongProfile);
        }
    }
    let blocks = code_blocks(info, rows, |plane, rows| {
        let mut coded = CodedBlock::default();
        lossless::encode(&planes[plane], backend, rows, &mut coded.bytes, &mut coded.lengths)?;
        Ok(coded)
    })?;
    write_frame(info, planes.iter().map(LosslessPlane::id), blocks.iter().map(CodedBlock::parts), out);
    Ok(())
}

fn check_planes<T>(info: &FrameInfo, planes: usize, rows: &[&[T]]) -> Result<(), Error> {
    info.check()?;
    check_len("planes", planes, 2 * info.layers)?;
    check_len("rows", rows.len(), 2 * info.layers)?;
    rows.iter().try_for_each(|rows| check_len("rows of a plane", rows.len(), info.tokens * info.channels()))
}

/// Codes the blocks of all planes, in order.
fn code_blocks<T: Sync>(
    info: &FrameInfo,
    rows: &[&[T]],
    code: impl Fn(usize, &[T]) -> Result<CodedBlock, Error> + Sync,
) -> Result<Vec<CodedBlock>, Error> {
    let blocks: Vec<(usize, &[T])> = rows
        .iter()
        .enumerate()
        .flat_map(|(plane, rows)| {
            rows.chunks(info.block_tokens * info.channels()).map(move |rows| (plane, rows))
        })
        .collect();
    #[cfg(feature = "rayon")]
    let blocks = blocks.par_iter();
    #[cfg(not(feature = "rayon"))]
    let blocks = blocks.iter();
    blocks.map(|&(plane, rows)| code(plane, rows)).collect()
}

/// Writes header, index and payload of blocks: their bytes, and the lengths of their tiles.
fn write_frame<'a>(
    info: &FrameInfo,
    ids: impl Iterator<Item = u32>,
    blocks: impl Iterator<Item = (&'a [u8], &'a [u16])> + Clone,
    out: &mut Vec<u8>,
) {
    info.write(blocks.clone().map(|(bytes, _)| bytes.len()).sum(), out);
    let index = out.len();
    ids.for_each(|id| out.extend_from_slice(&id.to_le_bytes()));
    let mut end = 0;
    for (bytes, lengths) in blocks.clone() {
        end += bytes.len() as u64;
        out.extend_from_slice(&end.to_le_bytes());
        out.extend_from_slice(&crc32fast::hash(bytes).to_le_bytes());
        lengths.iter().for_each(|length| out.extend_from_slice(&length.to_le_bytes()));
    }
    let checksum = crc32fast::hash(&out[index..]);
    out.extend_from_slice(&checksum.to_le_bytes());
    blocks.for_each(|(bytes, _)| out.extend_from_slice(bytes));
}

impl FrameInfo {
    fn write(&self, payload: usize, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&MAGIC);
        let element = match self.element {
            ElementType::F32 => 0,
            ElementType::F16 => 1,
            ElementType::Bf16 => 2,
        };
        let (rotated, lossless) = (u8::from(self.keys_rotated), u8::from(self.lossless));
        out.extend_from_slice(&[VERSION, LITTLE_ENDIAN, element, rotated]);
        out.extend_from_slice(&[TOKEN_HEAD_COMPONENT, self.level, lossless, 0]);
        for size in [self.layers, self.heads, self.head_dim] {
            out.extend_from_slice(&(size as u32).to_le_bytes());
        }
        out.extend_from_slice(&self.first_token.to_le_bytes());
        for size in [self.tokens, self.block_tokens] {
            out.extend_from_slice(&(size as u32).to_le_bytes());
        }
        out.extend_from_slice(&self.model_id.to_le_bytes());
        out.extend_from_slice(&(payload as u64).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        let checksum = crc32fast::hash(&out[start..]);
        out.extend_from_slice(&checksum.to_le_bytes());
    }
}
