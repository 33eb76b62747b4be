//! Rotations of a head: from second moments to a basis, its dual and singular values.

use alloc::vec::Vec;

use nalgebra::DMatrix;

use crate::eigen::{Spectrum, spectrum, symmetric};
use crate::error::check_len;
use crate::{Error, Gram, MapBuf, RopeSide};

/// Eigenvalues are raised to at least this fraction of the largest before a division by them.
const FLOOR: f64 = 1e-9;

/// Basis and dual are scaled by at most 2 to this power, so that both stay within the range of `f32` for any
/// scales of the two Grams.
const MOST_SHIFT: i32 = 40;

/// Minimum weight of a direction of a metric, as a fraction of the strongest direction's.
const METRIC_FLOOR: f64 = 1e-6;

/// The metric of one head: orthogonal directions and their weights; without directions it is the identity.
struct Metric {
    dim: usize,
    weights: Vec<f64>,
    vectors: Option<DMatrix<f64>>,
}

impl Metric {
    fn of<S: RopeSide>(gram: &Gram<S>, weight: f64) -> Result<Self, Error> {
        let dim = gram.dim();
        Ok(match spectrum(square(gram), METRIC_FLOOR)? {
            None => Self { dim, weights: alloc::vec![1.0; dim], vectors: None },
            Some(Spectrum { values, vectors, exponent }) => {
                let shift = (4 * exponent).clamp(-2 * MOST_SHIFT, 2 * MOST_SHIFT);
                let scale = libm::ldexp(weight / (gram.rows() as f64 * dim as f64), shift);
                Self {
                    dim,
                    weights: values.iter().map(|value| value * scale).collect(),
                    vectors: Some(vectors),
                }
            }
        })
    }

    /// Raises weights to the floor of all heads; an identity is of a head whose errors cost nothing.
    fn floor_all(all: &mut [Self]) {
        let weights = |metric: &&Self| metric.vectors.is_some();
        let strongest = all.iter().filter(weights).flat_map(|metric| &metric.weights);
        let strongest = strongest.copied().fold(0.0, f64::max);
        for metric in all.iter_mut().filter(|_| strongest > 0.0) {
            let is_idle = metric.vectors.is_none();
            for weight in &mut metric.weights {
                *weight = if is_idle { 0.0 } else { *weight }.max(strongest * METRIC_FLOOR);
            }
        }
    }

    /// The metric to the given power.
    fn power(&self, power: f64) -> DMatrix<f64> {
        let Self { dim, weights, vectors } = self;
        match vectors {
            None => DMatrix::from_diagonal_element(*dim, *dim, libm::pow(weights[0], power)),
            Some(vectors) => {
                let scaled = |r, c| vectors[(r, c)] * libm::pow(weights[c], power);
                DMatrix::from_fn(*dim, *dim, scaled) * vectors.transpose()
            }
        }
    }
}

/// The matrix with these blocks on its diagonal times another one.
fn blocks_times(blocks: &[DMatrix<f64>], matrix: &DMatrix<f64>) -> DMatrix<f64> {
    let mut product = DMatrix::zeros(matrix.nrows(), matrix.ncols());
    let mut first = 0;
    for block in blocks {
        let rows = block * matrix.rows(first, block.ncols());
        product.rows_mut(first, block.ncols()).copy_from(&rows);
        first += block.ncols();
    }
    product
}

/// A basis `A` and its dual `B`, with `B A^T = I` and their columns ordered by importance.
///
/// The cache stores the first `rank` components of `A^T k`, and a query is projected to the first `rank`
/// components of `B^T q`. At full rank `q . k = (B^T q) . (A^T k)`; dropping trailing columns gives every
/// lower rank. For values, the rows of `W_O` take the place of queries: the cache stores `A^T v`, and `B`
/// reconstructs it.
#[derive(Clone, Debug, PartialEq)]
pub struct Rotation {
    dim: usize,
    basis: Vec<f64>, // A (dim, dim) row-major; column c gives component c of a stored row
    dual: Vec<f64>,  // B (dim, dim) row-major; column c gives component c of a query
    sigma: Vec<f64>, // (dim,) descending unless reordered, in units of the score
}

