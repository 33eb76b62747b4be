//! Coded keys of a block: steps by component, encoding, decoding.

use super::dot::Tiles;
use super::exp2::{encode_step, step};
use super::level::{STEPS, code, floor, half_range, level};
use super::plan::KeyPlan;
use super::shape::{COLUMNS, LANES, MAX_DIM, QUAD, Shape, TILE, check_block};
use crate::assign::finite;
use crate::error::{check_len, count_rows};
use crate::simd::{Kernel, Run};
use crate::{Backend, Error};

/// The coded keys of a block of at most [`MAX_BLOCK`](super::MAX_BLOCK) tokens.
#[derive(Clone, Copy, Debug)]
pub struct Keys<'a> {
    stored: Shape,             // of all bits
    read: Shape,               // of the bits that are read: `stored` or its prefix
    n: usize,                  // 1 to MAX_BLOCK
    steps: &'a [u8],           // (dim,)
    words: &'a [u32],          // whole tiles of `stored`
    plan: Option<&'a KeyPlan>, // of `read`, if the caller has it
}

impl<'a> Keys<'a> {
    /// Takes what [`encode_keys_into`] wrote. Fewer tokens than were written are a truncated block: their
    /// whole tiles suffice. Every content is valid.
    ///
    /// # Shapes
    /// `steps` (dim,); `words` [`Shape::words_len`] of `n`.
    /// # Errors
    /// [`Error::Zero`] without tokens, [`Error::TooLarge`] for more than [`MAX_BLOCK`](super::MAX_BLOCK);
    /// [`Error::Length`].
    #[inline] // else the shapes are copied
    pub fn new(shape: Shape, n: usize, steps: &'a [u8], words: &'a [u32]) -> Result<Self, Error> {
        check_block(n)?;
        check_len("steps", steps.len(), shape.dim())?;
        check_len("words", words.len(), shape.words_len(n))?;
        Ok(Self { stored: shape, read: shape, n, steps, words, plan: None })
    }

    /// The same tokens at the fewer bits of [`Shape::prefix`], read in place.
    #[must_use]
    pub fn prefix(&self) -> Option<Self> {
        Some(Self { read: self.stored.prefix()?, plan: None, ..*self })
    }

    /// Takes the plan of the shape, which every use makes otherwise.
    #[cfg(feature = "alloc")]
    #[inline] // else the shapes are copied
    pub(super) const fn with_plan(self, plan: &'a KeyPlan) -> Self {
        Self { plan: Some(plan), ..self }
    }

    pub(super) const fn plan(&self) -> Option<&KeyPlan> {
        self.plan
    }

    /// Number of tokens.
    #[must_use]
    pub const fn n(&self) -> usize {
        self.n
    }

    /// The bits of the components, as far as they are read.
    #[must_use]
    pub const fn shape(&self) -> &Shape {
        &self.read
    }

    pub(super) const fn tiles(&self) -> Tiles<'_> {
        Tiles { shape: &self.read, stride: self.stored.tile_words(), words: self.words }
    }

    /// The distances between the levels of every component; zeros in the padding.
    #[inline(always)]
    pub(super) fn steps(&self) -> [f32; MAX_DIM] {
        let mut steps = [0.0; MAX_DIM];
        steps.iter_mut().zip(self.steps).for_each(|(of, &code)| *of = step(code));
        if self.stored != self.read {
            let widths = self.stored.widths().iter().zip(self.read.widths());
            for (steps, (stored, read)) in steps.chunks_exact_mut(QUAD).zip(widths) {
                steps.iter_mut().for_each(|step| *step *= (1_u32 << (stored - read)) as f32);
            }
        }
        steps
    }
}

/// Codes the transformed keys of a block.
///
/// The step of a component is the best of nine multiples, by the squared error of the block, of the step that
/// fits a Gaussian of its deviation: tails are clipped if that pays. A NaN or infinite component counts as 0, so
/// that it changes no other token of the block.
///
/// # Shapes
/// `rows` (n, dim), n at most [`MAX_BLOCK`](super::MAX_BLOCK), in the order of
/// [`allot`](super::allot), without their mean and
/// relative to the middle of the block; `steps` (dim,) and `words` [`Shape::words_len`] of n, fully written.
/// # Errors
/// [`Error::PartialRow`], [`Error::Zero`], [`Error::TooLarge`], [`Error::Length`]; nothing is then written.
/// # Cost
/// 10 * n * dim multiply-adds; no allocation.
pub fn encode_keys_into(
    shape: &Shape,
    rows: &[f32],
    steps: &mut [u8],
    words: &mut [u32],
) -> Result<(), Error> {
    encode_keys_into_with(Backend::detect(), shape, rows, steps, words)
}

/// [`encode_keys_into`] on a given backend.
///
/// # Errors
/// As [`encode_keys_into`], and [`Error::BackendUnavailable`].
pub fn encode_keys_into_with(
    backend: Backend,
    shape: &Shape,
    rows: &[f32],
    steps: &mut [u8],
    words: &mut [u32],
) -> Result<(), Error> {
    backend.check()?;
    let n = count_rows("rows", rows.len(), shape.dim())?;
    check_block(n)?;
    check_len("steps", steps.len(), shape.dim())?;
    check_len("words", words.len(), shape.words_len(n))?;
    backend.run(Encode { shape, rows, steps, words });
    Ok(())
}

struct Encode<'a, 'b> {
    shape: &'a Shape,
    rows: &'a [f32],
    steps: &'b mut [u8],
    words: &'b mut [u32],
}

