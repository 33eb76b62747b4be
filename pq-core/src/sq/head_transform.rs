//! What all sequences share of a head: mean, basis and dual basis of its keys, widths, basis of its values.

use alloc::vec::Vec;

use super::shape::{MAX_BLOCK, Shape, TILE};
use crate::error::{check_finite, check_len};
use crate::{BLOCK, Error, RopeMeanBuf};

/// What a [`HeadTransform`] is made of.
#[derive(Clone, Copy, Debug)]
pub struct TransformParts<'a> {
    /// Radians per position of every pair of components of a key: (dim / 2,). Zeros for a model without RoPE.
    pub frequencies: &'a [f32],
    /// The mean key before RoPE: (dim,).
    pub mean: &'a [f32],
    /// Multiplies keys: (dim, dim), row-major; column c gives component c of the code, in the order of
    /// [`allot`](super::allot).
    pub basis: &'a [f32],
    /// Multiplies queries: (dim, dim), the inverse of the basis, transposed.
    pub dual: &'a [f32],
    /// The codes of the keys.
    pub keys: Shape,
    /// The codes of the values: the same bits for every component.
    pub values: Shape,
    /// Tokens of a block: a multiple of 32, at most 256.
    pub block: usize,
    /// Whether blocks keep the mean of the error of their values, 16 bits a component: worth it up to 2 bits.
    pub mean_error: bool,
}

/// The transform of a head's keys, and the shapes of its codes: shared by the caches of all sequences.
///
/// Values come and go in their Hadamard basis, which an engine folds into its weights, and without their mean.
#[derive(Clone, Debug)]
pub struct HeadTransform {
    frequencies: Vec<f32>,
    mean: RopeMeanBuf,
    basis: Vec<f32>,
    dual: Vec<f32>,  // for queries relative to the first token of a block, not to its middle
    turns: Vec<f32>, // (2, dim / 2): cosines and sines of a run of positions
    keys: Shape,
    values: Shape,
    block: usize,
    mean_error: bool,
    id: u64,
}

impl HeadTransform {
    /// Copies the parts.
    ///
    /// # Errors
    /// [`Error::Length`] for parts of other dimensions; [`Error::NotFinite`]; [`Error::ShapeMismatch`] if the
    /// components of values differ in their bits; [`Error::Zero`], [`Error::TooLarge`] and
    /// [`Error::Unaligned`] for a block that is not a multiple of 32 up to 256.
    pub fn new(parts: &TransformParts<'_>) -> Result<Self, Error> {
        let TransformParts { frequencies, mean, basis, dual, keys, values, block, mean_error } = *parts;
        let dim = keys.dim();
        check_len("frequencies", frequencies.len(), dim / 2)?;
        check_len("basis", basis.len(), dim * dim)?;
        check_len("dual", dual.len(), dim * dim)?;
        check_finite("basis", basis)?;
        check_finite("dual", dual)?;
        if values.uniform_width().is_none() {
            return Err(Error::ShapeMismatch);
        }
        match block {
            0 => return Err(Error::Zero { what: "tokens of a block" }),
            _ if block > MAX_BLOCK => return Err(Error::TooLarge),
            _ if block % TILE != 0 => {
                return Err(Error::Unaligned { what: "tokens of a block", at: block, multiple: TILE });
            }
            _ => {}
        }
        let mean_buf = RopeMeanBuf::new(mean, frequencies)?;
        let numbers = [frequencies, mean, basis].into_iter().flatten().map(|x| u64::from(x.to_bits()));
        let widths = keys.widths().iter().chain(values.widths()).map(|&x| u64::from(x));
        // FNV-1a, 64 bits at a time.
        let id = widths
            .chain([block as u64, mean_error.into()])
            .chain(numbers)
            .fold(0xcbf2_9ce4_8422_2325, |id: u64, x| (id ^ x).wrapping_mul(0x100_0000_01b3));
        let mut dual = dual.to_vec();
        rotate_columns(frequencies, block / 2, &mut dual);
        let turn = |frequency: &f32| libm::sincos(run(block) as f64 * f64::from(*frequency));
        let cosines = frequencies.iter().map(|frequency| turn(frequency).1 as f32);
        let turns = cosines.chain(frequencies.iter().map(|frequency| turn(frequency).0 as f32)).collect();
        Ok(Self {
            frequencies: frequencies.to_vec(),
            mean: mean_buf,
            basis: basis.to_vec(),
            dual,
            turns,
            keys,
            values,
            block,
            mean_error,
            id,
        })
    }

    /// The codes of the keys.
    #[must_use]
    pub const fn keys(&self) -> &Shape {
        &self.keys
    }

    /// The codes of the values.
    #[must_use]
    pub const fn values(&self) -> &Shape {
        &self.values
    }

    /// Tokens of a block.
    #[must_use]
    pub const fn block(&self) -> usize {
        self.block
    }

    /// Bytes of the transform.
    #[must_use]
    pub fn size(&self) -> usize {
        let parts = [&self.basis, &self.dual, &self.frequencies, &self.turns];
        parts.into_iter().map(|part| size_of_val(&part[..])).sum::<usize>() + 4 * self.keys.dim() // the mean
    }

    /// Whether blocks keep the mean of the error of their values.
    pub(super) const fn has_mean_error(&self) -> bool {
        self.mean_error
    }

    /// Identifies the transform in saved caches.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    pub(super) const fn mean(&self) -> &RopeMeanBuf {
        &self.mean
    }

    pub(super) fn basis(&self) -> &[f32] {
        &self.basis
    }

    /// The dual basis for queries that are rotated relative to the first token of a block.
    pub(super) fn dual(&self) -> &[f32] {
        &self.dual
    }

    /// Tokens of a run, which divide a block: the scores of the mean are computed run by run.
    pub(super) const fn run(&self) -> usize {
        run(self.block)
    }

    /// Rotates queries (group, dim) to the next run, by tables: sines and cosines of every block would take as
    /// long as its dot products.
    pub(super) fn next_run(&self, queries: &mut [f32]) {
        let half = self.frequencies.len();
        let (cosines, sines) = self.turns.split_at(half);
        for query in queries.chunks_exact_mut(2 * half) {
            let (x, y) = query.split_at_mut(half);
            for (((x, y), cos), sin) in x.iter_mut().zip(y).zip(cosines).zip(sines) {
                (*x, *y) = (cos * *x + sin * *y, cos * *y - sin * *x);
            }
        }
    }
}

const fn run(block: usize) -> usize {
    if block.is_multiple_of(BLOCK) { BLOCK } else { TILE }
}

/// Rotates the columns of a map (dim, dim) by `positions`.
fn rotate_columns(frequencies: &[f32], positions: usize, map: &mut [f32]) {
    let dim = 2 * frequencies.len();
    let (upper, lower) = map.split_at_mut(dim * dim / 2);
    let pairs = upper.chunks_exact_mut(dim).zip(lower.chunks_exact_mut(dim));
    for ((x, y), &frequency) in pairs.zip(frequencies) {
        let (sin, cos) = libm::sincos(positions as f64 * f64::from(frequency));
        for (x, y) in x.iter_mut().zip(y) {
            let (a, b) = (f64::from(*x), f64::from(*y));
            (*x, *y) = ((cos * a - sin * b) as f32, (sin * a + cos * b) as f32);
        }
    }
}
