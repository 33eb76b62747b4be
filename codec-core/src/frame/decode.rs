//! Decoding of frames, whole or by layer, side and block, after every length has been checked.

#[cfg(feature = "alloc")]
use alloc::vec;
#[cfg(feature = "alloc")]
use alloc::vec::Vec;
#[cfg(feature = "alloc")]
use core::ops::Range;

#[cfg(feature = "rayon")]
use rayon::prelude::*;

use super::check_payload;
use crate::block::{self, BlockBytes};
#[cfg(feature = "alloc")]
use crate::element::Sealed;
use crate::error::check_len;
use crate::place::Scatter;
use crate::{
    Backend, BlockIndex, Element, Error, Frame, LosslessPlane, Place, Plane, RopeTable, Side, lossless,
};

/// # Blocks
impl<'a> Frame<'a> {
    /// Decodes a block: the tokens [`FrameInfo::tokens_of_block`](crate::FrameInfo::tokens_of_block) of one
    /// plane.
    ///
    /// `rope` rotates keys that were stored before RoPE to their positions. Without it they stay unrotated.
    ///
    /// # Shapes
    /// `out` (tokens of the block, heads, head_dim), fully written.
    /// # Errors
    /// [`Error::OutOfBounds`], [`Error::WrongPlane`], [`Error::Length`], [`Error::WrongCoding`] for a
    /// lossless frame, [`Error::NotBeforeRope`], [`Error::BadChecksum`]: `out` is then unchanged.
    /// [`Error::Truncated`], [`Error::Corrupt`] and [`Error::TrailingBytes`], which need a forged checksum,
    /// and [`Error::NotFinite`] if the transform of very large values produces a NaN: the contents of `out`
    /// are then unspecified.
    /// # Cost
    /// No allocation. A transform costs head_dim multiply-adds for each coefficient that is not zero.
    /// # Examples
    /// ```
    /// # use codec_core::*;
    /// # let rows: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() * (1 + i % 8) as f32).collect();
    /// # let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default())?;
    /// # let (info, mut bytes) = (FrameInfo { block_tokens: 64, ..FrameInfo::new(1, 2, 4, 100) }, vec![]);
    /// # encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut bytes)?;
    /// let frame = Frame::parse(&bytes, info.elements())?;
    /// let index = BlockIndex { layer: 0, side: Side::Keys, block: 1 };
    /// let mut out = vec![0.0; info.tokens_of_block(1).len() * info.channels()];
    /// frame.decode_block_into(&plane.view(), index, None, &mut out)?;
    /// assert!((out[0] - rows[64 * 8]).abs() < 0.1);
    /// # Ok::<(), Error>(())
    /// ```
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

    /// Decodes a block to its place in a cache of any [`Element`] type and layout.
    ///
    /// # Shapes
    /// `out`: rows in the layout of `place`; those of the block's tokens are written. `scratch`: at least
    /// block_tokens * heads * head_dim elements, overwritten. `rope` covers the tokens of the block.
    /// # Errors
    /// As [`Self::decode_block_into`], and [`Error::TooShort`] and [`Error::Zero`] for a place outside of
    /// `out`. `out` is unchanged after any error.
    /// # Cost
    /// No allocation. The block is decoded to `scratch` and copied.
    /// # Examples
    /// ```
    /// # use codec_core::*;
    /// # let rows: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() * (1 + i % 8) as f32).collect();
    /// # let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default())?;
    /// # let (info, mut bytes) = (FrameInfo { block_tokens: 64, ..FrameInfo::new(1, 2, 4, 100) }, vec![]);
    /// # encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut bytes)?;
    /// use half::bf16;
    /// let frame = Frame::parse(&bytes, info.elements())?;
    /// // (heads, tokens, head_dim) with room for 128 tokens.
    /// let (place, mut cache) = (Place::hnd(128, 4), vec![bf16::ZERO; 2 * 128 * 4]);
    /// let mut scratch = vec![0.0; info.block_tokens * info.channels()]; // one for all blocks
    /// for block in 0..info.blocks() {
    ///     let index = BlockIndex { layer: 0, side: Side::Keys, block };
    ///     frame.decode_block_to(&plane.view(), index, None, &place, &mut scratch, &mut cache)?;
    /// }
    /// assert!((cache[(128 + 70) * 4].to_f32() - rows[70 * 8 + 4]).abs() < 1.0); // token 70 of head 1
    /// # Ok::<(), Error>(())
    /// ```
    pub fn decode_block_to<E: Element>(
        &self,
        plane: &Plane<'_>,
        index: BlockIndex,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        scratch: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        self.decode_block_to_with(Backend::detect(), plane, index, rope, place, scratch, out)
    }

