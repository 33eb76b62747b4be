//! What the caches of all sequences share of a head.

use std::sync::Arc;

use kv_attend::owner::{Reader, Writer};
use pq_core::sq::HeadTransform;
use svd_core::Hadamard;

use crate::Error;

const MAGIC: [u8; 4] = *b"SQHD";
const VERSION: u32 = 1;

/// The transforms of a head's keys and values at some number of bits: [`Basis::head`](super::Basis::head).
#[derive(Clone, Debug)]
pub struct Head {
    transform: Arc<HeadTransform>,
    hadamard: Hadamard,   // of the values
    value_mean: Vec<f32>, // (dim of the values,)
    id: u64,              // of the mean
}

impl Head {
    pub(super) fn new(transform: HeadTransform, value_mean: &[f32]) -> Result<Arc<Self>, Error> {
        let hadamard = Hadamard::new(transform.values().dim())?;
        // FNV-1a, 32 bits at a time.
        let id = value_mean.iter().fold(0xcbf2_9ce4_8422_2325, |id: u64, x| {
            (id ^ u64::from(x.to_bits())).wrapping_mul(0x100_0000_01b3)
        });
        Ok(Arc::new(Self { transform: Arc::new(transform), hadamard, value_mean: value_mean.to_vec(), id }))
    }

    /// The transform of the keys, and the shapes of the codes.
    #[must_use]
    pub const fn transform(&self) -> &Arc<HeadTransform> {
        &self.transform
    }

    /// The mean of the values: (dim of the values,).
    #[must_use]
    pub fn value_mean(&self) -> &[f32] {
        &self.value_mean
    }

    /// Identifies the mean of the values in saved caches; the transform has an id of its own.
    pub(super) const fn id(&self) -> u64 {
        self.id
    }

    /// Moves values (n, dim) to the basis of the codes.
    pub(super) fn forward(&self, values: &mut [f32]) -> Result<(), Error> {
        for row in values.chunks_exact_mut(self.value_mean.len()) {
            row.iter_mut().zip(&self.value_mean).for_each(|(x, mean)| *x -= mean);
        }
        Ok(self.hadamard.forward(values)?)
    }

    /// Moves a sum of coded values back, whose weights add up to `weight`.
    pub(super) fn inverse(&self, weight: f32, row: &mut [f32]) -> Result<(), Error> {
        self.hadamard.inverse(row)?;
        row.iter_mut().zip(&self.value_mean).for_each(|(x, mean)| *x += weight * mean);
        Ok(())
    }

    /// Bytes of the transforms.
    #[must_use]
    pub fn size(&self) -> usize {
        self.transform.size() + size_of_val(&self.value_mean[..]) + size_of::<Hadamard>()
    }

    /// The head as bytes, with a checksum, for [`from_bytes`](Self::from_bytes): caches that were saved under
    /// it can be restored under what is read.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut writer = Writer::new(MAGIC, VERSION);
        let transform = self.transform.to_bytes();
        writer.usize(transform.len());
        writer.bytes(&transform);
        writer.elements(self.value_mean.iter().copied());
        writer.finish_checked()
    }

    /// Reads what [`to_bytes`](Self::to_bytes) wrote.
    ///
    /// # Errors
    /// Those of [`HeadTransform::from_bytes`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Arc<Self>, Error> {
        let mut reader = Reader::new("a head of scalar codes", MAGIC, VERSION, bytes)?;
        let len = reader.usize()?;
        let transform = HeadTransform::from_bytes(reader.bytes(len)?)?;
        let value_mean = reader.elements(transform.values().dim())?;
        reader.finish()?;
        check_finite("mean of the values", &value_mean)?;
        Self::new(transform, &value_mean)
    }
}

pub(super) fn check_finite(what: &'static str, values: &[f32]) -> Result<(), Error> {
    match values.iter().position(|x| !x.is_finite()) {
        None => Ok(()),
        Some(index) => Err(pq_core::Error::NotFinite { what, index }.into()),
    }
}
