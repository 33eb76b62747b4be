//! The packed codes of many vectors: blocks of 64 vectors, each with one run per subspace (see `pack`). An
//! `nbits`-bit field is below `ksub = 1 << nbits` by construction, so every byte string of the right length
//! is valid and lookups need no range check.

use core::ops::Range;

use crate::blocks::Blocks;
use crate::codes_mut::CodesMut;
use crate::error::{check_at_least, check_len, count_rows};
use crate::layout::Layout;
use crate::pack::get_in_run;
use crate::simd::BLOCK;
use crate::{Error, PqShape};

/// The packed codes of `n` vectors, borrowed: contiguous, or in the pages of a pool.
///
/// Scans, searches, attention and decoding accept both.
///
/// # Examples
/// ```
/// use pq_core::{Codes, PqShape};
/// let shape = PqShape::new(8, 4, 8)?;
/// let pool = vec![0; 10 * shape.page_len(16)]; // 10 pages of 16 tokens
/// let sequence = Codes::paged(shape, 40, &pool, &[7, 2, 5], 16)?;
/// assert_eq!(sequence.n(), 40);
/// assert_eq!(sequence.slice(16..40)?.n(), 24);
/// assert!(Codes::paged(shape, 40, &pool, &[7, 2, 10], 16).is_err()); // there is no page 10
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    shape: PqShape,
    n: usize,
    bytes: &'a [u8], // (blocks, m, 8 * nbits): n / 64 blocks rounded up, or the pages of the pool
    layout: Layout<'a>,
}

impl<'a> Codes<'a> {
    /// The codes of `n` vectors in contiguous memory.
    ///
    /// # Shapes
    /// `bytes` at least [`PqShape::codes_len`] of `n`; excess bytes are ignored.
    /// # Errors
    /// [`Error::TooShort`].
    pub fn new(shape: PqShape, n: usize, bytes: &'a [u8]) -> Result<Self, Error> {
        let len = shape.codes_len(n);
        check_at_least("codes", bytes.len(), len)?;
        Ok(Self::of(shape, n, &bytes[..len]))
    }

    /// The codes of `n` vectors, of which `bytes` holds exactly the [`PqShape::codes_len`].
    pub(crate) const fn of(shape: PqShape, n: usize, bytes: &'a [u8]) -> Self {
        Self { shape, n, bytes, layout: Layout::whole(shape) }
    }

    /// The codes of `n` vectors in pages of `page_tokens` vectors: 16, 32, or a multiple of [`BLOCK`].
    ///
    /// Pages of 16 and 32 are written by [`CodesMut`]. Results are bit-identical to those on contiguous
    /// codes, except that attention sums in another order.
    ///
    /// # Shapes
    /// `pool` whole pages of [`PqShape::page_len`] bytes; `table` at least `n / page_tokens` rounded up page
    /// numbers, in the order of the vectors.
    /// # Errors
    /// [`Error::Zero`] or [`Error::PageTokens`] for `page_tokens`, [`Error::TooShort`] for `table`,
    /// [`Error::Page`] for a page that the pool does not have.
    pub fn paged(
        shape: PqShape,
        n: usize,
        pool: &'a [u8],
        table: &'a [u32],
        page_tokens: usize,
    ) -> Result<Self, Error> {
        let layout = Layout::paged(shape, n, pool.len(), table, page_tokens)?;
        Ok(Self { shape, n, bytes: pool, layout })
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
        self.shape.codes_len(self.n)
    }

    /// The packed bytes, as [`new`](Self::new) takes them; for paged codes, the pool.
    #[must_use]
    pub const fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The codes of vectors `range.start` to `range.end - 1`, where `range.start` is a multiple of [`BLOCK`],
    /// or of the vectors of a smaller page.
    ///
    /// # Errors
    /// [`Error::Unaligned`]; [`Error::TooShort`] if there are fewer vectors, or if the range ends before it
    /// starts.
    pub fn slice(&self, range: Range<usize>) -> Result<Self, Error> {
        let multiple = self.layout.vectors();
        if !range.start.is_multiple_of(multiple) {
            return Err(Error::Unaligned { what: "the start of the slice", at: range.start, multiple });
        }
        check_at_least("codes", self.n, range.end)?;
        check_at_least("the range up to its end", range.end, range.start)?;
        Ok(self.part(range.start, range.end))
    }

