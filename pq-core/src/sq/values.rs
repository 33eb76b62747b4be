//! Coded values of a block: norms, encoding, decoding, weighted sums, the mean of the error.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::dot::{Dots, QUERIES, TILE_FACTORS, Tiles, WEIGHT_LIMIT};
use super::exp2;
use super::level::{STEPS, code, floor, half_range, level};
use super::plan::ValuePlan;
use super::shape::{LANES, MAX_BLOCK, MAX_DIM, QUAD, Shape, TILE, check_block};
use crate::assign::finite;
use crate::error::{check_len, count_rows};
use crate::simd::{Kernel, Run};
use crate::softmax::max;
use crate::{Backend, Error, encode_norm};

/// The coded values of a block of at most [`MAX_BLOCK`](super::MAX_BLOCK) tokens.
#[derive(Clone, Copy, Debug)]
pub struct Values<'a> {
    stored: Shape,               // uniform, of all bits
    read: Shape,                 // of the bits that are read: `stored` or its prefix
    bits: [u32; 2],              // of both
    norms: &'a [u8],             // (n,)
    words: &'a [u32],            // whole tiles of `stored`
    error: Option<&'a [f16]>,    // (dim,)
    plan: Option<&'a ValuePlan>, // of `read`, if the caller has it
}

impl<'a> Values<'a> {
    /// Takes what [`encode_values_into`] wrote, of the first tokens or all. Every content is valid.
    ///
    /// # Shapes
    /// `norms` (n,), 1 to [`MAX_BLOCK`](super::MAX_BLOCK); `words` [`Shape::words_len`] of n.
    /// # Errors
    /// [`Error::ShapeMismatch`] if components differ in their bits; [`Error::Zero`], [`Error::TooLarge`],
    /// [`Error::Length`].
    #[inline] // else the shapes are copied
    pub fn new(shape: Shape, norms: &'a [u8], words: &'a [u32]) -> Result<Self, Error> {
        let bits = uniform(&shape)?;
        check_block(norms.len())?;
        check_len("words", words.len(), shape.words_len(norms.len()))?;
        Ok(Self { stored: shape, read: shape, bits: [bits; 2], norms, words, error: None, plan: None })
    }

    /// Adds a vector to the value of every token of the block: the mean of what coding lost, see
    /// [`mean_error_into`].
    ///
    /// # Errors
    /// [`Error::Length`] if it does not have `dim` elements.
    #[inline] // else the shapes are copied
    pub fn with_error(self, error: &'a [f16]) -> Result<Self, Error> {
        check_len("error", error.len(), self.stored.dim())?;
        Ok(Self { error: Some(error), ..self })
    }

    /// The same tokens at the fewer bits of [`Shape::prefix`], read in place, without an error vector.
    #[must_use]
    pub fn prefix(&self) -> Option<Self> {
        let read = self.stored.prefix()?;
        let bits = [self.bits[0], read.uniform_width()?];
        Some(Self { read, bits, error: None, plan: None, ..*self })
    }

    /// Takes the plan of the shape, which every use makes otherwise.
    #[cfg(feature = "alloc")]
    #[inline] // else the shapes are copied
    pub(super) const fn with_plan(self, plan: &'a ValuePlan) -> Self {
        Self { plan: Some(plan), ..self }
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
}

/// What the queries of a block share.
pub(super) struct Adder<'a> {
    values: &'a Values<'a>,
    norms: [f32; MAX_BLOCK], // zeros after the block's tokens
    error: [f32; MAX_DIM],
}

impl<'a> Adder<'a> {
    #[inline(always)]
    pub fn new(values: &'a Values<'a>) -> Self {
        let (mut norms, mut error) = ([0.0; MAX_BLOCK], [0.0; MAX_DIM]);
        norms.iter_mut().zip(values.norms).for_each(|(norm, &code)| *norm = exp2::norm(code));
        if let Some(values) = values.error {
            values.convert_to_f32_slice(&mut error[..values.len()]);
        }
        Self { values, norms, error }
    }

