//! The coded tokens of a head, whose values come and go in their own basis.

use std::ops::Range;
use std::sync::Arc;

use kv_attend::owner::{EvictedRows, Fit, Pair, Queries, Reader, Store, Writer};
use kv_attend::{Backend, Element, Rows, SoftmaxStats};
use pq_core::Evicted;
use pq_core::sq::HeadCodes;

use super::Head;
use crate::Error;

/// Query heads that are attended together: their statistics are on the stack.
const HEADS: usize = 16;

/// The least square of a norm in [`Codes::fits`], an octave above the least norm that has a code: the error
/// of shorter values is at most the one expected of such a norm.
const LEAST_SQUARE: f64 = 1.0 / (128.0 * 128.0);

/// [`HeadCodes`] with the transforms of a [`Head`], and what coding has lost.
#[derive(Clone, Debug)]
pub struct Codes {
    head: Arc<Head>,
    codes: HeadCodes,
    coded: Coded,
}

/// All tokens coded since the first one. Values are in the basis of the codes.
#[derive(Clone, Copy, Debug, Default)]
struct Coded {
    tokens: usize,
    errors: Pair<f64>,  // squared
    value_squares: f64, // of the norms of values, as far as codes hold them
}

impl Codes {
    /// No tokens.
    #[must_use]
    pub fn new(head: Arc<Head>) -> Self {
        Self { codes: HeadCodes::new(head.transform().clone()), head, coded: Coded::default() }
    }

    /// What all sequences share.
    #[must_use]
    pub const fn head(&self) -> &Arc<Head> {
        &self.head
    }

    /// The codes.
    #[must_use]
    pub const fn codes(&self) -> &HeadCodes {
        &self.codes
    }

    /// How well the codes fit their tokens, in the units of [`Head::expected_errors`]. Values do not fit if
    /// their norms are far above those of the samples; far below, their error is small next to that of the
    /// samples.
    #[must_use]
    pub fn fits(&self) -> Pair<Fit> {
        let [own, slots] = [self.head.transform(), self.codes.transform()].map(|made| made.keys().slots());
        let Coded { tokens, errors, value_squares } = self.coded;
        let fit = |expected, found, added_bits| Fit { expected, found, tokens, added_bits };
        let Pair { keys, values } = self.head.expected_errors();
        let added_bits = (slots - own) as f64 / self.codes.transform().keys().dim().div_ceil(16) as f64;
        Pair {
            keys: fit(keys, errors.keys / tokens.max(1) as f64, added_bits),
            values: fit(values, errors.values / value_squares.max(f64::MIN_POSITIVE), 0.0),
        }
    }

    /// Codes whole blocks of tokens: [`HeadCodes::append`] of values that are plain. The first ones decide
    /// whether the codes of the keys have more bits: [`Bits::widen`](super::Bits::widen).
    ///
    /// # Shapes
    /// `keys` (n, dim) after RoPE, the first at position `first`; `values` (n, dim of the values).
    /// # Errors
    /// As [`HeadCodes::append`].
    pub fn append(
        &mut self,
        backend: Backend,
        first: usize,
        keys: &[f32],
        mut values: Vec<f32>,
    ) -> Result<Evicted, Error> {
        self.head.values().forward(&mut values)?;
        let is_first = self.coded.tokens == 0;
        let evicted = self.append_coded(backend, first, keys, &values)?;
        let fit = self.fits().keys;
        if !(self.head.widens() && is_first && fit.is_misfit()) {
            return Ok(evicted);
        }
        let transform = self.head.wider(fit.ratio())?;
        *self = Self { codes: HeadCodes::new(transform), ..Self::new(self.head.clone()) };
        self.append_coded(backend, first, keys, &values)
    }

