//! What all sequences share of a head: mean, basis and dual basis of its keys, widths, basis of its values.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use kv_attend::owner::{Reader, Writer};

use super::plan::{KeyPlan, ValuePlan};
use super::shape::{MAX_BLOCK, Shape, TILE};
use crate::error::{check_finite, check_len};
use crate::{BLOCK, Error};

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

impl TransformParts<'_> {
    fn check(&self) -> Result<(), Error> {
        let Self { frequencies, mean, basis, dual, keys, values, block, .. } = *self;
        let dim = keys.dim();
        if dim % 2 != 0 {
            return Err(Error::Unaligned { what: "dim", at: dim, multiple: 2 });
        }
        for (what, part, len) in [
            ("frequencies", frequencies, dim / 2),
            ("mean", mean, dim),
            ("basis", basis, dim * dim),
            ("dual", dual, dim * dim),
        ] {
            check_len(what, part.len(), len)?;
            check_finite(what, part)?;
        }
        if values.uniform_width().is_none() {
            return Err(Error::ShapeMismatch);
        }
        match block {
            0 => Err(Error::Zero { what: "tokens of a block" }),
            _ if block > MAX_BLOCK => Err(Error::TooLarge),
            _ if block % TILE != 0 => {
                Err(Error::Unaligned { what: "tokens of a block", at: block, multiple: TILE })
            }
            _ => Ok(()),
        }
    }
}

/// The transform of a head's keys, and the shapes of its codes: shared by the caches of all sequences.
///
/// Values come and go in their Hadamard basis, which an engine folds into its weights, and without their
/// mean.
#[derive(Clone, Debug)]
pub struct HeadTransform {
    frequencies: Vec<f32>,
    mean: Vec<f32>,
    // For keys and queries relative to the first token of a block, not to its middle.
    basis: Vec<f32>,
    dual: Vec<f32>,
    waves: Vec<f32>, // (2, dim / 2, run): cosines and sines of the positions of a run
    turn: Vec<f32>,  // (2, dim / 2): those of the position after it
    keys: Shape,
    key_plan: KeyPlan,
    values: Shape,
    value_plan: ValuePlan,
    block: usize,
    mean_error: bool,
    id: u64,
}

const MAGIC: [u8; 4] = *b"SQHT";
const VERSION: u32 = 1;

impl HeadTransform {
    /// Copies the parts.
    ///
    /// # Errors
    /// [`Error::Length`] for parts of other dimensions; [`Error::NotFinite`]; [`Error::ShapeMismatch`] if the
    /// components of values differ in their bits; [`Error::Unaligned`] for an odd number of components, which
    /// are no pairs; [`Error::Zero`], [`Error::TooLarge`] and [`Error::Unaligned`] for a block that is not a
    /// multiple of 32 up to 256.
    pub fn new(parts: &TransformParts<'_>) -> Result<Self, Error> {
        parts.check()?;
        let TransformParts { frequencies, mean, basis, dual, keys, values, block, mean_error } = *parts;
        let numbers = [frequencies, mean, basis].into_iter().flatten().map(|x| u64::from(x.to_bits()));
        let widths = keys.widths().iter().chain(values.widths()).map(|&x| u64::from(x));
        let id = hash(0xcbf2_9ce4_8422_2325, widths.chain([block as u64, mean_error.into()]).chain(numbers));
        let [mut basis, mut dual] = [basis.to_vec(), dual.to_vec()];
        rotate_columns(frequencies, block / 2, &mut basis);
        rotate_columns(frequencies, block / 2, &mut dual);
        Ok(Self::relative_to_first(&TransformParts { basis: &basis, dual: &dual, ..*parts }, id))
    }

    /// Takes parts whose maps are for rows relative to the first token of a block.
    fn relative_to_first(parts: &TransformParts<'_>, id: u64) -> Self {
        let TransformParts { frequencies, mean, basis, dual, keys, values, block, mean_error } = *parts;
        let run = run(block);
        Self {
            frequencies: frequencies.to_vec(),
            mean: mean.to_vec(),
            basis: basis.to_vec(),
            dual: dual.to_vec(),
            waves: waves(frequencies, 0..run),
            turn: waves(frequencies, run..run + 1),
            keys,
            key_plan: KeyPlan::new(&keys),
            values,
            value_plan: ValuePlan::new(&values),
            block,
            mean_error,
            id,
        }
    }