    /// [`Self::decode_block_to`] on the given backend.
    ///
    /// # Errors
    /// As there; [`Error::BackendUnavailable`].
    #[allow(clippy::too_many_arguments)] // of `decode_block_to` and the backend
    pub fn decode_block_to_with<E: Element>(
        &self,
        backend: Backend,
        plane: &Plane<'_>,
        index: BlockIndex,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        scratch: &mut [f32],
        out: &mut [E],
    ) -> Result<(), Error> {
        let tokens = self.info.tokens_of_block(index.block);
        place.check("out", out.len(), &self.info, tokens.clone())?;
        let (needed, actual) = (tokens.len() * self.info.channels(), scratch.len());
        let what = "scratch";
        let rows = scratch.get_mut(..needed).ok_or(Error::TooShort { what, needed, actual })?;
        self.decode_block_into_with(backend, plane, index, rope, rows)?;
        backend.run(Scatter { place, info: &self.info, tokens, rows, convert: E::narrow, out });
        Ok(())
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
        lossless::decode_into(plane, backend, &bytes, out)
    }

    fn check_plane(&self, plane: PlaneIdentity, layer: usize, side: Side) -> Result<(), Error> {
        if plane.lossless != self.info.lossless {
            return Err(Error::WrongCoding { lossless: self.info.lossless });
        }
        if plane.id != self.plane_id(layer, side)? || plane.channels != self.info.channels() {
            return Err(Error::WrongPlane);
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
}

/// # Planes
impl Frame<'_> {
    /// Decodes a plane: all tokens of a layer's keys or values. Feature `rayon` decodes blocks in parallel.
    ///
    /// # Shapes
    /// `out` (tokens, heads, head_dim); `rope`, if any, covers all tokens of the frame.
    /// # Errors
    /// As [`Self::decode_block_into`]. If a block fails, some blocks of `out` may be decoded and others not.
    /// # Examples
    /// ```
    /// # use codec_core::*;
    /// # let rows: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() * (1 + i % 8) as f32).collect();
    /// # let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default())?;
    /// # let (info, mut bytes) = (FrameInfo { block_tokens: 64, ..FrameInfo::new(1, 2, 4, 100) }, vec![]);
    /// # encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut bytes)?;
    /// let frame = Frame::parse(&bytes, info.elements())?;
    /// let mut keys = vec![0.0; 100 * 8];
    /// frame.decode_plane_into(&plane.view(), 0, Side::Keys, None, &mut keys)?;
    /// assert!(keys.iter().zip(&rows).all(|(a, b)| (a - b).abs() < 1.0));
    /// # Ok::<(), Error>(())
    /// ```
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
        self.check_plane(plane.into(), layer, side)?;
        self.check_rope(rope, side, self.info.tokens)?;
        check_len("out", out.len(), self.info.tokens * self.info.channels())?;
        self.decode_blocks(backend, plane, (layer, side), 0, rope, out)
    }

