//! Lookup tables of 8- or 16-bit integers, whose sums are exact.

use super::Lut;
use crate::error::check_len;
use crate::simd::{Kernel, Run, row_len};
use crate::{Backend, Error, PqShape};

/// Width of the entries of a [`QuantizedLut`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LutPrecision {
    /// One byte per entry: the fastest scan, meant for token selection.
    U8,
    /// Two bytes per entry: the scan takes twice as long, and the scores are accurate enough for attention
    /// weights.
    U16,
}

impl LutPrecision {
    pub(crate) const fn planes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::U16 => 2,
        }
    }
}

/// A lookup table of integers with one scale and one offset per query, borrowed from the caller's storage.
///
/// Entry `c` of row `j` stands for `min_j + scale * integer`, so a score is `offset + scale * sum of
/// integers` with `offset = sum of min_j`. Integer sums are the same on every backend.
///
/// # Source
/// André, Kermarrec, Le Scouarnec, "Quick ADC", ICMR 2017 (one scale per query); faiss's FastScan.
#[derive(Clone, Copy, Debug)]
pub struct QuantizedLut<'a> {
    shape: PqShape,
    precision: LutPrecision,
    bytes: &'a [u8], // (planes, m, row_len): low bytes, then high bytes
    scale: f32,
    offset: f32,
}

impl<'a> QuantizedLut<'a> {
    /// The largest number of subspaces whose sum of bytes fits in 16 bits.
    pub const MAX_M: usize = 257;

    /// Quantizes `lut` into `storage` ([`quantized_lut_len`](PqShape::quantized_lut_len) bytes).
    ///
    /// # Errors
    /// [`Error::Length`]; [`Error::TooManySubspaces`] beyond [`MAX_M`](Self::MAX_M); [`Error::NotFinite`];
    /// [`Error::TooLarge`] when the table's range exceeds `f32::MAX`.
    /// # Cost
    /// Two passes over the table.
    pub fn new(lut: &Lut<'_>, precision: LutPrecision, storage: &'a mut [u8]) -> Result<Self, Error> {
        Self::new_with(Backend::detect(), lut, precision, storage)
    }

    /// [`new`](Self::new) on a given backend.
    ///
    /// # Errors
    /// As [`new`](Self::new), and [`Error::BackendUnavailable`].
    pub fn new_with(
        backend: Backend,
        lut: &Lut<'_>,
        precision: LutPrecision,
        storage: &'a mut [u8],
    ) -> Result<Self, Error> {
        backend.check()?;
        let shape = lut.shape();
        if shape.m() > Self::MAX_M {
            return Err(Error::TooManySubspaces { m: shape.m(), max: Self::MAX_M });
        }
        check_len("quantized lut", storage.len(), shape.quantized_lut_len(precision))?;
        let (scale, offset) = backend.run(Quantize { lut, precision, storage });
        if !scale.is_finite() || !offset.is_finite() {
            crate::error::check_finite("lut", lut.values)?;
            return Err(Error::TooLarge);
        }
        Ok(Self { shape, precision, bytes: storage, scale, offset })
    }

    /// The shape of the quantizer.
    #[must_use]
    pub const fn shape(&self) -> PqShape {
        self.shape
    }

    /// Width of the entries.
    #[must_use]
    pub const fn precision(&self) -> LutPrecision {
        self.precision
    }

    /// Score units per integer step.
    #[must_use]
    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// The score for an integer sum of zero.
    #[must_use]
    pub const fn offset(&self) -> f32 {
        self.offset
    }

    /// The largest difference between a score and that of the `f32` table, up to the rounding of one `f32`
    /// multiplication and addition: half a step per subspace, plus 4 % of that for the rounding of the
    /// entries.
    #[must_use]
    pub fn error_bound(&self) -> f32 {
        0.52 * self.shape.m() as f32 * self.scale
    }

