//! The coded blocks of a head.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use half::f16;
use kv_attend::owner::{Reader, Writer};

use super::attend::{Tokens, attend_scratch_len, attend_tokens};
use super::head_transform::HeadTransform;
use super::keys::{Keys, decode_keys_into, encode_keys_into_with};
use super::product::ROWS;
use super::relative::{Queries, transform_keys};
use super::rotate::rotate_by;
use super::values::{Values, decode_values_into, encode_values_into_with, mean_error_into};
use crate::assign::finite;
use crate::error::{check_at_least, check_len, count_rows};
use crate::simd::Run;
use crate::{Attention, Backend, Error, Evicted, SoftmaxStats};

/// The coded tokens of one head of one sequence, in blocks.
///
/// # Examples
/// ```
/// use pq_core::sq::{HeadCodes, HeadTransform, Shape, TransformParts};
/// use pq_core::{Backend, SoftmaxStats, normalize_all};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let (dim, n) = (16, 64);
/// let identity: Vec<f32> = (0..dim * dim).map(|i| f32::from(i % (dim + 1) == 0)).collect();
/// let transform = HeadTransform::new(&TransformParts {
///     frequencies: &[0.0; 8], // no RoPE
///     mean: &[0.0; 16],
///     basis: &identity,
///     dual: &identity,
///     keys: Shape::uniform(dim, 4)?,
///     values: Shape::uniform(dim, 4)?,
///     block: 32,
///     mean_error: false,
/// })?;
/// let rows: Vec<f32> = (0..n * dim).map(noise).collect();
/// let mut codes = HeadCodes::new(transform.into());
/// codes.append(Backend::detect(), 0, &rows, &rows)?; // the values are the keys
/// // Half a byte a component, 16 steps a block and a norm a token.
/// assert_eq!((codes.len(), codes.size()), (64, 2 * (64 * 16 / 2) + 2 * 16 + 64));
///
/// let query = [0.5; 16];
/// let mut scratch = vec![0.0; codes.scratch_len(1)];
/// let (mut out, mut stats) = ([0.0; 16], [SoftmaxStats::EMPTY]);
/// codes.attend_into(Backend::detect(), &query, 0..64, None, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert!(out.iter().sum::<f32>() > 0.0); // tokens along the query have the weight
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HeadCodes {
    transform: Arc<HeadTransform>,
    first: usize,     // position of the first token
    lens: Vec<u16>,   // tokens of every block: all of it, unless the block was truncated or is the last
    steps: Vec<u8>,   // (blocks, dim)
    keys: Vec<u32>,   // (blocks, words of a block)
    norms: Vec<u8>,   // (blocks, block)
    values: Vec<u32>, // (blocks, words of a block)
    errors: Vec<f16>, // (blocks, dim of the values), or empty
}

