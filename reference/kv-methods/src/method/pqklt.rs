//! Product-quantizer codes of transformed keys and values: means, query-metric rotations and codebooks of
//! every head. Values in a Hadamard basis, divided by their norms, need neither rotation nor codebook of
//! their own: the codebook of Gaussians serves every head of every model, on any text.

#[cfg(feature = "cuda")]
mod device;
mod mean_errors;
mod store;

use std::sync::Arc;

use kv_attend::owner::{Pair, Side};
use kv_model::Config;
use pq_core::{
    CodebookBuf, TrainOptions, gaussian_centroids, gaussian_gain, norm_scale, train, unseen_error,
};
use svd_core::{Gram, Hadamard, MapBuf, NoRope, Rotation, Rows, balanced_order};

use super::kind::{BuildContext, Kind, Registration, SEED};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::paged::Paging;
use super::pq_code::{CODE_TILE, PqCode, check_codes};
use super::settings::{Settings, Switch, words};
use crate::cache::{CodingError, Geometry, Store};
use crate::calibrate::{Calibration, mean_row, rotated_keys, scaled, single};
use crate::{Error, Profile, Result};
pub(super) use store::{CodedStep, TransformedStore};
use store::{HeadCode, KeySpace, TransformedPlan, halved};

pub(super) const PQ_KLT: Registration = Registration {
    names: &["pqklt"],
    help: "\
  pqklt             attention on PQ codes of transformed rows             k=32x6 v=32x6 keys=mean|rope|rotated
                                                                          norms=on|off iterations=8 refine=0
                      values in a Hadamard basis with the codebook of     values=gaussian|trained
                      Gaussians, or in one with codebooks of their own
                      on a device: pages of N tokens, of a pool of M      pages=N pool=M
",
    examples: &[
        "pqklt:k=8/1:v=8/1:exact=f32:window=4",
        "pqklt:k=8/1:v=8/1:keys=rope:values=trained:exact=f32:window=4",
        "pqklt:k=8/1:v=8/1:keys=rotated:norms=off:exact=f32:window=4",
        "pqklt:k=8/1:v=8/1:refine=2:exact=f32:window=4",
    ],
    parse: |s| {
        let codes = PqCode::take_both(s, 6, 4)?;
        let klt = PqKlt::take(s, codes)?;
        Ok(Arc::new(PqKlt { pages: Paging::take(s, CODE_TILE)?, ..klt }))
    },
};
words!(
    KeySpace,
    "mean" => KeySpace::RotatedMean, "rope" => KeySpace::BeforeRope, "rotated" => KeySpace::AfterRope
);

/// The codebooks of the values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ValueBooks {
    /// The one of Gaussians for all heads, in a Hadamard basis.
    Gaussian,
    /// One for each head, trained in the basis that `W_O` weighs.
    Trained,
}

words!(ValueBooks, "gaussian" => ValueBooks::Gaussian, "trained" => ValueBooks::Trained);

/// One head's keys or values, fitted.
struct Fitted {
    rotation: Rotation,
    centroids: Vec<f32>,
    residuals: Vec<f32>, // (n, head_dim): transformed rows minus their decoded codes
    error: f64,          // relative, expected of other rows
}

impl Fitted {
    /// Mean squared error of each key component as the query sees it: (head_dim,).
    fn key_errors(&self, space: KeySpace, dim: usize) -> Result<Vec<f32>> {
        let n = (self.residuals.len() / dim) as f64;
        let mean_squares = |rows: &[f32]| -> Vec<f64> {
            let mut sums = vec![0.0; dim];
            for row in rows.chunks_exact(dim) {
                sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x) * f64::from(x) / n);
            }
            sums
        };
        Ok(single(&match space {
            KeySpace::RotatedMean | KeySpace::AfterRope => mean_squares(&self.residuals),
            KeySpace::BeforeRope => {
                // Rotation over all positions spreads the error of a pair evenly over its components.
                let mut rows = vec![0.0; self.residuals.len()];
                self.rotation.dual_map(dim)?.view().reconstruct_into(&self.residuals, &mut rows)?;
                let squares = mean_squares(&rows);
                let half = dim / 2;
                (0..dim).map(|d| 0.5 * (squares[d % half] + squares[d % half + half])).collect()
            }
        }))
    }
}

