//! Encoding of blocks: side information, then the bins of each tile as symbols.

use alloc::vec;
use alloc::vec::Vec;

use crate::block::{ANCHOR_LEVELS, MAX_ANCHOR_SCALE, MAX_BLOCK_TOKENS, centre, factors, tiles, token_step};
use crate::error::check_len;
use crate::model::tables::LANES;
use crate::plane::{Plane, Predictor, Scaling};
use crate::quant;
use crate::simd::Kernel;
use crate::tile::encode::{TileEncoder, TileValues};
use crate::{Backend, Error, Transform};

/// Encodes rows. Appends the block to `out` and the lengths of its tiles, in words of two bytes, to
/// `lengths`.
///
/// # Shapes
/// `rows` (tokens, channels), up to [`MAX_BLOCK_TOKENS`].
/// # Errors
/// [`Error::Length`], [`Error::TooLarge`], [`Error::NotFinite`], [`Error::OutOfRange`]; the caller then
/// truncates `out` and `lengths`.
pub(crate) fn encode(
    plane: &Plane<'_>,
    backend: Backend,
    rows: Vec<f32>,
    out: &mut Vec<u8>,
    lengths: &mut Vec<u16>,
) -> Result<(), Error> {
    let coefficients = plane.coefficients();
    let values = BlockValues::new(plane, backend, rows, out)?;
    let end = lengths.len() + tiles(plane.channels());
    for first in (0..coefficients).step_by(LANES).filter(|_| !values.rows.is_empty()) {
        let lanes = LANES.min(coefficients - first);
        let tile = values.tile(backend, first, lanes)?;
        let encoder = TileEncoder { models: &plane.models, coder: plane.coder, backend, first, lanes };
        let start = out.len();
        encoder.encode(&tile, out);
        lengths.push(u16::try_from((out.len() - start) / 2).map_err(|_| Error::TooLarge)?);
    }
    lengths.resize(end, 0);
    Ok(())
}

/// Turns rows minus their mean, (tokens, channels), into coefficients, (tokens, coefficients).
pub(crate) fn coefficients(transform: Transform<'_>, backend: Backend, rows: &mut Vec<f32>) {
    backend.run(transform.apply_forward(rows));
    let (from, to) = (transform.channels(), transform.coefficients());
    if to < from {
        let tokens = rows.len() / from;
        (0..tokens).for_each(|t| rows.copy_within(t * from..t * from + to, t * to));
        rows.truncate(tokens * to);
    }
}

impl Plane<'_> {
    /// The bins of a block of these rows, as they enter the entropy coder; useful to study rates.
    ///
    /// # Shapes
    /// `rows` (tokens, channels), up to [`MAX_BLOCK_TOKENS`]; the result (tokens without anchors,
    /// coefficients).
    /// # Errors
    /// [`Error::Length`], [`Error::TooLarge`], [`Error::NotFinite`], [`Error::OutOfRange`].
    pub fn bins(&self, rows: &[f32]) -> Result<Vec<i32>, Error> {
        self.bins_with(Backend::detect(), rows)
    }

    /// [`Self::bins`] on the given backend.
    ///
    /// # Errors
    /// As there; [`Error::BackendUnavailable`].
    pub fn bins_with(&self, backend: Backend, rows: &[f32]) -> Result<Vec<i32>, Error> {
        backend.check()?;
        let channels = self.coefficients();
        let values = BlockValues::new(self, backend, rows.to_vec(), &mut vec![])?;
        let mut all = vec![0; values.rows.len()];
        for first in (0..channels).step_by(LANES) {
            let lanes = LANES.min(channels - first);
            let tile = values.tile(backend, first, lanes)?;
            for (all, bins) in all.chunks_exact_mut(channels).zip(&tile.bins) {
                all[first..first + lanes].copy_from_slice(&bins[..lanes]);
            }
        }
        Ok(all)
    }
}

/// The values of a block that its tiles encode.
struct BlockValues<'a> {
    plane: &'a Plane<'a>,
    rows: Vec<f32>,        // coefficients minus their anchors
    token_steps: Vec<f32>, // for scalings by token, else empty
}

impl<'a> BlockValues<'a> {
    /// Subtracts the mean, applies the transform, subtracts anchors, and appends the side information to
    /// `out`.
    fn new(
        plane: &'a Plane<'a>,
        backend: Backend,
        mut rows: Vec<f32>,
        out: &mut Vec<u8>,
    ) -> Result<Self, Error> {
        let channels = plane.channels();
        let tokens = rows.len() / channels;
        check_len("rows", rows.len(), tokens * channels)?;
        if tokens > MAX_BLOCK_TOKENS {
            return Err(Error::TooLarge);
        }
        if !rows.iter().fold(true, |finite, x| finite & x.is_finite()) {
            return Err(Error::NotFinite { what: "rows" });
        }
        for row in rows.chunks_exact_mut(channels) {
            row.iter_mut().zip(plane.mean).for_each(|(x, mean)| *x -= mean);
        }
        if let Some(transform) = plane.transform {
            coefficients(transform, backend, &mut rows);
        }
        let channels = plane.coefficients();
        let mut token_steps = vec![];
        match (plane.predictor, plane.scaling) {
            (Predictor::Anchor { group }, _) => rows = take_anchors(&rows, channels, group.into(), out)?,
            (_, Scaling::TokenAbsmax { levels }) => {
                token_steps = rows.chunks_exact(channels).map(|row| write_step(row, levels, out)).collect();
            }
            _ => {}
        }
        Ok(Self { plane, rows, token_steps })
    }

