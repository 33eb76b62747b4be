//! CacheGen's planes: means, steps and probability models, one per layer and keys or values.

use codec_core::{PlaneProfile, Predictor};
use rayon::prelude::*;

use super::PredictorKind;
use crate::cache::Geometry;
use crate::calibrate::{Calibration, LayerSamples};
use crate::model::Model;
use crate::{Error, Profile, Result};

impl PredictorKind {
    /// The bins of layer `l`: with anchors 1, 2, 3 times by layer third (CacheGen, 5.2).
    fn bin(self, base: f32, l: usize, n_layers: usize) -> f32 {
        match self {
            Self::Mean => base,
            Self::Anchor => base * (1 + 3 * l / n_layers) as f32,
        }
    }

    fn predictor(self) -> Predictor {
        match self {
            Self::Mean => Predictor::Mean,
            Self::Anchor => Predictor::Anchor { group: 10 },
        }
    }
}

fn key(which: char, bin: f32, predictor: PredictorKind, l: usize) -> String {
    format!("cachegen/{predictor}-{bin}/{which}/{l}/plane")
}

/// Fits a plane to the keys (before RoPE) and one to the values of every layer.
pub(super) fn calibrate(
    model: &Model,
    samples: &Calibration,
    k: f32,
    v: f32,
    predictor: PredictorKind,
    profile: &mut Profile,
) -> Result<()> {
    let n_layers = samples.layers.len();
    let fit = |(l, layer): (usize, &LayerSamples)| {
        [('k', k, &layer.keys), ('v', v, &layer.values)].map(|(which, bin, rows)| -> Result<_> {
            let bin = predictor.bin(bin, l, n_layers);
            let plane = PlaneProfile::fit(rows, model.config.kv_dim(), predictor.predictor(), bin)?;
            Ok((key(which, bin, predictor, l), plane.to_bytes()))
        })
    };
    let planes: Vec<_> = samples.layers.par_iter().enumerate().flat_map_iter(fit).collect::<Result<_>>()?;
    planes.into_iter().for_each(|(key, bytes)| profile.put_bytes(key, bytes));
    Ok(())
}

/// The planes of layer `l`: of keys and of values.
pub(super) fn planes(
    profile: &Profile,
    geometry: Geometry,
    bins: [f32; 2],
    predictor: PredictorKind,
    l: usize,
    n_layers: usize,
) -> Result<[PlaneProfile; 2]> {
    let plane = |which, bin: f32| -> Result<PlaneProfile> {
        let key = key(which, predictor.bin(bin, l, n_layers), predictor, l);
        let plane =
            PlaneProfile::from_bytes(profile.bytes(&key)?).map_err(|e| Error::Profile(e.to_string()))?;
        if plane.channels() != geometry.kv_dim() {
            let what = format!("`{key}` has {} channels, not {}", plane.channels(), geometry.kv_dim());
            return Err(Error::Profile(what));
        }
        Ok(plane)
    };
    Ok([plane('k', bins[0])?, plane('v', bins[1])?])
}