impl HeadCodes {
    /// No tokens.
    #[must_use]
    pub const fn new(transform: Arc<HeadTransform>) -> Self {
        Self {
            transform,
            first: 0,
            lens: Vec::new(),
            steps: Vec::new(),
            keys: Vec::new(),
            norms: Vec::new(),
            values: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.lens.iter().map(|&n| usize::from(n)).sum()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.lens.is_empty()
    }

    /// The transform.
    #[must_use]
    pub const fn transform(&self) -> &Arc<HeadTransform> {
        &self.transform
    }

    /// Bytes of codes, steps, norms and errors.
    #[must_use]
    pub fn size(&self) -> usize {
        size_of_val(&self.keys[..])
            + size_of_val(&self.values[..])
            + self.steps.len()
            + self.norms.len()
            + size_of_val(&self.errors[..])
    }

    /// Codes tokens. They fill whole blocks from the first on, so append multiples of a block: a block that is
    /// not full stays so.
    ///
    /// Returns what coding lost: the squared error of keys in their basis, for which calibration expects
    /// [`Shape::distortion`](super::Shape::distortion) per key, and that of values without the mean of their
    /// error.
    ///
    /// # Shapes
    /// `keys` (n, dim) after RoPE, the first at position `first`, which continues the sequence; `values`
    /// (n, dim of the values) in their Hadamard basis, without their mean.
    /// # Errors
    /// [`Error::BackendUnavailable`], [`Error::PartialRow`], [`Error::Length`]; nothing is then changed.
    /// # Cost
    /// Per key dim * dim multiply-adds for the basis, and what
    /// [`encode_keys_into`](super::encode_keys_into) and [`encode_values_into`](super::encode_values_into) do.
    pub fn append(
        &mut self,
        backend: Backend,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<Evicted, Error> {
        backend.check()?;
        let (dim, dim_v, block) =
            (self.transform.keys().dim(), self.transform.values().dim(), self.transform.block());
        let n = count_rows("keys", keys.len(), dim)?;
        check_len("values", values.len(), n.saturating_mul(dim_v))?;
        match self.lens.is_empty() {
            true => self.first = first,
            false => check_len("position", first, self.first + self.len())?,
        }
        let blocks = keys.chunks(block * dim).zip(values.chunks(block * dim_v));
        let mut evicted = Evicted { tokens: n, ..Evicted::default() };
        for (i, (keys, values)) in blocks.enumerate() {
            let [key_error, value_error] = self.append_block(backend, first + i * block, keys, values)?;
            evicted.key_error += key_error;
            evicted.value_error += value_error;
        }
        Ok(evicted)
    }

    /// Codes a block and returns the squared errors of its keys and values.
    fn append_block(
        &mut self,
        backend: Backend,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<[f64; 2], Error> {
        let transform = &*self.transform;
        let (shape, values_shape) = (transform.keys(), transform.values());
        let (dim, block) = (shape.dim(), transform.block());
        let n = keys.len() / dim;
        let mut transformed = vec![0.0; keys.len()];
        transform_keys(backend, transform, first, &mut keys.to_vec(), &mut transformed)?;
        let (mut steps, mut norms) = (vec![0; dim], vec![0; block]);
        let mut words = [shape, values_shape].map(|shape| vec![0; shape.words_len(block)]);
        let [key_words, value_words] = &mut words;
        encode_keys_into_with(
            backend,
            shape,
            &transformed,
            &mut steps,
            &mut key_words[..shape.words_len(n)],
        )?;
        let value_words = &mut value_words[..values_shape.words_len(n)];
        encode_values_into_with(backend, values_shape, values, &mut norms[..n], value_words)?;
        let coded_keys = Keys::new(*shape, n, &steps, &key_words[..shape.words_len(n)])?;
        let coded_values = Values::new(*values_shape, &norms[..n], value_words)?;
        let mut decoded = [vec![0.0; keys.len()], vec![0.0; values.len()]];
        let [decoded_keys, decoded_values] = &mut decoded;
        decode_keys_into(&coded_keys, decoded_keys)?;
        decode_values_into(&coded_values, decoded_values)?;
        let errors = [squared_error(&transformed, decoded_keys), squared_error(values, decoded_values)];
        if transform.has_mean_error() {
            let mut error = vec![f16::ZERO; values_shape.dim()];
            mean_error_into(&coded_values, values, &mut error)?;
            self.errors.extend(error);
        }
        let [key_words, value_words] = words;
        self.lens.push(n as u16); // at most 256
        self.steps.extend(steps);
        self.keys.extend(key_words);
        self.norms.extend(norms);
        self.values.extend(value_words);
        Ok(errors)
    }

    /// Keeps the first `len` tokens. The block that the cut is in stays short.
    pub fn truncate(&mut self, len: usize) {
        let mut left = len;
        let mut blocks = 0;
        for n in &mut self.lens {
            if left == 0 {
                break;
            }
            *n = left.min(usize::from(*n)) as u16;
            left -= usize::from(*n);
            blocks += 1;
        }
        let (keys, values, block) = (self.transform.keys(), self.transform.values(), self.transform.block());
        self.lens.truncate(blocks);
        self.steps.truncate(blocks * keys.dim());
        self.keys.truncate(blocks * keys.words_len(block));
        self.norms.truncate(blocks * block);
        self.values.truncate(blocks * values.words_len(block));
        self.errors.truncate(blocks * values.dim());
    }

    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    #[must_use]
    pub fn scratch_len(&self, group: usize) -> usize {
        let transform = &*self.transform;
        let attend = attend_scratch_len(transform.keys(), transform.values(), transform.block(), group);
        let queries = blocks_together(group).saturating_mul(Queries::scratch_len(transform, group));
        group.saturating_mul(transform.keys().dim()).saturating_add(queries).saturating_add(attend)
    }

    /// Attention of a group of query heads over the tokens of `range`, added to `out` and `stats` as by
    /// [`attend_into`](super::attend_into), in the basis of the values.
    ///
    /// # Shapes
    /// `queries` (group, dim), after RoPE and scaled; `range` of at most [`len`](Self::len) tokens; `scratch`
    /// at least [`scratch_len`](Self::scratch_len); `out` (group, dim of the values); `stats` (group,).
    /// # Errors
    /// [`Error::BackendUnavailable`], [`Error::PartialRow`], [`Error::Length`], [`Error::TooShort`], and the
    /// error of a bad softcap; `out` and `stats` are then untouched.
    /// # Cost
    /// That of [`attend_into`](super::attend_into); per block and query dim * dim multiply-adds for the dual
    /// basis, per query and token dim for the mean. No allocation.
    #[expect(clippy::too_many_arguments, reason = "as attend_into, with a range, a cap and a backend")]
    pub fn attend_into(
        &self,
        backend: Backend,
        queries: &[f32],
        range: Range<usize>,
        softcap: Option<f32>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        backend.check()?;
        let (transform, len) = (&*self.transform, self.len());
        let (keys, values, block) = (transform.keys(), transform.values(), transform.block());
        let dim = keys.dim();
        let group = count_rows("queries", queries.len(), dim)?;
        check_len("stats", stats.len(), group)?;
        check_len("out", out.len(), group.saturating_mul(values.dim()))?;
        check_at_least("scratch", scratch.len(), self.scratch_len(group))?;
        check_at_least("tokens", len, range.end)?;
        Attention { softcap, ..Attention::default() }.check()?;
        if group == 0 {
            return Ok(());
        }
        let (rotated, scratch) = scratch.split_at_mut(queries.len());
        let together = blocks_together(group);
        let (of_queries, scratch) = scratch.split_at_mut(together * Queries::scratch_len(transform, group));
        let mut at = usize::MAX; // the position that `rotated` is relative to
        let mut turned = 0; // blocks since it was computed
        let mut blocks = self.blocks(range).peekable();
        while let Some(next) = blocks.peek() {
            let first = next.first;
            if turned >= BLOCKS_BY_TURNS || at != first {
                rotated.copy_from_slice(queries);
                rotate_by(transform.frequencies(), -(first as i64), rotated)?;
                (at, turned) = (first, 0);
            }
            let mut span = [None; ROWS];
            let mut count = 0;
            while let Some(next) = blocks.next_if(|next| count < together && next.first == at) {
                span[count] = Some(next);
                (at, count) = (at + block, count + 1);
            }
            turned += count;
            let mut of_queries = Queries::new(transform, count, rotated, of_queries);
            backend.run(&mut of_queries);
            for (i, visible) in span.iter().flatten().enumerate() {
                let (probes, bias) = of_queries.of_block(i, visible.n);
                bias.chunks_exact_mut(visible.n)
                    .for_each(|bias| bias[..visible.from].fill(f32::NEG_INFINITY));
                let (keys, values) = self.block(visible.index, visible.n)?;
                let tokens = Tokens { keys: &keys, values: &values, bias: Some(bias), softcap };
                attend_tokens(backend, probes, &tokens, scratch, out, stats)?;
            }
        }
        Ok(())
    }

    /// The blocks with tokens of `range`.
    fn blocks(&self, range: Range<usize>) -> impl Iterator<Item = Visible> {
        let mut start = 0;
        let of = move |(index, &len): (usize, &u16)| {
            let token = start;
            start += usize::from(len);
            let (from, n) = (range.start.max(token) - token, range.end.min(start).saturating_sub(token));
            (from < n).then_some(Visible { index, first: self.first + token, from, n })
        };
        self.lens.iter().enumerate().filter_map(of)
    }

    /// The first `n` tokens of block `b`.
    #[inline]
    fn block(&self, b: usize, n: usize) -> Result<(Keys<'_>, Values<'_>), Error> {
        let (keys, values, block) = (self.transform.keys(), self.transform.values(), self.transform.block());
        let words = &self.keys[b * keys.words_len(block)..][..keys.words_len(n)];
        let steps = &self.steps[b * keys.dim()..][..keys.dim()];
        let coded_keys = Keys::new(*keys, n, steps, words)?.with_plan(self.transform.key_plan());
        let words = &self.values[b * values.words_len(block)..][..values.words_len(n)];
        let norms = &self.norms[b * block..][..n];
        let coded_values = Values::new(*values, norms, words)?.with_plan(self.transform.value_plan());
        let coded_values = match self.errors.is_empty() {
            true => coded_values,
            false => coded_values.with_error(&self.errors[b * values.dim()..][..values.dim()])?,
        };
        Ok((coded_keys, coded_values))
    }

    /// Writes everything but the transform, whose id it writes.
    pub(super) fn write(&self, writer: &mut Writer) {
        writer.u64(self.transform.id());
        writer.usize(self.first);
        writer.usize(self.lens.len());
        self.lens.iter().for_each(|&n| writer.u32(n.into()));
        writer.bytes(&self.steps);
        self.keys.iter().for_each(|&word| writer.u32(word));
        writer.bytes(&self.norms);
        self.values.iter().for_each(|&word| writer.u32(word));
        writer.elements(self.errors.iter().copied());
    }

    /// Reads what [`write`](Self::write) wrote.
    pub(super) fn read(reader: &mut Reader<'_>, transform: &Arc<HeadTransform>) -> Result<Self, Error> {
        if reader.u64()? != transform.id() {
            return Err(Error::BadField { what: "transform id" });
        }
        let (keys, values, block) = (transform.keys(), transform.values(), transform.block());
        let (first, blocks) = (reader.usize()?, reader.usize()?);
        let of = |per_block: usize| blocks.checked_mul(per_block).ok_or(Error::TooLarge);
        let lens = words(reader, blocks)?.into_iter().map(|n| match usize::try_from(n) {
            Ok(1..) if n as usize <= block => Ok(n as u16),
            _ => Err(Error::BadField { what: "tokens of a block" }),
        });
        let lens = lens.collect::<Result<Vec<_>, _>>()?;
        let tokens = lens.iter().map(|&n| usize::from(n)).sum();
        first.checked_add(tokens).ok_or(Error::TooLarge)?;
        let steps = reader.bytes(of(keys.dim())?)?.to_vec();
        let key_words = words(reader, of(keys.words_len(block))?)?;
        let norms = reader.bytes(of(block)?)?.to_vec();
        let value_words = words(reader, of(values.words_len(block))?)?;
        let errors = if transform.has_mean_error() { of(values.dim())? } else { 0 };
        let errors = reader.elements(errors)?;
        let transform = transform.clone();
        Ok(Self { transform, first, lens, steps, keys: key_words, norms, values: value_words, errors })
    }
}

/// The squared distance of rows from what their codes decode to.
fn squared_error(rows: &[f32], decoded: &[f32]) -> f64 {
    let error = |(&x, &y): (&f32, &f32)| f64::from(finite(x)) - f64::from(y);
    rows.iter().zip(decoded).map(|pair| error(pair) * error(pair)).sum()
}

/// Blocks after which queries are rotated from the start again: rounding errors of turns add up.
const BLOCKS_BY_TURNS: usize = 16;

/// Blocks whose queries are multiplied by the dual basis together.
const fn blocks_together(group: usize) -> usize {
    match group {
        0 => 0,
        _ => ROWS.div_ceil(group),
    }
}

/// The part of a block that queries see.
#[derive(Clone, Copy)]
struct Visible {
    index: usize,
    first: usize, // position of its first token
    from: usize,  // tokens before are not seen
    n: usize,
}

/// Reads words.
fn words(reader: &mut Reader<'_>, len: usize) -> Result<Vec<u32>, Error> {
    let bytes = reader.bytes(len.checked_mul(4).ok_or(Error::TooLarge)?)?;
    Ok(bytes.as_chunks().0.iter().map(|&x| u32::from_le_bytes(x)).collect())
}
