//! Decoding of blocks: consecutive tokens of one plane. FORMAT.md, "Block", specifies the bytes.

#[cfg(feature = "alloc")]
pub(crate) mod encode;

use crate::error::check_len;
use crate::model::tables::LANES;
use crate::plane::{Plane, Predictor, Scaling};
use crate::quant::clamp_finite;
use crate::simd::Kernel;
use crate::tile::{Bins, Scale, Tile};
use crate::transform::RopeTable;
use crate::{Backend, Error};

/// The largest number of tokens in a block.
pub const MAX_BLOCK_TOKENS: usize = 1024;

/// Anchors are quantized to `-127..=127`, scaled by the largest magnitude of their row.
const ANCHOR_LEVELS: f32 = 127.0;

/// The largest scale of anchors. The next `f32`, `f32::MAX / 127` rounded, times 127 is infinite.
const MAX_ANCHOR_SCALE: f32 = f32::from_bits((f32::MAX / ANCHOR_LEVELS).to_bits() - 1);

/// Tiles of a plane: 32 channels each, fewer in the last one.
pub(crate) const fn tiles(channels: usize) -> usize {
    channels.div_ceil(LANES)
}

/// Length of the side information before the tiles: anchors, or scales of tokens.
pub(crate) fn side_len(plane: &Plane<'_>, tokens: usize) -> usize {
    match (plane.predictor, plane.scaling) {
        (Predictor::Anchor { group }, _) => tokens.div_ceil(group.into()) * (4 + plane.coefficients()),
        (_, Scaling::TokenAbsmax { .. }) => 2 * tokens,
        _ => 0,
    }
}

/// Checks that the scales of anchors or tokens are finite and not negative.
fn check_side(plane: &Plane<'_>, side: &[u8]) -> Result<(), Error> {
    let valid = match (plane.predictor, plane.scaling) {
        (Predictor::Anchor { .. }, _) => side
            .chunks_exact(4 + plane.coefficients())
            .all(|anchor| (0.0..=MAX_ANCHOR_SCALE).contains(&split_anchor(anchor).0)),
        // Bits from 0x7f80 on are an infinity, a NaN or a negative value.
        (_, Scaling::TokenAbsmax { .. }) => {
            side.as_chunks::<2>().0.iter().all(|&bf16| u16::from_le_bytes(bf16) < 0x7f80)
        }
        _ => true,
    };
    if valid { Ok(()) } else { Err(Error::Corrupt) }
}

/// The factors of a tile's prediction from the previous token.
pub(crate) fn factors(plane: &Plane<'_>, first: usize, lanes: usize) -> [f32; LANES] {
    let mut factors = [0.0; LANES];
    if let Predictor::Previous(all) = plane.predictor {
        factors[..lanes].copy_from_slice(&all[first..first + lanes]);
    }
    factors
}

/// The value of a bin, in steps.
#[inline(always)]
pub(crate) fn centre(bin: i32, [one, two]: [f32; 2]) -> f32 {
    let shift = match bin.abs() {
        1 => one,
        2 => two,
        _ => 0.0,
    };
    bin as f32 + if bin < 0 { -shift } else { shift }
}

/// The step of a token whose largest magnitude is stored as `bf16`.
pub(crate) fn token_step(bf16: u16, levels: u8) -> f32 {
    // A token of zeros has bins of zero under any step.
    (f32::from_bits(u32::from(bf16) << 16) / f32::from(levels)).max(f32::MIN_POSITIVE)
}

/// The encoded form of a block.
pub(crate) struct BlockBytes<'a> {
    pub bytes: &'a [u8],
    /// Lengths of the tiles in words of two bytes, `u16` little-endian.
    pub lengths: &'a [u8],
}

/// Decodes a block.
///
/// # Shapes
/// `out` (tokens, channels).
pub(crate) fn decode_into(
    plane: &Plane<'_>,
    backend: Backend,
    block: &BlockBytes<'_>,
    rope: Option<&RopeTable<'_>>,
    out: &mut [f32],
) -> Result<(), Error> {
    let (channels, coefficients) = (plane.channels(), plane.coefficients());
    let tokens = out.len() / channels;
    let (side, mut rest) = block.bytes.split_at_checked(side_len(plane, tokens)).ok_or(Error::Truncated)?;
    check_side(plane, side)?;
    let rows = plane.coded_tokens(tokens);
    let lengths = block.lengths.as_chunks::<2>().0;
    check_len("tiles", lengths.len(), tiles(channels))?;
    let (lengths, unused) = lengths.split_at(if rows > 0 { tiles(coefficients) } else { 0 });
    if unused.as_flattened().iter().any(|&byte| byte != 0) {
        return Err(Error::Corrupt);
    }
    for (first, length) in (0..coefficients).step_by(LANES).zip(lengths) {
        let (bytes, after) =
            rest.split_at_checked(2 * usize::from(u16::from_le_bytes(*length))).ok_or(Error::Truncated)?;
        rest = after;
        decode_tile(plane, backend, bytes, first, rows, side, out)?;
    }
    if !rest.is_empty() {
        return Err(Error::TrailingBytes);
    }
    if let Predictor::Anchor { group } = plane.predictor {
        add_anchors(side, (channels, coefficients), group.into(), out);
    }
    if let Some(transform) = plane.transform {
        backend.run(transform.apply_inverse(out));
    }
    if backend.run(Finish { mean: plane.mean, rope, out }) {
        Ok(())
    } else {
        Err(Error::NotFinite { what: "decoded values" })
    }
}

