//! The calibration of a layer: from queries, keys and values to rotations.

use alloc::vec;
use alloc::vec::Vec;

use crate::error::{check_len, count_rows};
use crate::layer_rotations::check_heads;
use crate::{Element, Error, Gram, LayerRotations, NoRope, PostRope, Rotation, Rows};

/// Calibration statistics of one KV head: second moments, and the number of tokens that attention spreads
/// over. Keys and queries are taken after RoPE, or unchanged in a model without it.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadGrams {
    /// Second moments of the keys.
    pub keys: Gram<PostRope>,
    /// Second moments of the queries of all heads of the group.
    pub queries: Gram<PostRope>,
    /// Second moments of the values.
    pub values: Gram<NoRope>,
    /// Second moments of the rows of `W_O`, in the columns of all query heads of the group.
    pub outputs: Gram<NoRope>,
    /// The effective number of tokens that a query attends to ([`LayerCalibration::set_effective_tokens`]).
    pub effective_tokens: f32,
}

impl HeadGrams {
    /// The rotations of keys and values with the least output error at every rank.
    fn rotations(&self) -> Result<[Rotation; 2], Error> {
        let values = self.values.mean_weighed(self.effective_tokens.into());
        Ok([
            Rotation::score_optimal(&self.keys, &self.queries)?,
            Rotation::score_optimal(&values, &self.outputs)?,
        ])
    }

    /// The output error per unit of squared error in the keys, at a scale of 1, and in the values;
    /// [`LayerRotations`] has the derivation.
    fn weights(&self) -> [f64; 2] {
        let [n_q, n_k, n_v] =
            [self.queries.rows(), self.keys.rows(), self.values.rows()].map(|rows| rows as f64);
        let outputs = self.outputs.matrix();
        let varying = self.values.centred().matrix().iter().zip(&outputs).map(|(v, w)| v * w).sum::<f64>();
        let spread = f64::from(self.effective_tokens).recip();
        [spread * varying.max(0.0) / n_v / (n_q * n_k), spread / n_v]
    }

    fn check(&self) -> Result<(), Error> {
        if self.effective_tokens.is_finite() && self.effective_tokens >= 1.0 {
            Ok(())
        } else {
            Err(Error::NotFinite { what: "effective tokens" })
        }
    }
}

/// Calibrates all heads of a layer on its queries, keys and values, batch by batch.
///
/// With grouped-query attention, a KV head's keys are paired with the queries of its whole group, and its
/// values with the group's columns of `W_O`: [`add`](Self::add) and [`set_output`](Self::set_output) take
/// whole tensors and form the pairs. Use a few thousand tokens of text like the application's, without the
/// sinks, with queries and keys rotated to positions across the whole context.
///
/// # Examples
/// ```
/// use svd_core::{Budget, LayerCalibration, Rows};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
/// let (heads, group, dim, hidden, n) = (2, 2, 16, 48, 400);
/// // Tensors (tokens, heads, head_dim) whose components have decaying scales.
/// let tensor = |seed: usize, heads: usize| -> Vec<f32> {
///     (0..n * heads * dim).map(|i| noise(seed + i) * 0.8_f32.powi((i % dim) as i32)).collect()
/// };
/// let (q, k, v) = (tensor(1, heads * group), tensor(2, heads), tensor(3, heads));
/// let w_o: Vec<f32> = (0..hidden * heads * group * dim).map(noise).collect(); // (hidden, ..)
///
/// let mut calibration = LayerCalibration::new(heads, group, [dim, dim])?;
/// let (q, kv) = (Rows::contiguous(&q, heads * group * dim)?, heads * dim);
/// calibration.add(q, Rows::contiguous(&k, kv)?, Rows::contiguous(&v, kv)?)?;
/// calibration.set_output(Rows::contiguous(&w_o, heads * group * dim)?)?;
/// calibration.set_effective_tokens(&[20.0, 35.0])?; // measured, one per head
/// let rotations = calibration.rotations()?;
/// // 96 of the 128 bytes that the keys and values of a token take as `f16`.
/// let ranks = rotations.ranks(0.25, Budget::Bytes { per_token: 96, per_component: 2 }, 1)?;
/// assert_eq!(ranks.as_flattened().iter().sum::<usize>(), 48);
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LayerCalibration {
    heads: Vec<HeadGrams>, // at least one, of equal dimensions
    group: usize,
}

