//! Between rows of keys and values and the bytes of a chunk.

use codec_core::{Frame, LayerRows, Place, Profile, write_chunk};

use super::{Arrival, ChunkKey, Error, Result};

/// Keys before RoPE and values of a layer: (n, n_kv_heads * head_dim) each.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LayerKv {
    /// Keys.
    pub keys: Vec<f32>,
    /// Values.
    pub values: Vec<f32>,
}

/// Encodes a chunk at every level of `profile`, from the rows of a context whose first token is at position
/// `first`.
///
/// # Errors
/// [`Error::Argument`] when `layers` do not hold the chunk's tokens; [`Error::Codec`] for rows that cannot be
/// encoded, such as a NaN.
pub fn encode_chunk(profile: &Profile, key: &ChunkKey, first: usize, layers: &[LayerKv]) -> Result<Vec<u8>> {
    let missing = Error::Argument("the rows do not hold the tokens of the chunk");
    let channels = profile.info().channels();
    let Some(start) = key.tokens.start.checked_sub(first) else { return Err(missing) };
    let range = start * channels..(start + key.tokens.len()) * channels;
    let rows = layers.iter().map(|layer| {
        Some(LayerRows { keys: layer.keys.get(range.clone())?, values: layer.values.get(range.clone())? })
    });
    let Some(rows) = rows.collect::<Option<Vec<_>>>() else { return Err(missing) };
    let place = Place::nhd(profile.info().heads, profile.info().head_dim);
    let mut frames = vec![];
    for level in 0..profile.levels() {
        let level = u8::try_from(level).map_err(|_| Error::Argument("more than 256 levels"))?;
        let mut info = profile.frame_info(level, key.tokens.len());
        info.first_token = key.tokens.start as u64;
        let mut frame = vec![0; info.max_frame_len()];
        let len = profile.encode_into(&info, &rows, &place, &mut frame)?;
        frame.truncate(len);
        frames.push(frame);
    }
    let frames: Vec<&[u8]> = frames.iter().map(Vec::as_slice).collect();
    let mut object = vec![];
    write_chunk(&frames, &mut object)?;
    Ok(object)
}

/// Decodes the frame of an arrival, layer by layer, keys before RoPE.
///
/// # Errors
/// [`Error::Codec`]; the errors of `take`.
pub fn decode_chunk<E: From<Error>>(
    profile: &Profile,
    arrival: &Arrival,
    mut take: impl FnMut(usize, &[f32], &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let info = profile.info();
    let elements = profile.frame_info(0, arrival.tokens.len()).elements();
    let frame = Frame::parse(&arrival.frame, elements).map_err(Error::from)?;
    let place = Place::nhd(info.heads, info.head_dim);
    let mut keys = vec![0.0; arrival.tokens.len() * info.channels()];
    let mut values = keys.clone();
    for layer in 0..info.layers {
        let decoded = profile.decode_layer_to(&frame, layer, None, &place, &mut keys, &mut values);
        decoded.map_err(Error::from)?;
        take(layer, &keys, &values)?;
    }
    Ok(())
}
