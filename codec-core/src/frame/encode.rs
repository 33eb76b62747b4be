//! Encoding of frames.

use alloc::vec::Vec;

#[cfg(feature = "rayon")]
use rayon::prelude::*;

use super::FrameInfo;
use crate::error::check_len;
use crate::{Backend, Error, LosslessPlane, Plane, block, lossless};

/// An encoded block before it becomes part of a frame.
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

/// Encodes all planes and appends the frame to `out`. Feature `rayon` encodes blocks in parallel; the bytes
/// are the same.
///
/// # Shapes
/// `planes` and `rows` (layers, 2): keys, then values, of each layer; each element of `rows` (tokens, heads,
/// head_dim).
/// # Errors
/// [`Error::Length`], [`Error::NotFinite`], [`Error::OutOfRange`], [`Error::TooLarge`], [`Error::Zero`],
/// [`Error::WrongCoding`] if `info.lossless`; `out` is then unchanged.
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

/// Assembles a frame from tiles that were encoded elsewhere, for example on a GPU, and appends it to `out`.
///
/// The blocks of its planes must consist of tiles only: planes with a step per channel and without anchors.
///
/// # Shapes
/// `ids` (layers, 2) of the planes; `lengths` (layers, 2, blocks, tiles) in units of two bytes; `payload`:
/// the tiles, concatenated.
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

/// Encodes all planes of 16-bit elements without loss and appends the frame to `out`.
///
/// # Shapes
/// As [`encode_frame`].
/// # Errors
/// As [`encode_frame`]; [`Error::WrongCoding`] unless `info.lossless`, [`Error::WrongProfile`] for another
/// element type.
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

/// Encodes the blocks of all planes, in order.
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

/// Writes header, index and payload. A block is its bytes and the lengths of its tiles.
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
