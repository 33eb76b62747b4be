//! Encoding of frames: blocks of all planes in parallel, then the index in front of them.

use alloc::borrow::Cow;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

#[cfg(feature = "rayon")]
use rayon::prelude::*;

use super::{FrameInfo, check_element};
use crate::error::check_len;
use crate::place::Gather;
use crate::{Backend, Element, Error, LosslessPlane, Place, Plane, block, lossless};

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
/// The error of a value is at most half a step of its channel, to which bins of magnitude 1 and 2 add the
/// magnitude of their centroid, at most half a step more ([`PlaneParts::centroids`](crate::PlaneParts)). With
/// a transform this is the error of a coefficient. There are two exceptions. In tiles (32 channels of a block
/// of tokens) with a bin beyond 16 bits, all steps are scaled by the smallest power of two that makes the
/// bins fit ([`Steps`](crate::Steps)). Anchors have 8 bits each, whatever the step.
///
/// [`encode_frame_into`] takes rows with strides or pages, and writes to a slice.
///
/// # Shapes
/// `planes` and `rows` (layers, 2): keys, then values, of each layer; each element of `rows` (tokens, heads,
/// head_dim).
/// # Errors
/// [`Error::Length`], [`Error::NotFinite`], [`Error::OutOfRange`], [`Error::TooLarge`], [`Error::Zero`],
/// [`Error::WrongCoding`] if `info.lossless`; `out` is then unchanged.
/// # Examples
/// ```
/// use codec_core::*;
/// # let keys: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() * (1 + i % 8) as f32).collect();
/// # let values: Vec<f32> = (0..800).map(|i| (i as f32 * 0.3).cos() + (i % 8) as f32).collect();
/// let (heads, head_dim, tokens) = (2, 4, 100); // of `keys` and `values`
/// let fit = |rows: &[f32]| PlaneBuf::fit(rows, heads * head_dim, None, &FitOptions::default());
/// let planes = [fit(&keys)?, fit(&values)?];
/// let info = FrameInfo::new(1, heads, head_dim, tokens);
/// let mut bytes = vec![];
/// encode_frame(&info, &[planes[0].view(), planes[1].view()], &[&keys, &values], &mut bytes)?;
/// assert!(bytes.len() < 2 * 800); // of 6,400
/// # Ok::<(), Error>(())
/// ```
pub fn encode_frame<E: Element>(
    info: &FrameInfo,
    planes: &[Plane<'_>],
    rows: &[&[E]],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    encode_frame_with(Backend::detect(), info, planes, rows, out)
}

/// [`encode_frame`] on the given backend.
///
/// # Errors
/// As there; [`Error::BackendUnavailable`].
pub fn encode_frame_with<E: Element>(
    backend: Backend,
    info: &FrameInfo,
    planes: &[Plane<'_>],
    rows: &[&[E]],
    out: &mut Vec<u8>,
) -> Result<(), Error> {
    check_whole(info, rows)?;
    let place = Place::nhd(info.heads, info.head_dim);
    CodedFrame::new(backend, info, planes, rows, &place)?.append_to(out);
    Ok(())
}

/// Encodes all planes, from rows of any [`Element`] type and layout, to the beginning of `out`. Returns the
/// length of the frame in bytes, which is at most [`FrameInfo::max_frame_len`].
///
/// # Shapes
/// `planes` and `rows` (layers, 2): keys, then values, of each layer; each element of `rows` holds the tokens
/// in the layout of `place`.
/// # Errors
/// As [`encode_frame`], and [`Error::TooShort`] for rows that end before the last token or an `out` that is
/// shorter than the frame; `out` is then unchanged.
/// # Cost
/// Blocks are encoded to temporary buffers, then copied to `out`.
/// # Examples
/// ```
/// use codec_core::*;
/// use half::f16;
/// # let options = FitOptions { steps: Steps::Deviations(0.1), ..FitOptions::default() };
/// # let sample: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() + (i % 8) as f32).collect();
/// let (heads, head_dim, tokens) = (2, 4, 100);
/// let plane = PlaneBuf::fit(&sample, heads * head_dim, None, &options)?;
/// // (heads, tokens, head_dim) in half precision, as most engines have them.
/// let keys: Vec<f16> = (0..800).map(|i| f16::from_f32((i as f32 * 0.3).cos())).collect();
///
/// let info = FrameInfo { element: ElementType::F16, ..FrameInfo::new(1, heads, head_dim, tokens) };
/// let place = Place::hnd(tokens, head_dim);
/// let mut buffer = vec![0; info.max_frame_len()];
/// let len = encode_frame_into(&info, &[plane.view(); 2], &[&keys, &keys], &place, &mut buffer)?;
///
/// let frame = Frame::parse(&buffer[..len], info.elements())?;
/// let mut decoded = vec![f16::ZERO; keys.len()];
/// frame.decode_plane_to(&plane.view(), 0, Side::Keys, None, &place, &mut decoded)?;
/// assert!(keys.iter().zip(&decoded).all(|(a, b)| (a.to_f32() - b.to_f32()).abs() < 0.1));
/// # Ok::<(), Error>(())
/// ```
pub fn encode_frame_into<E: Element>(
    info: &FrameInfo,
    planes: &[Plane<'_>],
    rows: &[&[E]],
    place: &Place<'_>,
    out: &mut [u8],
) -> Result<usize, Error> {
    encode_frame_into_with(Backend::detect(), info, planes, rows, place, out)
}

/// [`encode_frame_into`] on the given backend.
///
/// # Errors
/// As there; [`Error::BackendUnavailable`].
pub fn encode_frame_into_with<E: Element>(
    backend: Backend,
    info: &FrameInfo,
    planes: &[Plane<'_>],
    rows: &[&[E]],
    place: &Place<'_>,
    out: &mut [u8],
) -> Result<usize, Error> {
    CodedFrame::new(backend, info, planes, rows, place)?.write_to(out)
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
/// # Examples
/// ```
/// use codec_core::*;
/// # let rows: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() + (i % 8) as f32).collect();
/// let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default())?;
/// let info = FrameInfo::new(1, 2, 4, 100);
/// let mut encoded = vec![];
/// encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut encoded)?;
///
/// // A stand-in for a GPU: with up to 32 channels, a block is one tile.
/// let frame = Frame::parse(&encoded, info.elements())?;
/// let (mut payload, mut lengths) = (vec![], vec![]);
/// for side in [Side::Keys, Side::Values] {
///     for block in 0..info.blocks() {
///         let tile = &encoded[frame.block_range(BlockIndex { layer: 0, side, block })?];
///         payload.extend_from_slice(tile);
///         lengths.push((tile.len() / 2) as u16);
///     }
/// }
/// let mut assembled = vec![];
/// assemble_frame(&info, &[plane.id(); 2], &lengths, &payload, &mut assembled)?;
/// assert_eq!(assembled, encoded);
/// # Ok::<(), Error>(())
/// ```
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
    out.extend_from_slice(&head(info, ids.iter().copied(), blocks));
    out.extend_from_slice(payload);
    Ok(())
}

/// Encodes all planes of 16-bit elements losslessly, given as bits, and appends the frame to `out`.
///
/// # Shapes
/// As [`encode_frame`].
/// # Errors
/// As [`encode_frame`]; [`Error::WrongCoding`] unless `info.lossless`, [`Error::WrongPlane`] for another
/// element type.
/// # Examples
/// ```
/// use codec_core::*;
/// use half::{f16, slice::HalfFloatSliceExt};
/// let rows: Vec<f16> = (0..800).map(|i| f16::from_f32((i as f32 * 0.7).sin())).collect(); // (100, 8)
/// let (element, bits) = (ElementType::F16, rows.reinterpret_cast());
/// let plane = LosslessPlaneBuf::fit(element, bits, 8)?;
/// let info = FrameInfo { element, lossless: true, ..FrameInfo::new(1, 2, 4, 100) };
/// let mut bytes = vec![];
/// encode_lossless_frame(&info, &[plane.view(); 2], &[bits, bits], &mut bytes)?;
///
/// let (frame, mut out) = (Frame::parse(&bytes, info.elements())?, vec![0; 800]);
/// frame.decode_lossless_plane_to(&plane.view(), 0, Side::Keys, &Place::nhd(2, 4), &mut out)?;
/// assert_eq!(out, bits);
/// # Ok::<(), Error>(())
/// ```
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
    check_whole(info, rows)?;
    let place = Place::nhd(info.heads, info.head_dim);
    CodedFrame::lossless(backend, info, planes, rows, &place)?.append_to(out);
    Ok(())
}

/// Encodes all planes of 16-bit elements losslessly, given as bits in any layout, to the beginning of `out`.
/// Returns the length of the frame in bytes, which is at most [`FrameInfo::max_frame_len`].
///
/// # Shapes
/// As [`encode_frame_into`].
/// # Errors
/// As [`encode_frame_into`] and [`encode_lossless_frame`].
/// # Examples
/// ```
/// use codec_core::*;
/// use half::{bf16, slice::HalfFloatSliceExt};
/// let (heads, head_dim, tokens) = (2, 4, 100);
/// let rows: Vec<bf16> = (0..800).map(|i| bf16::from_f32((i as f32 * 0.7).sin())).collect();
/// let (element, bits) = (ElementType::Bf16, rows.reinterpret_cast());
/// let plane = LosslessPlaneBuf::fit(element, bits, heads * head_dim)?;
/// let info = FrameInfo { element, lossless: true, ..FrameInfo::new(1, heads, head_dim, tokens) };
/// let place = Place::nhd(heads, head_dim);
/// let mut buffer = vec![0; info.max_frame_len()];
/// let len = encode_lossless_frame_into(&info, &[plane.view(); 2], &[bits, bits], &place, &mut buffer)?;
///
/// let frame = Frame::parse(&buffer[..len], info.elements())?;
/// let mut out = vec![bf16::ZERO; rows.len()];
/// let out_bits = out.reinterpret_cast_mut();
/// frame.decode_lossless_plane_to(&plane.view(), 0, Side::Values, &place, out_bits)?;
/// assert_eq!(out, rows);
/// # Ok::<(), Error>(())
/// ```
pub fn encode_lossless_frame_into(
    info: &FrameInfo,
    planes: &[LosslessPlane<'_>],
    rows: &[&[u16]],
    place: &Place<'_>,
    out: &mut [u8],
) -> Result<usize, Error> {
    encode_lossless_frame_into_with(Backend::detect(), info, planes, rows, place, out)
}

/// [`encode_lossless_frame_into`] on the given backend.
///
/// # Errors
/// As there; [`Error::BackendUnavailable`].
pub fn encode_lossless_frame_into_with(
    backend: Backend,
    info: &FrameInfo,
    planes: &[LosslessPlane<'_>],
    rows: &[&[u16]],
    place: &Place<'_>,
    out: &mut [u8],
) -> Result<usize, Error> {
    CodedFrame::lossless(backend, info, planes, rows, place)?.write_to(out)
}

/// [`encode_lossless_frame_into`] from elements instead of their bits; `f32` is rounded to `info.element`.
pub(crate) fn encode_elements_into<E: Element>(
    info: &FrameInfo,
    planes: &[LosslessPlane<'_>],
    rows: &[&[E]],
    place: &Place<'_>,
    out: &mut [u8],
) -> Result<usize, Error> {
    let element = info.element;
    check_element::<E>(element)?;
    let backend = Backend::detect();
    if let Some(bits) = rows.iter().map(|rows| E::bits(rows)).collect::<Option<Vec<_>>>() {
        return encode_lossless_frame_into_with(backend, info, planes, &bits, place, out);
    }
    let rounded =
        |rows, tokens| Cow::Owned(gather(backend, info, rows, place, tokens, |x: E| x.to_u16(element)));
    CodedFrame::lossless_from(backend, info, planes, rows, place, rounded)?.write_to(out)
}

/// The tokens of a block as (tokens, heads, head_dim).
fn gather<T: Copy, U>(
    backend: Backend,
    info: &FrameInfo,
    rows: &[T],
    place: &Place<'_>,
    tokens: Range<usize>,
    convert: impl Fn(T) -> U,
) -> Vec<U> {
    let mut out = vec![];
    backend.run(Gather { place, info, tokens, rows, convert, out: &mut out });
    out
}

/// Checks that rows have the frame's tokens and no more.
fn check_whole<T>(info: &FrameInfo, rows: &[&[T]]) -> Result<(), Error> {
    info.check()?;
    rows.iter().try_for_each(|rows| check_len("rows of a plane", rows.len(), info.tokens * info.channels()))
}

/// The blocks of a frame, not yet joined.
struct CodedFrame<'a> {
    info: &'a FrameInfo,
    ids: Vec<u32>,
    blocks: Vec<CodedBlock>,
}

impl<'a> CodedFrame<'a> {
    fn new<E: Element>(
        backend: Backend,
        info: &'a FrameInfo,
        planes: &[Plane<'_>],
        rows: &[&[E]],
        place: &Place<'_>,
    ) -> Result<Self, Error> {
        if info.lossless {
            return Err(Error::WrongCoding { lossless: true });
        }
        check(backend, info, planes.iter().map(Plane::channels), rows, place)?;
        let blocks = code_blocks(info, |plane, tokens| {
            let widened = gather(backend, info, rows[plane], place, tokens, E::widen);
            let mut coded = CodedBlock::default();
            block::encode::encode(&planes[plane], backend, widened, &mut coded.bytes, &mut coded.lengths)?;
            Ok(coded)
        })?;
        Ok(Self { info, ids: planes.iter().map(Plane::id).collect(), blocks })
    }

    fn lossless(
        backend: Backend,
        info: &'a FrameInfo,
        planes: &[LosslessPlane<'_>],
        rows: &[&[u16]],
        place: &Place<'_>,
    ) -> Result<Self, Error> {
        Self::lossless_from(backend, info, planes, rows, place, |rows, tokens| {
            match place.contiguous(info, tokens.clone()) {
                Some(range) => Cow::Borrowed(&rows[range]),
                None => Cow::Owned(gather(backend, info, rows, place, tokens, |bits| bits)),
            }
        })
    }

    /// `bits_of` gives the bits of a plane's tokens, (tokens, heads, head_dim).
    fn lossless_from<'r, T: Copy + Sync>(
        backend: Backend,
        info: &'a FrameInfo,
        planes: &[LosslessPlane<'_>],
        rows: &[&'r [T]],
        place: &Place<'_>,
        bits_of: impl Fn(&'r [T], Range<usize>) -> Cow<'r, [u16]> + Sync,
    ) -> Result<Self, Error> {
        if !info.lossless {
            return Err(Error::WrongCoding { lossless: false });
        }
        check(backend, info, planes.iter().map(LosslessPlane::channels), rows, place)?;
        if planes.iter().any(|plane| plane.element() != info.element) {
            return Err(Error::WrongPlane);
        }
        let blocks = code_blocks(info, |plane, tokens| {
            let bits = bits_of(rows[plane], tokens);
            let mut coded = CodedBlock::default();
            lossless::encode(&planes[plane], backend, &bits, &mut coded.bytes, &mut coded.lengths)?;
            Ok(coded)
        })?;
        Ok(Self { info, ids: planes.iter().map(LosslessPlane::id).collect(), blocks })
    }

    /// The bytes in front of the blocks: header, ids of the planes, and index.
    fn head(&self) -> Vec<u8> {
        head(self.info, self.ids.iter().copied(), self.blocks.iter().map(CodedBlock::parts))
    }

    fn append_to(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.head());
        self.blocks.iter().for_each(|block| out.extend_from_slice(&block.bytes));
    }

    /// Returns the length of the frame.
    fn write_to(&self, out: &mut [u8]) -> Result<usize, Error> {
        let head = self.head();
        let needed = head.len() + self.blocks.iter().map(|block| block.bytes.len()).sum::<usize>();
        let actual = out.len();
        let mut rest = out.get_mut(..needed).ok_or(Error::TooShort { what: "out", needed, actual })?;
        for bytes in core::iter::once(&head).chain(self.blocks.iter().map(|block| &block.bytes)) {
            let (part, after) = rest.split_at_mut(bytes.len());
            part.copy_from_slice(bytes);
            rest = after;
        }
        Ok(needed)
    }
}

/// The checks that lossy and lossless frames share.
fn check<T>(
    backend: Backend,
    info: &FrameInfo,
    planes: impl ExactSizeIterator<Item = usize>,
    rows: &[&[T]],
    place: &Place<'_>,
) -> Result<(), Error> {
    backend.check()?;
    info.check()?;
    check_len("planes", planes.len(), 2 * info.layers)?;
    check_len("rows", rows.len(), 2 * info.layers)?;
    for channels in planes {
        check_len("channels of a plane", channels, info.channels())?;
    }
    rows.iter().try_for_each(|rows| place.check("rows of a plane", rows.len(), info, 0..info.tokens))
}

/// Encodes the blocks of all planes, in order. `code` gets a plane and the tokens of a block.
fn code_blocks(
    info: &FrameInfo,
    code: impl Fn(usize, Range<usize>) -> Result<CodedBlock, Error> + Sync,
) -> Result<Vec<CodedBlock>, Error> {
    let blocks = 0..2 * info.layers * info.blocks();
    #[cfg(feature = "rayon")]
    let blocks = blocks.into_par_iter();
    blocks.map(|i| code(i / info.blocks(), info.tokens_of_block(i % info.blocks()))).collect()
}

/// Header and index of a frame. A block is its bytes and the lengths of its tiles.
fn head<'a>(
    info: &FrameInfo,
    ids: impl Iterator<Item = u32>,
    blocks: impl Iterator<Item = (&'a [u8], &'a [u16])>,
) -> Vec<u8> {
    let mut index = Vec::with_capacity(info.index_len() + 4);
    ids.for_each(|id| index.extend_from_slice(&id.to_le_bytes()));
    let mut end = 0;
    for (bytes, lengths) in blocks {
        end += bytes.len();
        index.extend_from_slice(&(end as u64).to_le_bytes());
        index.extend_from_slice(&crc32fast::hash(bytes).to_le_bytes());
        lengths.iter().for_each(|length| index.extend_from_slice(&length.to_le_bytes()));
    }
    let checksum = crc32fast::hash(&index);
    index.extend_from_slice(&checksum.to_le_bytes());
    [&info.header(end)[..], &index].concat()
}
