//! Calibration samples: keys and values of a model over a text, and second moments of its queries and keys.

mod divergence;
mod text;

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kv_llama::{Activations, prefill};
use kv_model::{Model, Rope};
use rayon::prelude::*;
use svd_core::{Gram, MapBuf, NoRope, PostRope, PreRope, RopeSide, Rows};

use crate::cache::Geometry;
use crate::{Error, Method, Profile, Result};
pub use text::CalibrationText;

/// Leading tokens to skip: every method keeps the sinks exact, and their norms are outliers.
const SINKS: usize = 4;

/// Minimum number of tokens to calibrate on.
const FEWEST: usize = 64;

/// Positions of each key that codes of keys after RoPE are trained on. One position each gives at 16,000
/// tokens of another text 1 to 4 times the KL of four (12 M, 4.1 bits a component).
const COPIES: usize = 4;

/// Samples of every layer of a model over one text.
pub struct Calibration<'a> {
    pub(crate) model: &'a Model,
    pub(crate) rope: &'a Rope,
    pub(crate) tokens: Vec<u32>,
    pub(crate) layers: Vec<LayerSamples>,
    pub(crate) shared: Shared,
}

/// What several methods, or settings of a method, compute from the same samples, by name.
#[derive(Default)]
pub(crate) struct Shared(Mutex<BTreeMap<String, Arc<dyn Any + Send + Sync>>>);

impl Shared {
    /// The value of that name, made by the first who asks.
    pub fn get<T: Send + Sync + 'static>(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        let found = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned();
        if let Some(Ok(value)) = found.map(Arc::downcast) {
            return Ok(value);
        }
        let value = Arc::new(make()?);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into(), value.clone());
        Ok(value)
    }
}

/// Rows are (n, n_kv_heads * head_dim).
///
/// After RoPE, rows are at positions all over the context, not at their own: slowly rotating directions
/// hardly move at the first positions, and a rotation or a codebook fitted to those alone drops them.
pub(crate) struct LayerSamples {
    pub keys: Vec<f32>, // before RoPE
    pub values: Vec<f32>,
    pub key_grams: Vec<Gram<PostRope>>,        // per kv head
    pub query_grams: Vec<Gram<PostRope>>,      // per kv head, its whole group of query heads
    pub plain_query_grams: Vec<Gram<PreRope>>, // the same
    pub residual_rms: f64, // of the residual stream after the layer (for the last layer, before it); never 0
}

impl<'a> Calibration<'a> {
    /// Rejects too few tokens to calibrate on.
    ///
    /// # Errors
    /// [`Error::FewTokens`] for fewer than 64.
    pub const fn check_tokens(tokens: usize) -> Result<()> {
        if tokens < FEWEST { Err(Error::FewTokens { tokens, least: FEWEST }) } else { Ok(()) }
    }

    /// Runs the model over `tokens` and collects samples.
    ///
    /// # Errors
    /// [`Error::FewTokens`] for fewer than 64; errors of [`prefill`].
    pub fn gather(model: &'a Model, rope: &'a Rope, tokens: &[u32]) -> Result<Self> {
        Self::check_tokens(tokens.len())?;
        let mut layers: Vec<LayerSamples> = vec![];
        prefill(model, rope, tokens, &mut |l, activations| {
            let rms = rms(&activations.residual[SINKS * model.config.hidden_size..]);
            if let Some(before) = layers.last_mut() {
                before.residual_rms = rms;
            }
            layers.push(LayerSamples {
                residual_rms: rms,
                ..LayerSamples::gather(model, rope.layer(l), activations)?
            });
            Ok(())
        })?;
        Ok(Self { model, rope, tokens: tokens.to_vec(), layers, shared: Shared::default() })
    }

    /// What `fit` makes of each layer and KV head, in their order. Heads are fitted in parallel.
    pub(crate) fn of_heads<T: Send>(
        &self,
        fit: impl Fn(usize, usize) -> Result<T> + Sync,
    ) -> Result<Vec<(usize, usize, T)>> {
        let of_layer = |l| (0..self.model.config.n_kv_heads).map(move |head| (l, head));
        let heads: Vec<(usize, usize)> = (0..self.layers.len()).flat_map(of_layer).collect();
        heads.into_par_iter().map(|(l, head)| Ok((l, head, fit(l, head)?))).collect()
    }

    /// Second moment of the rows of `W_O` that multiply a head's values, over its group of query heads.
    pub(crate) fn output_gram(&self, l: usize, head: usize) -> Result<Gram<NoRope>> {
        let config = &self.model.config;
        let mut gram = Gram::new(config.head_dim)?;
        let weight = self.model.layers[l].attention.o.weight.to_f32();
        for query_head in head * config.gqa_group()..(head + 1) * config.gqa_group() {
            let weight = Rows::contiguous(&weight, config.q_dim())?;
            gram.add_rows(weight.columns(query_head * config.head_dim, config.head_dim)?)?;
        }
        Ok(gram)
    }
}

/// A profile from the tokens of one text, with the entries that `methods` need.
///
/// # Errors
/// As [`calibrated_on`].
pub fn calibrated(model: &Model, rope: &Rope, tokens: &[u32], methods: &[Method]) -> Result<Profile> {
    calibrated_on(model, rope, &CalibrationText::plain("text", tokens), methods)
}

