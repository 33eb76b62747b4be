//! The packed codes of many vectors: blocks of 64 vectors, each with one run per subspace (see `pack`). An
//! `nbits`-bit field is below `ksub = 1 << nbits` by construction, so every byte string of the right length
//! is valid and lookups need no range check.

use crate::Backend;
use crate::error::{check_len, count_rows};
use crate::pack::{BLOCK, ReplaceInRun, get_in_run, set_in_run};
use crate::{Error, PqShape};

/// The packed codes of `n` vectors, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    shape: PqShape,
    n: usize,
    bytes: &'a [u8], // (n / 64 rounded up, m, 8 * nbits)
}

impl<'a> Codes<'a> {
    /// The codes of `n` vectors in `bytes`, whose length is [`PqShape::codes_len`] of `n`.
    ///
    /// # Errors
    /// [`Error::Length`].
    pub fn new(shape: PqShape, n: usize, bytes: &'a [u8]) -> Result<Self, Error> {
        check_len("codes", bytes.len(), shape.codes_len(n))?;
        Ok(Self { shape, n, bytes })
    }

    /// The shape of the quantizer.
    #[must_use]
    pub const fn shape(&self) -> PqShape {
        self.shape
    }

    /// Number of vectors.
    #[must_use]
    pub const fn n(&self) -> usize {
        self.n
    }

    /// Size in bytes.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.bytes.len()
    }

    /// The codes of vector `i` in ascending order of subspaces.
    ///
    /// # Panics
    /// When `i >= n`.
    pub fn iter_vector(&self, i: usize) -> impl Iterator<Item = usize> + use<'a> {
        assert!(i < self.n, "vector {i} of {}", self.n);
        let nbits = self.shape.nbits();
        self.block(i / BLOCK)
            .chunks_exact(8 * nbits as usize)
            .map(move |run| get_in_run(run, nbits, i % BLOCK).into())
    }

    /// The runs of block `b`: (m, 8 * nbits).
    pub(crate) fn block(&self, b: usize) -> &'a [u8] {
        let size = self.shape.block_size();
        &self.bytes[b * size..][..size]
    }

    pub(crate) const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Vectors `start..end`, where `start` is a multiple of [`BLOCK`].
    pub(crate) fn slice(&self, start: usize, end: usize) -> Self {
        debug_assert!(start.is_multiple_of(BLOCK) && end <= self.n);
        let from = start / BLOCK * self.shape.block_size();
        let len = self.shape.codes_len(end - start);
        Self { shape: self.shape, n: end - start, bytes: &self.bytes[from..][..len] }
    }
}

/// Packs codes from another source, such as faiss: (n, m), one integer each, row-major.
///
/// # Shapes
/// `codes` (n, m); `bytes` [`PqShape::codes_len`] of n, fully written.
/// # Errors
/// [`Error::PartialRow`] for `codes`, [`Error::Length`] for `bytes`, or [`Error::CodeOutOfRange`] for a code
/// of ksub or more; `bytes` is then untouched.
/// # Examples
/// ```
/// use pq_core::{Codes, PqShape, pack_codes_into};
/// let shape = PqShape::new(4, 2, 6)?;
/// let mut bytes = vec![0; shape.codes_len(3)];
/// pack_codes_into(shape, &[1_u8, 63, 0, 7, 8, 9], &mut bytes)?;
/// assert!(Codes::new(shape, 3, &bytes)?.iter_vector(1).eq([0, 7]));
/// assert!(pack_codes_into(shape, &[1_u16, 64, 0, 7, 8, 9], &mut bytes).is_err());
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn pack_codes_into<C: Copy + Into<u16>>(
    shape: PqShape,
    codes: &[C],
    bytes: &mut [u8],
) -> Result<(), Error> {
    let n = count_rows("codes", codes.len(), shape.m())?;
    check_len("packed codes", bytes.len(), shape.codes_len(n))?;
    if let Some(index) = codes.iter().position(|&code| usize::from(code.into()) >= shape.ksub()) {
        return Err(Error::CodeOutOfRange { index, code: codes[index].into(), ksub: shape.ksub() });
    }
    bytes.fill(0);
    for (i, vector) in codes.chunks_exact(shape.m()).enumerate() {
        set_vector(shape, bytes, i, |j| vector[j].into());
    }
    Ok(())
}