    /// The bytes of plane `plane` of row `j`: (row_len,).
    pub(crate) fn row(&self, plane: usize, j: usize) -> &'a [u8] {
        let len = row_len(self.shape.ksub());
        &self.bytes[(plane * self.shape.m() + j) * len..][..len]
    }
}

impl PqShape {
    /// Bytes of the storage of a [`QuantizedLut`].
    #[must_use]
    pub const fn quantized_lut_len(&self, precision: LutPrecision) -> usize {
        precision.planes() * self.m() * row_len(self.ksub())
    }
}

struct Quantize<'a, 'b> {
    lut: &'a Lut<'a>,
    precision: LutPrecision,
    storage: &'b mut [u8],
}

impl Kernel for Quantize<'_, '_> {
    type Output = (f32, f32);

    /// Portable code that the compiler vectorizes for each instruction set. The result is fully determined:
    /// every backend writes the same bytes.
    #[inline(always)]
    fn scalar(self) -> (f32, f32) {
        const TO_INTEGER: f32 = 8_388_608.0; // 2^23: adding it rounds to nearest, ties to even, into the low bits
        let levels = match self.precision {
            LutPrecision::U8 => 255.0,
            LutPrecision::U16 => 65_535.0,
        };
        let (mut offset, mut range) = (0.0_f32, 0.0_f32);
        for row in self.lut.rows() {
            let (min, max) = extremes(row);
            offset += min;
            range = if max - min <= range { range } else { max - min }; // propagates NaN
        }
        // The reciprocal of a smaller scale may be infinite. A range of 0 has a scale of 0.
        let least = if range > 0.0 { f32::MIN_POSITIVE } else { 0.0 };
        let scale = if range / levels < least { least } else { range / levels }; // propagates NaN
        let per_score = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        let row_len = row_len(self.lut.shape().ksub());
        let (low, high) = self.storage.split_at_mut(self.lut.shape().m() * row_len);
        low.fill(0);
        high.fill(0);
        for (j, row) in self.lut.rows().enumerate() {
            let (min, _) = extremes(row);
            let integer = |x: f32| {
                let steps = (x - min) * per_score;
                // Only rounding at the top of the widest row can exceed `levels`.
                let steps = if steps < levels { steps } else { levels };
                (steps + TO_INTEGER).to_bits() as u16
            };
            for (byte, &x) in low[j * row_len..][..row_len].iter_mut().zip(row) {
                *byte = integer(x) as u8;
            }
            if self.precision == LutPrecision::U16 {
                for (byte, &x) in high[j * row_len..][..row_len].iter_mut().zip(row) {
                    *byte = (integer(x) >> 8) as u8;
                }
            }
        }
        (scale, offset)
    }
}

/// Minimum and maximum, in sixteen lanes so that they vectorize; both are NaN if an element is not finite.
#[inline(always)]
fn extremes(row: &[f32]) -> (f32, f32) {
    let mut min = [f32::INFINITY; 16];
    let mut max = [f32::NEG_INFINITY; 16];
    let mut zero = [0.0_f32; 16]; // stays zero as long as all elements are finite
    let (chunks, tail) = row.as_chunks::<16>();
    for chunk in chunks {
        for lane in 0..16 {
            let x = chunk[lane];
            min[lane] = if x < min[lane] { x } else { min[lane] };
            max[lane] = if x > max[lane] { x } else { max[lane] };
            zero[lane] += x * 0.0;
        }
    }
    for (lane, &x) in tail.iter().enumerate() {
        min[lane] = if x < min[lane] { x } else { min[lane] };
        max[lane] = if x > max[lane] { x } else { max[lane] };
        zero[lane] += x * 0.0;
    }
    let zero: f32 = zero.into_iter().sum();
    (
        zero + min.into_iter().fold(f32::INFINITY, f32::min),
        zero + max.into_iter().fold(f32::NEG_INFINITY, f32::max),
    )
}
