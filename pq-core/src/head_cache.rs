//! The cache of one KV head of one sequence.

mod attend;

use alloc::sync::Arc;

use kv_attend::owner::{ExactRows, Head, Reader, Writer};

use crate::{Attention, Backend, Codes, CodesBuf, Element, Error, HeadBooks, Rows, SoftmaxStats, Window};

/// Report of an append on the tokens that it encoded, for [`Drift`](crate::Drift).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evicted {
    /// Tokens that left the window.
    pub tokens: usize,
    /// Their keys' summed squared error.
    pub key_error: f64,
    /// Their values' summed squared error.
    pub value_error: f64,
}

/// The report of a layer from those of its heads: the tokens per head, and the errors summed over heads.
impl FromIterator<Self> for Evicted {
    fn from_iter<I: IntoIterator<Item = Self>>(heads: I) -> Self {
        heads.into_iter().fold(Self::default(), |sum, head| Self {
            tokens: head.tokens,
            key_error: sum.key_error + head.key_error,
            value_error: sum.value_error + head.value_error,
        })
    }
}

/// The keys and values of one head of one sequence: the first tokens (sinks) and the most recent ones as
/// exact rows of `E`, all others as codes.
///
/// Tokens are appended in order and leave the window in batches, as [`Window`] specifies; codes do not depend
/// on how the tokens were divided among appends. Attention runs over all three parts in one softmax.
/// [`LayerCache`](crate::LayerCache) holds all heads of a layer.
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
    exact: ExactRows<E>,
    codes: [CodesBuf; 2], // keys, values
}

impl<E: Element> HeadCache<E> {
    /// Creates an empty cache.
    #[must_use]
    pub fn new(books: Arc<HeadBooks>, window: Window) -> Self {
        let shapes = [books.keys().shape(), books.values().shape()];
        let exact = ExactRows::new(shapes.map(|shape| shape.dim()), window);
        Self { books, exact, codes: shapes.map(CodesBuf::new) }
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
        self.exact.sinks()
    }

    /// Number of tokens held as codes, which follow the sinks.
    #[must_use]
    pub fn coded(&self) -> usize {
        self.codes[0].view().n()
    }

    /// Number of exact tokens at the end.
    #[must_use]
    pub fn recent(&self) -> usize {
        self.exact.recent()
    }

    /// The codebooks that tokens between sinks and window are encoded with.
    #[must_use]
    pub const fn books(&self) -> &Arc<HeadBooks> {
        &self.books
    }

    /// Bytes of all rows and codes, without the shared codebooks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.exact.size() + self.codes.iter().map(|codes| codes.view().size()).sum::<usize>()
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
        let (books, mut errors) = ([self.books.keys(), self.books.values()], [0.0; 2]);
        let (coded, codes) = (self.coded(), &mut self.codes);
        let tokens = self.exact.append(coded, [keys, values], |side, rows| {
            errors[side] += codes[side].append_rows_with(backend, &books[side], rows)?;
            Ok::<_, Error>(())
        })?;
        let [key_error, value_error] = errors;
        Ok(Evicted { tokens, key_error, value_error })
    }

    /// Keeps the first `len` tokens, to drop rejected drafts or to share a prefix with another sequence.
    /// Codes stay codes: the window refills from the next token on.
    pub fn truncate(&mut self, len: usize) {
        let coded = self.exact.truncate(len, self.coded());
        self.codes.iter_mut().for_each(|codes| codes.truncate(coded));
    }
}

/// The interface of [`LayerCache`](crate::LayerCache) to a head.
impl<E: Element> Head for HeadCache<E> {
    type Element = E;
    type Shared = HeadBooks;
    type Evicted = Evicted;
    type Error = Error;
    const NAME: &'static str = "a layer cache";
    const MAGIC: [u8; 4] = *b"PQLC";
    const VERSION: u32 = 1;

    fn new(books: Arc<HeadBooks>, window: Window) -> Self {
        Self::new(books, window)
    }

    fn dims(&self) -> [usize; 2] {
        self.exact.dims()
    }

    fn len(&self) -> usize {
        self.len()
    }

    fn size(&self) -> usize {
        self.size()
    }

    fn append_with(
        &mut self,
        backend: Backend,
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) -> Result<Evicted, Error> {
        self.append_with(backend, keys, values)
    }

    fn truncate(&mut self, len: usize) {
        self.truncate(len);
    }

    fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        self.scratch_len(query_tokens, group)
    }

    fn attend_into_with<Q: Element>(
        &self,
        backend: Backend,
        attention: &Attention,
        queries: Rows<'_, Q>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        self.attend_into_with(backend, attention, queries, scratch, out, stats)
    }

    fn write(&self, writer: &mut Writer) {
        writer.u64(self.books.id());
        self.exact.write(writer, self.coded(), |writer, side| writer.bytes(self.codes[side].view().bytes()));
    }

    fn read(reader: &mut Reader<'_>, books: &Arc<HeadBooks>, window: Window) -> Result<Self, Error> {
        if reader.u64()? != books.id() {
            return Err(Error::BadField { what: "codebook id" });
        }
        let Self { exact, mut codes, .. } = Self::new(books.clone(), window);
        let exact = ExactRows::read(reader, exact.dims(), window, |reader, side, coded| {
            let shape = codes[side].view().shape();
            let bytes = reader.bytes(shape.codes_len(coded))?.to_vec();
            codes[side] = CodesBuf::from_packed(shape, coded, bytes)?;
            Ok::<_, Error>(())
        })?;
        Ok(Self { books: books.clone(), exact, codes })
    }
}
