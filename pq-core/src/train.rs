use alloc::vec::Vec;

use crate::error::{check_finite, check_len};
use crate::kmeans::kmeans;
use crate::{Error, PqShape};

/// How long and from which random start to train.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainOptions {
    /// Most Lloyd iterations per subspace.
    pub iterations: usize,
    /// The same seed gives the same bytes, whatever the number of threads.
    pub seed: u64,
}

/// A trained codebook.
#[derive(Clone, Debug)]
pub struct Trained {
    /// Centroids (m, ksub, dsub), ready for [`Codebook::new`](crate::Codebook::new).
    pub centroids: Vec<f32>,
    /// Sum over the vectors of the squared error, before the last update of the centroids.
    pub error: f64,
}

/// Trains a codebook: k-means in every subspace on its own.
///
/// # Shapes
/// `vectors` (n, dim), n at least 1. With n below ksub the spare centroids repeat.
/// # Errors
/// [`Error::Length`], [`Error::Zero`] for no vectors, [`Error::NotFinite`].
/// # Cost
/// At most `iterations * n * ksub * dim` multiply-adds; one copy of `vectors`. With feature `rayon` the subspaces run in
/// parallel.
/// # Source
/// Jégou, Douze, Schmid, TPAMI 2011; PQCache (arXiv 2407.12820), 3.3.
/// # Examples
/// ```
/// use pq_core::{PqShape, TrainOptions, train};
/// let vectors = [0.0, 0.0, 0.0, 10.0, 10.0, 0.0, 10.0, 10.0]; // the corners of a square
/// let trained = train(PqShape::new(2, 2, 1)?, &vectors, &TrainOptions { iterations: 4, seed: 1 })?;
/// assert_eq!(trained.error, 0.0);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn train(shape: PqShape, vectors: &[f32], options: &TrainOptions) -> Result<Trained, Error> {
    let n = vectors.len() / shape.dim();
    check_len("vectors", vectors.len(), n * shape.dim())?;
    if n == 0 {
        return Err(Error::Zero { what: "number of vectors" });
    }
    check_finite("vectors", vectors)?;
    let train_subspace = |j: usize| {
        let dsub = shape.dsub();
        let points: Vec<f32> =
            vectors.chunks_exact(shape.dim()).flat_map(|x| x[j * dsub..][..dsub].iter().copied()).collect();
        kmeans(&points, dsub, shape.ksub(), options.iterations.max(1), options.seed ^ j as u64)
    };
    #[cfg(feature = "rayon")]
    let subspaces: Vec<_> = {
        use rayon::prelude::*;
        (0..shape.m()).into_par_iter().map(train_subspace).collect()
    };
    #[cfg(not(feature = "rayon"))]
    let subspaces: Vec<_> = (0..shape.m()).map(train_subspace).collect();

    let error = subspaces.iter().map(|(_, error)| error).sum();
    let centroids = subspaces.into_iter().flat_map(|(centroids, _)| centroids).collect();
    Ok(Trained { centroids, error })
}