impl LayerCalibration {
    /// Creates an empty calibration for `heads` KV heads with `group` query heads each. `dims` are the
    /// components of a key and of a value. Without [`set_output`](Self::set_output), `W_O` is the identity in
    /// every head: errors of all components of the attention output count equally. Without
    /// [`set_effective_tokens`](Self::set_effective_tokens), every query attends to one token.
    ///
    /// # Errors
    /// [`Error::Zero`]; [`Error::TooLarge`] for more than 8,192 components, 65,536 query heads, or 2^28
    /// elements of the moments of keys and values.
    pub fn new(heads: usize, group: usize, dims: [usize; 2]) -> Result<Self, Error> {
        check_heads(heads, group)?;
        let squares = dims.map(|dim| dim.saturating_mul(dim));
        if squares[0].saturating_add(squares[1]).saturating_mul(heads) > MOST_ELEMENTS {
            return Err(Error::TooLarge);
        }
        let head = HeadGrams {
            keys: Gram::new(dims[0])?,
            queries: Gram::new(dims[0])?,
            values: Gram::new(dims[1])?,
            outputs: identity(group, dims[1])?,
            effective_tokens: 1.0,
        };
        Ok(Self { heads: vec![head; heads], group })
    }

    /// Takes moments that were computed elsewhere, for example by `kv-gpu` ([`Gram::from_sums`]).
    ///
    /// # Errors
    /// [`Error::Zero`] for no head, [`Error::TooLarge`] for more than 65,536 query heads; [`Error::Length`]
    /// when keys and queries, values and outputs, or two heads differ in their dimensions;
    /// [`Error::NotFinite`] for effective tokens that are not finite or below 1.
    pub fn from_grams(heads: Vec<HeadGrams>, group: usize) -> Result<Self, Error> {
        check_heads(heads.len(), group)?;
        let [dim, dim_v] = [heads[0].keys.dim(), heads[0].values.dim()];
        for head in &heads {
            head.check()?;
            let HeadGrams { keys, queries, values, outputs, .. } = head;
            check_len("keys of a head", keys.dim(), dim)?;
            check_len("queries of a head", queries.dim(), dim)?;
            check_len("values of a head", values.dim(), dim_v)?;
            check_len("outputs of a head", outputs.dim(), dim_v)?;
        }
        Ok(Self { heads, group })
    }

    /// The moments of all heads.
    #[must_use]
    pub fn grams(&self) -> &[HeadGrams] {
        &self.heads
    }

    /// Adds the rows of `n` tokens.
    ///
    /// # Shapes
    /// Tokens first (NHD): `queries` (n, heads * group * dim), `keys` (n, heads * dim), `values` (n, heads *
    /// dim of the values). For heads first (HND), [`add_heads`](Self::add_heads).
    /// # Errors
    /// [`Error::Length`], [`Error::NotFinite`], [`Error::TooLarge`]; nothing is then added.
    /// # Cost
    /// One [`Gram::add_rows`] of every query, key and value, and a copy of the moments.
    pub fn add<E: Element>(
        &mut self,
        queries: Rows<'_, E>,
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) -> Result<(), Error> {
        let ([dim, dim_v], heads) = (self.dims(), self.heads.len());
        check_len("row of queries", queries.components(), heads * self.group * dim)?;
        check_len("row of keys", keys.components(), heads * dim)?;
        check_len("row of values", values.components(), heads * dim_v)?;
        check_len("queries", queries.rows(), keys.rows())?;
        check_len("values", values.rows(), keys.rows())?;
        self.add_each(
            |h| Ok((keys.columns(h * dim, dim)?, values.columns(h * dim_v, dim_v)?)),
            |query_head| Ok(queries.columns(query_head * dim, dim)?),
        )
    }

