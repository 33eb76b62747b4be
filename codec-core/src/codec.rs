//! Rows of numbers to a frame and back.

#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use crate::error::check_len;
use crate::model::PRECISION;
use crate::quant::{MAX_BIN, bin, middle};
#[cfg(feature = "alloc")]
use crate::range::Encoder;
use crate::range::Decoder;
use crate::{Error, FrameInfo, Plane, Predictor};

/// Anchors are quantized to `-127..=127` by the largest magnitude of their row.
const ANCHOR_MAX: f32 = 127.0;

/// Codes rows under a plane's profile and appends the frame to `out`.
///
/// # Shapes
/// `rows` (tokens, channels), finite.
/// # Errors
/// [`Error::Length`], [`Error::NotFinite`] or [`Error::TooLarge`]; `out` is then unchanged.
/// # Cost
/// One table look-up and two divisions a number.
/// # Source
/// CacheGen (SIGCOMM 2024), 5.1 and 5.2.
#[cfg(feature = "alloc")]
pub fn encode(plane: &Plane<'_>, rows: &[f32], out: &mut Vec<u8>) -> Result<(), Error> {
    let channels = plane.channels();
    let tokens = rows.len() / channels;
    check_len("rows", rows.len(), tokens * channels)?;
    if rows.iter().any(|x| !x.is_finite()) {
        return Err(Error::NotFinite { what: "rows" });
    }
    let start = out.len();
    FrameInfo { profile_id: plane.id(), channels, tokens }.begin(out)?;
    let mut coder = Encoder::new(out);
    match plane.predictor {
        Predictor::Mean => {
            for row in rows.chunks_exact(channels) {
                encode_residual(plane, row, plane.mean, &mut coder);
            }
        }
        Predictor::Anchor { group } => {
            let mut anchor = alloc::vec![0.0; channels];
            for rows in rows.chunks(usize::from(group) * channels) {
                let (first, rest) = rows.split_at(channels);
                encode_anchor(first, &mut anchor, &mut coder);
                for row in rest.chunks_exact(channels) {
                    encode_residual(plane, row, &anchor, &mut coder);
                }
            }
        }
    }
    coder.finish();
    FrameInfo::end(start, out);
    Ok(())
}

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

#[cfg(feature = "alloc")]
fn encode_residual(plane: &Plane<'_>, row: &[f32], prediction: &[f32], coder: &mut Encoder<'_>) {
    let escape = plane.models.alphabet() - 1;
    let reach = (escape / 2) as i32;
    for (c, (&x, &p)) in row.iter().zip(prediction).enumerate() {
        let bin = bin(x - p, plane.step[c]);
        let symbol = if bin.abs() <= reach { (bin + reach) as usize } else { escape };
        let cdf = plane.models.row(c);
        coder.encode(u32::from(cdf[symbol]), u32::from(cdf[symbol + 1] - cdf[symbol]), PRECISION);
        if symbol == escape {
            encode_escape(bin, reach, coder);
        }
    }
}

fn decode_residual(plane: &Plane<'_>, row: &mut [f32], prediction: &[f32], coder: &mut Decoder<'_>) -> Result<(), Error> {
    let escape = plane.models.alphabet() - 1;
    let reach = (escape / 2) as i32;
    for (c, (x, &p)) in row.iter_mut().zip(prediction).enumerate() {
        let symbol = coder.decode_symbol(plane.models.row(c), PRECISION)?;
        let bin = if symbol == escape { decode_escape(reach, coder)? } else { symbol as i32 - reach };
        *x = p + middle(bin, plane.step[c]);
    }
    Ok(())
}

/// Sign, number of bits in 5 bits, then the bits of `|bin| - reach` below its leading one.
#[cfg(feature = "alloc")]
fn encode_escape(bin: i32, reach: i32, coder: &mut Encoder<'_>) {
    let excess = (bin.abs() - reach) as u32; // 1..=MAX_BIN
    let low_bits = excess.ilog2();
    coder.encode(u32::from(bin < 0), 1, 1);
    coder.encode(low_bits, 1, 5);
    let (high, low) = (low_bits.saturating_sub(12), low_bits.min(12));
    coder.encode((excess >> low) & ((1 << high) - 1), 1, high);
    coder.encode(excess & ((1 << low) - 1), 1, low);
}

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

/// Writes the row's scale and 8 bits a number; leaves in `anchor` what the decoder will see.
#[cfg(feature = "alloc")]
fn encode_anchor(row: &[f32], anchor: &mut [f32], coder: &mut Encoder<'_>) {
    let scale = row.iter().fold(0.0_f32, |max, x| max.max(x.abs())) / ANCHOR_MAX;
    coder.encode(scale.to_bits() >> 16, 1, 16);
    coder.encode(scale.to_bits() & 0xffff, 1, 16);
    for (&x, anchor) in row.iter().zip(anchor) {
        let level = if scale > 0.0 { bin(x, scale).clamp(-127, 127) } else { 0 };
        coder.encode((level + 128) as u32, 1, 8);
        *anchor = middle(level, scale);
    }
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