    /// Decodes a plane to its place in a cache of any [`Element`] type and layout. Feature `rayon` decodes
    /// blocks in parallel.
    ///
    /// # Shapes
    /// `out`: rows in the layout of `place`; those of the frame's tokens are written. `rope`, if any, covers
    /// all tokens of the frame.
    /// # Errors
    /// As [`Self::decode_block_to`]. If a block fails, some blocks of `out` may be decoded and others not.
    /// # Cost
    /// Allocates a block of `f32` per thread; blocks are decoded there and copied.
    /// # Examples
    /// ```
    /// # use codec_core::*;
    /// # let rows: Vec<f32> = (0..800).map(|i| (i as f32 * 0.7).sin() * (1 + i % 8) as f32).collect();
    /// # let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default())?;
    /// # let (info, mut bytes) = (FrameInfo { block_tokens: 64, ..FrameInfo::new(1, 2, 4, 100) }, vec![]);
    /// # encode_frame(&info, &[plane.view(); 2], &[&rows, &rows], &mut bytes)?;
    /// use half::f16;
    /// let frame = Frame::parse(&bytes, info.elements())?;
    /// // Pages of 32 tokens, (page, token, head, component). The frame's tokens follow 20 others.
    /// let pages = TokenPages { table: &[6, 1, 4, 3], page_tokens: 32, stride: 32 * 8 };
    /// let place = Place { first_token: 20, pages: Some(pages), ..Place::nhd(2, 4) };
    /// let mut pool = vec![f16::ZERO; 8 * pages.stride];
    /// frame.decode_plane_to(&plane.view(), 0, Side::Keys, None, &place, &mut pool)?;
    /// assert!((pool[(6 * 32 + 20) * 8].to_f32() - rows[0]).abs() < 0.1);
    /// # Ok::<(), Error>(())
    /// ```
    #[cfg(feature = "alloc")]
    pub fn decode_plane_to<E: Element>(
        &self,
        plane: &Plane<'_>,
        layer: usize,
        side: Side,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        out: &mut [E],
    ) -> Result<(), Error> {
        self.decode_plane_to_with(Backend::detect(), plane, layer, side, rope, place, out)
    }

    /// [`Self::decode_plane_to`] on the given backend.
    ///
    /// # Errors
    /// As there; [`Error::BackendUnavailable`].
    #[cfg(feature = "alloc")]
    #[allow(clippy::too_many_arguments)] // of `decode_plane_to` and the backend
    pub fn decode_plane_to_with<E: Element>(
        &self,
        backend: Backend,
        plane: &Plane<'_>,
        layer: usize,
        side: Side,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        out: &mut [E],
    ) -> Result<(), Error> {
        let info = &self.info;
        self.check_plane(plane.into(), layer, side)?;
        self.check_rope(rope, side, info.tokens)?;
        place.check("out", out.len(), info, 0..info.tokens)?;
        self.by_groups(|blocks, tokens, rows: &mut [f32]| {
            self.decode_blocks(backend, plane, (layer, side), blocks.start, rope, rows)?;
            backend.run(Scatter { place, info, tokens, rows, convert: E::narrow, out: &mut *out });
            Ok(())
        })
    }

    /// Decodes a plane of a lossless frame to its place in a cache of 16-bit elements, given by their bits.
    ///
    /// # Shapes
    /// `out`: rows in the layout of `place`; those of the frame's tokens are written.
    /// # Errors
    /// As [`Self::decode_plane_to`], with [`Error::WrongCoding`] for a lossy frame.
    #[cfg(feature = "alloc")]
    pub fn decode_lossless_plane_to(
        &self,
        plane: &LosslessPlane<'_>,
        layer: usize,
        side: Side,
        place: &Place<'_>,
        out: &mut [u16],
    ) -> Result<(), Error> {
        self.decode_lossless_plane_to_with(Backend::detect(), plane, layer, side, place, out)
    }

    /// [`Self::decode_lossless_plane_to`] on the given backend.
    ///
    /// # Errors
    /// As there; [`Error::BackendUnavailable`].
    #[cfg(feature = "alloc")]
    pub fn decode_lossless_plane_to_with(
        &self,
        backend: Backend,
        plane: &LosslessPlane<'_>,
        layer: usize,
        side: Side,
        place: &Place<'_>,
        out: &mut [u16],
    ) -> Result<(), Error> {
        let info = &self.info;
        self.check_plane(plane.into(), layer, side)?;
        place.check("out", out.len(), info, 0..info.tokens)?;
        if let Some(rows) = place.contiguous(info, 0..info.tokens) {
            return self.decode_lossless_blocks(backend, plane, (layer, side), 0, &mut out[rows]);
        }
        self.by_groups(|blocks, tokens, rows: &mut [u16]| {
            self.decode_lossless_blocks(backend, plane, (layer, side), blocks.start, rows)?;
            backend.run(Scatter { place, info, tokens, rows, convert: |bits| bits, out: &mut *out });
            Ok(())
        })
    }