/// What calibration leaves of one head's keys or values.
struct HeadEntries {
    mean: Vec<f32>,
    code: CodeEntries,
}

enum CodeEntries {
    /// Keys, with the errors of their components.
    Keys(Fitted, Vec<f32>),
    /// Values with a rotation and a codebook of their own.
    Values(Fitted),
    /// Values that the codebook of Gaussians serves.
    Gaussian {
        scale: f32, // the unit of their norms
        error: f64, // relative, expected of other rows
    },
}

impl HeadEntries {
    /// Names and values of the entries.
    fn parts(self) -> Vec<(&'static str, Vec<f32>)> {
        let of_fitted = |Fitted { rotation, centroids, error, .. }: Fitted| {
            let (store, probe) = (single(rotation.basis()), single(rotation.dual()));
            (error, vec![("store", store), ("probe", probe), ("centroids", centroids)])
        };
        let (error, mut parts) = match self.code {
            CodeEntries::Keys(fitted, errors) => {
                let (error, mut parts) = of_fitted(fitted);
                parts.push(("errors", errors));
                (error, parts)
            }
            CodeEntries::Values(fitted) => of_fitted(fitted),
            CodeEntries::Gaussian { scale, error } => (error, vec![("scale", vec![scale])]),
        };
        // Of rows near zero, whose norms have no code, the relative error may exceed single precision.
        let error = error.min(f64::from(f32::MAX)) as f32;
        parts.extend([("mean", self.mean), ("error", vec![error])]);
        parts
    }
}

/// How rows are transformed and coded.
#[derive(Debug)]
pub(super) struct PqKlt {
    codes: Pair<PqCode>,
    space: KeySpace,
    norms: bool, // of rows with codebooks of their own
    values: ValueBooks,
    iterations: usize,
    refine: usize,
    pages: Option<Paging>,
}

impl PqKlt {
    /// Takes the settings of the transform.
    pub fn take(s: &mut Settings<'_>, codes: Pair<PqCode>) -> Result<Self> {
        let space = s.own("keys", KeySpace::RotatedMean)?;
        let norms = s.common("norms", Switch::On)? == Switch::On;
        let shape = codes.values.shape(s.head_dim);
        let has_table = shape.is_ok_and(|shape| gaussian_centroids(shape.dsub(), shape.nbits()).is_ok());
        let default = if has_table { ValueBooks::Gaussian } else { ValueBooks::Trained };
        Ok(Self {
            codes,
            space,
            norms,
            values: s.common("values", default)?,
            iterations: s.positive("iterations", 8)?,
            refine: s.count("refine", 0)?,
            pages: None,
        })
    }

    /// Rejects a model whose heads the codes of `method` do not fit.
    pub fn check_as(&self, method: &str, config: &Config) -> Result<()> {
        check_codes(self.codes, method, config)?;
        if self.values == ValueBooks::Trained {
            return Ok(());
        }
        let wrong = |what: String| Error::Argument(format!("method {method}: values=gaussian: {what}"));
        CodebookBuf::gaussian(self.codes.values.shape(config.head_dim)?).map_err(|e| wrong(e.to_string()))?;
        Hadamard::new(config.head_dim).map_err(|e| wrong(e.to_string()))?;
        Ok(())
    }

    /// Whether rows are divided by their norms.
    pub fn has_norms(&self, side: Side) -> bool {
        self.norms || self.is_gaussian(side)
    }

    const fn is_gaussian(&self, side: Side) -> bool {
        matches!((side, self.values), (Side::Values, ValueBooks::Gaussian))
    }

    /// The factor of rows that are divided by their norms: values are averaged, so that their codes are
    /// without bias where it is known.
    fn norms(&self, side: Side, head_dim: usize) -> Result<Option<f32>> {
        let shape = self.codes[side].shape(head_dim)?;
        let gain =
            || Ok(if self.is_gaussian(side) { gaussian_gain(shape.dsub(), shape.nbits())? } else { 1.0 });
        self.has_norms(side).then(gain).transpose()
    }

