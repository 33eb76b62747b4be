//! The result of a calibration: rotations, and from them ranks, maps and folded weights.

use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::error::check_len;
use crate::{Budget, Element, Error, HeadMaps, Reduction, Rotation, Rows, RowsMut, ranks_by_loss};

/// The rotations of the keys and of the values of all heads of a layer.
///
/// # Keys and values on one scale
///
/// The cost of an error is measured in the layer's output, `sum_g W_g o_g` over the query heads `g`, with
/// `o = sum_t p_t v_t` and `p = softmax(scale * <q, k_t>)`.
///
/// * An error `e_t` of a value moves a head's output by `sum_t p_t W_g e_t`.
/// * An error `d_t` of a key moves its score by `s_t = scale * <q, d_t>`, hence to first order its weight by
///   `p_t (s_t - sum_u p_u s_u)`, and the head's output by `sum_t p_t s_t W_g (v_t - o)`.
///
/// The errors of different tokens are assumed independent of each other and of the weights, but not of zero
/// mean, since values have a mean: the mean passes through attention unchanged, and the rest averages out.
/// With `n = 1 / E sum_t p_t^2`, the effective number of tokens, the expected squared error from values is
///
/// ```text
/// |W_g mean(e)|^2 + E |W_g (e - mean(e))|^2 / n
/// ```
///
/// This is `1 / n` times the second moment of `W_g e` with the mean's square weighted by `n`. Calibration
/// rotates the values `V` by that moment, so the squares of the dropped `sigma_V`, divided by the number of
/// values, sum to it. For keys, the expected squared error is `scale^2 E <q, d>^2 E |W_g (v - o)|^2 / n`;
/// with the mean value for `o` and summed over the group, dropping component `c` costs
///
/// ```text
/// values: sigma_V[c]^2 / (n N_v)
/// keys:   sigma_K[c]^2 / (n N_q N_k) * scale^2 * sum_g |(V - mean) W_g^T|^2 / N_v
/// ```
///
/// with `N_q`, `N_k` and `N_v` calibrated queries, keys and values, since `sigma_K^2` sums to `|Q K^T|^2`
/// over the queries of the group. Each cost is a squared singular value times the weight of its side, as in
/// [`ranks_by_loss`]. All heads of a layer share the scale; between layers, divide by the mean square of the
/// residual stream that the outputs are added to.
///
/// This is an estimate: it omits second-order terms, and the errors of nearby tokens may be correlated. The
/// mean error of keys counts like the rest: the softmax cancels it among tokens of lower rank, but it shifts
/// their weights relative to the exact rows of a window.
///
/// # Examples
/// ```
/// use svd_core::{Budget, LayerCalibration, LowRankLayerCache, Rows, RowsMut, Window};
/// # let noise = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 504.0 - 1.0;
/// # let tensor = |seed: usize, n: usize, heads: usize, dim: usize| -> Vec<f32> {
/// #     (0..n * heads * dim).map(|i| noise(seed + i) * 0.8_f32.powi((i % dim) as i32)).collect()
/// # };
/// let (heads, group, dim, hidden, n) = (2, 2, 16, 48, 400);
/// let (q, k, v) = (tensor(1, n, heads * group, dim), tensor(2, n, heads, dim), tensor(3, n, heads, dim));
/// let mut w_v: Vec<f32> = (0..heads * dim * hidden).map(noise).collect();
/// let mut w_o: Vec<f32> = (0..hidden * heads * group * dim).map(noise).collect();
///
/// let mut calibration = LayerCalibration::new(heads, group, [dim, dim])?;
/// let (keys, values) = (Rows::contiguous(&k, heads * dim)?, Rows::contiguous(&v, heads * dim)?);
/// calibration.add(Rows::contiguous(&q, heads * group * dim)?, keys, values)?;
/// calibration.set_output(Rows::contiguous(&w_o, heads * group * dim)?)?;
/// let rotations = calibration.rotations()?;
///
/// // Once, when the model is loaded: from here on its values are rotated.
/// let w_o = RowsMut::contiguous(&mut w_o, heads * group * dim)?;
/// rotations.fold_values(RowsMut::contiguous(&mut w_v, hidden)?, w_o)?;
/// // For any budget, here three quarters: each head's ranks of keys and of values.
/// let ranks = rotations.ranks(0.25, Budget::Fraction(0.75), 1)?;
/// let maps = rotations.folded_maps(&ranks)?;
/// let cache = LowRankLayerCache::<half::f16>::new(&maps, Window { sinks: 4, recent: 64, batch: 1 })?;
/// assert_eq!(cache.heads()[1].store().maps().values().rank(), ranks[1][1]);
/// # Ok::<(), svd_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct LayerRotations {
    heads: Vec<[Rotation; 2]>, // keys, values; at least one head, all of the same dimensions
    group: usize,
    weights: Vec<[f64; 2]>, // (heads,): of keys at scale 1, of values
}