    /// Codes one block after the other, so that sums do not depend on how blocks are divided among appends.
    fn append_coded(
        &mut self,
        backend: Backend,
        first: usize,
        keys: &[f32],
        values: &[f32],
    ) -> Result<Evicted, Error> {
        let transform = self.codes.transform();
        let (dim, dim_v, block) = (transform.keys().dim(), transform.values().dim(), transform.block());
        if !keys.len().is_multiple_of(dim) {
            return Err(kv_attend::Error::PartialRow { what: "keys", row: dim, actual: keys.len() }.into());
        }
        let (n, scale) = (keys.len() / dim, f64::from(self.head.values().scale()));
        if values.len() != n * dim_v {
            let (expected, actual) = (n * dim_v, values.len());
            return Err(kv_attend::Error::Length { what: "values", expected, actual }.into());
        }
        let square =
            |row: &[f32]| row.iter().filter(|x| x.is_finite()).map(|&x| f64::from(x).powi(2)).sum::<f64>();
        let mut sum = Evicted::default();
        for (i, (keys, values)) in keys.chunks(block * dim).zip(values.chunks(block * dim_v)).enumerate() {
            let evicted = self.codes.append(backend, first + i * block, keys, values)?;
            self.coded.tokens += evicted.tokens;
            self.coded.errors.keys += evicted.key_error;
            self.coded.errors.values += evicted.value_error;
            values
                .chunks_exact(dim_v)
                .for_each(|row| self.coded.value_squares += square(row).max(LEAST_SQUARE));
            sum.tokens += evicted.tokens;
            sum.key_error += evicted.key_error;
            sum.value_error += evicted.value_error * scale * scale;
        }
        Ok(sum)
    }

    /// Drops all tokens from index `len` on. Without any left, the codes have the head's bits again.
    pub fn truncate(&mut self, len: usize) {
        match len {
            0 => *self = Self::new(self.head.clone()),
            _ => self.codes.truncate(len),
        }
    }

    /// Elements of the scratch of [`attend_into`](Self::attend_into) for `group` query heads.
    #[must_use]
    pub fn scratch_len(&self, group: usize) -> usize {
        let heads = group.min(HEADS);
        self.codes.scratch_len(heads).saturating_add(heads * self.head.value_mean().len())
    }

    /// Adds the tokens of `range` to the `out` and `stats` of a group of query heads:
    /// [`HeadCodes::attend_into`] with plain values.
    ///
    /// # Shapes
    /// `scaled` (group, dim): queries after RoPE, scaled; `scratch` at least
    /// [`scratch_len`](Self::scratch_len), best at a cache line; `out` (group, dim of the values); `stats`
    /// (group,).
    /// # Errors
    /// As [`HeadCodes::attend_into`].
    #[expect(clippy::too_many_arguments, reason = "those of HeadCodes::attend_into")]
    pub fn attend_into(
        &self,
        backend: Backend,
        scaled: &[f32],
        range: Range<usize>,
        softcap: Option<f32>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let (dim, dim_v) = (self.codes.transform().keys().dim(), self.head.value_mean().len());
        let heads = stats.len().min(HEADS);
        for (what, actual, row) in [("queries", scaled.len(), dim), ("out", out.len(), dim_v)] {
            let expected = stats.len().saturating_mul(row);
            if actual != expected {
                return Err(kv_attend::Error::Length { what, expected, actual }.into());
            }
        }
        let codes_len = scratch.len().checked_sub(heads * dim_v).ok_or(kv_attend::Error::TooShort {
            what: "scratch",
            needed: self.scratch_len(stats.len()),
            actual: scratch.len(),
        })?;
        // The parts of the scratch keep its alignment: codes first.
        let (scratch, parts) = scratch.split_at_mut(codes_len);
        let outs = out.chunks_mut(HEADS * dim_v).zip(stats.chunks_mut(HEADS));
        for (scaled, (out, stats)) in scaled.chunks(HEADS * dim).zip(outs) {
            let (part, part_stats) = (&mut parts[..out.len()], &mut [SoftmaxStats::EMPTY; HEADS]);
            let part_stats = &mut part_stats[..stats.len()];
            part.fill(0.0);
            self.codes.attend_into(backend, scaled, range.clone(), softcap, scratch, part, part_stats)?;
            let rows = out.chunks_exact_mut(dim_v).zip(stats);
            for ((part, part_stats), (out, stats)) in part.chunks_exact_mut(dim_v).zip(part_stats).zip(rows) {
                self.head.values().inverse(part_stats.sum, part)?;
                stats.merge(out, *part_stats, part)?;
            }
        }
        Ok(())
    }
}