    /// [`add`](Self::add) of rows with heads first (HND).
    ///
    /// # Shapes
    /// `queries` (heads * group * n, dim), `keys` (heads * n, dim), `values` (heads * n, dim of the values).
    /// # Errors
    /// As for [`add`](Self::add), and [`Error::PartialRow`].
    pub fn add_heads<E: Element>(
        &mut self,
        queries: Rows<'_, E>,
        keys: Rows<'_, E>,
        values: Rows<'_, E>,
    ) -> Result<(), Error> {
        let [dim, dim_v] = self.dims();
        let n = count_rows("keys", keys.rows(), self.heads.len())?;
        check_len("queries", queries.rows(), keys.rows().checked_mul(self.group).ok_or(Error::TooLarge)?)?;
        check_len("values", values.rows(), keys.rows())?;
        check_len("row of queries", queries.components(), dim)?;
        check_len("row of keys", keys.components(), dim)?;
        check_len("row of values", values.components(), dim_v)?;
        let tokens = |head: usize| head * n..(head + 1) * n;
        self.add_each(
            |h| Ok((keys.slice(tokens(h))?, values.slice(tokens(h))?)),
            |query_head| Ok(queries.slice(tokens(query_head))?),
        )
    }

    fn add_each<'a, E: Element>(
        &mut self,
        keys_and_values: impl Fn(usize) -> Result<(Rows<'a, E>, Rows<'a, E>), Error> + Sync,
        queries: impl Fn(usize) -> Result<Rows<'a, E>, Error> + Sync,
    ) -> Result<(), Error> {
        let group = self.group;
        self.update(|h, grams| {
            let (keys, values) = keys_and_values(h)?;
            grams.keys.add_rows(keys)?;
            grams.values.add_rows(values)?;
            (h * group..(h + 1) * group).try_for_each(|head| grams.queries.add_rows(queries(head)?))
        })
    }

    /// Sets the output projection, which weights the errors of values.
    ///
    /// # Shapes
    /// `w_o` (hidden, heads * group * dim of the values): a row computes a component of the layer's output.
    /// # Errors
    /// [`Error::Length`], [`Error::Zero`] for no row, [`Error::NotFinite`]; nothing is then changed.
    /// # Cost
    /// One [`Gram::add_rows`] of hidden rows per query head.
    pub fn set_output<E: Element>(&mut self, w_o: Rows<'_, E>) -> Result<(), Error> {
        let ([_, dim_v], group) = (self.dims(), self.group);
        check_len("row of W_O", w_o.components(), self.heads.len() * group * dim_v)?;
        if w_o.rows() == 0 {
            return Err(Error::Zero { what: "rows of W_O" });
        }
        self.update(|h, grams| {
            grams.outputs = Gram::new(dim_v)?;
            let mut heads = h * group..(h + 1) * group;
            heads.try_for_each(|head| grams.outputs.add_rows(w_o.columns(head * dim_v, dim_v)?))
        })
    }

    /// Sets the effective number of tokens that the queries of each head attend to, at the application's
    /// context: `1 / mean(sum_t p_t^2)` over queries, with attention's weights `p`. It is 1 if each query
    /// attends to one token, and n if it attends equally to n tokens. Attention averages the errors of
    /// truncated values over these tokens, except for their mean, which passes to every query in full
    /// ([`LayerRotations`]).
    ///
    /// `sum_t p_t^2` is `exp(l_2 - 2 l_1)`, where `l_1` is [`SoftmaxStats::log_sum_exp`] at the attention
    /// scale, and `l_2` at twice that scale.
    ///
    /// # Shapes
    /// `tokens` (heads,).
    /// # Errors
    /// [`Error::Length`]; [`Error::NotFinite`] for a number that is not finite or below 1. Nothing is then
    /// changed.
    ///
    /// [`SoftmaxStats::log_sum_exp`]: crate::SoftmaxStats::log_sum_exp
    pub fn set_effective_tokens(&mut self, tokens: &[f32]) -> Result<(), Error> {
        check_len("effective tokens", tokens.len(), self.heads.len())?;
        self.update(|h, head| {
            head.effective_tokens = tokens[h];
            head.check()
        })
    }

    /// Adds the tokens of another calibration of the same layer, from other text. The output projection and
    /// the effective tokens stay those of `self`.
    ///
    /// # Errors
    /// [`Error::Length`] when the heads, groups or dimensions differ, [`Error::TooLarge`]; nothing is then
    /// added.
    pub fn merge(&mut self, other: &Self) -> Result<(), Error> {
        check_len("heads", other.heads.len(), self.heads.len())?;
        check_len("group", other.group, self.group)?;
        self.update(|h, grams| {
            let HeadGrams { keys, queries, values, .. } = &other.heads[h];
            grams.keys.merge(keys)?;
            grams.queries.merge(queries)?;
            grams.values.merge(values)
        })
    }

    /// Changes all heads, or none if one of them fails.
    fn update(
        &mut self,
        change: impl Fn(usize, &mut HeadGrams) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let changed = for_each_head(self.heads.len(), |h| {
            let mut grams = self.heads[h].clone();
            change(h, &mut grams)?;
            Ok(grams)
        });
        self.heads = changed?;
        Ok(())
    }

    /// The rotations of all heads, of keys against queries and of values against `W_O`, with the least error
    /// at every rank ([`Rotation::score_optimal`]). The square of the values' mean is weighted by the
    /// [effective tokens](Self::set_effective_tokens).
    ///
    /// # Errors
    /// [`Error::Zero`] without tokens, [`Error::NoConvergence`].
    /// # Cost
    /// Four eigenproblems and two decompositions of (dim, dim) for every head.
    /// # Source
    /// KQ-SVD, arXiv 2512.05916; ZACK, 5.1, for the pairs: queries with keys, values with `W_O`.
    pub fn rotations(&self) -> Result<LayerRotations, Error> {
        let has_rows =
            |head: &HeadGrams| ![head.keys.rows(), head.queries.rows(), head.values.rows()].contains(&0);
        if !self.heads.iter().all(has_rows) {
            return Err(Error::Zero { what: "number of tokens" });
        }
        let heads = for_each_head(self.heads.len(), |h| {
            let head = &self.heads[h];
            Ok((head.rotations()?, head.weights()))
        });
        let (heads, weights) = heads?.into_iter().unzip();
        LayerRotations::new(heads, self.group, weights)
    }

    fn dims(&self) -> [usize; 2] {
        [self.heads[0].keys.dim(), self.heads[0].values.dim()]
    }
}

/// Maximum elements of the moments of a layer's keys and values, 2 GiB: a wrong argument
/// must not exhaust memory.
const MOST_ELEMENTS: usize = 1 << 28;

/// The Gram of `group` identity matrices.
fn identity(group: usize, dim: usize) -> Result<Gram<NoRope>, Error> {
    let mut matrix = vec![0.0; dim * dim];
    matrix.iter_mut().step_by(dim + 1).for_each(|diagonal| *diagonal = group as f64);
    Gram::from_sums(dim, (group * dim) as u64, &matrix, &vec![group as f64; dim])
}

/// Calls `make` for every head, in parallel with feature `rayon`.
fn for_each_head<T: Send>(
    heads: usize,
    make: impl Fn(usize) -> Result<T, Error> + Sync,
) -> Result<Vec<T>, Error> {
    #[cfg(feature = "rayon")]
    {
        use rayon::prelude::*;
        (0..heads).into_par_iter().map(&make).collect()
    }
    #[cfg(not(feature = "rayon"))]
    (0..heads).map(make).collect()
}
