//! Codebooks of Gaussians: one table for every subspace, head, layer and model.
//!
//! A row in a Hadamard basis (`svd_core::Hadamard`), divided by its norm, has components that look like
//! Gaussians of deviation `1 / sqrt(dim)`, whatever the row was. Its best codebook is therefore known before
//! any data: k-means of Gaussians, made once by `examples/gaussian_codebook.rs` and part of the crate.

use half::f16;

use crate::Error;
#[cfg(feature = "alloc")]
use crate::PqShape;

/// For 4 to 8 bits, for subspaces of 1, 2, 4, 8 and 16 components: (ksub, dsub) `f16`, little-endian.
static TABLES: &[u8] = include_bytes!("gaussian_codebook.bin");

const DSUBS: [usize; 5] = [1, 2, 4, 8, 16];
const FEWEST_BITS: u32 = 4;
const MOST_BITS: u32 = 8;

/// The centroids of one subspace for Gaussians of unit variance, of any of 1, 2, 4, 8 or 16 components and 4 to
/// 8 bits.
///
/// # Shapes
/// Yields (ksub, dsub) elements.
/// # Errors
/// [`Error::NoGaussian`] for other subspaces.
/// # Source
/// Linde, Buzo, Gray, "An Algorithm for Vector Quantizer Design", IEEE Trans. Comm. 1980, for Gaussians.
/// # Examples
/// ```
/// let levels: Vec<f32> = pq_core::gaussian_centroids(1, 4)?.collect();
/// let largest = levels.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
/// assert!(levels.len() == 16 && (2.4..3.0).contains(&largest)); // Max's table: 2.733
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn gaussian_centroids(
    dsub: usize,
    nbits: u32,
) -> Result<impl ExactSizeIterator<Item = f32> + Clone, Error> {
    let none = Error::NoGaussian { dsub, nbits };
    let index = DSUBS.iter().position(|&other| other == dsub).ok_or(none)?;
    if !(FEWEST_BITS..=MOST_BITS).contains(&nbits) {
        return Err(none);
    }
    let components: usize = DSUBS.iter().sum();
    let before = ((1 << nbits) - (1 << FEWEST_BITS)) * components
        + (1 << nbits) * DSUBS[..index].iter().sum::<usize>();
    let elements = TABLES.as_chunks::<2>().0;
    Ok(elements[before..][..dsub << nbits].iter().map(|&x| f16::from_le_bytes(x).to_f32()))
}

#[cfg(feature = "alloc")]
impl crate::CodebookBuf {
    /// The codebook of rows that are divided by their norms ([`divide_by_norms`](crate::divide_by_norms)) in a
    /// Hadamard basis: the same centroids in every subspace, of any data. Share one among all heads and layers.
    ///
    /// # Errors
    /// [`Error::NoGaussian`] unless subspaces have 1, 2, 4, 8 or 16 components and codes 4 to 8 bits.
    /// # Examples
    /// ```
    /// use pq_core::{CodebookBuf, PqShape};
    /// let book = CodebookBuf::gaussian(PqShape::new(128, 32, 8)?)?;
    /// assert!(book.view().centroid(0, 7).eq(book.view().centroid(31, 7)));
    /// # Ok::<(), pq_core::Error>(())
    /// ```
    pub fn gaussian(shape: PqShape) -> Result<Self, Error> {
        let scale = 1.0 / libm::sqrtf(shape.dim() as f32);
        let table = gaussian_centroids(shape.dsub(), shape.nbits())?.map(|x| x * scale);
        let centroids: alloc::vec::Vec<f32> = (0..shape.m()).flat_map(|_| table.clone()).collect();
        Self::new(shape, &centroids)
    }
}
