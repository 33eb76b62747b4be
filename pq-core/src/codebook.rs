use crate::error::{check_finite, check_len};
use crate::{Error, PqShape};

/// The centroids of every subspace, borrowed: (m, ksub, dsub), finite.
#[derive(Clone, Copy, Debug)]
pub struct Codebook<'a> {
    shape: PqShape,
    centroids: &'a [f32], // (m, ksub, dsub), every element finite
}

impl<'a> Codebook<'a> {
    /// Checks `centroids`, which may come from outside.
    ///
    /// # Errors
    /// [`Error::Length`] or [`Error::NotFinite`].
    pub fn new(shape: PqShape, centroids: &'a [f32]) -> Result<Self, Error> {
        check_len("centroids", centroids.len(), shape.codebook_len())?;
        check_finite("centroids", centroids)?;
        Ok(Self { shape, centroids })
    }

    /// The shape it was made for.
    #[must_use]
    pub const fn shape(&self) -> PqShape {
        self.shape
    }

    /// All centroids of subspace `j`: (ksub, dsub).
    ///
    /// # Panics
    /// When `j >= m`.
    #[must_use]
    pub fn subspace(&self, j: usize) -> &'a [f32] {
        let len = self.shape.ksub() * self.shape.dsub();
        &self.centroids[j * len..][..len]
    }

    /// Centroid `c` of subspace `j`: (dsub,).
    ///
    /// # Panics
    /// When `j >= m` or `c >= ksub`.
    #[must_use]
    pub fn centroid(&self, j: usize, c: usize) -> &'a [f32] {
        let dsub = self.shape.dsub();
        &self.subspace(j)[c * dsub..][..dsub]
    }
}
