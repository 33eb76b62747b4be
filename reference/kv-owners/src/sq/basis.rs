//! The basis of a head: statistics of sample rows, independent of the number of bits.

use std::sync::Arc;

use kv_attend::owner::{Reader, Writer};
use kv_attend::{Element, Rows};
use pq_core::norm_scale;
use pq_core::sq::{HeadTransform, MAX_BLOCK, Shape, TILE, TransformParts, allot, rotate_by};
use svd_core::{Gram, PreRope, Rotation};

use super::Head;
use super::head::check_finite;
use super::values::ValueTransform;
use crate::Error;

const MAGIC: [u8; 4] = *b"SQBA";
const VERSION: u32 = 2;

/// Rows of a layer to fit bases to: a few thousand tokens of any text.
#[derive(Clone, Copy, Debug)]
pub struct Samples<'a, E> {
    /// (n, heads * dim).
    pub keys: Rows<'a, E>,
    /// (m, heads * group * dim): query heads in order. There may be more or fewer of them than keys.
    pub queries: Rows<'a, E>,
    /// (any, heads * dim of the values).
    pub values: Rows<'a, E>,
    /// Radians per position of every pair of components `i` and `i + dim / 2`: (dim / 2,). Zeros for a model
    /// without RoPE.
    pub frequencies: &'a [f32],
    /// The position of the first row, if keys and queries are after RoPE; none if they are before.
    pub rotated_from: Option<usize>,
}

/// Bits of the codes of a head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bits {
    /// Mean bits per component of a key, in eighths: at least 1/8, at most 8. Rounded down to whole bits for
    /// every sixteenth component, at least one.
    pub keys: f32,
    /// Bits per component of a value: 1 to 8.
    pub values: u32,
    /// Whether blocks keep the mean of the error of their values, 16 bits a component: worth it up to 2 bits.
    pub mean_error: bool,
    /// Whether a sequence whose keys do not fit the basis, by [`Fit::is_misfit`], has as many more bits for
    /// those of this head as bring their error back to the expected one. That is decided by the first tokens
    /// that leave the window, at least 64 of them at once, so it depends on how a prompt is divided among
    /// appends.
    ///
    /// [`Fit::is_misfit`]: kv_attend::owner::Fit::is_misfit
    pub widen: bool,
}

/// 4 bits.
impl Default for Bits {
    fn default() -> Self {
        Self::uniform(4)
    }
}

impl Bits {
    /// The same bits for keys and values of all sequences, with the mean of the error up to 2.
    #[must_use]
    pub const fn uniform(bits: u32) -> Self {
        Self { keys: bits as f32, values: bits, mean_error: bits <= 2, widen: false }
    }

    /// Slots of the codes of keys of `dim` components: each is a bit for every sixteenth component.
    ///
    /// # Errors
    /// [`Error::KeyBits`].
    pub fn key_slots(&self, dim: usize) -> Result<usize, Error> {
        if !((0.125..=8.0).contains(&self.keys) && (8.0 * self.keys).fract() == 0.0) {
            return Err(Error::KeyBits { bits: self.keys });
        }
        Ok(((self.keys * dim.div_ceil(16) as f32) as usize).max(1))
    }
}

/// The basis of a head's keys in the order of their codes.
#[derive(Clone, Debug, PartialEq)]
pub struct CodedKeys {
    /// The codes.
    pub shape: Shape,
    /// Multiplies keys: (dim, dim), row-major.
    pub basis: Vec<f32>,
    /// Multiplies queries: the same.
    pub dual: Vec<f32>,
    /// Deviations of the components: (dim,).
    pub sigma: Vec<f32>,
}

/// The basis of a head, for any number of bits. Its parts are plain numbers, which an engine may store as it
/// likes.
#[derive(Clone, Debug, PartialEq)]
pub struct Basis {
    /// Tokens of a block: a multiple of 32, at most 256.
    pub block: usize,
    /// Mean of the keys before RoPE: (dim,).
    pub mean: Vec<f32>,
    /// Multiplies keys: (dim, dim), row-major, columns by falling `sigma`.
    pub basis: Vec<f32>,
    /// Multiplies queries: (dim, dim), the inverse of the basis, transposed.
    pub dual: Vec<f32>,
    /// Deviations of the components, in units of the error of scores: (dim,).
    pub sigma: Vec<f32>,
    /// Mean of the values: (dim of the values,).
    pub value_mean: Vec<f32>,
    /// The unit of the norms of values, a power of two from 2^-126 to 2^126: codes hold values without their
    /// mean whose norms are 2^-8 to 2^8 of it.
    pub value_scale: f32,
}

