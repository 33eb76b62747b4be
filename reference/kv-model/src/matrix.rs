//! Matrices of weights as they are kept in memory.

use std::borrow::Cow;

use half::f16;
use kv_attend::Backend;

use crate::gguf::{DotBlocks, FixedPoint, Layout};

/// A matrix that multiplies vectors from the left, row-major: in single precision, or as the blocks of a GGUF
/// file, which are decoded a few rows at a time.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    n_in: usize,
    n_out: usize,
    numbers: Numbers,
}

#[derive(Clone, Debug, PartialEq)]
enum Numbers {
    F32(Vec<f32>),
    /// Rows of whole blocks.
    Blocks {
        layout: Layout,
        bytes: Vec<u8>,
    },
}

impl Matrix {
    /// A matrix of rows of `n_in` numbers.
    ///
    /// # Panics
    /// When the rows are not whole.
    #[must_use]
    pub fn new(numbers: Vec<f32>, n_in: usize) -> Self {
        let n_out = numbers.len() / n_in;
        assert_eq!(numbers.len(), n_out * n_in, "rows of {n_in}");
        Self { n_in, n_out, numbers: Numbers::F32(numbers) }
    }

    /// A matrix of rows of `n_in` numbers in whole blocks.
    ///
    /// # Errors
    /// What is wrong with the lengths.
    pub(crate) fn of_blocks(layout: Layout, bytes: Vec<u8>, n_in: usize) -> Result<Self, String> {
        let row = layout.bytes(n_in)?;
        let n_out = bytes.len() / row;
        assert_eq!(bytes.len(), n_out * row, "rows of {n_in}");
        Ok(Self { n_in, n_out, numbers: Numbers::Blocks { layout, bytes } })
    }

    /// Length of a row: that of the vectors that it multiplies.
    #[must_use]
    pub const fn n_in(&self) -> usize {
        self.n_in
    }

    /// Number of rows: the length of the products.
    #[must_use]
    pub const fn n_out(&self) -> usize {
        self.n_out
    }

    /// Whether no number is a NaN or an infinity.
    pub(crate) fn is_finite(&self) -> bool {
        const SOME: usize = 1 << 15; // numbers that are decoded at a time
        let some = (SOME / self.n_in).max(1);
        (0..self.n_out).step_by(some).all(|first| {
            let mut rows = vec![0.0; some.min(self.n_out - first) * self.n_in];
            self.rows_into(first, &mut rows);
            rows.iter().all(|x| x.is_finite())
        })
    }

    /// Bytes in memory.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.numbers {
            Numbers::F32(numbers) => size_of_val(numbers.as_slice()),
            Numbers::Blocks { bytes, .. } => bytes.len(),
        }
    }

    /// All numbers (n_out, n_in), if they are kept in single precision.
    #[must_use]
    pub fn as_f32(&self) -> Option<&[f32]> {
        match &self.numbers {
            Numbers::F32(numbers) => Some(numbers),
            Numbers::Blocks { .. } => None,
        }
    }

    /// The rows, if they are kept in blocks of codes.
    #[must_use]
    pub fn as_codes(&self) -> Option<CodedRows<'_>> {
        match &self.numbers {
            Numbers::F32(_) => None,
            Numbers::Blocks { layout, bytes } => {
                let (group, dot) = layout.codes()?;
                Some(CodedRows { group, dot, bytes, row: bytes.len() / self.n_out, n_in: self.n_in })
            }
        }
    }

    /// All numbers (n_out, n_in).
    #[must_use]
    pub fn to_f32(&self) -> Cow<'_, [f32]> {
        match &self.numbers {
            Numbers::F32(numbers) => numbers.into(),
            Numbers::Blocks { .. } => {
                let mut numbers = vec![0.0; self.n_out * self.n_in];
                self.rows_into(0, &mut numbers);
                numbers.into()
            }
        }
    }

    /// All numbers (n_out, n_in), to change them: from now on they are kept in single precision.
    pub fn f32_mut(&mut self) -> &mut [f32] {
        if let Numbers::Blocks { .. } = self.numbers {
            self.numbers = Numbers::F32(self.to_f32().into_owned());
        }
        match &mut self.numbers {
            Numbers::F32(numbers) => numbers,
            Numbers::Blocks { .. } => &mut [], // not after the lines above
        }
    }

    /// Rows from the `first` on, as many as `out` has.
    ///
    /// # Panics
    /// When there are not so many.
    pub fn rows_into(&self, first: usize, out: &mut [f32]) {
        match &self.numbers {
            Numbers::F32(numbers) => out.copy_from_slice(&numbers[first * self.n_in..][..out.len()]),
            Numbers::Blocks { layout, bytes } => {
                let row = bytes.len() / self.n_out;
                layout.decode(&bytes[first * row..][..out.len() / self.n_in * row], out);
            }
        }
    }
}

/// The rows of a matrix in blocks of codes.
#[derive(Clone, Copy, Debug)]
pub struct CodedRows<'a> {
    group: usize, // codes of a scale
    dot: DotBlocks,
    bytes: &'a [u8],
    row: usize, // bytes of a row
    n_in: usize,
}

