//! The transform of a head's values: without their mean, in units of a scale, in a Hadamard basis.

use pq_core::is_norm_scale;
use svd_core::Hadamard;

use super::head::check_finite;
use crate::Error;

/// Between the values of an engine and those that codes hold.
#[derive(Debug)]
pub(super) struct ValueTransform {
    hadamard: Hadamard,
    mean: Vec<f32>, // (dim of the values,)
    scale: f32,     // a power of two whose reciprocal is normal, so that products are exact
}

impl ValueTransform {
    /// # Errors
    /// [`pq_core::Error::NotFinite`]; [`Error::ValueScale`]; those of [`Hadamard::new`].
    pub fn new(mean: &[f32], scale: f32) -> Result<Self, Error> {
        check_finite("mean of the values", mean)?;
        if !is_norm_scale(scale) {
            return Err(Error::ValueScale { scale });
        }
        Ok(Self { hadamard: Hadamard::new(mean.len())?, mean: mean.to_vec(), scale })
    }

    pub fn mean(&self) -> &[f32] {
        &self.mean
    }

    pub const fn scale(&self) -> f32 {
        self.scale
    }

    /// Identifies the transform in saved caches: FNV-1a, 32 bits at a time.
    pub fn id(&self) -> u64 {
        self.mean.iter().chain([&self.scale]).fold(0xcbf2_9ce4_8422_2325, |id: u64, x| {
            (id ^ u64::from(x.to_bits())).wrapping_mul(0x100_0000_01b3)
        })
    }

    /// Moves values (n, dim) to the basis of the codes.
    pub fn forward(&self, values: &mut [f32]) -> Result<(), Error> {
        let per_scale = self.scale.recip();
        for row in values.chunks_exact_mut(self.mean.len()) {
            row.iter_mut().zip(&self.mean).for_each(|(x, mean)| *x = *x * per_scale - mean * per_scale);
        }
        Ok(self.hadamard.forward(values)?)
    }

    /// Moves a sum of coded values back, whose weights add up to `weight`.
    pub fn inverse(&self, weight: f32, row: &mut [f32]) -> Result<(), Error> {
        self.hadamard.inverse(row)?;
        row.iter_mut().zip(&self.mean).for_each(|(x, mean)| *x = *x * self.scale + weight * mean);
        Ok(())
    }

    /// Bytes of the transform.
    pub fn size(&self) -> usize {
        size_of_val(self) + size_of_val(&self.mean[..])
    }
}