    /// Adds the values with the weights of at most [`QUERIES`] queries, and `masses` times the error vector.
    ///
    /// `weights` (group, tokens of whole tiles), finite before the block's end; `masses` (group,), their
    /// sums; `integers` and `sums` are scratch of (group, tokens of whole tiles / 2) and (group, padded dim);
    /// `out` (group, dim).
    #[inline(always)]
    pub fn add(
        &self,
        dots: impl Dots,
        weights: &mut [f32],
        masses: &[f32],
        [integers, sums]: [&mut [f32]; 2],
        out: &mut [f32],
    ) {
        let shape = &self.values.stored;
        let n = self.values.n().next_multiple_of(TILE);
        let integers: &mut [u32] = bytemuck::cast_slice_mut(integers);
        let sums: &mut [u32] = &mut bytemuck::cast_slice_mut(sums)[..masses.len() * shape.padded_dim()];
        let mut scales = [(0.0, 0.0); QUERIES];
        let of_queries = weights.chunks_exact_mut(n).zip(integers.chunks_exact_mut(n / 2));
        for ((weights, integers), scale) in of_queries.zip(&mut scales) {
            *scale = self.round(dots, weights, integers);
        }
        let made;
        let plan = match self.values.plan {
            Some(plan) => plan,
            None => {
                made = ValuePlan::new(&self.values.read);
                &made
            }
        };
        dots.values(self.values.tiles(), plan, integers, sums);
        let of_queries = out.chunks_exact_mut(shape.dim()).zip(sums.chunks_exact(shape.padded_dim()));
        for (((out, sums), (unit, lowest)), &mass) in of_queries.zip(scales).zip(masses) {
            for ((out, &sum), error) in out.iter_mut().zip(sums).zip(&self.error) {
                *out += sum as i32 as f32 * unit + (lowest + mass * error);
            }
        }
    }

    /// Rounds weights times norms to integers. Returns the value of 1 of their products with codes, and that
    /// of the sum with codes 0.
    #[inline(always)]
    fn round(&self, dots: impl Dots, weights: &mut [f32], integers: &mut [u32]) -> (f32, f32) {
        weights.iter_mut().zip(&self.norms).for_each(|(weight, norm)| *weight *= norm);
        let unit = max(weights).max(0.0) / WEIGHT_LIMIT;
        let per_unit = if unit > 0.0 { unit.recip().min(f32::MAX) } else { 0.0 };
        let mut rounded = [0; MAX_BLOCK];
        let rounded = &mut rounded[..weights.len()];
        rounded.iter_mut().zip(weights).for_each(|(z, weight)| *z = round(*weight * per_unit));
        dots.factors_of(rounded, integers);
        let total: i32 = rounded.iter().sum();
        let unit = unit * self.values.step();
        (unit, unit * (total as f32 * (0.5 - half_range(self.values.bits[1]))))
    }
}

/// Rounds a weight, which is not negative.
#[inline(always)]
fn round(weight: f32) -> i32 {
    // The reciprocal may be rounded up, so the largest weight may exceed the limit.
    floor((if weight < WEIGHT_LIMIT { weight } else { WEIGHT_LIMIT }) + 0.5).1 as i32
}

/// Square roots of the numbers of components: software would take as long as the products of ten tokens.
const ROOTS: [f32; MAX_DIM + 1] = {
    let (mut roots, mut dim) = ([0.0; MAX_DIM + 1], 1);
    while dim <= MAX_DIM {
        let (mut root, mut i) = (16.0, 0);
        while i < 10 {
            root = (root + dim as f64 / root) / 2.0; // Newton
            i += 1;
        }
        roots[dim] = root as f32;
        dim += 1;
    }
    roots
};

/// The step of a value of norm 1.
fn unit_step(dim: usize, bits: u32) -> f32 {
    STEPS[bits as usize] / ROOTS[dim]
}

/// The bits of all components.
fn uniform(shape: &Shape) -> Result<u32, Error> {
    let prefix = shape.prefix().map_or(Some(0), |prefix| prefix.uniform_width());
    prefix.and(shape.uniform_width()).ok_or(Error::ShapeMismatch)
}

/// Codes the values of a block, in a Hadamard basis and without their mean. A NaN or infinite component is
/// taken as 0. Norms are those of [`encode_norm`]: values that are longer than 2^8, or shorter than 2^-8, take
/// these norms, so that values of a head come in units of their usual norm.
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
                for row in row.chunks(LANES) {
                    squares.iter_mut().zip(row).for_each(|(sum, &x)| *sum += finite(x) * finite(x));
                }
                *norm = encode_norm(libm::sqrtf(squares.iter().sum()));
                let per_step = 1.0 / (exp2::norm(*norm) * unit_step(dim, bits));
                codes.iter_mut().zip(row).for_each(|(c, &x)| *c = code(finite(x), per_step, bits));
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
/// `rows` (n, dim), that `values` code; `error` (dim,), fully written, rounded to the nearest finite number.
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
            for (sum, (&x, y)) in sums.iter_mut().zip(row.iter().zip(decoded)) {
                *sum += finite(x) - y;
            }
        }
    }
    // An infinity would be one in the sum of all tokens.
    let [least, most] = [f16::MIN, f16::MAX].map(f16::to_f32);
    let mean = |sum: f32| f16::from_f32((sum / values.n() as f32).clamp(least, most));
    error.iter_mut().zip(sums).for_each(|(error, sum)| *error = mean(sum));
    Ok(())
}

/// Words of factors of the weights of whole tiles.
pub(super) const fn weight_words(n: usize) -> usize {
    n.div_ceil(TILE).saturating_mul(TILE_FACTORS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_roots() {
        assert!((1..=MAX_DIM).all(|dim| ROOTS[dim] == libm::sqrtf(dim as f32)));
    }
}
