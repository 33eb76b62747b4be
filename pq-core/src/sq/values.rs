//! Coded values of a block: norms, encoding, decoding, weighted sums, the mean of the error.

use half::f16;

use super::dot::{Dots, TILE_PAIRS, Tiles, WEIGHT_LIMIT, pairs};
use super::exp2;
use super::level::{STEPS, code, half_range, level};
use super::shape::{LANES, MAX_BLOCK, MAX_DIM, QUAD, Shape, TILE, check_block};
use crate::error::{check_len, count_rows};
use crate::simd::{Kernel, Run};
use crate::{Backend, Error, encode_norm};

/// The coded values of a block of at most [`MAX_BLOCK`](super::MAX_BLOCK) tokens.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    stored: Shape,            // uniform, of all bits
    read: Shape,              // of the bits that are read: `stored` or its prefix
    bits: [u32; 2],           // of both
    norms: &'a [u8],          // (n,)
    words: &'a [u32],         // whole tiles of `stored`
    error: Option<&'a [f16]>, // (dim,)
}

impl<'a> Values<'a> {
    /// Takes what [`encode_values_into`] wrote, of the first tokens or all. Every content is valid.
    ///
    /// # Shapes
    /// `norms` (n,), 1 to [`MAX_BLOCK`](super::MAX_BLOCK); `words` [`Shape::words_len`] of n.
    /// # Errors
    /// [`Error::ShapeMismatch`] if components differ in their bits; [`Error::Zero`], [`Error::TooLarge`],
    /// [`Error::Length`].
    pub fn new(shape: Shape, norms: &'a [u8], words: &'a [u32]) -> Result<Self, Error> {
        let bits = uniform(&shape)?;
        check_block(norms.len())?;
        check_len("words", words.len(), shape.words_len(norms.len()))?;
        Ok(Self { stored: shape, read: shape, bits: [bits; 2], norms, words, error: None })
    }

    /// Adds a vector to the value of every token of the block: the mean of what coding lost, see
    /// [`mean_error_into`].
    ///
    /// # Errors
    /// [`Error::Length`] if it does not have `dim` elements.
    pub fn with_error(self, error: &'a [f16]) -> Result<Self, Error> {
        check_len("error", error.len(), self.stored.dim())?;
        Ok(Self { error: Some(error), ..self })
    }

    /// The same tokens at the fewer bits of [`Shape::prefix`], read in place, without an error vector.
    #[must_use]
    pub fn prefix(&self) -> Option<Self> {
        let read = self.stored.prefix()?;
        Some(Self { read, bits: [self.bits[0], read.uniform_width()?], error: None, ..*self })
    }

    /// Number of tokens.
    #[must_use]
    pub const fn n(&self) -> usize {
        self.norms.len()
    }

    /// The bits of the components, as far as they are read.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.read
    }

    const fn tiles(&self) -> Tiles<'_> {
        Tiles { shape: &self.read, stride: self.stored.tile_words(), words: self.words }
    }

    /// The distance between levels of a value of norm 1.
    fn step(&self) -> f32 {
        let [bits, read] = self.bits;
        unit_step(self.stored.dim(), bits) * (1_u32 << (bits - read)) as f32
    }

    /// Adds the values with the weights of a group of queries, and `shares` times the error vector.
    ///
    /// `weights` (group, tokens of whole tiles), zero after the block's tokens; `integers` and `sums` are
    /// scratch of (group, tokens of whole tiles / 2) and (group, dim); `out` (group, dim).
    #[inline(always)]
    pub(super) fn add(
        &self,
        dots: impl Dots,
        weights: &mut [f32],
        shares: impl Fn(usize) -> f32,
        [integers, sums]: [&mut [f32]; 2],
        out: &mut [f32],
    ) {
        let dim = self.stored.dim();
        let padded = self.n().next_multiple_of(TILE);
        let mut norms = [0.0; MAX_BLOCK];
        norms.iter_mut().zip(self.norms).for_each(|(norm, &code)| *norm = exp2::norm(code));
        let integers: &mut [u32] = bytemuck::cast_slice_mut(integers);
        let sums: &mut [u32] = bytemuck::cast_slice_mut(sums);
        let mut rounded = weights.chunks_exact_mut(padded).zip(integers.chunks_exact_mut(padded / 2));
        for (weights, integers) in &mut rounded {
            weights.iter_mut().zip(&norms).for_each(|(weight, norm)| *weight *= norm);
            round_weights(weights, integers);
        }
        dots.values(self.tiles(), integers, sums);
        for (g, (out, sums)) in out.chunks_exact_mut(dim).zip(sums.chunks_exact(dim)).enumerate() {
            let unit = weight_unit(&weights[g * padded..][..padded]) * self.step();
            let total: i64 = integers[g * padded / 2..][..padded / 2]
                .iter()
                .map(|&x| i64::from(x & 0xffff) + i64::from(x >> 16))
                .sum();
            let offset = unit * (total as f32 * (0.5 - half_range(self.bits[1])));
            for (out, &sum) in out.iter_mut().zip(sums) {
                *out += sum as i32 as f32 * unit + offset;
            }
            if let Some(error) = self.error {
                let share = shares(g);
                out.iter_mut().zip(error).for_each(|(out, error)| *out += share * error.to_f32());
            }
        }
    }
}