impl Basis {
    /// Fits the bases of all heads of a layer, in blocks of `block` tokens.
    ///
    /// Keys are rotated to where they would be in a block, relative to its middle, after their mean is
    /// subtracted; the basis is that of [`Rotation::query_metric`] with the second moment of the queries
    /// before RoPE of all heads of the group. The first few tokens of a text, whose norms are outliers and
    /// which caches keep exact, should not be among the samples.
    ///
    /// # Errors
    /// [`kv_attend::Error::Zero`] for no head or no row; [`kv_attend::Error::Length`] and
    /// [`kv_attend::Error::PartialRow`] for rows that are not those of `heads` heads;
    /// [`kv_attend::Error::TooLarge`] for positions beyond `i64`; [`pq_core::Error`] for a bad block; errors
    /// of the rotation, or [`pq_core::Error::NotFinite`], for rows that are not finite.
    /// # Cost
    /// n * dim * dim multiply-adds per head for its keys, and as many for each of its query heads; an
    /// eigenproblem of dim components.
    pub fn fit_layer<E: Element>(
        samples: &Samples<'_, E>,
        heads: usize,
        block: usize,
    ) -> Result<Vec<Self>, Error> {
        let dims = samples.dims(heads)?;
        let fit = |head: usize| Self::fit_head(samples, heads, head, dims, block);
        #[cfg(feature = "rayon")]
        {
            use rayon::prelude::*;
            (0..heads).into_par_iter().map(fit).collect()
        }
        #[cfg(not(feature = "rayon"))]
        (0..heads).map(fit).collect()
    }

    fn fit_head<E: Element>(
        samples: &Samples<'_, E>,
        heads: usize,
        head: usize,
        [dim, dim_v]: [usize; 2],
        block: usize,
    ) -> Result<Self, Error> {
        let keys = samples.plain(samples.keys.columns(head * dim, dim)?)?;
        let mut metric: Gram<PreRope> = Gram::new(dim)?;
        let group = samples.queries.components() / (heads * dim);
        for query_head in head * group..(head + 1) * group {
            let queries = samples.plain(samples.queries.columns(query_head * dim, dim)?)?;
            metric.add_rows(Rows::contiguous(&queries, dim)?)?;
        }
        let values = samples.values.columns(head * dim_v, dim_v)?;
        Self::fit(Rows::contiguous(&keys, dim)?, &metric, values, samples.frequencies, block)
    }

    /// Fits the basis of one head, given the second moment `metric` of the queries of its group before RoPE:
    /// [`fit_layer`](Self::fit_layer).
    ///
    /// # Shapes
    /// `keys` (n, dim) before RoPE, `values` (m, dim of the values), n and m at least 1; `frequencies`
    /// (dim / 2,).
    /// # Errors
    /// As [`fit_layer`](Self::fit_layer).
    pub fn fit<K: Element, V: Element>(
        keys: Rows<'_, K>,
        metric: &Gram<PreRope>,
        values: Rows<'_, V>,
        frequencies: &[f32],
        block: usize,
    ) -> Result<Self, Error> {
        check_block(block)?;
        for (what, rows) in [("keys", keys.rows()), ("values", values.rows())] {
            if rows == 0 {
                return Err(kv_attend::Error::Zero { what }.into());
            }
        }
        let (dim, dim_v, mut keys) = (keys.components(), values.components(), floats(keys));
        let mean = mean_row(&keys, dim);
        for (i, key) in keys.chunks_exact_mut(dim).enumerate() {
            key.iter_mut().zip(&mean).for_each(|(x, mean)| *x -= mean);
            // Where the key would be in its block, relative to the middle.
            let position = (i % block) as i64 - (block / 2) as i64;
            rotate_by(frequencies, position, key)?;
        }
        let mut covariance: Gram<PreRope> = Gram::new(dim)?;
        covariance.add_rows(Rows::contiguous(&keys, dim)?)?;
        let rotation = Rotation::query_metric(&covariance, metric)?;
        let values = floats(values);
        let value_mean = mean_row(&values, dim_v);
        check_finite("mean of the values", &value_mean)?;
        Ok(Self {
            block,
            mean,
            basis: single(rotation.basis()),
            dual: single(rotation.dual()),
            sigma: single(rotation.sigma()),
            value_mean,
            // The mean is not subtracted: the rest of a few samples may be nothing but rounding errors.
            value_scale: norm_scale(&values, dim_v)?,
        })
    }

    /// The basis of the keys in the order of codes of `slots` slots ([`Bits::key_slots`]).
    ///
    /// # Errors
    /// Those of [`allot`]; [`kv_attend::Error::Length`] for maps of another size.
    pub fn coded_keys(&self, slots: usize) -> Result<CodedKeys, Error> {
        let dim = self.sigma.len();
        let mut order = vec![0; dim];
        let shape = allot(&self.sigma, slots, &mut order)?;
        for (what, map) in [("basis", &self.basis), ("dual", &self.dual)] {
            if map.len() != dim * dim {
                let (expected, actual) = (dim * dim, map.len());
                return Err(pq_core::Error::Length { what, expected, actual }.into());
            }
        }
        let columns = |map: &[f32]| -> Vec<f32> {
            map.chunks_exact(dim).flat_map(|row| order.iter().map(move |&c| row[c])).collect()
        };
        let sigma = order.iter().map(|&c| self.sigma[c]).collect();
        Ok(CodedKeys { shape, basis: columns(&self.basis), dual: columns(&self.dual), sigma })
    }

