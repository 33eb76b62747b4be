//! The coded tokens of one KV head of one sequence.

mod attend;

use alloc::sync::Arc;

use kv_attend::owner::{EvictedRows, Queries, Reader, Store, Writer};

use crate::{Backend, Codes, CodesBuf, Element, Error, HeadBooks, PqShape, SoftmaxStats};

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

/// The codes of the keys and values of one head of one sequence, between the sinks and the window of a
/// [`HeadCache`](crate::HeadCache).
#[derive(Clone, Debug)]
pub struct HeadCodes {
    books: Arc<HeadBooks>,
    codes: [CodesBuf; 2], // keys, values
}

impl HeadCodes {
    /// The codebooks that tokens are encoded with.
    #[must_use]
    pub const fn books(&self) -> &Arc<HeadBooks> {
        &self.books
    }

    /// The codes of the keys.
    #[must_use]
    pub fn keys(&self) -> Codes<'_> {
        self.codes[0].view()
    }

    /// The codes of the values.
    #[must_use]
    pub fn values(&self) -> Codes<'_> {
        self.codes[1].view()
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
        let codes = [books.keys().shape(), books.values().shape()].map(CodesBuf::new);
        Self { books, codes }
    }

    fn dims(&self) -> [usize; 2] {
        [self.books.keys().shape().dim(), self.books.values().shape().dim()]
    }

    fn len(&self) -> usize {
        self.keys().n()
    }

    fn size(&self) -> usize {
        self.keys().size() + self.values().size()
    }

    fn append(&mut self, backend: Backend, evicted: &EvictedRows<'_, E>) -> Result<Evicted, Error> {
        let (books, mut errors) = ([self.books.keys(), self.books.values()], [0.0; 2]);
        for (side, parts) in evicted.sides().iter().enumerate() {
            for &rows in parts {
                errors[side] += self.codes[side].append_rows_with(backend, &books[side], rows)?;
            }
        }
        let [key_error, value_error] = errors;
        Ok(Evicted { tokens: evicted.tokens(), key_error, value_error })
    }

    fn truncate(&mut self, len: usize) {
        self.codes.iter_mut().for_each(|codes| codes.truncate(len));
    }

    fn scratch_len(&self, query_tokens: usize, group: usize) -> usize {
        attend::scratch_len(&self.books, query_tokens.saturating_mul(group))
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

    fn write(&self, writer: &mut Writer) {
        writer.u64(self.books.id());
        writer.usize(self.keys().n());
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
        let codes = [codes(books.keys().shape())?, codes(books.values().shape())?];
        Ok(Self { books: books.clone(), codes })
    }
}