/// The value of 1 of a query's integer weights.
#[inline(always)]
fn weight_unit(weights: &[f32]) -> f32 {
    crate::softmax::max(weights).max(0.0) / WEIGHT_LIMIT
}

/// Rounds weights, which are not negative, to integers.
#[inline(always)]
fn round_weights(weights: &[f32], integers: &mut [u32]) {
    let unit = weight_unit(weights);
    let per_unit = if unit > 0.0 { 1.0 / unit } else { 0.0 };
    for (weights, integers) in weights.chunks_exact(QUAD).zip(integers.chunks_exact_mut(2)) {
        let rounded = core::array::from_fn(|j| {
            // Its reciprocal may be rounded up, so the largest weight may exceed the limit.
            let x = weights[j] * per_unit;
            (if x < WEIGHT_LIMIT { x + 0.5 } else { WEIGHT_LIMIT }) as i32
        });
        integers.copy_from_slice(&pairs(rounded));
    }
}

/// The step of a value of norm 1.
fn unit_step(dim: usize, bits: u32) -> f32 {
    STEPS[bits as usize] / libm::sqrtf(dim as f32)
}

/// The bits of all components.
fn uniform(shape: &Shape) -> Result<u32, Error> {
    let prefix = shape.prefix().map_or(Some(0), |prefix| prefix.uniform_width());
    prefix.and(shape.uniform_width()).ok_or(Error::ShapeMismatch)
}

/// Codes the values of a block, in a Hadamard basis and without their mean.
///
/// # Shapes
/// `rows` (n, dim), n at most [`MAX_BLOCK`](super::MAX_BLOCK); `norms` (n,) and `words`
/// [`Shape::words_len`] of n, fully written.
/// # Errors
/// [`Error::ShapeMismatch`] if components differ in their bits; [`Error::PartialRow`], [`Error::Zero`],
/// [`Error::TooLarge`], [`Error::Length`]; nothing is then written.
/// # Cost
/// n * dim multiply-adds; no allocation.
pub fn encode_values_into(
    shape: &Shape,
    rows: &[f32],
    norms: &mut [u8],
    words: &mut [u32],
) -> Result<(), Error> {
    encode_values_into_with(Backend::detect(), shape, rows, norms, words)
}

/// [`encode_values_into`] on a given backend.
///
/// # Errors
/// As [`encode_values_into`], and [`Error::BackendUnavailable`].
pub fn encode_values_into_with(
    backend: Backend,
    shape: &Shape,
    rows: &[f32],
    norms: &mut [u8],
    words: &mut [u32],
) -> Result<(), Error> {
    backend.check()?;
    let bits = uniform(shape)?;
    let n = count_rows("rows", rows.len(), shape.dim())?;
    check_block(n)?;
    check_len("norms", norms.len(), n)?;
    check_len("words", words.len(), shape.words_len(n))?;
    backend.run(Encode { shape, bits, rows, norms, words });
    Ok(())
}

struct Encode<'a, 'b> {
    shape: &'a Shape,
    bits: u32,
    rows: &'a [f32],
    norms: &'b mut [u8],
    words: &'b mut [u32],
}