impl CodedRows<'_> {
    /// A vector in the form in which it is multiplied by these rows.
    ///
    /// # Panics
    /// When the rows are not as long.
    #[must_use]
    pub fn fixed_point(&self, x: &[f32]) -> FixedPoint {
        assert_eq!(x.len(), self.n_in);
        FixedPoint::new(x, self.group)
    }

    /// `out[i] = rows[first + i] . x`, of a vector that [`Self::fixed_point`] has made: by groups of
    /// neighbouring codes that share a scale and an offset,
    /// `sum over groups of scale * (codes . x) + offset * sum(x)`, in `f32` in an order that depends on the
    /// CPU.
    ///
    /// # Cost
    /// One pass over the blocks, whose codes stay in registers. Floor: their bytes from memory.
    ///
    /// # Panics
    /// When there are not so many rows, or the vector is for rows of another kind.
    pub fn dot(&self, first: usize, x: &FixedPoint, out: &mut [f32]) {
        assert_eq!((x.len(), x.group()), (self.n_in, self.group));
        (self.dot)(Backend::detect(), &self.bytes[first * self.row..][..out.len() * self.row], x, out);
    }
}

/// Matrices in blocks, for tests of what is computed with them.
#[doc(hidden)]
impl Matrix {
    /// The matrix in blocks of Q8_0.
    ///
    /// # Errors
    /// When rows are no whole blocks.
    pub fn to_q8_0(&self) -> Result<Self, String> {
        fn block(x: &[f32]) -> impl Iterator<Item = u8> {
            let scale = f16::from_f32(x.iter().fold(0.0_f32, |most, x| most.max(x.abs())) / 127.0);
            let inverse = if scale > f16::ZERO { 1.0 / scale.to_f32() } else { 0.0 };
            scale.to_le_bytes().into_iter().chain(x.iter().map(move |x| (x * inverse).round() as i8 as u8))
        }
        let bytes = self.to_f32().chunks(32).flat_map(block).collect();
        Self::of_blocks(Layout::of(8)?, bytes, self.n_in)
    }

    /// A matrix of every type that stays in its blocks, of pseudo-random rows that are not large.
    #[must_use]
    pub fn examples(n_out: usize, n_in: usize) -> Vec<Self> {
        const KINDS: [u32; 14] = [1, 2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 30, 39];
        let example = |kind: u32| {
            let layout = Layout::of(kind).ok()?;
            let mut state = kind;
            let mut next = || {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 24) as u8 & 0xbf // no exponent is large, wherever it is
            };
            let bytes = (0..n_out * layout.bytes(n_in).ok()?).map(|_| next()).collect();
            Self::of_blocks(layout, bytes, n_in).ok()
        };
        KINDS.into_iter().filter_map(example).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_their_numbers() {
        let all = Matrix::examples(7, 512);
        assert_eq!(all.len(), 14);
        for blocks in all {
            let floats = Matrix::new(blocks.to_f32().into_owned(), 512);
            assert!(blocks.is_finite() && floats.is_finite());
            assert_eq!(
                (blocks.n_out(), blocks.as_f32(), floats.as_f32().map(<[f32]>::len)),
                (7, None, Some(7 * 512))
            );
            let [mut a, mut b] = [[0.0; 1024]; 2];
            blocks.rows_into(5, &mut a);
            floats.rows_into(5, &mut b);
            assert_eq!(a, b);
            let mut changed = blocks.clone();
            changed.f32_mut()[0] = 0.123;
            assert!(
                changed != floats && changed.bytes() == floats.bytes() && blocks.bytes() < floats.bytes()
            );
            changed.f32_mut()[0] = f32::NAN;
            assert!(!changed.is_finite());
        }
    }

    /// A vector that is exact in fixed point: integers times a power of two, the largest of which is 32767 in
    /// each group.
    fn exact_in_fixed_point(len: usize) -> Vec<f32> {
        let x = |i: usize| match i % 16 {
            3 => 32767.0,
            _ => ((i * 7919) % 65535) as f32 - 32767.0,
        };
        (0..len).map(|i| x(i) * 2.0_f32.powi(i as i32 / 32 % 7 - 18)).collect()
    }

    /// Every type on every backend: rows of one block and of several, and of lengths that no number of
    /// registers divides.
    #[test]
    fn products_on_all_backends_follow_the_formula() {
        let q8_0 = |n_in| Matrix::new(exact_in_fixed_point(5 * n_in), n_in).to_q8_0().unwrap();
        let large = [256, 768, 1024].into_iter().flat_map(|n_in| Matrix::examples(5, n_in));
        for matrix in large.chain([32, 64, 96, 160].map(q8_0)) {
            let (n_in, numbers) = (matrix.n_in(), matrix.to_f32());
            let Some(rows) = matrix.as_codes() else { continue };
            let x = exact_in_fixed_point(n_in);
            for backend in Backend::ALL.into_iter().filter(|backend| backend.is_available()) {
                let mut out = [f32::NAN; 5];
                (rows.dot)(backend, rows.bytes, &rows.fixed_point(&x), &mut out);
                for (row, out) in numbers.chunks(n_in).zip(out) {
                    let terms = || row.iter().zip(&x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                    let (exact, sum): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
                    assert!(
                        (f64::from(out) - exact).abs() <= 1e-6 * sum,
                        "{backend:?}, rows of {n_in} in {} bytes",
                        rows.row
                    );
                }
            }
        }
    }
}
