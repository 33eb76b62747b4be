//! Packed codes: the `m` codes of a vector follow each other in `nbits` bits each (see `pack`), and a vector starts at a
//! byte. An `nbits`-bit field is below `ksub = 1 << nbits` by construction, so every byte string of
//! the right length is valid and look-ups need no range check.

use crate::error::check_len;
use crate::pack::unpack_bits;
use crate::{Error, PqShape};

/// The packed codes of `n` vectors, borrowed.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    shape: PqShape,
    n: usize,
    bytes: &'a [u8], // (n, code_size)
}

impl<'a> Codes<'a> {
    /// Takes as many vectors as `bytes` holds.
    ///
    /// # Errors
    /// [`Error::Length`] when `bytes` is no multiple of `code_size`.
    pub fn new(shape: PqShape, bytes: &'a [u8]) -> Result<Self, Error> {
        let n = bytes.len() / shape.code_size();
        check_len("codes", bytes.len(), n * shape.code_size())?;
        Ok(Self { shape, n, bytes })
    }

    /// The shape they were made for.
    #[must_use]
    pub const fn shape(&self) -> PqShape {
        self.shape
    }

    /// Number of vectors.
    #[must_use]
    pub const fn n(&self) -> usize {
        self.n
    }

    /// The packed codes of vector `i`: (code_size,).
    ///
    /// # Panics
    /// When `i >= n`.
    #[must_use]
    pub fn vector(&self, i: usize) -> &'a [u8] {
        let size = self.shape.code_size();
        &self.bytes[i * size..][..size]
    }

    /// The codes of vector `i`, subspace after subspace.
    ///
    /// # Panics
    /// When `i >= n`.
    pub fn iter_vector(&self, i: usize) -> impl Iterator<Item = usize> + use<'a> {
        unpack_bits(self.vector(i), self.shape.nbits(), self.shape.m())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_broken_length_is_an_error() {
        let shape = PqShape::new(8, 4, 6).unwrap();
        assert_eq!(shape.code_size(), 3);
        assert!(matches!(
            Codes::new(shape, &[0; 4]),
            Err(Error::Length { what: "codes", expected: 3, actual: 4 })
        ));
    }
}
