//! The codebooks of one KV head, shared by all sequences.

use alloc::sync::Arc;
use alloc::vec::Vec;

use kv_attend::owner::{Pair, Reader, Writer};

use crate::error::check_len;
use crate::squares::squares;
use crate::{
    Backend, Codebook, CodebookBuf, Element, Error, PqShape, Rows, TrainOptions, Trained, train_batch,
    unseen_error,
};

const MAGIC: [u8; 4] = *b"PQHB";
const VERSION: u32 = 1;

/// The codebooks of the keys and of the values of one head, shared by the caches of all sequences through an
/// [`Arc`].
///
/// # Examples
/// ```
/// use pq_core::{HeadBooks, PqShape, Rows, TrainOptions};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// // 300 tokens of 2 heads of 16 components, as an engine's (tokens, heads, head_dim).
/// let keys: Vec<f32> = (0..300 * 32).map(|i| noise(i) + if i % 16 == 5 { 8.0 } else { 0.0 }).collect();
/// let rows = Rows::contiguous(&keys, 32)?;
/// let shape = PqShape::new(16, 8, 4)?;
/// let books = HeadBooks::train_layer(rows, rows, 2, [shape; 2], &TrainOptions::default())?;
/// assert_eq!((books.len(), books[1].keys().shape()), (2, shape));
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HeadBooks {
    keys: CodebookBuf,
    values: CodebookBuf,
    id: u64,
    expected: Option<Pair<f64>>,
}

impl HeadBooks {
    /// Combines the codebooks of the keys and of the values.
    #[must_use]
    pub fn new(keys: CodebookBuf, values: CodebookBuf) -> Self {
        let id = [&keys, &values].into_iter().fold(0xcbf2_9ce4_8422_2325, |id, book| {
            let shape = book.view().shape();
            let sizes = [shape.dim() as u64, shape.m() as u64, u64::from(shape.nbits())];
            let numbers = book.view().columns().flatten().map(|x| u64::from(x.to_bits()));
            // FNV-1a, 64 bits at a time.
            sizes.into_iter().chain(numbers).fold(id, |id: u64, x| (id ^ x).wrapping_mul(0x100_0000_01b3))
        });
        Self { keys, values, id, expected: None }
    }

    /// Trains the codebooks of all heads of a layer on rows (n, heads * dim), such as a prompt's; the result
    /// has `heads` elements.
    ///
    /// # Shapes
    /// `keys` (n, heads * dim of `shapes[0]`), `values` (n, heads * dim of `shapes[1]`), n at least 1.
    /// # Errors
    /// As [`train`](crate::train); [`Error::Zero`] for no head, [`Error::Length`] for rows of another length.
    /// # Cost
    /// That of [`train_batch`], and a copy of the rows.
    pub fn train_layer<E: Element>(
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
        heads: usize,
        shapes: [PqShape; 2],
        options: &TrainOptions<'_>,
    ) -> Result<Vec<Arc<Self>>, Error> {
        let [keys, values] =
            [train_side(keys, heads, shapes[0], options)?, train_side(values, heads, shapes[1], options)?];
        let books = keys.into_iter().zip(values).map(|((keys, key_error), (values, value_error))| {
            Arc::new(Self::new(keys, values).with_expected_errors(Pair::new(key_error, value_error)))
        });
        Ok(books.collect())
    }

    /// The same codebooks with the squared errors to expect of keys and values, relative to the squared rows.
    /// [`train_layer`](Self::train_layer) sets them by [`unseen_error`]; bytes do not hold them.
    #[must_use]
    pub fn with_expected_errors(self, errors: Pair<f64>) -> Self {
        Self { expected: Some(errors), ..self }
    }

    /// The squared errors to expect of keys and values, relative to the squared rows, if they are known:
    /// [`HeadCodes::fits`](crate::HeadCodes::fits) compares them with those of a sequence.
    #[must_use]
    pub const fn expected_errors(&self) -> Option<Pair<f64>> {
        self.expected
    }

    /// Bytes of the centroids.
    #[must_use]
    pub fn size(&self) -> usize {
        let floats = [&self.keys, &self.values].map(|book| book.view().shape().codebook_len());
        size_of::<f32>() * floats.iter().sum::<usize>()
    }

    /// The codebook of the keys.
    #[must_use]
    pub fn keys(&self) -> Codebook<'_> {
        self.keys.view()
    }

    /// The codebook of the values.
    #[must_use]
    pub fn values(&self) -> Codebook<'_> {
        self.values.view()
    }

    /// A hash of the shapes and centroids, by which a saved cache recognizes its codebooks.
    #[must_use]
    pub const fn id(&self) -> u64 {
        self.id
    }

    /// Both codebooks as bytes, with centroids of type `E`, as [`CodebookBuf::to_bytes`]. Rounded centroids
    /// have another [`id`](Self::id): a cache can only be restored with the books under which it was saved.
    #[must_use]
    pub fn to_bytes<E: Element>(&self) -> Vec<u8> {
        self.saved::<E>().finish()
    }

    /// [`to_bytes`](Self::to_bytes) with a checksum, which [`from_bytes`](Self::from_bytes) compares: without
    /// it most single wrong bits are read as other values.
    #[must_use]
    pub fn to_bytes_checked<E: Element>(&self) -> Vec<u8> {
        self.saved::<E>().finish_checked()
    }

    fn saved<E: Element>(&self) -> Writer {
        let mut writer = Writer::new(MAGIC, VERSION);
        for book in [&self.keys, &self.values] {
            book.write::<E>(&mut writer);
        }
        writer
    }

    /// Reads what [`to_bytes`](Self::to_bytes) or [`to_bytes_checked`](Self::to_bytes_checked) wrote.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::TrailingBytes`],
    /// [`Error::BadChecksum`], [`Error::BadField`], [`Error::NotFinite`], or the error of a bad shape.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new("the codebooks of a head", MAGIC, VERSION, bytes)?;
        let books = [CodebookBuf::read(&mut reader)?, CodebookBuf::read(&mut reader)?];
        reader.finish()?;
        let [keys, values] = books;
        Ok(Self::new(keys, values))
    }
}

/// Trains one codebook per head; also returns the relative error to expect of each.
fn train_side<E: Element>(
    rows: Rows<'_, E>,
    heads: usize,
    shape: PqShape,
    options: &TrainOptions<'_>,
) -> Result<Vec<(CodebookBuf, f64)>, Error> {
    let dim = shape.dim();
    if heads == 0 {
        return Err(Error::Zero { what: "number of heads" });
    }
    check_len("row", rows.components(), heads.saturating_mul(dim))?;
    let sets =
        (0..heads).map(|h| rows.columns(h * dim, dim).map(|head| head.iter().flatten().copied().collect()));
    let sets: Vec<Vec<E>> = sets.collect::<Result<_, _>>()?;
    let sets: Vec<&[E]> = sets.iter().map(Vec::as_slice).collect();
    let trained = train_batch(shape, &sets, options)?;
    let n = options.max_vectors.map_or(rows.rows(), |most| most.min(rows.rows()));
    let of = if options.encode { rows.rows() } else { n }; // vectors of the error
    let book = |(trained, set): (&Trained, &&[E])| {
        let squares = squares(Backend::detect(), Rows::contiguous(set, dim)?);
        let squares = squares * of as f64 / rows.rows() as f64;
        let error = if squares > 0.0 { trained.error / squares } else { 0.0 };
        Ok((CodebookBuf::new(shape, &trained.centroids)?, unseen_error(error, n, shape.ksub())))
    };
    trained.iter().zip(&sets).map(book).collect()
}
