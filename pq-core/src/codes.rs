//! Packed codes: the `m` codes of a vector follow each other in `nbits` bits each, least significant bit first, and a
//! vector starts at a byte. An `nbits`-bit field is below `ksub = 1 << nbits` by construction, so every byte string of
//! the right length is valid and look-ups need no range check.

use crate::error::check_len;
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
        unpack(self.vector(i), self.shape.nbits(), self.shape.m())
    }
}

/// Reads `m` fields of `nbits` bits.
fn unpack(bytes: &[u8], nbits: u32, m: usize) -> impl Iterator<Item = usize> + use<'_> {
    let mut bits = 0_u32; // the lowest `held` bits are yet to be read; held < 8 + 12
    let mut held = 0;
    let mut rest = bytes.iter();
    (0..m).map(move |_| {
        while held < nbits {
            bits |= u32::from(rest.next().copied().unwrap_or(0)) << held;
            held += 8;
        }
        let code = bits & ((1 << nbits) - 1);
        bits >>= nbits;
        held -= nbits;
        code as usize
    })
}

/// Writes one vector's codes; `codes` yields `m` values below `1 << nbits`, `bytes` has `code_size` elements.
pub(crate) fn pack(codes: impl Iterator<Item = usize>, nbits: u32, bytes: &mut [u8]) {
    let mut bits = 0_u32;
    let mut held = 0;
    let mut out = bytes.iter_mut();
    let mut emit = |byte: u32| {
        if let Some(slot) = out.next() {
            *slot = byte as u8;
        }
    };
    for code in codes {
        bits |= (code as u32) << held;
        held += nbits;
        while held >= 8 {
            emit(bits);
            bits >>= 8;
            held -= 8;
        }
    }
    if held > 0 {
        emit(bits);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::vec;
    use std::vec::Vec;

    #[test]
    fn every_width_round_trips() {
        for nbits in 1..=12 {
            for m in [1, 2, 3, 7, 8, 9, 64] {
                let shape = PqShape::new(m, m, nbits).unwrap();
                let codes: Vec<usize> = (0..m).map(|j| (j * 2_654_435_761) % shape.ksub()).collect();
                let mut bytes = vec![0; shape.code_size()];
                pack(codes.iter().copied(), nbits, &mut bytes);
                let view = Codes::new(shape, &bytes).unwrap();
                assert_eq!(view.iter_vector(0).collect::<Vec<_>>(), codes, "m {m} nbits {nbits}");
            }
        }
    }

    #[test]
    fn a_broken_length_is_an_error() {
        let shape = PqShape::new(8, 4, 6).unwrap();
        assert_eq!(shape.code_size(), 3);
        assert!(matches!(Codes::new(shape, &[0; 4]), Err(Error::Length { what: "codes", expected: 3, actual: 4 })));
    }
}
