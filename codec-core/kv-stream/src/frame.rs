//! The frames of a context's chunks: rows of keys and values at every level, and back.

use std::ops::Range;

use codec_core::{Element, Frame, FrameInfo, LayerRows, ModelInfo, Place, Profile, RopeTable, Side};

use crate::{Error, Result};

type CodecResult<T> = Result<T, codec_core::Error>;

/// Decoded keys and values of a layer: (tokens, heads, head_dim) each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerKv {
    /// Keys, on the side of RoPE that the profile says.
    pub keys: Vec<f32>,
    /// Values.
    pub values: Vec<f32>,
}

impl LayerKv {
    /// The rows to encode.
    #[must_use]
    pub fn rows(&self) -> LayerRows<'_, f32> {
        LayerRows { keys: &self.keys, values: &self.values }
    }
}

/// Encodes the tokens at these positions at every level of `profile`.
///
/// # Shapes
/// `layers` (layers,): rows of any element type in the layout of `place`, whose `first_token` is the row of
/// the first of these tokens.
/// # Errors
/// Those of [`Profile::encode_into`], such as for rows that do not hold the tokens, or a NaN.
pub fn encode_frames<E: Element>(
    profile: &Profile,
    tokens: &Range<usize>,
    layers: &[LayerRows<'_, E>],
    place: &Place<'_>,
) -> CodecResult<Vec<Vec<u8>>> {
    let encode = |level: usize| {
        let level = u8::try_from(level).map_err(|_| codec_core::Error::OutOfBounds { what: "level" })?;
        let info = FrameInfo { first_token: tokens.start as u64, ..profile.frame_info(level, tokens.len()) };
        let mut frame = vec![0; info.max_frame_len()];
        let len = profile.encode_into(&info, layers, place, &mut frame)?;
        frame.truncate(len);
        Ok(frame)
    };
    (0..profile.levels()).map(encode).collect()
}

/// A frame that holds given tokens at a given level.
#[derive(Clone, Debug)]
pub struct ChunkFrame<'a> {
    profile: &'a Profile,
    frame: Frame<'a>,
}

impl<'a> ChunkFrame<'a> {
    /// Reads the frame of these tokens at this level.
    ///
    /// # Errors
    /// [`Error::Codec`] for bytes that are not a frame, a frame that is too large, of another model, with
    /// keys from the other side of RoPE or under other planes, and one that is lossless where the level is
    /// not, or the reverse; [`Error::OtherFrame`].
    pub fn parse(profile: &'a Profile, bytes: &'a [u8], tokens: &Range<usize>, level: usize) -> Result<Self> {
        Self::of(profile, Frame::parse(bytes, limit(profile, tokens))?, tokens, level)
    }

    /// As [`Self::parse`], for a prefix of a frame that holds at least the bytes before its payload.
    ///
    /// # Errors
    /// As there.
    pub fn parse_start(
        profile: &'a Profile,
        bytes: &'a [u8],
        tokens: &Range<usize>,
        level: usize,
    ) -> Result<Self> {
        Self::of(profile, Frame::parse_start(bytes, limit(profile, tokens))?, tokens, level)
    }

    fn of(profile: &'a Profile, frame: Frame<'a>, tokens: &Range<usize>, level: usize) -> Result<Self> {
        let info = profile.info();
        check_tokens(frame.info(), tokens, level)?;
        let &FrameInfo { model_id, layers, heads, head_dim, keys_rotated, .. } = frame.info();
        if (ModelInfo { model_id, layers, heads, head_dim, keys_rotated }) != *info {
            return Err(codec_core::Error::WrongModel.into());
        }
        let FrameInfo { lossless, level: byte, .. } = *frame.info();
        if lossless != profile.frame_info(byte, 0).lossless {
            return Err(codec_core::Error::WrongCoding { lossless }.into());
        }
        for (layer, side) in (0..layers).flat_map(|layer| [(layer, Side::Keys), (layer, Side::Values)]) {
            if profile.plane_id(level, layer, side)? != frame.plane_id(layer, side)? {
                return Err(codec_core::Error::WrongPlane.into());
            }
        }
        Ok(Self { profile, frame })
    }

    /// The frame.
    #[must_use]
    pub const fn frame(&self) -> &Frame<'a> {
        &self.frame
    }

    /// Decodes a layer to its place in a cache: see [`Profile::decode_layer_to`]. Layers may be decoded in
    /// any order, concurrently.
    ///
    /// # Errors
    /// As there.
    pub fn layer_to<E: Element>(
        &self,
        layer: usize,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        keys: &mut [E],
        values: &mut [E],
    ) -> Result<()> {
        Ok(self.profile.decode_layer_to(&self.frame, layer, rope, place, keys, values)?)
    }

    /// Decodes the keys or the values of a layer to their place in a cache: see [`Profile::decode_plane_to`].
    ///
    /// # Errors
    /// As there.
    pub fn plane_to<E: Element>(
        &self,
        layer: usize,
        side: Side,
        rope: Option<&RopeTable<'_>>,
        place: &Place<'_>,
        out: &mut [E],
    ) -> Result<()> {
        Ok(self.profile.decode_plane_to(&self.frame, layer, side, rope, place, out)?)
    }

    /// Decodes a layer to rows of its own: see [`Self::layer_to`].
    ///
    /// # Errors
    /// As there.
    pub fn layer(&self, layer: usize) -> Result<LayerKv> {
        let info = self.profile.info();
        let mut keys = vec![0.0; self.frame.info().tokens * info.channels()];
        let mut values = keys.clone();
        let place = Place::nhd(info.heads, info.head_dim);
        self.layer_to(layer, None, &place, &mut keys, &mut values)?;
        Ok(LayerKv { keys, values })
    }
}

/// Maximum elements of a frame of these tokens.
fn limit(profile: &Profile, tokens: &Range<usize>) -> usize {
    2 * profile.info().layers * tokens.len() * profile.info().channels()
}

/// Checks that a frame holds these tokens at this level.
///
/// # Errors
/// [`Error::OtherFrame`].
pub fn check_tokens(info: &FrameInfo, tokens: &Range<usize>, level: usize) -> Result<()> {
    let &FrameInfo { first_token, tokens: n, level: found_level, .. } = info;
    if (first_token, n, usize::from(found_level)) == (tokens.start as u64, tokens.len(), level) {
        return Ok(());
    }
    Err(Error::OtherFrame {
        found: first_token..first_token.saturating_add(n as u64),
        found_level: usize::from(found_level),
        expected: tokens.clone(),
        expected_level: level,
    })
}