impl Rotation {
    /// Principal directions of the stored rows alone, `A = B`: the least squared error of the rows themselves
    /// at every rank, regardless of queries.
    ///
    /// # Errors
    /// [`Error::NoConvergence`].
    pub fn principal<S: RopeSide>(stored: &Gram<S>) -> Result<Self, Error> {
        let (values, vectors) = symmetric(square(stored))?;
        let sigma = values.iter().map(|x| libm::sqrt(x.max(0.0))).collect();
        let basis = row_major(&vectors);
        Ok(Self { dim: stored.dim(), basis: basis.clone(), dual: basis, sigma })
    }

    /// ZACK's rotation: the right singular vectors of the stacked `[Q; K]` (or `[V; W_O]`), `A = B = V`.
    ///
    /// With grouped-query attention, a key head and all query heads of its group share one stack.
    ///
    /// # Errors
    /// [`Error::Length`] if the dimensions differ, [`Error::NotFinite`], [`Error::NoConvergence`].
    /// # Source
    /// ZACK, 4 and 5.1.
    pub fn stacked<S: RopeSide>(stored: &Gram<S>, probes: &Gram<S>) -> Result<Self, Error> {
        let mut sum = stored.clone();
        sum.merge(probes)?;
        Self::principal(&sum)
    }

    /// The rotation that minimizes the squared error of all scores `q . k` at every rank (KQ-SVD).
    ///
    /// With Cholesky-like factors `G_K = F_K F_K^T`, `G_Q = F_Q F_Q^T` and the decomposition `F_K^T F_Q = X S
    /// Y^T`: `A = F_Q Y S^(-1/2)`, `B = F_K X S^(-1/2)`. Unlike the stacked form it does not depend on how
    /// the model splits the scale between queries and keys. If either side is all zeros, as in a pruned head,
    /// every score is 0 and the rotation is the identity.
    ///
    /// # Errors
    /// [`Error::Length`] if the dimensions differ, [`Error::NoConvergence`].
    /// # Source
    /// KQ-SVD, arXiv 2512.05916.
    /// # Examples
    /// ```
    /// use svd_core::{Gram, PostRope, Rotation, Rows, RowsMut};
    /// let (mut keys, mut queries) = (Gram::<PostRope>::new(2)?, Gram::new(2)?);
    /// keys.add_rows(Rows::contiguous(&[3.0_f32, 1.0, 2.0, 0.5, 1.0, 1.0], 2)?)?;
    /// queries.add_rows(Rows::contiguous(&[1.0_f32, -1.0, 0.5, 2.0], 2)?)?;
    /// let rotation = Rotation::score_optimal(&keys, &queries)?;
    /// let (mut k, mut q) = ([0.0_f32; 2], [0.0_f32; 2]);
    /// let (key, query) = ([3.0_f32, 1.0], [0.5_f32, 2.0]);
    /// rotation.basis_map(2)?.view().project_into(Rows::from(&key[..]), RowsMut::from(&mut k[..]))?;
    /// rotation.dual_map(2)?.view().project_into(Rows::from(&query[..]), RowsMut::from(&mut q[..]))?;
    /// let score = q[0] * k[0] + q[1] * k[1];
    /// assert!((score - 3.5_f32).abs() < 1e-4); // full rank loses nothing
    /// # Ok::<(), svd_core::Error>(())
    /// ```
    pub fn score_optimal<S: RopeSide>(stored: &Gram<S>, probes: &Gram<S>) -> Result<Self, Error> {
        check_len("probes", probes.dim(), stored.dim())?;
        let dim = stored.dim();
        let spectra = (spectrum(square(stored), FLOOR)?, spectrum(square(probes), FLOOR)?);
        let (Some(keys), Some(queries)) = spectra else {
            let identity = row_major(&DMatrix::identity(dim, dim));
            return Ok(Self { dim, basis: identity.clone(), dual: identity, sigma: alloc::vec![0.0; dim] });
        };
        let (e_k, e_q) = (keys.exponent, queries.exponent);
        let (f_k, f_q) = (factor(keys), factor(queries));
        let svd = f_k.tr_mul(&f_q).try_svd(true, true, f64::EPSILON, 10_000).ok_or(Error::NoConvergence)?;
        let (Some(x), Some(y_t)) = (svd.u, svd.v_t) else { return Err(Error::NoConvergence) };
        let mut order: Vec<usize> = (0..dim).collect();
        order.sort_by(|&a, &b| svd.singular_values[b].total_cmp(&svd.singular_values[a]));
        let sigma: Vec<f64> = order.iter().map(|&i| svd.singular_values[i]).collect();
        let map = |columns: DMatrix<f64>, shift: i32| {
            let (scale, root) =
                (libm::ldexp(1.0, shift), |c: usize| libm::sqrt(sigma[c].max(sigma[0] * FLOOR)));
            row_major(&DMatrix::from_fn(dim, dim, |r, c| columns[(r, order[c])] / root(c) * scale))
        };
        // The unscaled factors are 4^e_k and 4^e_q times as large, and `S` is 4^(e_k + e_q) times as large.
        let shift = (e_q - e_k).clamp(-MOST_SHIFT, MOST_SHIFT);
        let (basis, dual) = (map(f_q * y_t.transpose(), shift), map(f_k * x, -shift));
        let sigma = sigma.iter().map(|x| libm::ldexp(*x, 2 * (e_k + e_q))).collect();
        Ok(Self { dim, basis, dual, sigma })
    }

