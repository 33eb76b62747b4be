//! The cache of one key/value head of one sequence.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::bytes::{Reader, Writer};
use crate::error::{check_at_least, check_len, count_rows};
use crate::{
    Attention, Backend, CodedTokens, Codes, CodesBuf, Element, Error, ExactTokens, HeadBooks, Rows,
    SoftmaxStats, Window, attend_exact_into_with, attend_exact_scratch_len, attend_into_with,
    attend_scratch_len, lut_into_with,
};

/// What an append has encoded, for [`Drift`](crate::Drift).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evicted {
    /// Tokens that left the window.
    pub tokens: usize,
    /// Their keys' summed squared error.
    pub key_error: f64,
    /// Their values' summed squared error.
    pub value_error: f64,
}

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones exact,
/// as rows of `E`, all others as codes.
///
/// Tokens are appended in order and leave the window in batches, as [`Window`] says; codes do not depend on
/// how the tokens were divided among appends. Attention runs over all three parts in one softmax.
/// [`LayerCache`](crate::LayerCache) has all heads of a layer.
#[derive(Clone, Debug)]
pub struct HeadCache<E> {
    books: Arc<HeadBooks>,
    window: Window,
    rows: [ExactRows<E>; 2], // keys, values
    codes: [CodesBuf; 2],
}

/// Floats of a cache line: registers that straddle two lines cost up to a tenth of the time.
const ALIGNMENT: usize = 16;

/// Exact rows of one side.
#[derive(Clone, Debug)]
struct ExactRows<E> {
    dim: usize,
    sinks: Vec<E>,
    recent: Vec<E>, // after `start` elements that have been encoded
    start: usize,
}

impl<E: Element> ExactRows<E> {
    const fn new(dim: usize) -> Self {
        Self { dim, sinks: Vec::new(), recent: Vec::new(), start: 0 }
    }

    fn recent(&self) -> &[E] {
        &self.recent[self.start..]
    }

    /// Forgets the oldest `n` recent rows. Rows move to the front only when half of the memory is free, so
    /// that a token's share is one move, and the window stays in one piece.
    fn forget(&mut self, n: usize) {
        self.start += n * self.dim;
        if self.start >= self.recent.len() - self.start {
            self.recent.drain(..self.start);
            self.start = 0;
        }
    }
}

