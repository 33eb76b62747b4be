use alloc::vec::Vec;

use nalgebra::DMatrix;

use crate::eigen::{factor, symmetric};
use crate::error::check_len;
use crate::{Error, Gram};

/// Eigenvalues below this part of the largest are raised to it before they are divided by.
const FLOOR: f64 = 1e-9;

/// Two maps whose product is the identity, with their columns ordered by importance.
///
/// A key is stored as its first `rank` components of `A^T k`, a query meets it as the first `rank` of `B^T q`, and
/// `q . k = (B^T q) . (A^T k)` at full rank since `B A^T = I`. Dropping columns from the right gives every lower rank.
/// For values read `W_O` in place of `q`: stored as `A^T v`, turned back by `B`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    dim: usize,
    store: Vec<f32>, // A (dim, dim) row-major; column c makes stored component c
    probe: Vec<f32>, // B (dim, dim) row-major; column c makes the query's component c
    sigma: Vec<f64>, // (dim,) descending unless reordered, in units of the score
}

impl Rotation {
    /// ZACK's rotation: the right singular vectors of the stacked `[Q; K]` (or `[V; W_O]`), `A = B = V`.
    ///
    /// With grouped queries all query heads of a group and their key head share one stack.
    ///
    /// # Errors
    /// [`Error::Length`] when the dimensions differ, [`Error::NotFinite`], [`Error::NoConvergence`].
    /// # Source
    /// ZACK, 4 and 5.1.
    pub fn stacked(stored: &Gram, probes: &Gram) -> Result<Self, Error> {
        let mut sum = stored.clone();
        sum.merge(probes)?;
        let dim = sum.dim();
        let (values, vectors) = symmetric(DMatrix::from_vec(dim, dim, sum.matrix()))?;
        let sigma = values.iter().map(|x| libm::sqrt(x.max(0.0))).collect();
        let basis = row_major(&vectors);
        Ok(Self { dim, store: basis.clone(), probe: basis, sigma })
    }

