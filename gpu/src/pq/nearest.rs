//! Shared by the kernels that find nearest centroids: training and encoding.

use pq_core::PqShape;

use crate::{Error, VectorElement};

/// Threads of a block, and points of a tile: `THREADS` and `TILE` of the kernels.
pub(super) const TILE: usize = 256;

/// Maximum shared memory of a block of compute capability 8.0. A device with less rejects the kernel.
const MOST_SHARED: usize = 163 << 10;

/// Bytes of `NearestShared` of the kernels.
pub(super) const fn shared_bytes(quantizer: PqShape) -> usize {
    let (dsub, centroids) = (quantizer.dsub(), 64);
    let step = if dsub < 32 { dsub } else { 32 };
    dsub.saturating_mul(4 * (TILE + 4))
        .saturating_add(4 * (step * (centroids + 4) + centroids) + (2 + 4) * TILE)
}

/// The preprocessor symbols for `shared` bytes of shared memory.
pub(super) fn defines(
    quantizer: PqShape,
    element: VectorElement,
    shared: usize,
) -> Result<[(&'static str, usize); 6], Error> {
    if shared > MOST_SHARED {
        let operation = format!("{quantizer:?}");
        return Err(Error::Unsupported {
            operation,
            supported: "centroids and points that fit 163 KiB together",
        });
    }
    Ok([
        ("M", quantizer.m()),
        ("DSUB", quantizer.dsub()),
        ("KSUB", quantizer.ksub()),
        ("NBITS", quantizer.nbits() as usize),
        ("ELEMENT", element as usize),
        ("SHARED_BYTES", shared),
    ])
}