impl LayerRotations {
    /// Takes the rotations of each head's keys and values, for example from a profile, and their cost per
    /// unit of squared error, for keys at a scale of 1.
    ///
    /// # Errors
    /// [`Error::Zero`] for no head or group, [`Error::TooLarge`] for more than 65,536 query heads;
    /// [`Error::Length`] when heads differ in their dimensions, or there is not one pair of weights per head;
    /// [`Error::NotFinite`] for a weight that is negative, infinite or NaN.
    pub fn new(heads: Vec<[Rotation; 2]>, group: usize, weights: Vec<[f64; 2]>) -> Result<Self, Error> {
        check_heads(heads.len(), group)?;
        check_len("weights", weights.len(), heads.len())?;
        if weights.as_flattened().iter().any(|x| !(x.is_finite() && *x >= 0.0)) {
            return Err(Error::NotFinite { what: "weights" });
        }
        let dims = heads[0].each_ref().map(Rotation::dim);
        for [keys, values] in &heads {
            check_len("keys of a head", keys.dim(), dims[0])?;
            check_len("values of a head", values.dim(), dims[1])?;
        }
        Ok(Self { heads, group, weights })
    }

    /// The rotations of the keys and of the values of each head.
    #[must_use]
    pub fn heads(&self) -> &[[Rotation; 2]] {
        &self.heads
    }

    /// The singular values of head 0's keys, of its values, of head 1's keys, and so on: the arguments of
    /// [`ranks_by_loss`] and [`ranks_by_removal`](crate::ranks_by_removal).
    #[must_use]
    pub fn spectra(&self) -> Vec<&[f64]> {
        self.heads.as_flattened().iter().map(Rotation::sigma).collect()
    }

    /// The cost of a unit of squared error in each of the [`spectra`](Self::spectra): an estimate of the
    /// squared error of the layer's output. `scale` is that of the scores.
    #[must_use]
    pub fn weights(&self, scale: f32) -> Vec<f64> {
        let square = f64::from(scale) * f64::from(scale);
        self.weights.iter().flat_map(|[keys, values]| [square * keys, *values]).collect()
    }

    /// The ranks of each head's keys and values with the least output error within `budget`, in multiples of
    /// `multiple`.
    ///
    /// For a budget of the whole model, pass the [`spectra`](Self::spectra) and [`weights`](Self::weights) of
    /// all layers to [`ranks_by_loss`], and each layer's part of the result to [`maps`](Self::maps).
    ///
    /// # Errors
    /// As for [`ranks_by_loss`].
    pub fn ranks(&self, scale: f32, budget: Budget, multiple: usize) -> Result<Vec<[usize; 2]>, Error> {
        let ranks = ranks_by_loss(&self.spectra(), &self.weights(scale), budget, multiple)?;
        Ok(ranks.as_chunks().0.to_vec())
    }

    /// The maps of a [`LowRankLayerCache`](crate::LowRankLayerCache) at these ranks, for a model with
    /// unchanged weights.
    ///
    /// # Errors
    /// [`Error::Length`] if there is not one pair of ranks per head, [`Error::Zero`], [`Error::Rank`].
    pub fn maps(&self, ranks: &[[usize; 2]]) -> Result<Vec<Arc<HeadMaps>>, Error> {
        self.maps_of(ranks, Reduction::projected)
    }

    /// [`maps`](Self::maps) for a model with weights folded by [`fold_values`](Self::fold_values): values are
    /// rotated on input, and outputs stay rotated.
    ///
    /// # Errors
    /// As for [`maps`](Self::maps).
    pub fn folded_maps(&self, ranks: &[[usize; 2]]) -> Result<Vec<Arc<HeadMaps>>, Error> {
        self.maps_of(ranks, |values, rank| Reduction::folded(values.dim(), rank))
    }