    /// The same transform with other codes of the keys: component `order[i]` becomes component `i`, as
    /// [`allot`](super::allot) orders them. For a head whose keys need more bits than those of other heads.
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] for codes of another dimension; [`Error::Length`] and [`Error::BadField`] if
    /// `order` is no permutation of the components.
    pub fn recoded(&self, keys: Shape, order: &[usize]) -> Result<Self, Error> {
        let dim = self.keys.dim();
        if keys.dim() != dim {
            return Err(Error::ShapeMismatch);
        }
        check_len("order", order.len(), dim)?;
        let mut seen = vec![false; dim];
        if !order.iter().all(|&i| i < dim && !core::mem::replace(&mut seen[i], true)) {
            return Err(Error::BadField { what: "order" });
        }
        let columns = |map: &[f32]| -> Vec<f32> {
            map.chunks_exact(dim).flat_map(|row| order.iter().map(move |&i| row[i])).collect()
        };
        let (basis, dual) = (columns(&self.basis), columns(&self.dual));
        let widths = keys.widths().iter().map(|&x| u64::from(x));
        let id = hash(self.id, widths.chain(order.iter().map(|&i| i as u64)));
        Ok(Self { basis, dual, keys, key_plan: KeyPlan::new(&keys), id, ..self.clone() })
    }

    /// The transform as bytes, for [`from_bytes`](Self::from_bytes): caches that were saved under it can be
    /// restored under what is read.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.saved().finish()
    }

    /// [`to_bytes`](Self::to_bytes) with a checksum, which [`from_bytes`](Self::from_bytes) compares: without
    /// it most single wrong bits are read as other values.
    #[must_use]
    pub fn to_bytes_checked(&self) -> Vec<u8> {
        self.saved().finish_checked()
    }

    fn saved(&self) -> Writer {
        let mut writer = Writer::new(MAGIC, VERSION);
        writer.u64(self.id);
        self.keys.write(&mut writer);
        self.values.write(&mut writer);
        writer.usize(self.block);
        writer.u32(self.mean_error.into());
        for part in [&self.frequencies, &self.mean, &self.basis, &self.dual] {
            writer.elements(part.iter().copied());
        }
        writer
    }

    /// Reads what [`to_bytes`](Self::to_bytes) or [`to_bytes_checked`](Self::to_bytes_checked) wrote.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::TrailingBytes`],
    /// [`Error::BadChecksum`], [`Error::BadField`], those of [`Shape::new`] and of [`new`](Self::new).
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new("the transform of a head", MAGIC, VERSION, bytes)?;
        let id = reader.u64()?;
        let (keys, values) = (Shape::read(&mut reader)?, Shape::read(&mut reader)?);
        let block = reader.usize()?;
        let mean_error = match reader.u32()? {
            0 => false,
            1 => true,
            _ => return Err(Error::BadField { what: "mean of the error" }),
        };
        let dim = keys.dim();
        let [frequencies, mean] = [reader.elements(dim / 2)?, reader.elements(dim)?];
        let [basis, dual] = [reader.elements(dim * dim)?, reader.elements(dim * dim)?];
        reader.finish()?;
        let parts = TransformParts {
            frequencies: &frequencies,
            mean: &mean,
            basis: &basis,
            dual: &dual,
            keys,
            values,
            block,
            mean_error,
        };
        parts.check()?;
        Ok(Self::relative_to_first(&parts, id))
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
        let parts = [&self.frequencies, &self.mean, &self.basis, &self.dual, &self.waves, &self.turn];
        size_of_val(self) + parts.into_iter().map(|part| size_of_val(&part[..])).sum::<usize>()
    }

    /// Whether blocks keep the mean of the error of their values.
    pub(super) const fn has_mean_error(&self) -> bool {
        self.mean_error
    }

    /// Identifies the transform in saved caches.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    pub(super) const fn key_plan(&self) -> &KeyPlan {
        &self.key_plan
    }

    pub(super) const fn value_plan(&self) -> &ValuePlan {
        &self.value_plan
    }

    pub(super) fn frequencies(&self) -> &[f32] {
        &self.frequencies
    }

    /// The mean key before RoPE.
    pub(super) fn mean(&self) -> &[f32] {
        &self.mean
    }

    /// The basis for keys relative to the first token of their block.
    pub(super) fn basis(&self) -> &[f32] {
        &self.basis
    }

    /// The dual basis for queries relative to the first token of a block.
    pub(super) fn dual(&self) -> &[f32] {
        &self.dual
    }

    /// Tokens of a run, which divide a block: one table of cosines and sines serves every run.
    pub(super) const fn run(&self) -> usize {
        run(self.block)
    }

    /// Cosines and sines of the positions of a run: (2, dim / 2, run).
    pub(super) fn waves(&self) -> &[f32] {
        &self.waves
    }

    /// Cosines and sines of the number of positions of a run: (2, dim / 2).
    pub(super) fn turn(&self) -> &[f32] {
        &self.turn
    }
}

/// FNV-1a, 64 bits at a time.
fn hash(start: u64, numbers: impl Iterator<Item = u64>) -> u64 {
    numbers.fold(start, |id, x| (id ^ x).wrapping_mul(0x100_0000_01b3))
}

const fn run(block: usize) -> usize {
    if block.is_multiple_of(BLOCK) { BLOCK } else { TILE }
}

/// Cosines and sines: (2, frequencies, positions).
fn waves(frequencies: &[f32], positions: Range<usize>) -> Vec<f32> {
    let mut waves = vec![0.0; 2 * frequencies.len() * positions.len()];
    let (cosines, sines) = waves.split_at_mut(frequencies.len() * positions.len());
    let angles = frequencies
        .iter()
        .flat_map(|&frequency| positions.clone().map(move |position| position as f64 * f64::from(frequency)));
    for (angle, (cosine, sine)) in angles.zip(cosines.iter_mut().zip(sines)) {
        let (sin, cos) = libm::sincos(angle);
        (*cosine, *sine) = (cos as f32, sin as f32);
    }
    waves
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
