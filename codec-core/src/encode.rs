//! Rows of numbers to a frame.

use alloc::vec;
use alloc::vec::Vec;

use crate::error::check_len;
use crate::model::PRECISION;
use crate::quant::{bin, middle};
use crate::range::Encoder;
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
/// One division and one table look-up a number.
/// # Source
/// CacheGen (SIGCOMM 2024), 5.2.
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
            let mut anchor = vec![0.0; channels];
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

/// Sign, number of bits in 5 bits, then the bits of `|bin| - reach` below its leading one.
fn encode_escape(bin: i32, reach: i32, coder: &mut Encoder<'_>) {
    let excess = (bin.abs() - reach) as u32; // 1..=MAX_BIN
    let low_bits = excess.ilog2();
    coder.encode(u32::from(bin < 0), 1, 1);
    coder.encode(low_bits, 1, 5);
    let (high, low) = (low_bits.saturating_sub(12), low_bits.min(12));
    coder.encode((excess >> low) & ((1 << high) - 1), 1, high);
    coder.encode(excess & ((1 << low) - 1), 1, low);
}

/// Writes the row's scale and 8 bits a number; leaves in `anchor` what the decoder will see.
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