impl<E: Element> Store<E> for Codes {
    type Shared = Head;
    type Report = Evicted;
    type Error = Error;
    const NAME: &'static str = "a layer cache of scalar codes with bases";
    const MAGIC: [u8; 4] = *b"SQBL";
    const VERSION: u32 = 2;
    const QUERIES: usize = HEADS;

    fn new(head: Arc<Head>) -> Self {
        Self::new(head)
    }

    fn dims(&self) -> [usize; 2] {
        Store::<E>::dims(&self.codes)
    }

    fn block(&self) -> usize {
        Store::<E>::block(&self.codes)
    }

    fn len(&self) -> usize {
        self.codes.len()
    }

    fn size(&self) -> usize {
        self.codes.size()
    }

    fn append(&mut self, backend: Backend, evicted: &EvictedRows<'_, E>) -> Result<Evicted, Error> {
        let whole = |parts: &[Rows<'_, E>; 2]| -> Vec<f32> {
            parts.iter().flat_map(|rows| rows.iter().flatten()).map(|x| x.to_f32()).collect()
        };
        let [keys, values] = evicted.sides();
        Self::append(self, backend, evicted.first(), &whole(keys), whole(values))
    }

    fn truncate(&mut self, len: usize) {
        Self::truncate(self, len);
    }

    fn scratch_len(&self, _query_tokens: usize, group: usize) -> usize {
        Self::scratch_len(self, group)
    }

    fn attend_into(
        &self,
        backend: Backend,
        queries: &Queries<'_>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        let [dim, dim_v] = Store::<E>::dims(&self.codes);
        let (group, softcap) = (queries.group(), queries.attention().softcap);
        let each_token = queries.scaled().chunks_exact(group * dim);
        let outs = out.chunks_exact_mut(group * dim_v).zip(stats.chunks_exact_mut(group));
        for (i, (scaled, (out, stats))) in each_token.zip(outs).enumerate() {
            let range = queries.visible(i, self.codes.len());
            Self::attend_into(self, backend, scaled, range, softcap, scratch, out, stats)?;
        }
        Ok(())
    }

    fn fits(&self) -> Option<Pair<Fit>> {
        Some(Self::fits(self))
    }

    fn write(&self, writer: &mut Writer) {
        let Coded { tokens, errors, value_squares } = self.coded;
        writer.u64(self.head.values().id());
        writer.usize(self.codes.transform().keys().slots());
        writer.usize(tokens);
        [errors.keys, errors.values, value_squares].into_iter().for_each(|x| writer.u64(x.to_bits()));
        Store::<E>::write(&self.codes, writer);
    }

    fn read(reader: &mut Reader<'_>, head: &Arc<Head>) -> Result<Self, Error> {
        if reader.u64()? != head.values().id() {
            return Err(kv_attend::Error::BadField { what: "mean and scale of the values" }.into());
        }
        let transform = head.with_slots(reader.usize()?)?;
        let tokens = reader.usize()?;
        let mut squares = |what| match f64::from_bits(reader.u64()?) {
            x if x.is_finite() && x >= 0.0 => Ok(x),
            _ => Err(kv_attend::Error::BadField { what }),
        };
        let errors = Pair { keys: squares("error of the keys")?, values: squares("error of the values")? };
        let coded = Coded { tokens, errors, value_squares: squares("squares of the values")? };
        let codes = <HeadCodes as Store<E>>::read(reader, &transform)?;
        Ok(Self { head: head.clone(), codes, coded })
    }
}