    /// The shared state of the head's caches at some number of bits. `frequencies` are those of
    /// [`Samples::frequencies`].
    ///
    /// # Errors
    /// [`Error::KeyBits`]; those of [`allot`], [`Shape::new`] and [`HeadTransform::new`], for bits of values
    /// outside their range and parts that do not fit together; [`Error::ValueScale`];
    /// [`svd_core::Error::TooLarge`] for values that have no Hadamard transform.
    pub fn head(&self, frequencies: &[f32], bits: &Bits) -> Result<Arc<Head>, Error> {
        let CodedKeys { shape, basis, dual, sigma } = self.coded_keys(bits.key_slots(self.sigma.len())?)?;
        let values = ValueTransform::new(&self.value_mean, self.value_scale)?;
        let transform = HeadTransform::new(&TransformParts {
            frequencies,
            mean: &self.mean,
            basis: &basis,
            dual: &dual,
            keys: shape,
            values: Shape::uniform(self.value_mean.len(), bits.values)?,
            block: self.block,
            mean_error: bits.mean_error,
        })?;
        Head::new(transform, sigma, values, bits.widen)
    }

    /// The basis as bytes, with a checksum.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new(MAGIC, VERSION);
        [self.block, self.sigma.len(), self.value_mean.len()].into_iter().for_each(|n| writer.usize(n));
        for part in [&self.mean, &self.basis, &self.dual, &self.sigma, &self.value_mean] {
            writer.elements(part.iter().copied());
        }
        writer.elements([self.value_scale].into_iter());
        writer.finish_checked()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote. [`head`](Self::head) checks the parts.
    ///
    /// # Errors
    /// [`kv_attend::Error::BadMagic`], `Version`, `Truncated`, `TrailingBytes`, `BadChecksum`, `TooLarge`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new("a basis of scalar codes", MAGIC, VERSION, bytes)?;
        let [block, dim, dim_v] = [reader.usize()?, reader.usize()?, reader.usize()?];
        let square = dim.checked_mul(dim).ok_or(kv_attend::Error::TooLarge)?;
        let mut part = |len: usize| reader.elements::<f32>(len);
        let (mean, basis, dual, sigma) = (part(dim)?, part(square)?, part(square)?, part(dim)?);
        let (value_mean, value_scale) = (part(dim_v)?, part(1)?[0]);
        reader.finish()?;
        Ok(Self { block, mean, basis, dual, sigma, value_mean, value_scale })
    }
}

impl<E: Element> Samples<'_, E> {
    /// Components of a key and of a value, once all shapes are checked.
    fn dims(&self, heads: usize) -> Result<[usize; 2], Error> {
        if heads == 0 {
            return Err(kv_attend::Error::Zero { what: "number of heads" }.into());
        }
        let part = |what, rows: &Rows<'_, E>, row: usize| match rows.components() {
            _ if rows.rows() == 0 => Err(kv_attend::Error::Zero { what }),
            actual if !actual.is_multiple_of(row) => Err(kv_attend::Error::PartialRow { what, row, actual }),
            components => Ok(components / row),
        };
        let (dim, dim_v) = (part("keys", &self.keys, heads)?, part("values", &self.values, heads)?);
        part("queries", &self.queries, heads * dim)?;
        if 2 * self.frequencies.len() != dim {
            let (what, actual) = ("frequencies", self.frequencies.len());
            return Err(kv_attend::Error::Length { what, expected: dim / 2, actual }.into());
        }
        check_finite("frequencies", self.frequencies)?;
        if let Some(first) = self.rotated_from {
            let end = first.checked_add(self.keys.rows().max(self.queries.rows()));
            if end.is_none_or(|end| i64::try_from(end).is_err()) {
                return Err(kv_attend::Error::TooLarge.into());
            }
        }
        Ok([dim, dim_v])
    }

    /// Rows of one head before RoPE. [`dims`](Self::dims) has checked that their positions are an `i64`.
    fn plain(&self, rows: Rows<'_, E>) -> Result<Vec<f32>, Error> {
        let mut plain = floats(rows);
        if let Some(first) = self.rotated_from {
            for (i, row) in plain.chunks_exact_mut(rows.components()).enumerate() {
                rotate_by(self.frequencies, -((first + i) as i64), row)?;
            }
        }
        Ok(plain)
    }
}

fn check_block(block: usize) -> Result<(), pq_core::Error> {
    let what = "tokens of a block";
    match block {
        0 => Err(pq_core::Error::Zero { what }),
        _ if block > MAX_BLOCK => Err(pq_core::Error::TooLarge),
        _ if !block.is_multiple_of(TILE) => {
            Err(pq_core::Error::Unaligned { what, at: block, multiple: TILE })
        }
        _ => Ok(()),
    }
}

fn floats<E: Element>(rows: Rows<'_, E>) -> Vec<f32> {
    rows.iter().flatten().map(|x| x.to_f32()).collect()
}

/// The mean of rows (n, dim), n at least 1, summed in `f64`.
fn mean_row(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut mean = vec![0.0_f64; dim];
    for row in rows.chunks_exact(dim) {
        mean.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    let n = (rows.len() / dim) as f64;
    mean.into_iter().map(|sum| (sum / n) as f32).collect()
}

fn single(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}