    /// The query-metric KLT, for quantization: components are uncorrelated, and equal errors in any two
    /// components cost the scores equally.
    ///
    /// Let `M` be the mean outer product of the queries (of the rows of `W_O` for values) divided by dim, and
    /// `U` the eigenvectors of `M^(1/2) C M^(1/2)`: `A = M^(1/2) U`, `B = M^(-1/2) U`. `covariance` is a Gram
    /// about the mean ([`Gram::centred`]). `A^T k` is quantized, `B` reconstructs it, and `sigma` holds the
    /// standard deviations of the components. If the metric is all zeros, as in a pruned head, errors cost
    /// nothing, and `M` is the identity.
    ///
    /// # Errors
    /// [`Error::Length`] if the dimensions differ, [`Error::Zero`] without rows, [`Error::NotFinite`] if
    /// products of the moments overflow, [`Error::NoConvergence`].
    /// # Source
    /// The KLT under a weighted error: Gersho, Gray, "Vector Quantization and Signal Compression", 8.6; the
    /// weight is the error of `q . k` for queries with second moment `M`.
    pub fn query_metric<S: RopeSide>(covariance: &Gram<S>, metric: &Gram<S>) -> Result<Self, Error> {
        Self::joint_query_metric(covariance, &[(metric, 1.0)])
    }

