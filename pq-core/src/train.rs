//! Training: k-means in every subspace of every set, and the assembly of codebooks and codes.

use alloc::vec;
use alloc::vec::Vec;

use kv_attend::{AnyRows, for_any_rows};

use crate::assign::Vectors;
use crate::error::{check_finite, check_len, count_rows};
use crate::kmeans::{Clusters, Limits, Points};
use crate::rng::SplitMix64;
use crate::{Backend, Element, Error, PqShape, Rows};

/// What the first iteration of k-means assigns vectors to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Start<'a> {
    /// Distinct random vectors.
    #[default]
    Random,
    /// Random vectors that lie far apart (k-means++). It costs about one more iteration, and hardly lowers
    /// the error on keys.
    PlusPlus,
    /// Given centroids (m, ksub, dsub): a warm start from another prompt or layer, or a refresh.
    From(&'a [f32]),
}

/// Parameters of [`train`] and [`train_batch`].
#[derive(Clone, Copy)]
pub struct TrainOptions<'a> {
    /// Maximum number of Lloyd iterations per subspace; 0 counts as 1.
    /// [`ClusteringCost`](crate::ClusteringCost) gives the number that overlaps with the prefill.
    pub iterations: usize,
    /// Training ends when an iteration lowers the error by no more than this fraction of it; with 0, when the
    /// error stops falling. Finite and at least 0. Centroids without points are relocated first.
    pub tolerance: f64,
    /// Where Lloyd's iterations start.
    pub start: Start<'a>,
    /// Trains on at most this many of the vectors, drawn at random.
    pub max_vectors: Option<usize>,
    /// A deadline, polled before every iteration but the first, from any thread: `true` ends the training of
    /// that subspace. Results then depend on the speed of the machine.
    pub time_is_up: Option<&'a (dyn Fn() -> bool + Sync)>,
    /// Also assigns all vectors to the final centroids and returns their packed codes, which is cheaper than
    /// encoding them later.
    pub encode: bool,
    /// The same seed gives the same bytes, whatever the number of threads.
    pub seed: u64,
}

impl Default for TrainOptions<'_> {
    /// 25 iterations from random vectors, on all vectors, without codes.
    fn default() -> Self {
        Self {
            iterations: 25,
            tolerance: 0.0,
            start: Start::Random,
            max_vectors: None,
            time_is_up: None,
            encode: false,
            seed: 0,
        }
    }
}

/// The centroids that training found, how well they fit, and, if requested, the codes of the vectors.
#[derive(Clone, Debug)]
pub struct Trained {
    /// Centroids (m, ksub, dsub), ready for [`Codebook::new`](crate::Codebook::new).
    pub centroids: Vec<f32>,
    /// Summed squared error: over all vectors with [`TrainOptions::encode`], otherwise over the training
    /// vectors before the last update of the centroids.
    pub error: f64,
    /// Maximum over the subspaces of the iterations that ran.
    pub iterations: usize,
    /// Packed codes of all vectors, as [`Codes`](crate::Codes) takes them; empty without
    /// [`TrainOptions::encode`].
    pub codes: Vec<u8>,
}

/// The error to expect of a codebook on other vectors, given that on the `n` vectors that it was trained on:
/// each of its `ksub` centroids is the mean of some of them, which brings it as much nearer to these as it
/// brings it away from others. The error of 256 centroids grows by an eighth if they were trained on 4,096
/// vectors.
#[must_use]
pub fn unseen_error(error: f64, n: usize, ksub: usize) -> f64 {
    error * (n + ksub) as f64 / n.saturating_sub(ksub).max(1) as f64
}

/// Trains a codebook: k-means in every subspace independently.
///
/// # Shapes
/// `vectors` (n, dim), n at least 1. With n below ksub, vectors repeat as centroids.
/// # Errors
/// [`Error::PartialRow`]; [`Error::Zero`] for no vectors or a sample of none; [`Error::Length`] for the
/// centroids of a warm start; [`Error::NotFinite`]; [`Error::Tolerance`].
/// # Cost
/// At most `iterations * n * ksub * dim` multiply-adds; one copy of `vectors` in `f32`. With feature `rayon`
/// the subspaces run in parallel.
/// # Source
/// Jégou, Douze, Schmid, TPAMI 2011; PQCache (arXiv 2407.12820), 3.3.
/// # Examples
/// ```
/// use pq_core::{PqShape, TrainOptions, train};
/// let vectors = [0.0_f32, 0.0, 0.0, 10.0, 10.0, 0.0, 10.0, 10.0]; // the corners of a square
/// let trained = train(PqShape::new(2, 2, 1)?, &vectors, &TrainOptions { seed: 1, ..Default::default() })?;
/// assert_eq!(trained.error, 0.0);
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn train<E: Element>(
    shape: PqShape,
    vectors: &[E],
    options: &TrainOptions<'_>,
) -> Result<Trained, Error> {
    train_with(Backend::detect(), shape, vectors, options)
}

/// [`train`] on a given backend.
///
/// # Errors
/// As [`train`], and [`Error::BackendUnavailable`].
pub fn train_with<E: Element>(
    backend: Backend,
    shape: PqShape,
    vectors: &[E],
    options: &TrainOptions<'_>,
) -> Result<Trained, Error> {
    let mut trained = train_batch_with(backend, shape, &[vectors], options)?;
    trained.pop().ok_or(Error::Zero { what: "number of codebooks" })
}

