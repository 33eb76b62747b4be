//! Centroids by columns, with the half norms that the search for the nearest one needs.

use crate::error::{check_finite, check_len};
use crate::{Element, Error, PqShape};
#[cfg(feature = "alloc")]
use kv_attend::owner::{Reader, Writer};

#[cfg(feature = "alloc")]
const MAGIC: [u8; 4] = *b"PQCB";
#[cfg(feature = "alloc")]
const VERSION: u32 = 1;

/// The centroids of every subspace in the layout of the kernels, borrowed from the caller's storage.
///
/// Arguments and results are (m, ksub, dsub), the order of faiss and of [`Trained`](crate::Trained). The
/// kernels read the centroids component by component, (m, dsub, ksub), and half of their squared norms, (m,
/// ksub). [`new`](Self::new) computes both once.
///
/// # Examples
/// ```
/// use pq_core::{Codebook, PqShape};
/// let shape = PqShape::new(2, 1, 1)?; // one subspace of two components, two centroids
/// let mut storage = vec![0.0; shape.codebook_storage_len()];
/// let codebook = Codebook::new(shape, &[1.0, 2.0, 3.0, 4.0], &mut storage)?;
/// assert!(codebook.centroid(0, 1).eq([3.0, 4.0]));
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Codebook<'a> {
    shape: PqShape,
    columns: &'a [f32],    // (m, dsub, ksub), every element finite
    half_norms: &'a [f32], // (m, ksub)
    largest: f32,          // half norm; infinite if one overflows
}

/// One subspace of a codebook.
#[derive(Clone, Copy)]
pub(crate) struct Subspace<'a> {
    pub columns: &'a [f32],    // (dsub, ksub)
    pub half_norms: &'a [f32], // (ksub,)
    pub largest: f32,          // at least the largest half norm
}

impl<'a> Subspace<'a> {
    pub fn ksub(&self) -> usize {
        self.half_norms.len()
    }

    /// Component `d` of every centroid.
    pub fn column(&self, d: usize) -> &'a [f32] {
        &self.columns[d * self.ksub()..][..self.ksub()]
    }
}