    /// [`Self::query_metric`] of the rows of several heads next to each other, of one layer or of several.
    ///
    /// Heads see different queries, so the metric has a block for each of them: `M` of the head, as there,
    /// times the head's weight, the price of its errors next to those of the others. Components mix heads:
    /// what heads have in common is coded once. A direction that no query sees weighs a millionth of the
    /// strongest of all.
    ///
    /// # Shapes
    /// `covariance` (dim, dim); `blocks`: the metric and the weight of each head, in the order of their
    /// components, whose numbers sum to dim.
    /// # Errors
    /// As [`Self::query_metric`]; [`Error::NotFinite`] for a weight that is not positive and finite.
    /// # Cost
    /// One eigenproblem of dim components, 10 dim^3 operations; the rest is less.
    pub fn joint_query_metric<S: RopeSide>(
        covariance: &Gram<S>,
        blocks: &[(&Gram<S>, f64)],
    ) -> Result<Self, Error> {
        let dim = covariance.dim();
        check_len("metrics", blocks.iter().map(|(metric, _)| metric.dim()).sum(), dim)?;
        if covariance.rows() == 0 || blocks.iter().any(|(metric, _)| metric.rows() == 0) {
            return Err(Error::Zero { what: "rows" });
        }
        if blocks.iter().any(|&(_, weight)| !(weight.is_finite() && weight > 0.0)) {
            return Err(Error::NotFinite { what: "weights" });
        }
        let metrics = blocks.iter().map(|&(gram, weight)| Metric::of(gram, weight));
        let mut metrics = metrics.collect::<Result<Vec<_>, Error>>()?;
        if let [_, _, ..] = &metrics[..] {
            Metric::floor_all(&mut metrics);
        }
        let roots = |power| metrics.iter().map(|metric| metric.power(power)).collect::<Vec<_>>();
        let (half, inverse_half) = (roots(0.5), roots(-0.5));
        let mut weighted = blocks_times(&half, &(square(covariance) / covariance.rows() as f64));
        let mut first = 0;
        for block in &half {
            let mut columns = weighted.columns_mut(first, block.ncols());
            let product = &columns * block;
            columns.copy_from(&product);
            first += block.ncols();
        }
        let (variances, basis) = symmetric(weighted)?;
        let sigma = variances.iter().map(|x| libm::sqrt(x.max(0.0))).collect();
        let map = |blocks: &[_]| row_major(&blocks_times(blocks, &basis));
        Self::from_parts(map(&half), map(&inverse_half), sigma)
    }

    /// The rotation with component `order[c]` at position `c`.
    ///
    /// # Errors
    /// [`Error::Length`], or [`Error::Order`] if `order` is not a permutation of the components.
    pub fn reordered(&self, order: &[usize]) -> Result<Self, Error> {
        check_len("order", order.len(), self.dim)?;
        let mut seen = alloc::vec![false; self.dim];
        for &c in order {
            match seen.get_mut(c) {
                Some(seen) if !*seen => *seen = true,
                _ => return Err(Error::Order { component: c }),
            }
        }
        let columns = |map: &[f64]| -> Vec<f64> {
            map.chunks_exact(self.dim).flat_map(|row| order.iter().map(move |&c| row[c])).collect()
        };
        let sigma = order.iter().map(|&c| self.sigma[c]).collect();
        Ok(Self { dim: self.dim, basis: columns(&self.basis), dual: columns(&self.dual), sigma })
    }

    /// Takes matrices that were computed before, for example read from a profile.
    ///
    /// # Shapes
    /// `basis` and `dual` (dim, dim) row-major, `sigma` (dim,).
    ///
    /// # Errors
    /// [`Error::Zero`], [`Error::Length`] or [`Error::NotFinite`].
    pub fn from_parts(basis: Vec<f64>, dual: Vec<f64>, sigma: Vec<f64>) -> Result<Self, Error> {
        let dim = sigma.len();
        if dim == 0 {
            return Err(Error::Zero { what: "dim" });
        }
        let len = dim.checked_mul(dim).ok_or(Error::TooLarge)?;
        check_len("basis", basis.len(), len)?;
        check_len("dual", dual.len(), len)?;
        if basis.iter().chain(&dual).chain(&sigma).any(|x| !x.is_finite()) {
            return Err(Error::NotFinite { what: "rotation" });
        }
        Ok(Self { dim, basis, dual, sigma })
    }

    /// Components of a vector.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// `A` (dim, dim): projects stored rows (keys, values).
    #[must_use]
    pub fn basis(&self) -> &[f64] {
        &self.basis
    }

    /// `B` (dim, dim): projects queries or rows of `W_O`, and reconstructs stored rows.
    #[must_use]
    pub fn dual(&self) -> &[f64] {
        &self.dual
    }

