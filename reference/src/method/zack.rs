//! ZACK's rotations and ranks.

use std::sync::Arc;

use rayon::prelude::*;
use svd_core::{Gram, Rotation, rank_for_removal, removal_for_keep};

use super::Basis;
use crate::cache::{Geometry, HeadRotation};
use crate::calibrate::Calibration;
use crate::model::{Config, Model};
use crate::{Error, Profile, Result};

fn key(basis: Basis, which: char, l: usize, head: usize, part: &str) -> String {
    format!("zack/{basis}/{which}/{l}/{head}/{part}")
}

/// Rotations of every head: of keys against queries, and of values against `W_O`.
pub(super) fn calibrate(
    model: &Model,
    samples: &Calibration,
    basis: Basis,
    profile: &mut Profile,
) -> Result<()> {
    let geometry = Geometry::of(&model.config);
    let rotate = |stored: &Gram, probes: &Gram| match basis {
        Basis::Closed => Rotation::score_optimal(stored, probes),
        Basis::Stacked => Rotation::stacked(stored, probes),
    };
    let heads: Vec<(usize, usize)> =
        (0..samples.layers.len()).flat_map(|l| (0..geometry.n_kv_heads).map(move |head| (l, head))).collect();
    let rotations = heads.par_iter().map(|&(l, head)| -> Result<_> {
        let layer = &samples.layers[l];
        let keys = rotate(&layer.key_grams[head], &layer.query_grams[head])?;
        let mut values = Gram::new(geometry.head_dim)?;
        values.add_rows(&geometry.head_rows(head, &layer.values))?;
        Ok([keys, rotate(&values, &output_gram(model, l, head)?)?])
    });
    for ((l, head), rotations) in heads.iter().zip(rotations.collect::<Result<Vec<_>>>()?) {
        for (which, rotation) in ['k', 'v'].into_iter().zip(rotations) {
            let sigma = rotation.sigma().iter().map(|&x| x as f32).collect();
            let parts = [
                ("store", rotation.store().to_vec()),
                ("probe", rotation.probe().to_vec()),
                ("sigma", sigma),
            ];
            for (part, values) in parts {
                profile.put_floats(key(basis, which, *l, *head, part), values);
            }
        }
    }
    Ok(())
}

/// Second moment of the rows of `W_O` that read a head's values, over its group of query heads.
pub(super) fn output_gram(model: &Model, l: usize, head: usize) -> Result<Gram> {
    let config = &model.config;
    let group = config.gqa_group() * config.head_dim;
    let mut gram = Gram::new(config.head_dim)?;
    for row in model.layers[l].attention.o.weight.chunks_exact(config.q_dim()) {
        gram.add_rows(&row[head * group..][..group])?;
    }
    Ok(gram)
}

/// Rotations and ranks of all heads.
pub(super) struct ZackPlan {
    pub heads: Vec<Arc<Vec<HeadRotation>>>, // per layer
    pub values: Vec<Vec<Rotation>>,         // (n_layers, n_kv_heads)
}

impl ZackPlan {
    /// Reads the rotations and cuts them so that the parts `keep_k` and `keep_v` of all dimensions stay; one removal rate
    /// for all heads (ZACK 5.2).
    pub fn read(config: &Config, profile: &Profile, keep_k: f64, keep_v: f64, basis: Basis) -> Result<Self> {
        let read = |which: char| -> Result<Vec<Vec<Rotation>>> {
            (0..config.n_layers)
                .map(|l| {
                    (0..config.n_kv_heads)
                        .map(|head| read_rotation(config, profile, basis, which, l, head))
                        .collect()
                })
                .collect()
        };
        let (keys, values) = (read('k')?, read('v')?);
        let (key_removal, value_removal) = (removal(&keys, keep_k)?, removal(&values, keep_v)?);
        let heads = keys
            .into_iter()
            .zip(&values)
            .map(|(keys, values)| {
                let heads = keys.into_iter().zip(values).map(|(keys, values)| {
                    let key_rank = rank_for_removal(keys.sigma(), key_removal)?;
                    let value_rank = rank_for_removal(values.sigma(), value_removal)?;
                    Ok(HeadRotation { keys, key_rank, value_rank })
                });
                Ok(Arc::new(heads.collect::<Result<_>>()?))
            })
            .collect::<Result<_>>()?;
        Ok(Self { heads, values })
    }
}

fn removal(rotations: &[Vec<Rotation>], keep: f64) -> Result<f64> {
    let sigmas: Vec<&[f64]> = rotations.iter().flatten().map(Rotation::sigma).collect();
    Ok(removal_for_keep(&sigmas, keep)?)
}

fn read_rotation(
    config: &Config,
    profile: &Profile,
    basis: Basis,
    which: char,
    l: usize,
    head: usize,
) -> Result<Rotation> {
    let part = |part| profile.floats(&key(basis, which, l, head, part)).map(<[f32]>::to_vec);
    let sigma: Vec<f64> = part("sigma")?.into_iter().map(f64::from).collect();
    let rotation = Rotation::from_parts(part("store")?, part("probe")?, sigma)
        .map_err(|e| Error::Profile(e.to_string()))?;
    if rotation.dim() != config.head_dim {
        return Err(Error::Profile(format!(
            "a rotation of {} dimensions for heads of {}",
            rotation.dim(),
            config.head_dim
        )));
    }
    Ok(rotation)
}