    /// The codes of vector `i` in ascending order of subspaces.
    ///
    /// # Panics
    /// When `i >= n`.
    pub fn iter_vector(&self, i: usize) -> impl Iterator<Item = usize> + use<'a> {
        assert!(i < self.n, "vector {i} of {}", self.n);
        let (nbits, vectors) = (self.shape.nbits(), self.layout.vectors());
        self.block(i / vectors)
            .chunks_exact(self.run_len())
            .map(move |run| get_in_run(run, nbits, vectors, i % vectors).into())
    }

    /// Vectors of a block: 64, or those of a smaller page.
    #[inline(always)]
    pub(crate) const fn block_vectors(&self) -> usize {
        self.layout.vectors()
    }

    /// Bytes of a run of a block.
    #[inline(always)]
    pub(crate) const fn run_len(&self) -> usize {
        self.layout.vectors() / 8 * self.shape.nbits() as usize
    }

    /// The runs of block `b`: (m, [`run_len`](Self::run_len)).
    #[inline(always)]
    pub(crate) fn block(&self, b: usize) -> &'a [u8] {
        &self.bytes[self.layout.at(b)..][..self.layout.block_size()]
    }

    /// Blocks of a pool that make up 64 vectors.
    #[inline(always)]
    pub(crate) const fn parts(&self) -> usize {
        BLOCK / self.layout.vectors()
    }

    /// The blocks of 64 vectors from block `first` on, as many as exist and fit in `parts`. Kernels get the
    /// blocks of a chunk this way, so that paged codes are as fast as contiguous codes.
    #[inline(always)]
    pub(crate) fn blocks<'b>(&self, first: usize, parts: &'b mut [&'a [u8]]) -> Blocks<'b> {
        let of_block = self.parts();
        let left = self.n.div_ceil(BLOCK).saturating_sub(first);
        let count = left.min(parts.len() / of_block) * of_block;
        let parts = &mut parts[..count];
        let last = self.n.div_ceil(self.layout.vectors()).saturating_sub(1);
        for (i, part) in parts.iter_mut().enumerate() {
            // The last page is repeated to fill 64 vectors.
            *part = self.block((first * of_block + i).min(last));
        }
        Blocks::new(parts, of_block)
    }

    /// Vectors `start..end`, where `start` is a multiple of the vectors of a block.
    pub(crate) fn part(&self, start: usize, end: usize) -> Self {
        debug_assert!(start.is_multiple_of(self.layout.vectors()) && start <= end && end <= self.n);
        let (shape, n, first) = (self.shape, end - start, start / self.layout.vectors());
        match self.layout.skip(first) {
            Some(layout) => Self { shape, n, bytes: self.bytes, layout },
            None => {
                let bytes = &self.bytes[first * shape.block_size()..][..shape.codes_len(n)];
                Self { shape, n, bytes, layout: self.layout }
            }
        }
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
    let mut packed = CodesMut::new(shape, bytes);
    for (i, vector) in codes.chunks_exact(shape.m()).enumerate() {
        let mut packed = packed.vector(i);
        for (j, &code) in vector.iter().enumerate() {
            let code: u16 = code.into();
            packed.set(j, &[code.into()]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_length_is_an_error() {
        let shape = PqShape::new(8, 4, 6).unwrap();
        assert!(matches!(
            Codes::new(shape, 65, &[0; 192]),
            Err(Error::TooShort { what: "codes", needed: 384, actual: 192 })
        ));
        assert!(Codes::new(shape, usize::MAX, &[0; 192]).is_err());
        let codes = Codes::new(shape, 128, &[0; 384]).unwrap();
        #[allow(clippy::reversed_empty_ranges)] // what a caller may compute
        let reversed = codes.slice(128..64);
        assert!(matches!(reversed, Err(Error::TooShort { needed: 128, actual: 64, .. })));
    }
}
