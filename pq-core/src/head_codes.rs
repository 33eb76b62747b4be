//! The coded tokens of one KV head of one sequence.

mod attend;

use alloc::sync::Arc;
use core::ops::Range;

use kv_attend::owner::{EvictedRows, Fit, Pair, Queries, Reader, Side, Store, Writer};

use crate::error::{check_at_least, check_len};
use crate::squares::squares;
use crate::{Attention, Backend, Codes, CodesBuf, Element, Error, HeadBooks, PqShape, Rows, SoftmaxStats};

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

/// The codes of the keys and values of one head of one sequence: the tokens between the sinks and the window
/// of a [`HeadCache`](crate::HeadCache), or all tokens that an engine codes with exact rows of its own.
///
/// # Examples
/// ```
/// use pq_core::{Backend, HeadBooks, HeadCodes, PqShape, Rows, SoftmaxStats, TrainOptions, normalize_all};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// # let rows: Vec<f32> = (0..300 * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// let rows = Rows::contiguous(&rows, 16)?; // 300 tokens of a head
/// let shapes = [PqShape::new(16, 8, 4)?; 2];
/// let books = HeadBooks::train_layer(rows, rows, 1, shapes, &TrainOptions::default())?;
/// let mut codes = HeadCodes::new(books[0].clone());
/// codes.append(Backend::detect(), rows, rows)?;
/// codes.truncate(290); // drafts are rejected
///
/// let query = [0.25; 16]; // after RoPE and scaled
/// let mut scratch = vec![0.0; codes.scratch_len(1)];
/// let (mut out, mut stats) = ([0.0; 16], [SoftmaxStats::EMPTY]);
/// // A sliding window sees the tokens from 34 on.
/// codes.attend_into(Backend::detect(), &query, 34..290, None, &mut scratch, &mut out, &mut stats)?;
/// normalize_all(&stats, &mut out)?;
/// assert!((out[5] - 8.0).abs() < 0.5);
/// assert!(codes.fits().is_some_and(|fits| fits.keys.ratio() < 1.1));
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HeadCodes {
    books: Arc<HeadBooks>,
    codes: Pair<CodesBuf>,
    coded: Coded,
}

/// All tokens coded since the first one.
#[derive(Clone, Copy, Debug, Default)]
struct Coded {
    tokens: usize,
    errors: Pair<f64>,  // squared
    squares: Pair<f64>, // of the rows
}

impl HeadCodes {
    /// No tokens.
    #[must_use]
    pub fn new(books: Arc<HeadBooks>) -> Self {
        let codes = Pair::new(CodesBuf::new(books.keys().shape()), CodesBuf::new(books.values().shape()));
        Self { books, codes, coded: Coded::default() }
    }

    /// The codebooks that tokens are encoded with.
    #[must_use]
    pub const fn books(&self) -> &Arc<HeadBooks> {
        &self.books
    }