/// Writes the codes of vector `i` and leaves all others unchanged.
pub(crate) fn set_vector(shape: PqShape, bytes: &mut [u8], i: usize, code: impl Fn(usize) -> u16) {
    let block = &mut bytes[i / BLOCK * shape.block_size()..][..shape.block_size()];
    for (j, run) in block.chunks_exact_mut(8 * shape.nbits() as usize).enumerate() {
        set_in_run(run, shape.nbits(), i % BLOCK, code(j));
    }
}

/// Writes the codes of subspace `j` of vectors `first` and on, up to 64, and leaves all others unchanged.
pub(crate) fn set_codes(
    backend: Backend,
    shape: PqShape,
    bytes: &mut [u8],
    first: usize,
    j: usize,
    codes: &[u32],
) {
    let run_len = 8 * shape.nbits() as usize;
    let (here, next) = codes.split_at(codes.len().min(BLOCK - first % BLOCK));
    for (block, at, codes) in [(first / BLOCK, first % BLOCK, here), (first / BLOCK + 1, 0, next)] {
        if !codes.is_empty() {
            let run = &mut bytes[block * shape.block_size() + j * run_len..][..run_len];
            backend.run(ReplaceInRun { run, nbits: shape.nbits(), first: at, codes });
        }
    }
}

/// A growing [`Codes`] that owns its bytes.
#[cfg(feature = "alloc")]
#[derive(Clone, Debug)]
pub struct CodesBuf {
    shape: PqShape,
    n: usize,
    bytes: alloc::vec::Vec<u8>, // codes_len(n)
}

#[cfg(feature = "alloc")]
impl CodesBuf {
    /// No codes.
    #[must_use]
    pub const fn new(shape: PqShape) -> Self {
        Self { shape, n: 0, bytes: alloc::vec::Vec::new() }
    }

    /// Encodes `vectors` (n, dim) and appends their codes; returns the summed squared error, as
    /// [`encode_into`](crate::encode_into).
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] or [`Error::PartialRow`]; nothing is then appended.
    pub fn append<E: crate::Element>(
        &mut self,
        codebook: &crate::Codebook<'_>,
        vectors: &[E],
    ) -> Result<f64, Error> {
        self.append_with(Backend::detect(), codebook, vectors)
    }

    /// [`append`](Self::append) on a given backend.
    ///
    /// # Errors
    /// As [`append`](Self::append), and [`Error::BackendUnavailable`].
    pub fn append_with<E: crate::Element>(
        &mut self,
        backend: Backend,
        codebook: &crate::Codebook<'_>,
        vectors: &[E],
    ) -> Result<f64, Error> {
        if codebook.shape() != self.shape {
            return Err(Error::ShapeMismatch);
        }
        let n = self.n + vectors.len() / self.shape.dim();
        self.bytes.resize(self.shape.codes_len(n), 0);
        let encoded = crate::encode_into_with(backend, codebook, vectors, self.n, &mut self.bytes);
        self.n = if encoded.is_ok() { n } else { self.n };
        self.bytes.truncate(self.shape.codes_len(self.n));
        encoded
    }

    /// Keeps the first `n` vectors and removes all others.
    pub fn truncate(&mut self, n: usize) {
        self.n = self.n.min(n);
        self.bytes.truncate(self.shape.codes_len(self.n));
    }

    /// Borrows them.
    #[must_use]
    pub fn view(&self) -> Codes<'_> {
        Codes { shape: self.shape, n: self.n, bytes: &self.bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_length_is_an_error() {
        let shape = PqShape::new(8, 4, 6).unwrap();
        assert!(matches!(
            Codes::new(shape, 65, &[0; 192]),
            Err(Error::Length { what: "codes", expected: 384, actual: 192 })
        ));
        assert!(Codes::new(shape, usize::MAX, &[0; 192]).is_err());
    }
}