    /// Singular values (dim,), descending unless reordered: the contribution of each component.
    #[must_use]
    pub fn sigma(&self) -> &[f64] {
        &self.sigma
    }

    /// The first `rank` columns of `A` in `f32`: projects keys and values on the decode path.
    ///
    /// # Errors
    /// [`Error::Zero`] or [`Error::Rank`].
    pub fn basis_map(&self, rank: usize) -> Result<MapBuf, Error> {
        self.cut(&self.basis, rank)
    }

    /// The first `rank` columns of `B` in `f32`: projects queries and reconstructs rows on the decode path.
    ///
    /// # Errors
    /// [`Error::Zero`] or [`Error::Rank`].
    pub fn dual_map(&self, rank: usize) -> Result<MapBuf, Error> {
        self.cut(&self.dual, rank)
    }

    fn cut(&self, map: &[f64], rank: usize) -> Result<MapBuf, Error> {
        self.check_rank(rank)?;
        let columns = map.chunks_exact(self.dim).flat_map(|row| row[..rank].iter().map(|&x| x as f32));
        MapBuf::new(columns.collect(), self.dim, rank)
    }

    /// The error of all scores at `rank`, relative to the scores: `|Q K^T - Q B_r A_r^T K^T|_F / |Q K^T|_F`.
    ///
    /// 0 if all scores are 0.
    ///
    /// # Errors
    /// [`Error::Length`] if a dimension differs, [`Error::Zero`], [`Error::Rank`], [`Error::NotFinite`] if
    /// the error overflows.
    /// # Cost
    /// Four products of (dim, dim) matrices.
    pub fn score_error<S: RopeSide>(
        &self,
        stored: &Gram<S>,
        probes: &Gram<S>,
        rank: usize,
    ) -> Result<f64, Error> {
        check_len("stored", stored.dim(), self.dim)?;
        check_len("probes", probes.dim(), self.dim)?;
        self.check_rank(rank)?;
        let map = |values: &[f64]| DMatrix::from_row_slice(self.dim, self.dim, values);
        // Each Gram is divided by its largest element: the factor cancels, and products of small Grams do not
        // underflow.
        let unit = |gram: DMatrix<f64>| {
            let largest = gram.amax();
            if largest > 0.0 { gram / largest } else { gram }
        };
        let (g_k, g_q) = (unit(square(stored)), unit(square(probes)));
        let (a, b) = (map(&self.basis), map(&self.dual));
        // I - A_r B_r^T projects onto the dropped components.
        let missing =
            DMatrix::identity(self.dim, self.dim) - a.columns(0, rank) * b.columns(0, rank).transpose();
        let error = (missing.transpose() * &g_k * missing).component_mul(&g_q).sum();
        let total = g_k.component_mul(&g_q).sum();
        match error.is_finite() {
            false => Err(Error::NotFinite { what: "rotation" }),
            true if total > 0.0 => Ok(libm::sqrt(error.max(0.0) / total)),
            true => Ok(0.0),
        }
    }

    pub(crate) fn check_rank(&self, rank: usize) -> Result<(), Error> {
        match rank {
            0 => Err(Error::Zero { what: "rank" }),
            _ if rank > self.dim => Err(Error::Rank { rank, dim: self.dim }),
            _ => Ok(()),
        }
    }
}

fn square<S: RopeSide>(gram: &Gram<S>) -> DMatrix<f64> {
    DMatrix::from_vec(gram.dim(), gram.dim(), gram.matrix())
}

/// A square root of the Gram, `V L^(1/2)`, given its eigenvectors and eigenvalues.
fn factor(Spectrum { values, mut vectors, .. }: Spectrum) -> DMatrix<f64> {
    for (mut vector, value) in vectors.column_iter_mut().zip(values) {
        vector.scale_mut(libm::sqrt(value));
    }
    vectors
}

fn row_major(matrix: &DMatrix<f64>) -> Vec<f64> {
    matrix.transpose().as_slice().to_vec()
}