/// A profile from a text of one or several kinds, with the entries that `methods` need.
///
/// # Errors
/// Errors of gathering and calibrating.
pub fn calibrated_on(
    model: &Model,
    rope: &Rope,
    text: &CalibrationText,
    methods: &[Method],
) -> Result<Profile> {
    let mut profile = Profile::new(text, rope.len());
    if methods.iter().any(Method::needs_profile) {
        methods.iter().try_for_each(|method| method.fitted(&model.config).map(drop))?;
        let samples = Calibration::gather(model, rope, &text.tokens)?;
        methods.iter().try_for_each(|method| method.calibrate(&samples, &mut profile))?;
    }
    Ok(profile)
}

impl LayerSamples {
    fn gather(model: &Model, rope: &Rope, Activations { q, k, v, .. }: Activations<'_>) -> Result<Self> {
        let (q_dim, kv_dim) = (model.config.q_dim(), model.config.kv_dim());
        let geometry = Geometry::of(&model.config);
        let (plain_queries, keys) = (q[SINKS * q_dim..].to_vec(), k[SINKS * kv_dim..].to_vec());
        let (queries, spread_keys) =
            (rope.spread(&plain_queries, q_dim, SINKS, 1), rope.spread(&keys, kv_dim, SINKS, 1));
        let grams = (0..geometry.n_kv_heads)
            .into_par_iter()
            .map(|head| {
                let mut keys = Gram::new(geometry.head_dim)?;
                let rows = Rows::contiguous(&spread_keys, kv_dim)?;
                keys.add_rows(rows.columns(head * geometry.head_dim, geometry.head_dim)?)?;
                Ok((keys, (probes(geometry, head, &queries)?, probes(geometry, head, &plain_queries)?)))
            })
            .collect::<Result<Vec<_>>>()?;
        let (key_grams, query_grams): (_, Vec<_>) = grams.into_iter().unzip();
        let (query_grams, plain_query_grams) = query_grams.into_iter().unzip();
        let values = v[SINKS * kv_dim..].to_vec();
        Ok(Self { keys, values, key_grams, query_grams, plain_query_grams, residual_rms: 1.0 })
    }
}

/// A head's keys after RoPE to train codes on: [`COPIES`] of each of `keys` (n, head_dim), before RoPE, at
/// positions all over the context. `rope` is that of the layer.
pub(crate) fn rotated_keys(rope: &Rope, keys: &[f32]) -> Vec<f32> {
    rope.spread(keys, 2 * rope.frequencies().len(), SINKS, COPIES)
}

/// The second moment of all queries of a KV head's group.
fn probes<S: RopeSide>(geometry: Geometry, head: usize, queries: &[f32]) -> Result<Gram<S>> {
    let group = geometry.n_heads / geometry.n_kv_heads;
    let mut gram = Gram::new(geometry.head_dim)?;
    let queries = Rows::contiguous(queries, geometry.n_heads * geometry.head_dim)?;
    for query_head in head * group..(head + 1) * group {
        gram.add_rows(queries.columns(query_head * geometry.head_dim, geometry.head_dim)?)?;
    }
    Ok(gram)
}

/// The RMS, the unit of errors in a residual stream; 1 for a stream that is zero or nearly so.
fn rms(x: &[f32]) -> f64 {
    const LEAST: f64 = 1e-12;
    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
    let rms = (squares / x.len() as f64).sqrt();
    if rms > LEAST { rms } else { 1.0 }
}

/// The mean of rows (n, dim).
pub(crate) fn mean_row(rows: &[f32], dim: usize) -> Vec<f32> {
    let mut mean = vec![0.0_f64; dim];
    for row in rows.chunks_exact(dim) {
        mean.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
    }
    let n = (rows.len() / dim) as f64;
    mean.into_iter().map(|sum| (sum / n) as f32).collect()
}

/// Rounds to single precision, the type of a profile's entries.
pub(crate) fn single(x: &[f64]) -> Vec<f32> {
    x.iter().map(|&x| x as f32).collect()
}

/// A map (dim, dim) in single precision, times a power of two: a profile's scale of values, or its
/// reciprocal.
///
/// # Errors
/// [`svd_core::Error::Length`] for a map of another size.
pub(crate) fn scaled(map: &[f64], factor: f32, dim: usize) -> Result<MapBuf> {
    Ok(MapBuf::new(map.iter().map(|&x| x as f32 * factor).collect(), dim, dim)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    #[test]
    fn settings_that_train_alike_share_entries() {
        let model = fixture::model();
        let rope = Rope::new(&model.config, 64);
        let tokens: Vec<u32> = (0..64_u32).map(|i| (i * i + 7 * i) % 96).collect();
        let methods = |list: &str| Method::parse_list(list).unwrap();
        let entries = |list: &str| calibrated(&model, &rope, &tokens, &methods(list)).unwrap().len();
        let one = entries("million:k=4x2:v=4x2");
        assert_eq!(entries("million:k=4x2:v=4x2,million:k=4x2:v=4x2:window=8:exact-layers=0"), one);
        assert_eq!(entries("million:k=4x2:v=4x2,million:k=4x2:v=4x2:iterations=1"), 2 * one);

        // Entries that a profile has are not computed again, which samples without rows would not allow.
        let mut profile = calibrated(&model, &rope, &tokens, &methods("million:k=4x2:v=4x2")).unwrap();
        let mut samples = Calibration::gather(&model, &rope, &tokens).unwrap();
        for layer in &mut samples.layers {
            (layer.keys, layer.values) = (vec![], vec![]);
        }
        let mut calibrate = |method: &str| methods(method)[0].calibrate(&samples, &mut profile);
        calibrate("million:k=4x2:v=4x2:window=8").unwrap();
        assert!(calibrate("million:k=4x2:v=4x2:iterations=1").is_err());
    }
}