impl Kernel for Encode<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Self { shape, bits, rows, norms, words } = self;
        let dim = shape.dim();
        words.fill(0);
        let tiles = words.chunks_exact_mut(shape.tile_words()).zip(rows.chunks(TILE * dim));
        for ((words, rows), norms) in tiles.zip(norms.chunks_mut(TILE)) {
            let mut codes = [[0; MAX_DIM]; TILE];
            for ((codes, row), norm) in codes.iter_mut().zip(rows.chunks_exact(dim)).zip(norms) {
                let mut squares = [0.0; LANES];
                for row in row.chunks_exact(LANES) {
                    squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
                }
                *norm = encode_norm(libm::sqrtf(squares.iter().sum()));
                let per_step = 1.0 / (exp2::norm(*norm) * unit_step(dim, bits));
                codes.iter_mut().zip(row).for_each(|(c, &x)| *c = code(x, per_step, bits));
            }
            shape.value_fields(|field| {
                for (unit, codes) in codes.chunks_exact(QUAD).enumerate() {
                    let vector = &mut words[LANES * field.place(unit).0..][..LANES];
                    for (j, codes) in codes.iter().enumerate() {
                        let codes = &codes[LANES * field.part..][..LANES];
                        vector.iter_mut().zip(codes).for_each(|(word, &c)| *word |= field.put(unit, j, c));
                    }
                }
            });
        }
    }
}

/// Decodes values to transformed rows, without the error vector.
///
/// # Shapes
/// `rows` (n, dim), fully written.
/// # Errors
/// [`Error::Length`]; `rows` is then untouched.
pub fn decode_values_into(values: &Values<'_>, rows: &mut [f32]) -> Result<(), Error> {
    let Tiles { shape, stride, words } = values.tiles();
    let dim = shape.dim();
    check_len("rows", rows.len(), values.n() * dim)?;
    let norms = values.norms.chunks(TILE);
    for ((words, rows), norms) in words.chunks_exact(stride).zip(rows.chunks_mut(TILE * dim)).zip(norms) {
        let mut codes = [[0; MAX_DIM]; TILE];
        shape.value_fields(|field| {
            for (unit, codes) in codes.chunks_exact_mut(QUAD).enumerate() {
                let vector = &words[LANES * field.place(unit).0..][..LANES];
                for (j, codes) in codes.iter_mut().enumerate() {
                    let codes = &mut codes[LANES * field.part..][..LANES];
                    codes.iter_mut().zip(vector).for_each(|(c, &word)| *c |= field.get(unit, j, word));
                }
            }
        });
        for ((row, codes), &norm) in rows.chunks_exact_mut(dim).zip(codes).zip(norms) {
            let step = values.step() * exp2::norm(norm);
            row.iter_mut().zip(codes).for_each(|(x, c)| *x = level(c, values.bits[1]) * step);
        }
    }
    Ok(())
}

/// The mean over a block of what coding lost, for [`Values::with_error`]. Attention averages the errors of
/// single tokens but not what they have in common, which is most of the loss at 2 bits and less, and next to
/// nothing at 3 and more.
///
/// # Shapes
/// `rows` (n, dim), that `values` code; `error` (dim,), fully written, rounded to nearest.
/// # Errors
/// [`Error::Length`]; `error` is then untouched.
/// # Cost
/// n * dim additions, and decoding; no allocation.
pub fn mean_error_into(values: &Values<'_>, rows: &[f32], error: &mut [f16]) -> Result<(), Error> {
    let dim = values.shape().dim();
    check_len("rows", rows.len(), values.n() * dim)?;
    check_len("error", error.len(), dim)?;
    let mut sums = [0.0; MAX_DIM];
    let (mut decoded, stride) = ([0.0; MAX_DIM * TILE], values.stored.tile_words());
    let tiles = values.words.chunks_exact(stride).zip(values.norms.chunks(TILE));
    for ((words, norms), rows) in tiles.zip(rows.chunks(TILE * dim)) {
        let decoded = &mut decoded[..rows.len()];
        decode_values_into(&Values { norms, words, ..*values }, decoded)?;
        for (row, decoded) in rows.chunks_exact(dim).zip(decoded.chunks_exact(dim)) {
            for (sum, (x, y)) in sums.iter_mut().zip(row.iter().zip(decoded)) {
                *sum += x - y;
            }
        }
    }
    error.iter_mut().zip(sums).for_each(|(error, sum)| *error = f16::from_f32(sum / values.n() as f32));
    Ok(())
}

/// Words of pairs of weights of whole tiles.
pub(super) const fn weight_words(n: usize) -> usize {
    n.div_ceil(TILE).saturating_mul(TILE_PAIRS)
}
