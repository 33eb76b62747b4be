//! A frame back to rows of numbers.

use crate::error::check_len;
use crate::model::PRECISION;
use crate::quant::{MAX_BIN, middle};
use crate::range::Decoder;
use crate::{Error, FrameInfo, Plane, Predictor};

/// Turns a frame back into rows.
///
/// # Shapes
/// `out` (tokens, channels) as the frame says (see [`FrameInfo::parse`]).
/// # Errors
/// What [`FrameInfo::parse`] finds; [`Error::WrongProfile`], [`Error::Length`]: `out` is then untouched.
/// [`Error::Truncated`], [`Error::Corrupt`], [`Error::TrailingBytes`]: `out` then holds rows up to the fault, and its old
/// content after it. These three need a forged checksum.
/// # Cost
/// A binary search in the channel's table a number, no allocation.
pub fn decode_into(plane: &Plane<'_>, bytes: &[u8], out: &mut [f32]) -> Result<(), Error> {
    let (info, payload) = FrameInfo::parse(bytes)?;
    if info.profile_id != plane.id() || info.channels != plane.channels() {
        return Err(Error::WrongProfile);
    }
    let channels = plane.channels();
    check_len("out", out.len(), info.tokens.checked_mul(channels).ok_or(Error::TooLarge)?)?;
    let mut coder = Decoder::new(payload)?;
    match plane.predictor {
        Predictor::Mean => {
            for row in out.chunks_exact_mut(channels) {
                decode_residual(plane, row, plane.mean, &mut coder)?;
            }
        }
        Predictor::Anchor { group } => {
            for rows in out.chunks_mut(usize::from(group) * channels) {
                let (anchor, rest) = rows.split_at_mut(channels);
                decode_anchor(anchor, &mut coder)?;
                for row in rest.chunks_exact_mut(channels) {
                    decode_residual(plane, row, anchor, &mut coder)?;
                }
            }
        }
    }
    coder.finish()
}

fn decode_residual(
    plane: &Plane<'_>,
    row: &mut [f32],
    prediction: &[f32],
    coder: &mut Decoder<'_>,
) -> Result<(), Error> {
    let escape = plane.models.alphabet() - 1;
    let reach = (escape / 2) as i32;
    for (c, (x, &p)) in row.iter_mut().zip(prediction).enumerate() {
        let symbol = coder.decode_symbol(plane.models.row(c), PRECISION)?;
        let bin = if symbol == escape { decode_escape(reach, coder)? } else { symbol as i32 - reach };
        *x = p + middle(bin, plane.step[c]);
    }
    Ok(())
}

/// What `encode_escape` wrote.
fn decode_escape(reach: i32, coder: &mut Decoder<'_>) -> Result<i32, Error> {
    let negative = coder.decode_bits(1)? == 1;
    let low_bits = coder.decode_bits(5)?;
    if low_bits > MAX_BIN.ilog2() {
        return Err(Error::Corrupt);
    }
    let (high, low) = (low_bits.saturating_sub(12), low_bits.min(12));
    let excess = (1 << low_bits) | (coder.decode_bits(high)? << low) | coder.decode_bits(low)?;
    let magnitude = reach + excess as i32;
    Ok(if negative { -magnitude } else { magnitude })
}

fn decode_anchor(anchor: &mut [f32], coder: &mut Decoder<'_>) -> Result<(), Error> {
    let scale = f32::from_bits((coder.decode_bits(16)? << 16) | coder.decode_bits(16)?);
    if !(scale.is_finite() && scale >= 0.0) {
        return Err(Error::Corrupt);
    }
    for x in anchor {
        *x = middle(coder.decode_bits(8)? as i32 - 128, scale);
    }
    Ok(())
}