    /// The rotation with the least squared error of all scores `q . k` at every rank (KQ-SVD).
    ///
    /// With Cholesky-like factors `G_K = F_K F_K^T`, `G_Q = F_Q F_Q^T` and the decomposition `F_K^T F_Q = X S Y^T`:
    /// `A = F_Q Y S^(-1/2)`, `B = F_K X S^(-1/2)`. Unlike the stacked form it does not depend on how the model
    /// happened to split the scale between queries and keys.
    ///
    /// # Errors
    /// [`Error::Length`] when the dimensions differ, [`Error::NotFinite`], [`Error::NoConvergence`].
    /// # Source
    /// KQ-SVD, arXiv 2512.05916.
    /// # Examples
    /// ```
    /// use svd_core::{Gram, Rotation, project_into};
    /// let (mut keys, mut queries) = (Gram::new(2)?, Gram::new(2)?);
    /// keys.add_rows(&[3.0, 1.0, 2.0, 0.5, 1.0, 1.0])?;
    /// queries.add_rows(&[1.0, -1.0, 0.5, 2.0])?;
    /// let rotation = Rotation::score_optimal(&keys, &queries)?;
    /// let (mut k, mut q) = ([0.0; 2], [0.0; 2]);
    /// project_into(rotation.store(), &[3.0, 1.0], &mut k)?;
    /// project_into(rotation.probe(), &[0.5, 2.0], &mut q)?;
    /// let score = q[0] * k[0] + q[1] * k[1];
    /// assert!((score - 3.5_f32).abs() < 1e-4); // full rank loses nothing
    /// # Ok::<(), svd_core::Error>(())
    /// ```
    pub fn score_optimal(stored: &Gram, probes: &Gram) -> Result<Self, Error> {
        check_len("probes", probes.dim(), stored.dim())?;
        let dim = stored.dim();
        let f_k = factor(DMatrix::from_vec(dim, dim, stored.matrix()), FLOOR)?;
        let f_q = factor(DMatrix::from_vec(dim, dim, probes.matrix()), FLOOR)?;
        let svd = f_k.tr_mul(&f_q).try_svd(true, true, f64::EPSILON, 10_000).ok_or(Error::NoConvergence)?;
        let (Some(x), Some(y_t)) = (svd.u, svd.v_t) else { return Err(Error::NoConvergence) };
        let mut order: Vec<usize> = (0..dim).collect();
        order.sort_by(|&a, &b| svd.singular_values[b].total_cmp(&svd.singular_values[a]));
        let sigma: Vec<f64> = order.iter().map(|&i| svd.singular_values[i]).collect();
        let least = (sigma[0] * FLOOR).max(f64::MIN_POSITIVE);
        let scaled = |columns: DMatrix<f64>| {
            DMatrix::from_fn(dim, dim, |r, c| columns[(r, order[c])] / libm::sqrt(sigma[c].max(least)))
        };
        let store = row_major(&scaled(f_q * y_t.transpose()));
        let probe = row_major(&scaled(f_k * x));
        if store.iter().chain(&probe).any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "gram" });
        }
        Ok(Self { dim, store, probe, sigma })
    }

    /// The query-metric KLT: components that are uncorrelated, and in which equal errors cost the scores equally. The rotation
    /// to quantize in.
    ///
    /// With `M` the mean outer product of what meets the rows (queries for keys, the rows of `W_O` for values) divided by
    /// dim, and `U` the eigenvectors of `M^(1/2) C M^(1/2)`: `A = M^(1/2) U`, `B = M^(-1/2) U`. `covariance` holds rows
    /// whose mean has been taken out. Rows are quantized as `A^T k`, come back as `B` times that, and `sigma` are
    /// the components' deviations.
    ///
    /// # Errors
    /// [`Error::Length`] when the dimensions differ, [`Error::Zero`] without rows, [`Error::NotFinite`],
    /// [`Error::NoConvergence`].
    /// # Source
    /// The KLT under a weighted error: Gersho, Gray, "Vector Quantization and Signal Compression", 8.6; the weight is the
    /// error of `q . k` for queries with second moment `M`.
    pub fn query_metric(covariance: &Gram, metric: &Gram) -> Result<Self, Error> {
        /// Directions that hardly any query has get at least this part of the strongest one's weight.
        const METRIC_FLOOR: f64 = 1e-6;
        check_len("metric", metric.dim(), covariance.dim())?;
        if covariance.rows() == 0 || metric.rows() == 0 {
            return Err(Error::Zero { what: "rows" });
        }
        let dim = covariance.dim();
        let (values, vectors) = symmetric(DMatrix::from_vec(dim, dim, metric.matrix()))?;
        let least = (values[0] * METRIC_FLOOR).max(f64::MIN_POSITIVE);
        let scale = 1.0 / (metric.rows() as f64 * dim as f64);
        let root = |power: f64| {
            let scaled = DMatrix::from_fn(dim, dim, |r, c| {
                vectors[(r, c)] * libm::pow(values[c].max(least) * scale, power)
            });
            scaled * vectors.transpose()
        };
        let (half, inverse_half) = (root(0.5), root(-0.5));
        let rows = covariance.rows() as f64;
        let covariance = DMatrix::from_vec(dim, dim, covariance.matrix()) / rows;
        let (variances, basis) = symmetric(&half * covariance * &half)?;
        let sigma = variances.iter().map(|x| libm::sqrt(x.max(0.0))).collect();
        Self::from_parts(row_major(&(half * &basis)), row_major(&(inverse_half * &basis)), sigma)
    }

    /// The same with component `order[c]` in place `c`.
    ///
    /// # Errors
    /// [`Error::Length`], or [`Error::Order`] when `order` is no permutation of the components.
    pub fn reordered(&self, order: &[usize]) -> Result<Self, Error> {
        check_len("order", order.len(), self.dim)?;
        let mut seen = alloc::vec![false; self.dim];
        for &c in order {
            match seen.get_mut(c) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(Error::Order { component: c }),
            }
        }
        let columns = |map: &[f32]| -> Vec<f32> {
            map.chunks_exact(self.dim).flat_map(|row| order.iter().map(move |&c| row[c])).collect()
        };
        let sigma = order.iter().map(|&c| self.sigma[c]).collect();
        Ok(Self { dim: self.dim, store: columns(&self.store), probe: columns(&self.probe), sigma })
    }

    /// Takes maps that were made before, as from a profile.
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Length`] or [`Error::NotFinite`].
    pub fn from_parts(store: Vec<f32>, probe: Vec<f32>, sigma: Vec<f64>) -> Result<Self, Error> {
        let dim = sigma.len();
        if dim == 0 {
            return Err(Error::Zero { what: "dim" });
        }
        let len = dim.checked_mul(dim).ok_or(Error::TooLarge)?;
        check_len("store", store.len(), len)?;
        check_len("probe", probe.len(), len)?;
        if store.iter().chain(&probe).any(|x| !x.is_finite()) || sigma.iter().any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "rotation" });
        }
        Ok(Self { dim, store, probe, sigma })
    }

    /// Components of a vector.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// `A` (dim, dim): the map of what is stored (keys, values).
    #[must_use]
    pub fn store(&self) -> &[f32] {
        &self.store
    }

    /// `B` (dim, dim): the map of what meets it (queries, `W_O`).
    #[must_use]
    pub fn probe(&self) -> &[f32] {
        &self.probe
    }

    /// Singular values (dim,), descending: what each component contributes to the scores.
    #[must_use]
    pub fn sigma(&self) -> &[f64] {
        &self.sigma
    }
}

fn row_major(matrix: &DMatrix<f64>) -> Vec<f32> {
    matrix.transpose().iter().map(|&x| x as f32).collect()
}