/// Decodes a tile into its channels of `out`.
fn decode_tile(
    plane: &Plane<'_>,
    backend: Backend,
    bytes: &[u8],
    first: usize,
    rows: usize,
    side: &[u8],
    out: &mut [f32],
) -> Result<(), Error> {
    let lanes = LANES.min(plane.coefficients() - first);
    let tile = Tile::parse(bytes, rows, lanes)?;
    let mut dequantizer = Dequantizer {
        scale: tile.scale(),
        centroids: plane.centroids,
        factors: factors(plane, first, lanes),
        steps: [0.0; LANES],
        last: [0.0; LANES],
    };
    if let Scaling::Steps(steps) = plane.scaling {
        dequantizer.steps[..lanes].copy_from_slice(&steps[first..first + lanes]);
    }
    let mut done = 0;
    tile.decode(&plane.models, first, backend, |bins| {
        let place = Place { plane, side, first, lanes, done };
        backend.run(WriteRows { dequantizer: &mut dequantizer, bins, place, out });
        done += bins.len();
    })
}

/// Parameters and state that turn the bins of a tile into values.
struct Dequantizer {
    scale: Scale,
    centroids: [f32; 2],
    factors: [f32; LANES],
    steps: [f32; LANES],
    last: [f32; LANES], // the previous row, in steps
}

/// The position of decoded rows in the plane.
#[derive(Clone, Copy)]
struct Place<'a> {
    plane: &'a Plane<'a>,
    side: &'a [u8],
    first: usize,
    lanes: usize,
    done: usize,
}

struct WriteRows<'a, 'b> {
    dequantizer: &'b mut Dequantizer,
    bins: &'b [Bins],
    place: Place<'a>,
    out: &'b mut [f32],
}

impl Kernel for WriteRows<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Place { plane, side, first, lanes, done } = self.place;
        let (dequantizer, channels) = (self.dequantizer, plane.channels());
        for (i, bins) in self.bins.iter().enumerate() {
            let steps = match plane.scaling {
                Scaling::Steps(_) => dequantizer.steps,
                Scaling::TokenAbsmax { levels } => {
                    let bits = [side[2 * (done + i)], side[2 * (done + i) + 1]];
                    [token_step(u16::from_le_bytes(bits), levels); LANES]
                }
            };
            let mut row = [0.0; LANES];
            match dequantizer.scale {
                Scale::Predicted => {
                    for lane in 0..LANES {
                        let value = dequantizer.last[lane] * dequantizer.factors[lane]
                            + centre(bins[lane], dequantizer.centroids);
                        dequantizer.last[lane] = value;
                        row[lane] = value * steps[lane];
                    }
                }
                Scale::Plain(exponent) => {
                    // Two factors, since 2^exponent may exceed the range of f32.
                    let (a, b) = (exponent / 2, exponent - exponent / 2);
                    let power = |e: u8| f32::from_bits((127 + u32::from(e)) << 23);
                    for lane in 0..LANES {
                        row[lane] = clamp_finite(bins[lane] as f32 * steps[lane] * power(a) * power(b));
                    }
                }
            }
            let token = match plane.predictor {
                Predictor::Anchor { group } => token_of_row(done + i, group.into()),
                _ => done + i,
            };
            self.out[token * channels + first..][..lanes].copy_from_slice(&row[..lanes]);
        }
    }
}

/// The token of the `row`-th row that is not an anchor.
const fn token_of_row(row: usize, group: usize) -> usize {
    row / (group - 1) * group + 1 + row % (group - 1)
}

/// Adds the mean, applies RoPE, and clamps values that round beyond the finite `f32`. Returns whether all
/// values are finite: the inverse transform of very large coefficients can produce a NaN.
struct Finish<'a, 'b> {
    mean: &'a [f32],
    rope: Option<&'b RopeTable<'a>>,
    out: &'b mut [f32],
}

impl Kernel for Finish<'_, '_> {
    type Output = bool;

    #[inline(always)]
    fn scalar(self) -> bool {
        // Integers in the order of magnitudes, NaN last; unlike a maximum of floats, theirs vectorizes.
        let magnitude = |x: f32| x.to_bits() << 1;
        let mut largest = 0;
        for (t, row) in self.out.chunks_exact_mut(self.mean.len()).enumerate() {
            for (x, mean) in row.iter_mut().zip(self.mean) {
                *x = clamp_finite(*x + mean);
                largest = largest.max(magnitude(*x));
            }
            if let Some(rope) = self.rope {
                rope.rotate(t, row);
                largest = row.iter().fold(largest, |largest, x| largest.max(magnitude(*x)));
            }
        }
        largest <= magnitude(f32::MAX)
    }
}

/// Scale and levels of an anchor.
fn split_anchor(bytes: &[u8]) -> (f32, &[u8]) {
    let (scale, levels) = bytes.split_at(4);
    (f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]), levels)
}

/// Writes the anchors into their rows and adds them to the other rows of their groups.
fn add_anchors(side: &[u8], (channels, coefficients): (usize, usize), group: usize, out: &mut [f32]) {
    for (anchor, rows) in side.chunks_exact(4 + coefficients).zip(out.chunks_mut(group * channels)) {
        let (scale, levels) = split_anchor(anchor);
        let (anchor, rest) = rows.split_at_mut(channels);
        for (x, &level) in anchor.iter_mut().zip(levels) {
            *x = f32::from(level as i8) * scale;
        }
        for row in rest.chunks_exact_mut(channels) {
            row.iter_mut().zip(&*anchor).for_each(|(x, anchor)| *x += anchor);
        }
    }
}
