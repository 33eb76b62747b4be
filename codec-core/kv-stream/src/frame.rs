//! The frames of a context's chunks: rows of keys and values at every level, and back.

use std::ops::Range;

use codec_core::{Frame, FrameInfo, LayerRows, ModelInfo, Place, Profile, Side};

use crate::{Error, Result};

type CodecResult<T> = std::result::Result<T, codec_core::Error>;

/// Keys before RoPE and values of a layer: (n, n_kv_heads * head_dim) each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerKv {
    /// Keys.
    pub keys: Vec<f32>,
    /// Values.
    pub values: Vec<f32>,
}

/// Encodes the tokens at these positions at every level of `profile`, from the rows of a context whose first
/// token is at position `first`.
///
/// # Errors
/// [`codec_core::Error::Length`] when `layers` do not hold the tokens; those of
/// [`Profile::encode_into`], such as for a NaN.
pub fn encode_frames(
    profile: &Profile,
    tokens: &Range<usize>,
    first: usize,
    layers: &[LayerKv],
) -> CodecResult<Vec<Vec<u8>>> {
    let model = profile.info();
    let rows = |rows| rows_of(rows, tokens, first, model.channels());
    let layers =
        layers.iter().map(|layer| Ok(LayerRows { keys: rows(&layer.keys)?, values: rows(&layer.values)? }));
    let layers = layers.collect::<CodecResult<Vec<_>>>()?;
    let place = Place::nhd(model.heads, model.head_dim);
    let encode = |level: usize| {
        let level = u8::try_from(level).map_err(|_| codec_core::Error::OutOfBounds { what: "level" })?;
        let info = FrameInfo { first_token: tokens.start as u64, ..profile.frame_info(level, tokens.len()) };
        let mut frame = vec![0; info.max_frame_len()];
        let len = profile.encode_into(&info, &layers, &place, &mut frame)?;
        frame.truncate(len);
        Ok(frame)
    };
    (0..profile.levels()).map(encode).collect()
}

/// The rows of these tokens, where the first row is that of token `first`.
fn rows_of<'a>(
    rows: &'a [f32],
    tokens: &Range<usize>,
    first: usize,
    channels: usize,
) -> CodecResult<&'a [f32]> {
    let at = |token: usize| token.checked_sub(first)?.checked_mul(channels);
    let range = at(tokens.start).zip(at(tokens.end)).map(|(start, end)| start..end);
    range.and_then(|range| rows.get(range)).ok_or_else(|| codec_core::Error::Length {
        what: "rows of the tokens",
        expected: tokens.end.saturating_sub(first).saturating_mul(channels),
        actual: rows.len(),
    })
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
    /// keys from the other side of RoPE or under other planes, and a lossless one; [`Error::Stream`] for a
    /// frame of other tokens or of another level.
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
        if !is_of(frame.info(), tokens, level) {
            let FrameInfo { first_token, tokens: n, level: other, .. } = frame.info();
            return Err(Error::Stream(format!(
                "a frame of {first_token} + {n} tokens at level {other}, not of {} + {} at level {level}",
                tokens.start,
                tokens.len()
            )));
        }
        let &FrameInfo { model_id, layers, heads, head_dim, keys_rotated, .. } = frame.info();
        if (ModelInfo { model_id, layers, heads, head_dim, keys_rotated }) != *info {
            return Err(codec_core::Error::WrongModel.into());
        }
        if frame.info().lossless {
            return Err(codec_core::Error::WrongCoding { lossless: true }.into());
        }
        for (layer, side) in (0..layers).flat_map(|layer| [(layer, Side::Keys), (layer, Side::Values)]) {
            if profile.plane(level, layer, side)?.view().id() != frame.plane_id(layer, side)? {
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

    /// Decodes a layer. Layers may be decoded in any order, concurrently.
    ///
    /// # Errors
    /// Those of [`Profile::decode_layer_to`].
    pub fn layer(&self, layer: usize) -> CodecResult<LayerKv> {
        let info = self.profile.info();
        let mut keys = vec![0.0; self.frame.info().tokens * info.channels()];
        let mut values = keys.clone();
        let place = Place::nhd(info.heads, info.head_dim);
        self.profile.decode_layer_to(&self.frame, layer, None, &place, &mut keys, &mut values)?;
        Ok(LayerKv { keys, values })
    }
}

/// Maximum elements of a frame of these tokens.
fn limit(profile: &Profile, tokens: &Range<usize>) -> usize {
    2 * profile.info().layers * tokens.len() * profile.info().channels()
}

/// Whether a frame holds these tokens at this level.
pub(crate) fn is_of(info: &FrameInfo, tokens: &Range<usize>, level: usize) -> bool {
    (info.first_token, info.tokens, usize::from(info.level)) == (tokens.start as u64, tokens.len(), level)
}