    fn key(&self, side: Side, l: usize, head: usize, part: &str) -> String {
        let Self { space, iterations, .. } = self;
        let space = match side {
            Side::Keys => space.to_string(),
            Side::Values if self.is_gaussian(side) => self.values.to_string(),
            Side::Values => "v".into(),
        };
        let (code, norms, letter) = (self.codes[side], self.has_norms(side), side.letter());
        format!("pqklt/{space}/{norms}/{iterations}/{code}/{letter}/{l}/{head}/{part}")
    }

    /// Fits the rotation to `covariance` and the metric, and centroids to the rotated rows, which are of
    /// `tokens` tokens; also returns the centroids' error.
    fn fit<S: svd_core::RopeSide>(
        &self,
        code: PqCode,
        metric: &Gram<S>,
        covariance: &Gram<S>,
        mut rows: Vec<f32>,
        tokens: usize,
    ) -> Result<Fitted> {
        let dim = metric.dim();
        let rotation = Rotation::query_metric(covariance, metric)?;
        let rotation = rotation.reordered(&balanced_order(rotation.sigma(), code.m)?)?;
        let gain = self.norms.then_some(1.0);
        let norms = HeadCode::transform(&rotation.basis_map(dim)?, gain, &mut rows)?;
        let options = TrainOptions { iterations: self.iterations, seed: SEED, ..Default::default() };
        let shape = code.shape(dim)?;
        let centroids = halved(&train(shape, &rows, &options)?.centroids);
        let codebook = CodebookBuf::new(shape, &centroids)?;
        let residuals = HeadCode::residuals(&codebook, &mut rows, gain, &norms)?;
        let error = CodingError::of(dim, &rows, &residuals).relative();
        let error = unseen_error(error, tokens, shape.ksub());
        Ok(Fitted { rotation, centroids, residuals, error })
    }

    /// The error of values in their Hadamard basis, in units of `scale`.
    fn gaussian_error(&self, dim: usize, scale: f32, mut rows: Vec<f32>) -> Result<f64> {
        let basis = scaled(Hadamard::new(dim)?.rotation()?.basis(), scale.recip(), dim)?;
        let gain = self.norms(Side::Values, dim)?;
        let norms = HeadCode::transform(&basis, gain, &mut rows)?;
        let book = CodebookBuf::gaussian(self.codes.values.shape(dim)?)?;
        let residuals = HeadCode::residuals(&book, &mut rows, gain, &norms)?;
        Ok(CodingError::of(dim, &rows, &residuals).relative())
    }

    /// The empty store of layer `l`.
    pub fn store(&self, context: &BuildContext<'_>, l: usize) -> Result<TransformedStore> {
        let plan = self.plan(context.config, context.profile, l)?;
        TransformedStore::new(context.geometry, context.rope(l), Arc::new(plan))
    }

    /// Layer `l` from the profile.
    pub fn plan(&self, config: &Config, profile: &Profile, l: usize) -> Result<TransformedPlan> {
        let dim = config.head_dim;
        let gaussian = match self.values {
            ValueBooks::Trained => None,
            ValueBooks::Gaussian => {
                let book = Arc::new(CodebookBuf::gaussian(self.codes.values.shape(dim)?)?);
                Some((Hadamard::new(dim)?.rotation()?, book))
            }
        };
        let read = |side: Side, head: usize| -> Result<HeadCode> {
            let key = |part| self.key(side, l, head, part);
            let mean = profile.factors(&key("mean"), dim)?.to_vec();
            let errors = match side {
                Side::Keys => profile.deviations(&key("errors"), dim)?.to_vec(),
                Side::Values => vec![],
            };
            let error = profile.expected_error(&key("error"))? as f32;
            let is_gaussian = self.is_gaussian(side);
            let (basis, dual, codebook) = match gaussian.as_ref().filter(|_| is_gaussian) {
                Some((rotation, book)) => {
                    let scale = profile.unit_of_norms(&key("scale"))?;
                    let map = |map: &[f64], factor| scaled(map, factor, dim);
                    (map(rotation.basis(), scale.recip())?, map(rotation.dual(), scale)?, book.clone())
                }
                None => {
                    let codebook = profile.codebook(&key("centroids"), self.codes[side].shape(dim)?)?;
                    let [basis, dual] = profile.basis_and_dual([&key("store"), &key("probe")], dim)?;
                    let map = |map: &[f32]| MapBuf::new(map.to_vec(), dim, dim);
                    (map(basis)?, map(dual)?, Arc::new(codebook))
                }
            };
            let norms = self.norms(side, dim)?;
            Ok(HeadCode { mean, basis, dual, codebook, is_gaussian, norms, errors, error })
        };
        let heads = (0..config.n_kv_heads).map(|head| Pair::try_of(|side| read(side, head)));
        Ok(TransformedPlan { heads: heads.collect::<Result<_>>()?, space: self.space, refine: self.refine })
    }
}

