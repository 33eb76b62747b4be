//! Product-quantizer codes of transformed keys and values: means, query-metric rotations and codebooks of
//! every head.

mod store;

use std::sync::Arc;

use pq_core::{CodebookBuf, RopeMeanBuf, TrainOptions, train};
use rayon::prelude::*;
use svd_core::{Gram, MapBuf, NoRope, Rotation, balanced_order};

use super::kind::{Entry, Kind, SEED, Site};
use super::pq_code::PqCode;
use super::settings::{Switch, words};
use crate::cache::{Geometry, Store};
use crate::calibrate::{Calibration, mean_row, output_gram, single};
use crate::model::{Config, Model, Rope};
use crate::side::{Pair, Side};
use crate::{Error, Profile, Result};
use store::{HeadCode, KeySpace, TransformedPlan, TransformedStore, halved};

pub(super) const PQ_KLT: Entry = Entry {
    names: &["pqklt"],
    help: "\
  pqklt             attention on PQ codes of transformed rows             k=32x6 v=32x6 keys=mean|rope norms=on|off
                                                                          iterations=8 refine=0
",
    parse: |s| {
        Ok(Arc::new(PqKlt {
            codes: PqCode::take_both(s, 6, 4)?,
            space: s.own("keys", KeySpace::RotatedMean)?,
            norms: s.common("norms", Switch::On)? == Switch::On,
            iterations: s.positive("iterations", 8)?,
            refine: s.count("refine", 0)?,
        }))
    },
};
words!(KeySpace, "mean" => KeySpace::RotatedMean, "rope" => KeySpace::BeforeRope);

#[derive(Debug)]
struct PqKlt {
    codes: Pair<PqCode>,
    space: KeySpace,
    norms: bool,
    iterations: usize,
    refine: usize,
}

impl PqKlt {
    fn key(&self, side: Side, l: usize, head: usize, part: &str) -> String {
        let Self { space, norms, iterations, .. } = self;
        let space = if side == Side::Keys { space.to_string() } else { "v".into() };
        let (code, letter) = (self.codes[side], side.letter());
        format!("pqklt/{space}/{norms}/{iterations}/{code}/{letter}/{l}/{head}/{part}")
    }

    /// The rotation of the rows after their mean is subtracted, and centroids of the rotated rows.
    fn fit<S: svd_core::RopeSide>(
        &self,
        code: PqCode,
        metric: &Gram<S>,
        mut rows: Vec<f32>,
    ) -> Result<(Rotation, Vec<f32>)> {
        let mut covariance = Gram::new(metric.dim())?;
        covariance.add_rows(&rows)?;
        let rotation = Rotation::query_metric(&covariance, metric)?;
        let rotation = rotation.reordered(&balanced_order(rotation.sigma(), code.m)?)?;
        HeadCode::transform(&rotation.basis_map(metric.dim())?, self.norms, &mut rows)?;
        let options = TrainOptions { iterations: self.iterations, seed: SEED, ..Default::default() };
        Ok((rotation, halved(&train(code.shape(metric.dim())?, &rows, &options)?.centroids)))
    }

    /// Layer `l` from the profile.
    fn plan(&self, config: &Config, profile: &Profile, l: usize) -> Result<TransformedPlan> {
        let read = |side: Side, head: usize| -> Result<HeadCode> {
            let part = |part| profile.floats(&self.key(side, l, head, part)).map(<[f32]>::to_vec);
            let wrong = |e: &dyn std::fmt::Display| Error::Profile(e.to_string());
            let map = |name| -> Result<MapBuf> {
                MapBuf::new(part(name)?, config.head_dim, config.head_dim).map_err(|e| wrong(&e))
            };
            let shape = self.codes[side].shape(config.head_dim)?;
            let codebook = CodebookBuf::new(shape, &part("centroids")?).map_err(|e| wrong(&e))?;
            let mean = part("mean")?;
            if mean.len() != config.head_dim {
                return Err(Error::Profile(format!("a mean of {} dimensions", mean.len())));
            }
            Ok(HeadCode { mean, basis: map("store")?, dual: map("probe")?, codebook, norms: self.norms })
        };
        let heads = (0..config.n_kv_heads).map(|head| Pair::try_of(|side| read(side, head)));
        Ok(TransformedPlan { heads: heads.collect::<Result<_>>()?, space: self.space, refine: self.refine })
    }
}

impl Kind for PqKlt {
    fn check(&self, config: &Config) -> Result<()> {
        self.codes.check("pqklt", config)
    }

    fn needs_profile(&self) -> bool {
        true
    }

    /// Fills the profile from samples of the model.
    fn calibrate(
        &self,
        model: &Model,
        rope: &Rope,
        samples: &Calibration,
        profile: &mut Profile,
    ) -> Result<()> {
        let geometry = Geometry::of(&model.config);
        let heads: Vec<(usize, usize)> = (0..samples.layers.len())
            .flat_map(|l| (0..geometry.n_kv_heads).map(move |head| (l, head)))
            .collect();
        let made = heads.par_iter().map(|&(l, head)| -> Result<_> {
            let layer = &samples.layers[l];
            let mut keys = geometry.head_rows(head, &layer.keys);
            let mean = take_mean(&mut keys, geometry.head_dim);
            let fitted = match self.space {
                KeySpace::BeforeRope => self.fit(self.codes.keys, &layer.plain_query_grams[head], keys)?,
                KeySpace::RotatedMean => {
                    keys = geometry.head_rows(head, &layer.rotated_keys);
                    RopeMeanBuf::new(&mean, rope.layer(l).frequencies())?
                        .view()
                        .subtract(Calibration::FIRST, &mut keys)?;
                    self.fit(self.codes.keys, &layer.query_grams[head], keys)?
                }
            };
            let keys = (mean, fitted);
            let mut values = geometry.head_rows(head, &layer.values);
            let mean = take_mean(&mut values, geometry.head_dim);
            let metric: Gram<NoRope> = output_gram(model, l, head)?;
            Ok([keys, (mean, self.fit(self.codes.values, &metric, values)?)])
        });
        for ((l, head), made) in heads.iter().zip(made.collect::<Result<Vec<_>>>()?) {
            for (side, (mean, (rotation, centroids))) in Side::ALL.into_iter().zip(made) {
                let parts = [
                    ("mean", mean),
                    ("store", single(rotation.basis())),
                    ("probe", single(rotation.dual())),
                    ("centroids", centroids),
                ];
                for (part, values) in parts {
                    profile.put_floats(self.key(side, *l, *head, part), values);
                }
            }
        }
        Ok(())
    }

    fn stores(&self, site: &Site<'_>) -> Result<Vec<Box<dyn Store>>> {
        site.layers(|l| {
            let plan = self.plan(site.config, site.profile, l)?;
            TransformedStore::new(site.geometry, site.rope(l), Arc::new(plan))
        })
    }
}

/// Takes the mean out of rows (n, dim) and returns it.
fn take_mean(rows: &mut [f32], dim: usize) -> Vec<f32> {
    let mean = mean_row(rows, dim);
    HeadCode::subtract_mean(&mean, rows);
    mean
}
