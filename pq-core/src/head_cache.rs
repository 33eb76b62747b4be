//! The cache of one key/value head of one sequence.

mod attend;

use alloc::sync::Arc;

use kv_attend::owner::{Moves, Reader, WindowRows, Writer};

use crate::error::check_len;
use crate::{Backend, Codes, CodesBuf, Element, Error, HeadBooks, Rows, Window};

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
///
/// # Examples
/// ```
/// use pq_core::*;
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// # let keys: Vec<f32> = (0..200 * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// let keys = Rows::contiguous(&keys, 16)?; // 200 tokens, whose values are the keys
/// let shapes = [PqShape::new(16, 8, 6)?; 2];
/// let books = HeadBooks::train_layer(keys, keys, 1, shapes, &TrainOptions::default())?;
/// let mut head = HeadCache::new(books[0].clone(), Window { sinks: 4, recent: 32, batch: 16 });
/// let evicted = head.append(keys, keys)?;
/// assert_eq!((head.sinks(), head.coded(), head.recent()), (4, evicted.tokens, 36));
///
/// let queries = [0.1_f32; 2 * 16]; // two query heads
/// let mut scratch = vec![0.0; head.scratch_len(1, 2)];
/// let (mut out, mut stats) = ([0.0; 2 * 16], [SoftmaxStats::EMPTY; 2]);
/// let attention = Attention::scaled(0.25);
/// head.attend_into(&attention, Rows::from(&queries[..]), &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert!((out[5] - 8.0).abs() < 1.0);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HeadCache<E> {
    books: Arc<HeadBooks>,
    window: Window,
    rows: [WindowRows<E>; 2], // keys, values
    codes: [CodesBuf; 2],
}

impl<E: Element> HeadCache<E> {
    /// No tokens.
    #[must_use]
    pub fn new(books: Arc<HeadBooks>, window: Window) -> Self {
        let shapes = [books.keys().shape(), books.values().shape()];
        Self {
            books,
            window,
            rows: shapes.map(|shape| WindowRows::new(shape.dim())),
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
        self.rows[0].sinks().len() / self.rows[0].dim()
    }

    /// Number of tokens held as codes, which follow the sinks.
    #[must_use]
    pub fn coded(&self) -> usize {
        self.codes[0].view().n()
    }

    /// Number of exact tokens at the end.
    #[must_use]
    pub fn recent(&self) -> usize {
        self.rows[0].recent().len() / self.rows[0].dim()
    }

    /// Components of a key and of a value.
    pub(crate) const fn dims(&self) -> [usize; 2] {
        [self.rows[0].dim(), self.rows[1].dim()]
    }

    /// The codebooks.
    #[must_use]
    pub const fn books(&self) -> &Arc<HeadBooks> {
        &self.books
    }

    /// Bytes of all tokens' rows and codes. The codebooks, which sequences share, are not among them.
    #[must_use]
    pub fn size(&self) -> usize {
        let rows = self.rows.iter().map(WindowRows::size);
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
            check_len("row", rows.components(), held.dim())?;
        }
        let moves = Moves::new(&self.window, self.len(), self.recent(), keys.rows());
        let mut errors = [0.0; 2];
        for (side, new) in [keys, values].into_iter().enumerate() {
            let (rows, codes) = (&mut self.rows[side], &mut self.codes[side]);
            let book = if side == 0 { self.books.keys() } else { self.books.values() };
            rows.push(new, &moves, |rows| {
                errors[side] += codes.append_rows_with(backend, &book, rows)?;
                Ok::<_, Error>(())
            })?;
        }
        Ok(Evicted { tokens: moves.evicted(), key_error: errors[0], value_error: errors[1] })
    }

    /// Keeps the first `len` tokens: rejected drafts, or a prefix that another sequence shares. Codes stay
    /// codes: the window fills again from the next token on.
    pub fn truncate(&mut self, len: usize) {
        let sinks = self.sinks().min(len);
        let coded = self.coded().min(len - sinks);
        let recent = self.recent().min(len - sinks - coded);
        for (rows, codes) in self.rows.iter_mut().zip(&mut self.codes) {
            rows.truncate(sinks, recent);
            codes.truncate(coded);
        }
    }

    /// Writes everything but window, shapes and codebooks, which all heads of a layer share or are given
    /// again.
    pub(crate) fn write(&self, writer: &mut Writer) {
        writer.u64(self.books.id());
        [self.sinks(), self.coded(), self.recent()].into_iter().for_each(|n| writer.usize(n));
        for (rows, codes) in self.rows.iter().zip(&self.codes) {
            rows.write(writer);
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
        let [sinks, coded, recent] = [reader.usize()?, reader.usize()?, reader.usize()?];
        if !window.can_hold(sinks, coded, recent) {
            return Err(Error::BadField { what: "number of tokens" });
        }
        for (rows, codes) in cache.rows.iter_mut().zip(&mut cache.codes) {
            *rows = WindowRows::read(reader, rows.dim(), [sinks, recent])?;
            let shape = codes.view().shape();
            *codes = CodesBuf::from_packed(shape, coded, reader.bytes(shape.codes_len(coded))?.to_vec())?;
        }
        Ok(cache)
    }
}