impl Kind for PqKlt {
    fn check(&self, config: &Config) -> Result<()> {
        self.check_as("pqklt", config)
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn device_setting(&self) -> Option<&'static str> {
        self.pages.map(|_| "pages")
    }

    /// Fills the profile from samples of the model.
    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        let geometry = Geometry::of(&samples.model.config);
        let made = samples.of_heads(|l, head| {
            let (layer, rope) = (&samples.layers[l], samples.rope.layer(l));
            let mut keys = geometry.head_rows(head, &layer.keys);
            let tokens = keys.len() / geometry.head_dim;
            let mut mean = take_mean(&mut keys, geometry.head_dim);
            let fitted = match self.space {
                KeySpace::BeforeRope => {
                    let covariance = gram_of(&keys, geometry.head_dim)?;
                    self.fit(self.codes.keys, &layer.plain_query_grams[head], &covariance, keys, tokens)?
                }
                KeySpace::RotatedMean => {
                    keys = rotated_keys(rope, &keys); // less their rotated mean
                    let covariance = gram_of(&keys, geometry.head_dim)?;
                    self.fit(self.codes.keys, &layer.query_grams[head], &covariance, keys, tokens)?
                }
                KeySpace::AfterRope => {
                    let rows = rotated_keys(rope, &geometry.head_rows(head, &layer.keys));
                    keys.clone_from(&rows);
                    take_mean(&mut keys, geometry.head_dim);
                    mean.fill(0.0);
                    let covariance = gram_of(&keys, geometry.head_dim)?;
                    self.fit(self.codes.keys, &layer.query_grams[head], &covariance, rows, tokens)?
                }
            };
            let errors = fitted.key_errors(self.space, geometry.head_dim)?;
            let keys = HeadEntries { mean, code: CodeEntries::Keys(fitted, errors) };
            let mut values = geometry.head_rows(head, &layer.values);
            let scale = norm_scale(&values, geometry.head_dim)?;
            let mean = take_mean(&mut values, geometry.head_dim);
            if self.values == ValueBooks::Gaussian {
                let error = self.gaussian_error(geometry.head_dim, scale, values)?;
                return Ok([keys, HeadEntries { mean, code: CodeEntries::Gaussian { scale, error } }]);
            }
            let metric: Gram<NoRope> = samples.output_gram(l, head)?;
            let covariance = gram_of(&values, geometry.head_dim)?;
            let fitted = self.fit(self.codes.values, &metric, &covariance, values, tokens)?;
            Ok([keys, HeadEntries { mean, code: CodeEntries::Values(fitted) }])
        })?;
        for (l, head, made) in made {
            for (side, entries) in Side::ALL.into_iter().zip(made) {
                for (part, values) in entries.parts() {
                    profile.put_floats(self.key(side, l, head, part), values);
                }
            }
        }
        Ok(())
    }

    #[cfg(feature = "cuda")]
    fn on_device(&self) -> std::result::Result<&dyn DeviceKind, Limit> {
        Ok(self)
    }

    fn stores(&self, context: &BuildContext<'_>) -> Result<Vec<Box<dyn Store>>> {
        context.layers(|l| self.store(context, l))
    }
}

/// The Gram matrix of rows (n, dim).
fn gram_of<S: svd_core::RopeSide>(rows: &[f32], dim: usize) -> Result<Gram<S>> {
    let mut gram = Gram::new(dim)?;
    gram.add_rows(Rows::contiguous(rows, dim)?)?;
    Ok(gram)
}

/// Subtracts the mean from rows (n, dim) and returns it.
fn take_mean(rows: &mut [f32], dim: usize) -> Vec<f32> {
    let mean = mean_row(rows, dim);
    HeadCode::subtract_mean(&mean, rows);
    mean
}