/// [`train`] for many codebooks of one shape, such as one per layer and head. With feature `rayon` the
/// subspaces of all codebooks share the threads.
///
/// Each of `sets` is (n, dim) with its own n. [`Start::From`] gives every codebook the same initial
/// centroids.
///
/// # Errors
/// As [`train`].
/// # Examples
/// ```
/// use pq_core::{PqShape, TrainOptions, train_batch};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1000) as f32 / 500.0 - 1.0;
/// let shape = PqShape::new(8, 4, 3)?;
/// let heads: [Vec<f32>; 2] = [0, 1].map(|h| (0..100 * 8).map(|i| noise(i + 9 * h)).collect());
/// let trained = train_batch(shape, &[&heads[0], &heads[1]], &TrainOptions::default())?;
/// assert_eq!(trained[1].centroids.len(), shape.codebook_len());
/// # Ok::<(), pq_core::Error>(())
/// ```
pub fn train_batch<E: Element>(
    shape: PqShape,
    sets: &[&[E]],
    options: &TrainOptions<'_>,
) -> Result<Vec<Trained>, Error> {
    train_batch_with(Backend::detect(), shape, sets, options)
}

/// [`train_batch`] on a given backend.
///
/// # Errors
/// As [`train_batch`], and [`Error::BackendUnavailable`].
pub fn train_batch_with<E: Element>(
    backend: Backend,
    shape: PqShape,
    sets: &[&[E]],
    options: &TrainOptions<'_>,
) -> Result<Vec<Trained>, Error> {
    backend.check()?;
    if !(options.tolerance >= 0.0 && options.tolerance.is_finite()) {
        return Err(Error::Tolerance);
    }
    for vectors in sets {
        let n = count_rows("vectors", vectors.len(), shape.dim())?;
        if n == 0 || options.max_vectors == Some(0) {
            return Err(Error::Zero { what: "number of vectors" });
        }
        check_finite("vectors", vectors)?;
    }
    if let Start::From(centroids) = options.start {
        check_len("starting centroids", centroids.len(), shape.codebook_len())?;
        check_finite("starting centroids", centroids)?;
    }
    let sets = sets.iter().map(|vectors| Ok(Rows::contiguous(vectors, shape.dim())?.into()));
    let sets = sets.collect::<Result<Vec<AnyRows<'_>>, Error>>()?;
    Ok(train_sets(backend, shape, &sets, options))
}

/// [`train_batch`] with checked arguments.
fn train_sets(
    backend: Backend,
    shape: PqShape,
    sets: &[AnyRows<'_>],
    options: &TrainOptions<'_>,
) -> Vec<Trained> {
    let subspace = |task: usize| {
        let (set, j) = (task / shape.m(), task % shape.m());
        for_any_rows!(sets[set], vectors => train_subspace(backend, shape, vectors, j, options))
    };
    let tasks = 0..sets.len() * shape.m();
    #[cfg(feature = "rayon")]
    let subspaces: Vec<_> = {
        use rayon::prelude::*;
        tasks.into_par_iter().map(subspace).collect()
    };
    #[cfg(not(feature = "rayon"))]
    let subspaces: Vec<_> = tasks.map(subspace).collect();
    subspaces.chunks_exact(shape.m()).map(|subspaces| assemble(shape, subspaces)).collect()
}

/// One trained subspace and, with [`TrainOptions::encode`], the runs of its codes.
struct TrainedSubspace {
    clusters: Clusters,
    runs: Vec<u8>, // (blocks, 8 * nbits)
}

fn train_subspace<E: Element>(
    backend: Backend,
    shape: PqShape,
    rows: Rows<'_, E>,
    j: usize,
    options: &TrainOptions<'_>,
) -> TrainedSubspace {
    let (dsub, k) = (shape.dsub(), shape.ksub());
    let points = |chosen| Points::of_subspace(backend, Vectors { rows, chosen }, j * dsub, dsub);
    // All subspaces draw the same vectors.
    let drawn = options.max_vectors.filter(|&max| max < rows.rows()).map(|max| {
        let mut drawn = SplitMix64(options.seed).sample(rows.rows(), max);
        drawn.sort_unstable();
        drawn
    });
    let training = points(drawn.as_deref());
    let mut rng = SplitMix64(options.seed ^ j as u64);
    let start = match options.start {
        Start::Random => training.random_start(k, &mut rng),
        Start::PlusPlus => training.plus_plus_start(k, &mut rng),
        Start::From(centroids) => centroids[j * k * dsub..][..k * dsub].to_vec(),
    };
    let limits = Limits {
        iterations: options.iterations.max(1),
        tolerance: options.tolerance,
        time_is_up: options.time_is_up,
    };
    let mut clusters = training.cluster(backend, start, &limits);
    let mut runs = vec![];
    if options.encode {
        let all = if drawn.is_some() { points(None) } else { training };
        (runs, clusters.error) = all.encode(backend, &clusters.centroids, shape.nbits());
    }
    TrainedSubspace { clusters, runs }
}

/// Concatenates the subspaces of a codebook and interleaves their runs into blocks.
fn assemble(shape: PqShape, subspaces: &[TrainedSubspace]) -> Trained {
    let run_len = 8 * shape.nbits() as usize;
    let blocks = subspaces.first().map_or(0, |subspace| subspace.runs.len() / run_len);
    Trained {
        centroids: subspaces
            .iter()
            .flat_map(|subspace| subspace.clusters.centroids.iter().copied())
            .collect(),
        error: subspaces.iter().map(|subspace| subspace.clusters.error).sum(),
        iterations: subspaces.iter().map(|subspace| subspace.clusters.iterations).max().unwrap_or(0),
        codes: (0..blocks)
            .flat_map(|b| subspaces.iter().flat_map(move |subspace| &subspace.runs[b * run_len..][..run_len]))
            .copied()
            .collect(),
    }
}