impl<E: Element> HeadCache<E> {
    /// No tokens.
    #[must_use]
    pub fn new(books: Arc<HeadBooks>, window: Window) -> Self {
        let shapes = [books.keys().shape(), books.values().shape()];
        Self {
            books,
            window,
            rows: shapes.map(|shape| ExactRows::new(shape.dim())),
            codes: shapes.map(CodesBuf::new),
        }
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.sinks() + self.coded() + self.recent()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of sinks, exact tokens at the beginning.
    #[must_use]
    pub fn sinks(&self) -> usize {
        self.rows[0].sinks.len() / self.rows[0].dim
    }

    /// Number of tokens held as codes, which follow the sinks.
    #[must_use]
    pub fn coded(&self) -> usize {
        self.codes[0].view().n()
    }

    /// Number of exact tokens at the end.
    #[must_use]
    pub fn recent(&self) -> usize {
        self.rows[0].recent().len() / self.rows[0].dim
    }

    /// Components of a key and of a value.
    pub(crate) const fn dims(&self) -> [usize; 2] {
        [self.rows[0].dim, self.rows[1].dim]
    }

    /// The codebooks.
    #[must_use]
    pub const fn books(&self) -> &Arc<HeadBooks> {
        &self.books
    }

    /// Bytes of all tokens' rows and codes. The codebooks, which sequences share, are not among them.
    #[must_use]
    pub fn size(&self) -> usize {
        let rows = self.rows.iter().map(|rows| size_of_val(&rows.sinks[..]) + size_of_val(rows.recent()));
        rows.sum::<usize>() + self.codes.iter().map(|codes| codes.view().size()).sum::<usize>()
    }

    /// The codes of the keys and of the values, for a search or another operation on codes.
    #[must_use]
    pub fn codes(&self) -> (Codes<'_>, Codes<'_>) {
        (self.codes[0].view(), self.codes[1].view())
    }

    /// Appends tokens, and encodes those that leave the window.
    ///
    /// # Shapes
    /// `keys` (n, dim), `values` (n, dim of the values).
    /// # Errors
    /// [`Error::Length`]; the cache is then unchanged.
    pub fn append(&mut self, keys: Rows<'_, E>, values: Rows<'_, E>) -> Result<Evicted, Error> {
        self.append_with(Backend::detect(), keys, values)
    }

    /// [`append`](Self::append) on a given backend.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`Error::BackendUnavailable`].
    pub fn append_with(
        &mut self,
        backend: Backend,
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) -> Result<Evicted, Error> {
        backend.check()?;
        check_len("values", values.rows(), keys.rows())?;
        for (rows, held) in [(keys, &self.rows[0]), (values, &self.rows[1])] {
            check_len("row", rows.components(), held.dim)?;
        }
        let n = keys.rows();
        let to_sinks = self.window.to_sinks(self.len(), n);
        let evicted = self.window.to_evict(self.recent() + n - to_sinks);
        let held = evicted.min(self.recent());
        let mut errors = [0.0; 2];
        for (side, new) in [keys, values].into_iter().enumerate() {
            let (rows, codes) = (&mut self.rows[side], &mut self.codes[side]);
            let book = if side == 0 { self.books.keys() } else { self.books.values() };
            rows.sinks.extend(new.slice(0..to_sinks)?.iter().flatten());
            let leaving = Rows::contiguous(&rows.recent()[..held * rows.dim], rows.dim)?;
            errors[side] += codes.append_rows_with(backend, &book, leaving)?;
            rows.forget(held);
            let passing = new.slice(to_sinks..to_sinks + evicted - held)?;
            errors[side] += codes.append_rows_with(backend, &book, passing)?;
            rows.recent.extend(new.slice(to_sinks + evicted - held..n)?.iter().flatten());
        }
        Ok(Evicted { tokens: evicted, key_error: errors[0], value_error: errors[1] })
    }

    /// Keeps the first `len` tokens: rejected drafts, or a prefix that another sequence shares. Codes stay
    /// codes: the window fills again from the next token on.
    pub fn truncate(&mut self, len: usize) {
        let sinks = self.sinks().min(len);
        let coded = self.coded().min(len - sinks);
        let recent = self.recent().min(len - sinks - coded);
        for (rows, codes) in self.rows.iter_mut().zip(&mut self.codes) {
            rows.sinks.truncate(sinks * rows.dim);
            codes.truncate(coded);
            rows.recent.truncate(rows.start + recent * rows.dim);
        }
    }

    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    #[must_use]
    pub fn scratch_len(&self, group: usize) -> usize {
        let (keys, values) = (self.books.keys().shape(), self.books.values().shape());
        let exact = attend_exact_scratch_len(group, keys.dim());
        let queries_and_luts = group.saturating_mul(keys.dim() + keys.lut_len());
        queries_and_luts
            .saturating_add(attend_scratch_len(values, group).max(exact))
            .saturating_add(ALIGNMENT)
    }

    /// Attention of a group of query heads on all tokens, with scores `scale * <query, key>`.
    ///
    /// Adds the tokens to `out` and `stats`, as [`attend_into`](crate::attend_into) does: start from zeros
    /// and [`SoftmaxStats::EMPTY`], and finish with [`normalize_all`](crate::normalize_all).
    ///
    /// # Shapes
    /// `queries` (group, dim); `scratch` at least [`scratch_len`](Self::scratch_len); `out` (group, dim of
    /// the values); `stats` (group,).
    /// # Errors
    /// [`Error::PartialRow`], [`Error::Length`], [`Error::TooShort`]; `out` and `stats` are then untouched.
    pub fn attend_into<Q: Element>(
        &self,
        queries: &[Q],
        scale: f32,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        self.attend_into_with(Backend::detect(), queries, scale, scratch, out, stats)
    }

    /// [`attend_into`](Self::attend_into) on a given backend.
    ///
    /// # Errors
    /// As [`attend_into`](Self::attend_into), and [`Error::BackendUnavailable`].
    pub fn attend_into_with<Q: Element>(
        &self,
        backend: Backend,
        queries: &[Q],
        scale: f32,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        backend.check()?;
        let [dim, dim_v] = self.dims();
        let group = count_rows("queries", queries.len(), dim)?;
        check_len("stats", stats.len(), group)?;
        check_len("out", out.len(), group.saturating_mul(dim_v))?;
        check_at_least("scratch", scratch.len(), self.scratch_len(group))?;
        let unaligned = scratch.as_ptr().align_offset(ALIGNMENT * size_of::<f32>());
        let scratch = &mut scratch[unaligned.min(ALIGNMENT)..];
        let (tables, scratch) = scratch.split_at_mut(group * self.books.keys().shape().lut_len());
        let (scratch, scaled) = scratch.split_at_mut(scratch.len() - group * dim);
        scaled.iter_mut().zip(queries).for_each(|(scaled, q)| *scaled = scale * q.to_f32());
        if self.coded() > 0 {
            let luts = lut_into_with(backend, &self.books.keys(), scaled, tables)?;
            let (keys, values) = self.codes();
            let tokens = CodedTokens::new(keys, values, self.books.values())?;
            attend_into_with(backend, &luts, &tokens, scratch, out, stats)?;
        }
        let [keys, values] = &self.rows;
        for (keys, values) in [(&keys.sinks[..], &values.sinks[..]), (keys.recent(), values.recent())] {
            if !keys.is_empty() {
                let tokens = ExactTokens::contiguous(keys, dim, values, dim_v)?;
                let queries = Rows::from(&*scaled);
                attend_exact_into_with(
                    backend,
                    &Attention::default(),
                    queries,
                    &tokens,
                    scratch,
                    out,
                    stats,
                )?;
            }
        }
        Ok(())
    }

    /// Writes everything but window, shapes and codebooks, which all heads of a layer share or are given
    /// again.
    pub(crate) fn write(&self, writer: &mut Writer) {
        writer.u64(self.books.id());
        [self.sinks(), self.coded(), self.recent()].into_iter().for_each(|n| writer.len(n));
        for (rows, codes) in self.rows.iter().zip(&self.codes) {
            writer.elements(rows.sinks.iter().chain(rows.recent()).copied());
            writer.bytes(codes.view().bytes());
        }
    }

    pub(crate) fn read(
        reader: &mut Reader<'_>,
        books: &Arc<HeadBooks>,
        window: Window,
    ) -> Result<Self, Error> {
        if reader.u64()? != books.id() {
            return Err(Error::BadField { what: "codebook id" });
        }
        let mut cache = Self::new(books.clone(), window);
        let [sinks, coded, recent] = [reader.len()?, reader.len()?, reader.len()?];
        let too_many = sinks > window.sinks || recent > window.recent.saturating_add(window.batch.max(1) - 1);
        if too_many || (sinks < window.sinks && (coded > 0 || recent > 0)) {
            return Err(Error::BadField { what: "number of tokens" });
        }
        for (rows, codes) in cache.rows.iter_mut().zip(&mut cache.codes) {
            rows.sinks = reader.elements(sinks.checked_mul(rows.dim).ok_or(Error::TooLarge)?)?;
            rows.recent = reader.elements(recent.checked_mul(rows.dim).ok_or(Error::TooLarge)?)?;
            let shape = codes.view().shape();
            *codes = CodesBuf::from_packed(shape, coded, reader.bytes(shape.codes_len(coded))?.to_vec())?;
        }
        Ok(cache)
    }
}