    /// The quantized values of one tile.
    fn tile(&self, backend: Backend, first: usize, lanes: usize) -> Result<TileValues, Error> {
        let tokens = self.rows.len() / self.plane.coefficients();
        let mut tile = TileValues {
            bins: vec![[0; LANES]; tokens],
            steps: vec![[0.0; LANES]; tokens],
            squares: [0.0; LANES],
            lowest: [0.0; LANES],
            highest: [0.0; LANES],
        };
        let finite = backend.run(Quantize { values: self, first, lanes, tile: &mut tile });
        match finite.iter().position(|&finite| !finite) {
            Some(lane) => Err(Error::OutOfRange { channel: first + lane }),
            None => Ok(tile),
        }
    }
}

/// Quantizes the residuals of values, predicted from the decoder's reconstruction. Returns for each lane
/// whether its values are finite in steps.
struct Quantize<'a, 'b> {
    values: &'a BlockValues<'a>,
    first: usize,
    lanes: usize,
    tile: &'b mut TileValues,
}

impl Kernel for Quantize<'_, '_> {
    type Output = [bool; LANES];

    #[inline(always)]
    fn scalar(self) -> [bool; LANES] {
        let BlockValues { plane, rows, token_steps } = self.values;
        let (first, lanes) = (self.first, self.lanes);
        let mut inverse = [0.0; LANES];
        if let Scaling::Steps(steps) = plane.scaling {
            inverse.iter_mut().zip(&steps[first..first + lanes]).for_each(|(y, step)| *y = 1.0 / step);
        }
        let factors = factors(plane, first, lanes);
        let (mut finite, mut last) = ([true; LANES], [0.0; LANES]);
        let (mut squares, mut lowest, mut highest) = ([0.0_f32; LANES], [0.0_f32; LANES], [0.0_f32; LANES]);
        let rows = rows.chunks_exact(plane.coefficients());
        for (t, ((row, steps), bins)) in rows.zip(&mut self.tile.steps).zip(&mut self.tile.bins).enumerate() {
            if let Some(step) = token_steps.get(t) {
                inverse = [1.0 / step; LANES];
            }
            let mut values = [0.0; LANES];
            values[..lanes].copy_from_slice(&row[first..first + lanes]);
            for lane in 0..LANES {
                let value = values[lane] * inverse[lane];
                let prediction = last[lane] * factors[lane];
                let bin = quant::bin(value - prediction);
                last[lane] = prediction + centre(bin, plane.centroids);
                steps[lane] = value;
                bins[lane] = bin;
                finite[lane] &= value.abs() <= f32::MAX;
                squares[lane] += bin as f32 * bin as f32;
                lowest[lane] = lowest[lane].min(value);
                highest[lane] = highest[lane].max(value);
            }
        }
        (self.tile.squares, self.tile.lowest, self.tile.highest) = (squares, lowest, highest);
        finite
    }
}

/// Writes the scale and the levels of each group's anchor; returns the other rows minus their reconstructed
/// anchor.
fn take_anchors(rows: &[f32], channels: usize, group: usize, out: &mut Vec<u8>) -> Result<Vec<f32>, Error> {
    let mut differences = Vec::with_capacity(rows.len());
    for rows in rows.chunks(group * channels) {
        let (anchor, rest) = rows.split_at(channels);
        if let Some(channel) = anchor.iter().position(|x| !x.is_finite()) {
            return Err(Error::OutOfRange { channel });
        }
        let largest = anchor.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
        let scale = (largest / ANCHOR_LEVELS).min(MAX_ANCHOR_SCALE);
        out.extend_from_slice(&scale.to_le_bytes());
        let levels = anchor.iter().map(|x| quant::bin(x / scale.max(f32::MIN_POSITIVE)).clamp(-127, 127));
        let start = out.len();
        out.extend(levels.map(|level| level as i8 as u8));
        for row in rest.chunks_exact(channels) {
            let anchor = out[start..].iter().map(|&level| f32::from(level as i8) * scale);
            differences.extend(row.iter().zip(anchor).map(|(x, anchor)| x - anchor));
        }
    }
    Ok(differences)
}

/// Writes the largest magnitude of a row as bf16, rounded to nearest even; returns the step of the row.
fn write_step(row: &[f32], levels: u8, out: &mut Vec<u8>) -> f32 {
    let largest = row.iter().fold(0.0_f32, |max, x| max.max(x.abs()));
    let bits = largest.min(3.3e38).to_bits(); // the largest bf16 is 3.39e38
    let rounded = ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    out.extend_from_slice(&rounded.to_le_bytes());
    token_step(rounded, levels)
}