    /// Decodes a plane of a lossless frame to its place in a cache of the frame's element type or of `f32`;
    /// `rope` rotates keys that were stored before RoPE, in `f32`.
    #[cfg(feature = "alloc")]
    pub(crate) fn decode_elements_to<E: Element>(
        &self,
        plane: &LosslessPlane<'_>,
        layer: usize,
        side: Side,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        out: &mut [E],
    ) -> Result<(), Error> {
        let (info, backend) = (&self.info, Backend::detect());
        let element = info.element;
        super::check_element::<E>(element)?;
        self.check_plane(plane.into(), layer, side)?;
        self.check_rope(rope, side, info.tokens)?;
        if rope.is_none()
            && let Some(bits) = E::bits_mut(out)
        {
            return self.decode_lossless_plane_to_with(backend, plane, layer, side, place, bits);
        }
        place.check("out", out.len(), info, 0..info.tokens)?;
        self.by_groups(|blocks, tokens, rows: &mut [u16]| {
            self.decode_lossless_blocks(backend, plane, (layer, side), blocks.start, rows)?;
            let Some(rope) = rope else {
                let convert = |bits| E::from_u16(bits, element);
                backend.run(Scatter { place, info, tokens, rows, convert, out: &mut *out });
                return Ok(());
            };
            let mut wide: Vec<f32> = rows.iter().map(|&bits| f32::from_u16(bits, element)).collect();
            for (token, row) in tokens.clone().zip(wide.chunks_exact_mut(info.channels())) {
                rope.rotate(token, row);
            }
            if wide.iter().any(|x| !x.is_finite()) {
                return Err(Error::NotFinite { what: "decoded values" });
            }
            backend.run(Scatter { place, info, tokens, rows: &wide, convert: E::narrow, out: &mut *out });
            Ok(())
        })
    }

    /// Decodes the blocks of a lossless frame from `first` on that `out` has room for.
    #[cfg(feature = "alloc")]
    fn decode_lossless_blocks(
        &self,
        backend: Backend,
        plane: &LosslessPlane<'_>,
        (layer, side): (usize, Side),
        first: usize,
        out: &mut [u16],
    ) -> Result<(), Error> {
        self.each_block(first, out, |block, out| {
            self.decode_lossless_block_into_with(backend, plane, BlockIndex { layer, side, block }, out)
        })
    }

    /// Calls `decode` for groups of one block per thread, with the blocks, their tokens, and scratch for
    /// their rows.
    #[cfg(feature = "alloc")]
    fn by_groups<T: Copy + Default>(
        &self,
        mut decode: impl FnMut(Range<usize>, Range<usize>, &mut [T]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let info = &self.info;
        #[cfg(feature = "rayon")]
        let at_once = rayon::current_num_threads();
        #[cfg(not(feature = "rayon"))]
        let at_once = 1_usize;
        let most = info.tokens.min(at_once.saturating_mul(info.block_tokens));
        let mut rows = vec![T::default(); most * info.channels()];
        for first in (0..info.blocks()).step_by(at_once) {
            let blocks = first..info.blocks().min(first + at_once);
            let tokens = info.tokens_of_block(first).start..info.tokens_of_block(blocks.end - 1).end;
            let len = tokens.len() * info.channels();
            decode(blocks, tokens, &mut rows[..len])?;
        }
        Ok(())
    }

    /// Decodes the blocks from `first` on that `out` has room for.
    fn decode_blocks(
        &self,
        backend: Backend,
        plane: &Plane<'_>,
        (layer, side): (usize, Side),
        first: usize,
        rope: Option<&RopeTable<'_>>,
        out: &mut [f32],
    ) -> Result<(), Error> {
        backend.check()?;
        self.each_block(first, out, |block, out| {
            let rope = rope.map(|rope| rope.tokens_of(self.info.tokens_of_block(block)));
            self.decode_block_into_with(backend, plane, BlockIndex { layer, side, block }, rope.as_ref(), out)
        })
    }

    /// Calls `decode` with the blocks from `first` on, and their parts of `out`, in parallel with feature
    /// `rayon`.
    fn each_block<T: Send>(
        &self,
        first: usize,
        out: &mut [T],
        decode: impl Fn(usize, &mut [T]) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let block_len = self.info.block_tokens * self.info.channels();
        let decode = |(block, out): (usize, &mut [T])| decode(first + block, out);
        #[cfg(feature = "rayon")]
        return out.par_chunks_mut(block_len).enumerate().try_for_each(decode);
        #[cfg(not(feature = "rayon"))]
        out.chunks_mut(block_len).enumerate().try_for_each(decode)
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