    /// The codes of the keys.
    #[must_use]
    pub fn keys(&self) -> Codes<'_> {
        self.codes.keys.view()
    }

    /// The codes of the values.
    #[must_use]
    pub fn values(&self) -> Codes<'_> {
        self.codes.values.view()
    }

    /// Number of tokens.
    #[must_use]
    pub fn len(&self) -> usize {
        self.keys().n()
    }

    /// Whether there are no tokens.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of the codes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.keys().size() + self.values().size()
    }

    /// How well the codebooks fit the tokens: squared errors relative to the squared rows. All tokens count
    /// that were coded since the first one, or since the codes were read from bytes. `None` if the codebooks
    /// do not know [what to expect](HeadBooks::expected_errors).
    #[must_use]
    pub fn fits(&self) -> Option<Pair<Fit>> {
        let Coded { tokens, errors, squares } = self.coded;
        let fit = |expected: Pair<f64>, side| {
            let found = if squares[side] > 0.0 { errors[side] / squares[side] } else { 0.0 };
            Fit { expected: expected[side], found, tokens, added_bits: 0.0 }
        };
        self.books.expected_errors().map(|expected| Pair::of(|side| fit(expected, side)))
    }

    /// Codes tokens.
    ///
    /// # Shapes
    /// `keys` (n, dim), `values` (n, dim of the values).
    /// # Errors
    /// [`Error::BackendUnavailable`], [`Error::Length`]; nothing is then appended.
    pub fn append<E: Element>(
        &mut self,
        backend: Backend,
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) -> Result<Evicted, Error> {
        backend.check()?;
        check_len("values", values.rows(), keys.rows())?;
        check_len("row of keys", keys.components(), self.books.keys().shape().dim())?;
        check_len("row of values", values.components(), self.books.values().shape().dim())?;
        let errors = Pair {
            keys: self.codes.keys.append_rows_with(backend, &self.books.keys(), keys)?,
            values: self.codes.values.append_rows_with(backend, &self.books.values(), values)?,
        };
        let squares = Pair::new(squares(backend, keys), squares(backend, values));
        self.coded.tokens += keys.rows();
        for side in Side::ALL {
            self.coded.errors[side] += errors[side];
            self.coded.squares[side] += squares[side];
        }
        Ok(Evicted { tokens: keys.rows(), key_error: errors.keys, value_error: errors.values })
    }

    /// Keeps the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.codes.iter_mut().for_each(|codes| codes.truncate(len));
        if len == 0 {
            self.coded = Coded::default();
        }
    }

    /// Elements of the scratch of [`attend_into`](Self::attend_into).
    #[must_use]
    pub fn scratch_len(&self, queries: usize) -> usize {
        attend::scratch_len(&self.books, queries)
    }

    /// Attention of a group of query heads, or of several query tokens that see the same tokens, over the
    /// tokens of `range`, added to `out` and `stats` as by [`attend_into`](crate::attend_into).
    ///
    /// # Shapes
    /// `queries` (n, dim), after RoPE and scaled; `range` of at most [`len`](Self::len) tokens; `scratch` at
    /// least [`scratch_len`](Self::scratch_len) of n, best at a cache line; `out` (n, dim of the values);
    /// `stats` (n,).
    /// # Errors
    /// [`Error::BackendUnavailable`], [`Error::Length`], [`Error::TooShort`], and the error of a bad softcap;
    /// `out` and `stats` are then untouched.
    /// # Cost
    /// That of [`lut_into`](crate::lut_into) and [`attend_into`](crate::attend_into); no allocation.
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
        let [dim, dim_v] = [self.books.keys(), self.books.values()].map(|book| book.shape().dim());
        check_len("queries", queries.len(), stats.len().saturating_mul(dim))?;
        check_len("out", out.len(), stats.len().saturating_mul(dim_v))?;
        check_at_least("scratch", scratch.len(), self.scratch_len(stats.len()))?;
        check_at_least("tokens", self.len(), range.end)?;
        Attention { softcap, ..Attention::default() }.check()?;
        if range.is_empty() || stats.is_empty() {
            return Ok(());
        }
        attend::Part { codes: self, backend, softcap, range }.add(queries, scratch, out, stats)
    }
}

/// What [`HeadCache`](crate::HeadCache) needs.
impl<E: Element> Store<E> for HeadCodes {
    type Shared = HeadBooks;
    type Report = Evicted;
    type Error = Error;
    const NAME: &'static str = "a layer cache";
    const MAGIC: [u8; 4] = *b"PQLC";
    const VERSION: u32 = 2;
    const QUERIES: usize = 16;

    fn new(books: Arc<HeadBooks>) -> Self {
        Self::new(books)
    }

    fn dims(&self) -> [usize; 2] {
        [self.books.keys().shape().dim(), self.books.values().shape().dim()]
    }

    fn len(&self) -> usize {
        Self::len(self)
    }

    fn size(&self) -> usize {
        Self::size(self)
    }

    fn append(&mut self, backend: Backend, evicted: &EvictedRows<'_, E>) -> Result<Evicted, Error> {
        let [keys, values] = evicted.sides();
        let mut sum = Evicted::default();
        for (&keys, &values) in keys.iter().zip(values) {
            let Evicted { tokens, key_error, value_error } = Self::append(self, backend, keys, values)?;
            sum.tokens += tokens;
            sum.key_error += key_error;
            sum.value_error += value_error;
        }
        Ok(sum)
    }

    fn truncate(&mut self, len: usize) {
        Self::truncate(self, len);
    }

    fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        Self::scratch_len(self, query_tokens.saturating_mul(group))
    }

    fn attend_into(
        &self,
        backend: Backend,
        queries: &Queries<'_>,
        scratch: &mut [f32],
        out: &mut [f32],
        stats: &mut [SoftmaxStats],
    ) -> Result<(), Error> {
        attend::attend_into(self, backend, queries, scratch, out, stats)
    }

    fn fits(&self) -> Option<Pair<Fit>> {
        Self::fits(self)
    }

    fn write(&self, writer: &mut Writer) {
        writer.u64(self.books.id());
        writer.usize(self.len());
        self.codes.iter().for_each(|codes| writer.bytes(codes.view().bytes()));
    }

    fn read(reader: &mut Reader<'_>, books: &Arc<HeadBooks>) -> Result<Self, Error> {
        if reader.u64()? != books.id() {
            return Err(Error::BadField { what: "codebook id" });
        }
        let n = reader.usize()?;
        let mut codes = |shape: PqShape| {
            let bytes = reader.bytes(shape.codes_len(n))?.to_vec();
            CodesBuf::from_packed(shape, n, bytes)
        };
        let codes = Pair::new(codes(books.keys().shape())?, codes(books.values().shape())?);
        Ok(Self { books: books.clone(), codes, coded: Coded::default() })
    }
}