    fn maps_of(
        &self,
        ranks: &[[usize; 2]],
        values_at: impl Fn(&Rotation, usize) -> Result<Reduction, Error>,
    ) -> Result<Vec<Arc<HeadMaps>>, Error> {
        check_len("ranks", ranks.len(), self.heads.len())?;
        let map = |([keys, values], &[key_rank, value_rank]): (&[Rotation; 2], &[usize; 2])| {
            let keys = Reduction::projected(keys, key_rank)?;
            Ok(Arc::new(HeadMaps::new(keys, values_at(values, value_rank)?)))
        };
        self.heads.iter().zip(ranks).map(map).collect()
    }

    /// Folds the values' rotations into the weights, in place: the layer computes the same function, but
    /// `W_V` yields rotated values, and `W_O` rotates them back.
    ///
    /// Rotations are folded at full rank. [`folded_maps`](Self::folded_maps) truncate the values, so the
    /// ranks can change later.
    ///
    /// # Shapes
    /// `w_v` (heads * dim of the values, hidden), a separate matrix or the value rows of a fused projection;
    /// `w_o` (hidden, heads * group * dim of the values). A bias goes through
    /// [`fold_value_bias`](Self::fold_value_bias).
    /// # Errors
    /// [`Error::Length`]; nothing is then changed.
    /// # Cost
    /// (rows of `w_o` * group + columns of `w_v`) * heads * dim^2 multiply-adds in `f64`, and a copy of one
    /// head.
    /// # Source
    /// ZACK, 5.1, V compression.
    pub fn fold_values<E: Element>(
        &self,
        mut w_v: RowsMut<'_, E>,
        mut w_o: RowsMut<'_, E>,
    ) -> Result<(), Error> {
        let dim = self.heads[0][1].dim();
        check_len("rows of W_V", w_v.rows(), self.heads.len() * dim)?;
        check_len("row of W_O", w_o.components(), self.heads.len() * self.group * dim)?;
        for (h, [_, rotation]) in self.heads.iter().enumerate() {
            let folded = rotation.fold_basis(w_v.as_rows().slice(h * dim..(h + 1) * dim)?, dim)?;
            for (i, row) in folded.chunks_exact(w_v.components()).enumerate() {
                round(row, w_v.row_mut(h * dim + i));
            }
            for head in h * self.group..(h + 1) * self.group {
                let mut columns = w_o.reborrow().columns(head * dim, dim)?;
                let folded = rotation.fold_output(columns.as_rows(), dim)?;
                for (i, row) in folded.chunks_exact(dim).enumerate() {
                    round(row, columns.row_mut(i));
                }
            }
        }
        Ok(())
    }

    /// Folds the values' rotations into the bias of `W_V` (heads * dim of the values), in place.
    ///
    /// # Errors
    /// [`Error::Length`]; nothing is then changed.
    pub fn fold_value_bias<E: Element>(&self, bias: &mut [E]) -> Result<(), Error> {
        let dim = self.heads[0][1].dim();
        check_len("bias", bias.len(), self.heads.len() * dim)?;
        for (bias, [_, rotation]) in bias.chunks_exact_mut(dim).zip(&self.heads) {
            round(&rotation.fold_basis(Rows::contiguous(bias, 1)?, dim)?, bias);
        }
        Ok(())
    }
}

fn round<E: Element>(row: &[f32], out: &mut [E]) {
    out.iter_mut().zip(row).for_each(|(out, &x)| *out = E::from_f32(x));
}

/// Maximum query heads of a layer, beyond any model: a wrong argument must not exhaust memory.
const MOST_HEADS: usize = 1 << 16;

/// Checks a layer's number of KV heads, and of query heads per KV head.
pub(crate) fn check_heads(heads: usize, group: usize) -> Result<(), Error> {
    match heads.checked_mul(group) {
        Some(0) if heads == 0 => Err(Error::Zero { what: "number of heads" }),
        Some(0) => Err(Error::Zero { what: "query heads per head" }),
        Some(1..=MOST_HEADS) => Ok(()),
        _ => Err(Error::TooLarge),
    }
}
