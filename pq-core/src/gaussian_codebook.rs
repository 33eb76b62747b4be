//! Codebooks of Gaussians: one table for every subspace, head, layer and model.
//!
//! A row in a Hadamard basis (`svd_core::Hadamard`), divided by its norm, has components that look like
//! Gaussians of deviation `1 / sqrt(dim)`, whatever the row was. Its best codebook is therefore known before
//! any data: k-means of Gaussians, made once by `examples/gaussian_codebook.rs` and part of the crate.
//!
//! A centroid is the mean of its cell, so that decoded rows are shorter than rows: `E<x, decoded> = (1 - D)
//! |x|^2` with `D` the mean squared error of a component of unit variance, .32 for 8 components in 8 bits.
//! That is the least error of a row alone. But attention averages rows, of which the errors cancel and the
//! shortening does not. Rows times [`gaussian_gain`] before they are divided by their norms are decoded
//! without this bias.

use half::f16;

use crate::Error;
#[cfg(feature = "alloc")]
use crate::PqShape;

/// For 4 to 8 bits, for subspaces of 1, 2, 4, 8 and 16 components: (ksub, dsub) `f16`, little-endian.
static TABLES: &[u8] = include_bytes!("gaussian_codebook.bin");

/// `1 / (1 - D)` for 4 to 8 bits, for the subspaces of `DSUBS`: means of a million Gaussian vectors.
const GAINS: [[f32; 5]; 5] = [
    [1.0091, 1.1218, 1.5158, 2.4989, 4.6716],
    [1.0026, 1.0600, 1.3383, 2.0635, 3.6754],
    [1.0006, 1.0301, 1.2254, 1.7826, 3.0638],
    [1.0002, 1.0166, 1.1541, 1.6002, 2.6453],
    [1.0001, 1.0078, 1.1073, 1.4709, 2.3456],
];
const DSUBS: [usize; 5] = [1, 2, 4, 8, 16];
const FEWEST_BITS: u32 = 4;
const MOST_BITS: u32 = 8;

/// The centroids of one subspace for Gaussians of unit variance, of any of 1, 2, 4, 8 or 16 components and 4
/// to 8 bits.
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
    let index = index(dsub, nbits)?;
    let components: usize = DSUBS.iter().sum();
    let before = ((1 << nbits) - (1 << FEWEST_BITS)) * components
        + (1 << nbits) * DSUBS[..index].iter().sum::<usize>();
    let elements = TABLES.as_chunks::<2>().0;
    Ok(elements[before..][..dsub << nbits].iter().map(|&x| f16::from_le_bytes(x).to_f32()))
}

/// The factor of rows before [`divide_by_norms`](crate::divide_by_norms) at which the codebook of Gaussians
/// decodes them without bias, `E<x, decoded> = |x|^2`: `1 / (1 - D)`, with `D` the relative error of the
/// codebook. The squared error of a row becomes `D / (1 - D)` of its square, instead of `D`.
///
/// For rows that are averaged with weights, such as values in attention; not for the nearest neighbor.
///
/// # Errors
/// [`Error::NoGaussian`] for other subspaces.
/// # Source
/// Unbiased estimates of inner products from codes: Gao, Long, "RaBitQ", SIGMOD 2024, 3.2.
/// # Examples
/// ```
/// let (fine, coarse) = (pq_core::gaussian_gain(2, 8)?, pq_core::gaussian_gain(8, 8)?);
/// assert!((1.0..1.01).contains(&fine) && (1.4..1.5).contains(&coarse));
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn gaussian_gain(dsub: usize, nbits: u32) -> Result<f32, Error> {
    let index = index(dsub, nbits)?;
    Ok(GAINS[(nbits - FEWEST_BITS) as usize][index])
}

/// The index of `dsub` in `DSUBS`.
fn index(dsub: usize, nbits: u32) -> Result<usize, Error> {
    let index = DSUBS.iter().position(|&other| other == dsub);
    let index = index.filter(|_| (FEWEST_BITS..=MOST_BITS).contains(&nbits));
    index.ok_or(Error::NoGaussian { dsub, nbits })
}

#[cfg(feature = "alloc")]
impl crate::CodebookBuf {
    /// The codebook of rows that are divided by their norms ([`divide_by_norms`](crate::divide_by_norms)) in
    /// a Hadamard basis: the same centroids in every subspace, of any data. Share one among all heads and
    /// layers.
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