impl<'a> Codebook<'a> {
    /// Checks `centroids` (m, ksub, dsub) of any [`Element`], which may be untrusted, and arranges them in
    /// `storage` ([`PqShape::codebook_storage_len`] elements).
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::NotFinite`].
    pub fn new<E: Element>(shape: PqShape, centroids: &[E], storage: &'a mut [f32]) -> Result<Self, Error> {
        check_len("centroids", centroids.len(), shape.codebook_len())?;
        check_finite("centroids", centroids)?;
        check_len("codebook storage", storage.len(), shape.codebook_storage_len())?;
        let (columns, half_norms) = storage.split_at_mut(shape.codebook_len());
        let per_subspace = shape.ksub() * shape.dsub();
        for ((centroids, columns), half_norms) in centroids
            .chunks_exact(per_subspace)
            .zip(columns.chunks_exact_mut(per_subspace))
            .zip(half_norms.chunks_exact_mut(shape.ksub()))
        {
            arrange(centroids, shape.dsub(), columns, half_norms);
        }
        Ok(Self { shape, columns, half_norms, largest: largest(half_norms) })
    }

    /// The quantizer that the centroids belong to.
    #[must_use]
    pub const fn shape(&self) -> PqShape {
        self.shape
    }

    /// The components of centroid `c` of subspace `j`.
    ///
    /// # Panics
    /// When `j >= m` or `c >= ksub`.
    pub fn centroid(&self, j: usize, c: usize) -> impl Iterator<Item = f32> + use<'a> {
        assert!(c < self.shape.ksub());
        let ksub = self.shape.ksub();
        self.subspace(j).columns[c..].iter().step_by(ksub).copied()
    }

    /// Writes all centroids in the order of [`new`](Self::new).
    ///
    /// # Shapes
    /// `centroids` (m, ksub, dsub), fully written.
    /// # Errors
    /// [`Error::Length`]; `centroids` is then untouched.
    pub fn centroids_into(&self, centroids: &mut [f32]) -> Result<(), Error> {
        check_len("centroids", centroids.len(), self.shape.codebook_len())?;
        let (ksub, dsub) = (self.shape.ksub(), self.shape.dsub());
        for (subspace, centroids) in self.subspaces().zip(centroids.chunks_exact_mut(ksub * dsub)) {
            for (c, centroid) in centroids.chunks_exact_mut(dsub).enumerate() {
                for (d, y) in centroid.iter_mut().enumerate() {
                    *y = subspace.column(d)[c];
                }
            }
        }
        Ok(())
    }

    #[inline(always)]
    pub(crate) fn subspace(&self, j: usize) -> Subspace<'a> {
        let (ksub, dsub) = (self.shape.ksub(), self.shape.dsub());
        Subspace {
            columns: &self.columns[j * ksub * dsub..][..ksub * dsub],
            half_norms: &self.half_norms[j * ksub..][..ksub],
            largest: self.largest,
        }
    }

    /// The columns in order: one component of every centroid of a subspace, (ksub,), each.
    pub(crate) fn columns(&self) -> core::slice::ChunksExact<'a, f32> {
        self.columns.chunks_exact(self.shape.ksub())
    }

    pub(crate) fn subspaces(&self) -> impl Iterator<Item = Subspace<'a>> + use<'a> {
        self.subspaces_from(0)
    }

    #[inline(always)]
    pub(crate) fn subspaces_from(&self, first: usize) -> impl Iterator<Item = Subspace<'a>> + use<'a> {
        let (ksub, largest) = (self.shape.ksub(), self.largest);
        let columns = self.columns[first * ksub * self.shape.dsub()..].chunks_exact(ksub * self.shape.dsub());
        let half_norms = self.half_norms[first * ksub..].chunks_exact(ksub);
        columns.zip(half_norms).map(move |(columns, half_norms)| Subspace { columns, half_norms, largest })
    }
}

/// Transposes one subspace's centroids, (ksub, dsub) to (dsub, ksub), and computes half of their squared
/// norms.
pub(crate) fn arrange<E: Element>(centroids: &[E], dsub: usize, columns: &mut [f32], half_norms: &mut [f32]) {
    let ksub = half_norms.len();
    for ((c, centroid), half_norm) in centroids.chunks_exact(dsub).enumerate().zip(half_norms) {
        *half_norm = 0.0;
        for (d, y) in centroid.iter().map(|y| y.to_f32()).enumerate() {
            columns[d * ksub + c] = y;
            *half_norm += 0.5 * y * y;
        }
    }
}

/// The largest half norm, which is not NaN.
pub(crate) fn largest(half_norms: &[f32]) -> f32 {
    half_norms.iter().copied().fold(0.0, f32::max)
}

/// A [`Codebook`] that owns its storage.
// N.B. The centroids stay `f32` in memory. At (64, 8) and 128 components the books of a head's keys and
// values take 384 KiB, of which 128 KiB are half norms, and all sequences share them. The codes of one
// sequence of 8,192 tokens take 1 MiB a head. Centroids in `f16` would save 128 KiB: 9 % of books and codes
// for one such sequence, 1.5 % for eight. Encoding, tables and the sum of values read columns of `f32`: each
// would need `f16` kernels, or would widen a codebook into 128 KiB of scratch at every call.
#[cfg(feature = "alloc")]
#[derive(Clone, Debug)]
pub struct CodebookBuf {
    shape: PqShape,
    storage: alloc::vec::Vec<f32>, // as `Codebook::new` leaves it
    largest: f32,
}

#[cfg(feature = "alloc")]
impl CodebookBuf {
    /// As [`Codebook::new`], from centroids (m, ksub, dsub).
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::NotFinite`].
    pub fn new<E: Element>(shape: PqShape, centroids: &[E]) -> Result<Self, Error> {
        check_len("centroids", centroids.len(), shape.codebook_len())?;
        let mut storage = alloc::vec![0.0; shape.codebook_storage_len()];
        let largest = Codebook::new(shape, centroids, &mut storage)?.largest;
        Ok(Self { shape, storage, largest })
    }

    /// All centroids (m, ksub, dsub), in the order of [`new`](Self::new).
    #[must_use]
    pub fn centroids(&self) -> alloc::vec::Vec<f32> {
        let (ksub, view) = (self.shape.ksub(), self.view());
        (0..self.shape.m()).flat_map(|j| (0..ksub).flat_map(move |c| view.centroid(j, c))).collect()
    }

    /// The codebook as bytes, with centroids of type `E`: `f32` keeps every bit, `f16` takes half as much. A
    /// component beyond the range of `E` becomes infinite, which [`from_bytes`](Self::from_bytes) rejects.
    #[must_use]
    pub fn to_bytes<E: Element>(&self) -> alloc::vec::Vec<u8> {
        self.saved::<E>().finish()
    }

    /// [`to_bytes`](Self::to_bytes) with a checksum, which [`from_bytes`](Self::from_bytes) compares: without it
    /// most single wrong bits are read as other values.
    #[must_use]
    pub fn to_bytes_checked<E: Element>(&self) -> alloc::vec::Vec<u8> {
        self.saved::<E>().finish_checked()
    }

    fn saved<E: Element>(&self) -> Writer {
        let mut writer = Writer::new(MAGIC, VERSION);
        self.write::<E>(&mut writer);
        writer
    }

    /// Reads what [`to_bytes`](Self::to_bytes) or [`to_bytes_checked`](Self::to_bytes_checked) wrote.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::TrailingBytes`],
    /// [`Error::BadChecksum`], [`Error::BadField`], [`Error::NotFinite`], or the error of a bad shape.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        let mut reader = Reader::new("a codebook", MAGIC, VERSION, bytes)?;
        let book = Self::read(&mut reader)?;
        reader.finish()?;
        Ok(book)
    }

    pub(crate) fn write<E: Element>(&self, writer: &mut Writer) {
        self.shape.write(writer);
        writer.tag::<E>();
        writer.elements(self.centroids().into_iter().map(E::from_f32));
    }

    pub(crate) fn read(reader: &mut Reader<'_>) -> Result<Self, Error> {
        let shape = PqShape::read(reader)?;
        Self::new(shape, &reader.tagged_elements(shape.codebook_len())?)
    }

    /// Borrows the codebook.
    #[must_use]
    pub fn view(&self) -> Codebook<'_> {
        let (columns, half_norms) = self.storage.split_at(self.shape.codebook_len());
        Codebook { shape: self.shape, columns, half_norms, largest: self.largest }
    }
}
