//! Packed codes that own their bytes: they grow, shrink, and are saved.

use alloc::vec::Vec;

use kv_attend::owner::{Reader, Writer};

use crate::error::{check_len, count_rows};
use crate::simd::BLOCK;
use crate::{Backend, Codebook, Codes, CodesMut, Element, Error, PqShape, Rows, encode_rows_into_with};

const MAGIC: [u8; 4] = *b"PQCO";
const VERSION: u32 = 1;

/// A growing [`Codes`] that owns its bytes.
///
/// # Examples
/// ```
/// use pq_core::{CodebookBuf, CodesBuf, PqShape, TrainOptions, train};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let shape = PqShape::new(16, 8, 4)?;
/// let prompt: Vec<f32> = (0..200 * 16).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// let trained = train(shape, &prompt, &TrainOptions { encode: true, ..Default::default() })?;
/// let codebook = CodebookBuf::new(shape, &trained.centroids)?;
/// let mut codes = CodesBuf::from_packed(shape, 200, trained.codes)?; // the prompt's, from training
/// codes.append(&codebook.view(), &prompt[..16])?;
/// let restored = CodesBuf::from_bytes(&codes.to_bytes())?;
/// assert!(restored.view().iter_vector(200).eq(codes.view().iter_vector(0)));
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct CodesBuf {
    shape: PqShape,
    n: usize,
    bytes: Vec<u8>, // codes_len(n)
}

impl CodesBuf {
    /// Creates an empty buffer.
    #[must_use]
    pub const fn new(shape: PqShape) -> Self {
        Self { shape, n: 0, bytes: Vec::new() }
    }

    /// Takes the packed codes of `n` vectors, such as [`Trained::codes`](crate::Trained::codes).
    ///
    /// # Shapes
    /// `bytes` [`PqShape::codes_len`] of `n`.
    /// # Errors
    /// [`Error::Length`].
    pub fn from_packed(shape: PqShape, n: usize, bytes: Vec<u8>) -> Result<Self, Error> {
        check_len("codes", bytes.len(), shape.codes_len(n))?;
        Ok(Self { shape, n, bytes })
    }

    /// The packed bytes, as [`from_packed`](Self::from_packed) takes them.
    #[must_use]
    pub fn into_packed(self) -> Vec<u8> {
        self.bytes
    }

    /// Serializes the codes with their shape and count.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.saved().finish()
    }

    /// [`to_bytes`](Self::to_bytes) with a checksum, which [`from_bytes`](Self::from_bytes) compares: without it
    /// most single wrong bits are read as other values.
    #[must_use]
    pub fn to_bytes_checked(&self) -> Vec<u8> {
        self.saved().finish_checked()
    }

    fn saved(&self) -> Writer {
        let mut writer = Writer::new(MAGIC, VERSION);
        self.shape.write(&mut writer);
        writer.usize(self.n);
        writer.bytes(&self.bytes);
        writer
    }

    /// Reads what [`to_bytes`](Self::to_bytes) or [`to_bytes_checked`](Self::to_bytes_checked) wrote.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::TrailingBytes`],
    /// [`Error::BadChecksum`], or the error of a bad shape.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new("codes", MAGIC, VERSION, bytes)?;
        let (shape, n) = (PqShape::read(&mut reader)?, reader.usize()?);
        let bytes = reader.bytes(shape.codes_len(n))?.to_vec();
        reader.finish()?;
        Self::from_packed(shape, n, bytes)
    }

    /// Encodes `vectors` (n, dim) and appends their codes; returns the summed squared error, as
    /// [`encode_into`](crate::encode_into).
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] or [`Error::PartialRow`]; nothing is then appended.
    pub fn append<E: Element>(&mut self, codebook: &Codebook<'_>, vectors: &[E]) -> Result<f64, Error> {
        self.append_with(Backend::detect(), codebook, vectors)
    }

    /// [`append`](Self::append) on a given backend.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`Error::BackendUnavailable`].
    pub fn append_with<E: Element>(
        &mut self,
        backend: Backend,
        codebook: &Codebook<'_>,
        vectors: &[E],
    ) -> Result<f64, Error> {
        if codebook.shape() != self.shape {
            return Err(Error::ShapeMismatch);
        }
        count_rows("vectors", vectors.len(), self.shape.dim())?;
        self.append_rows_with(backend, codebook, Rows::contiguous(vectors, self.shape.dim())?)
    }

    /// [`append`](Self::append) of strided rows, as [`encode_rows_into`](crate::encode_rows_into).
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] or [`Error::Length`]; nothing is then appended.
    pub fn append_rows<E: Element>(
        &mut self,
        codebook: &Codebook<'_>,
        vectors: Rows<'_, E>,
    ) -> Result<f64, Error> {
        self.append_rows_with(Backend::detect(), codebook, vectors)
    }

    /// [`append_rows`](Self::append_rows) on a given backend.
    ///
    /// # Errors
    /// As [`append_rows`](Self::append_rows), and [`Error::BackendUnavailable`].
    pub fn append_rows_with<E: Element>(
        &mut self,
        backend: Backend,
        codebook: &Codebook<'_>,
        vectors: Rows<'_, E>,
    ) -> Result<f64, Error> {
        if codebook.shape() != self.shape {
            return Err(Error::ShapeMismatch);
        }
        let n = self.n + vectors.rows();
        self.bytes.resize(self.shape.codes_len(n), 0);
        let encoded = encode_rows_into_with(backend, codebook, vectors, self.n, &mut self.bytes);
        self.n = if encoded.is_ok() { n } else { self.n };
        self.bytes.truncate(self.shape.codes_len(self.n));
        encoded
    }

    /// Keeps the first `n` vectors. The bytes are then those of a buffer that never held the others.
    pub fn truncate(&mut self, n: usize) {
        if n >= self.n {
            return;
        }
        self.n = n;
        self.bytes.truncate(self.shape.codes_len(n));
        // The last block may hold codes of removed vectors, which a saved prefix must not reveal.
        let zeros = [0; BLOCK];
        let zeros = &zeros[..n.next_multiple_of(BLOCK) - n];
        let mut codes = CodesMut::new(self.shape, &mut self.bytes);
        (0..self.shape.m()).for_each(|j| codes.set(Backend::detect(), n, j, zeros));
    }

    /// Borrows the codes.
    #[must_use]
    pub fn view(&self) -> Codes<'_> {
        Codes::of(self.shape, self.n, &self.bytes)
    }
}