/// Multiples of the step of a Gaussian of the block's deviation.
const MULTIPLES: [f32; 9] = [0.6, 0.75, 0.9, 1.05, 1.25, 1.5, 1.9, 2.5, 3.3];

impl Kernel for Encode<'_, '_> {
    type Output = ();

    /// The compiler vectorizes the loops over the 16 components of a group.
    #[inline(always)]
    fn scalar(self) {
        let Self { shape, rows, steps, words } = self;
        for (group, steps) in steps.chunks_mut(LANES).enumerate() {
            steps.copy_from_slice(&choose_steps(shape, rows, group)[..steps.len()]);
        }
        let mut per_step = [0.0; MAX_DIM];
        per_step.iter_mut().zip(&*steps).for_each(|(x, &code)| *x = 1.0 / step(code));
        words.fill(0);
        let tiles = words.chunks_exact_mut(shape.tile_words()).zip(rows.chunks(TILE * shape.dim()));
        for (words, rows) in tiles {
            let mut codes = [[0; MAX_DIM]; TILE];
            for (codes, row) in codes.iter_mut().zip(rows.chunks_exact(shape.dim())) {
                for (quad, (codes, row)) in codes.chunks_exact_mut(QUAD).zip(row.chunks(QUAD)).enumerate() {
                    let bits = shape.width(QUAD * quad);
                    for ((c, &x), per_step) in codes.iter_mut().zip(row).zip(&per_step[QUAD * quad..]) {
                        *c = code(finite(x), *per_step, bits);
                    }
                }
            }
            shape.key_fields(|field| {
                for half in 0..2 {
                    let unit = 2 * (field.part % COLUMNS) + half;
                    let vector = &mut words[LANES * field.place(unit).0..][..LANES];
                    for (word, codes) in vector.iter_mut().zip(&codes[LANES * half..]) {
                        for (j, &c) in codes[QUAD * field.part..][..QUAD].iter().enumerate() {
                            *word |= field.put(unit, j, c);
                        }
                    }
                }
            });
        }
    }
}

/// Chooses the steps of a group of 16 components.
#[inline(always)]
fn choose_steps(shape: &Shape, rows: &[f32], group: usize) -> [u8; LANES] {
    let rows = || rows.chunks_exact(shape.dim()).map(|row| lanes(&row[LANES * group..]));
    let n = rows().len() as f32;
    let bits: [u32; LANES] = core::array::from_fn(|i| shape.width(LANES * group + i));
    let half: [f32; LANES] = bits.map(half_range);
    let top: [f32; LANES] = bits.map(|bits| ((1_u32 << bits) - 1) as f32);
    let mut squares = [0.0; LANES];
    for row in rows() {
        squares.iter_mut().zip(&row).for_each(|(sum, x)| *sum += x * x);
    }
    let fitting: [f32; LANES] =
        core::array::from_fn(|i| libm::sqrtf(squares[i] / n) * STEPS[bits[i] as usize]);
    let (mut best, mut steps) = ([f32::INFINITY; LANES], [0; LANES]);
    for multiple in MULTIPLES {
        let coded = fitting.map(|fitting| encode_step(multiple * fitting));
        let step = coded.map(step);
        let per_step = step.map(|step| 1.0 / step);
        let mut errors = [0.0; LANES];
        for row in rows() {
            for i in 0..LANES {
                let x = row[i] * per_step[i] + half[i];
                let x = if x > 0.0 { x } else { 0.0 };
                let c = floor(if x < top[i] { x } else { top[i] }).0;
                let error = row[i] - (c + 0.5 - half[i]) * step[i];
                errors[i] += error * error;
            }
        }
        for i in 0..LANES {
            if errors[i] < best[i] || multiple == MULTIPLES[0] {
                (best[i], steps[i]) = (errors[i], coded[i]);
            }
        }
    }
    steps
}

/// One vector of components: the first 16 of `row`, zeros where it has fewer or they are not finite.
#[inline(always)]
fn lanes(row: &[f32]) -> [f32; LANES] {
    let lanes = row.first_chunk().copied().unwrap_or_else(|| {
        let mut lanes = [0.0; LANES];
        lanes[..row.len()].copy_from_slice(row);
        lanes
    });
    lanes.map(finite)
}

/// Decodes keys to transformed rows, for tests and for comparisons: attention does not need it.
///
/// # Shapes
/// `rows` (n, dim), fully written.
/// # Errors
/// [`Error::Length`]; `rows` is then untouched.
pub fn decode_keys_into(keys: &Keys<'_>, rows: &mut [f32]) -> Result<(), Error> {
    let Tiles { shape, stride, words } = keys.tiles();
    let dim = shape.dim();
    check_len("rows", rows.len(), keys.n * dim)?;
    let steps = keys.steps();
    for (words, rows) in words.chunks_exact(stride).zip(rows.chunks_mut(TILE * dim)) {
        let mut codes = [[0; MAX_DIM]; TILE];
        shape.key_fields(|field| {
            for half in 0..2 {
                let unit = 2 * (field.part % COLUMNS) + half;
                let vector = &words[LANES * field.place(unit).0..][..LANES];
                for (&word, codes) in vector.iter().zip(&mut codes[LANES * half..]) {
                    for (j, c) in codes[QUAD * field.part..][..QUAD].iter_mut().enumerate() {
                        *c |= field.get(unit, j, word);
                    }
                }
            }
        });
        for (row, codes) in rows.chunks_exact_mut(dim).zip(codes) {
            for (i, (x, c)) in row.iter_mut().zip(codes).enumerate() {
                *x = level(c, shape.width(i)) * steps[i];
            }
        }
    }
    Ok(())
}
