//! The sizes of a quantizer, checked once so that no later product of them overflows.

use crate::Error;
use crate::simd::BLOCK;

/// A validated product quantizer shape: `m` subspaces of `dsub = dim / m` components, `nbits` bits per code.
///
/// # Examples
/// ```
/// let shape = pq_core::PqShape::new(128, 64, 8)?;
/// assert_eq!((shape.dsub(), shape.ksub(), shape.codes_len(1000)), (2, 256, 1024 * 64));
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PqShape {
    dim: usize,
    m: usize,
    nbits: u32, // 1..=12
}

impl PqShape {
    /// A checked shape.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::DimNotDivisible`], [`Error::NbitsOutOfRange`], or [`Error::TooLarge`] for
    /// `m` above `u32::MAX`, and when the length of a codebook's storage or of a table may overflow: for `dim`
    /// of `usize::MAX >> 13` or more.
    pub const fn new(dim: usize, m: usize, nbits: u32) -> Result<Self, Error> {
        if dim == 0 {
            return Err(Error::Zero { what: "dim" });
        }
        if m == 0 {
            return Err(Error::Zero { what: "m" });
        }
        if !dim.is_multiple_of(m) {
            return Err(Error::DimNotDivisible { dim, m });
        }
        if nbits == 0 || nbits > 12 {
            return Err(Error::NbitsOutOfRange { nbits });
        }
        // This bounds (dim << nbits) + (m << nbits), two bytes for each of m << nbits entries, and the bytes
        // of a block.
        if dim.checked_mul(2 << 12).is_none() || m as u64 > u32::MAX as u64 {
            return Err(Error::TooLarge);
        }
        Ok(Self { dim, m, nbits })
    }

    /// Components of a vector.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Subspaces, and codes per vector.
    #[must_use]
    pub const fn m(&self) -> usize {
        self.m
    }

    /// Bits per code.
    #[must_use]
    pub const fn nbits(&self) -> u32 {
        self.nbits
    }

    /// Components per subspace.
    #[must_use]
    pub const fn dsub(&self) -> usize {
        self.dim / self.m
    }

    /// Centroids per subspace.
    #[must_use]
    pub const fn ksub(&self) -> usize {
        1 << self.nbits
    }

    /// Bytes of a packed block of [`BLOCK`] vectors: `8 * m * nbits`.
    #[must_use]
    pub const fn block_size(&self) -> usize {
        BLOCK / 8 * self.m * self.nbits as usize
    }

    /// Bytes of the packed codes of `n` vectors, rounded up to whole blocks of [`BLOCK`] vectors.
    #[must_use]
    pub const fn codes_len(&self, n: usize) -> usize {
        n.div_ceil(BLOCK).saturating_mul(self.block_size())
    }

    /// Bytes of a page of `page_tokens` codes: 16 or 32, or whole blocks of [`BLOCK`].
    #[must_use]
    pub const fn page_len(&self, page_tokens: usize) -> usize {
        match page_tokens {
            16 | 32 => page_tokens / 8 * self.m * self.nbits as usize,
            _ => self.codes_len(page_tokens),
        }
    }

    /// Elements of a codebook (m, ksub, dsub).
    #[must_use]
    pub const fn codebook_len(&self) -> usize {
        self.ksub() * self.dim
    }

    /// Elements of the storage of a [`Codebook`](crate::Codebook).
    #[must_use]
    pub const fn codebook_storage_len(&self) -> usize {
        self.codebook_len() + self.lut_len()
    }

    /// Elements of a lookup table (m, ksub).
    #[must_use]
    pub const fn lut_len(&self) -> usize {
        self.m * self.ksub()
    }
}

#[cfg(feature = "alloc")]
impl PqShape {
    /// Writes 16 bytes.
    pub(crate) fn write(self, writer: &mut kv_attend::owner::Writer) {
        writer.usize(self.dim());
        writer.u32(self.m() as u32);
        writer.u32(self.nbits());
    }

    pub(crate) fn read(reader: &mut kv_attend::owner::Reader<'_>) -> Result<Self, Error> {
        let (dim, m, nbits) = (reader.usize()?, reader.u32()?, reader.u32()?);
        Self::new(dim, m as usize, nbits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_shapes_are_errors() {
        assert_eq!(PqShape::new(0, 1, 8), Err(Error::Zero { what: "dim" }));
        assert_eq!(PqShape::new(8, 0, 8), Err(Error::Zero { what: "m" }));
        assert_eq!(PqShape::new(10, 4, 8), Err(Error::DimNotDivisible { dim: 10, m: 4 }));
        assert_eq!(PqShape::new(8, 4, 0), Err(Error::NbitsOutOfRange { nbits: 0 }));
        assert_eq!(PqShape::new(8, 4, 13), Err(Error::NbitsOutOfRange { nbits: 13 }));
        assert_eq!(PqShape::new(usize::MAX, 1, 8), Err(Error::TooLarge));
        assert_eq!(PqShape::new(1 << (usize::BITS - 13), 1, 1), Err(Error::TooLarge));
        if let Ok(m) = usize::try_from(1_u64 << 32) {
            assert_eq!(PqShape::new(m, m, 1), Err(Error::TooLarge));
        }
    }
}
