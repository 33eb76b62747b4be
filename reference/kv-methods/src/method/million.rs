//! MILLION: attention on product-quantizer codes of rotated keys and of values, with codebooks that are
//! trained offline, one per layer, head and side (the released code shares one over all layers and heads).

mod outliers;

use std::sync::Arc;

use kv_attend::owner::{Pair, Side};
#[cfg(feature = "cuda")]
use kv_device::plan::{CodedRows, Plan};
use kv_model::Config;
use pq_core::{CodebookBuf, HeadBooks, HeadCodes, TrainOptions, train_batch, unseen_error};

use super::kind::{BuildContext, Kind, Registration, SEED};
#[cfg(feature = "cuda")]
use super::on_device::{DeviceKind, Limit};
use super::paged::Paging;
use super::pq_code::{CODE_TILE, PqCode, check_codes};
use crate::cache::{Geometry, HeadStore, Store};
use crate::calibrate::{Calibration, mean_row, rotated_keys};
use crate::{Profile, Result};
use outliers::{Kept, OutlierStore};

pub(super) const MILLION: Registration = Registration {
    names: &["million"],
    help: "\
  million           attention on PQ codes                                 k=64x8 v=64x8 iterations=8
                                                                          outliers=PERCENT kept exact
                      on a device: pages of N tokens, of a pool of M      pages=N pool=M
",
    examples: &[
        "million:k=8/1:v=8/1:exact=f32:window=4",
        "million:k=8/1:v=8/1:outliers=2:exact=f32:window=4",
    ],
    parse: |s| {
        let codes = PqCode::take_both(s, 8, 2)?;
        let (iterations, outliers) = (s.positive("iterations", 8)?, s.percent("outliers", 0)?);
        Ok(Arc::new(Million { codes, iterations, outliers, pages: Paging::take(s, CODE_TILE)? }))
    },
};

#[derive(Debug)]
struct Million {
    codes: Pair<PqCode>,
    iterations: usize,
    outliers: usize, // percent
    pages: Option<Paging>,
}

impl Million {
    fn key(&self, side: Side, l: usize, head: usize, part: &str) -> String {
        let Self { iterations, outliers, .. } = self;
        let (code, letter) = (self.codes[side], side.letter());
        format!("million/{code}/{iterations}/{outliers}/{letter}/{l}/{head}/{part}")
    }

    /// The codebooks of layer `l`, one pair per KV head.
    fn trained(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Vec<Pair<CodebookBuf>>> {
        self.of_heads(geometry, l, |side, key| {
            profile.codebook(&key("centroids"), self.codes[side].shape(geometry.head_dim)?)
        })
    }

    /// The relative errors of layer `l`'s codes on the calibration text.
    fn errors(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Vec<Pair<f64>>> {
        self.of_heads(geometry, l, |_, key| profile.expected_error(&key("error")))
    }

    /// The outliers that layer `l` keeps of an empty sequence.
    fn kept(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Vec<Pair<Kept>>> {
        self.of_heads(geometry, l, |_, key| {
            Ok(Kept::about(profile.factors(&key("centre"), geometry.head_dim)?))
        })
    }

    /// What `read` returns for each side of each head of layer `l`, given the names of its entries.
    fn of_heads<T>(
        &self,
        geometry: Geometry,
        l: usize,
        read: impl Fn(Side, &dyn Fn(&str) -> String) -> Result<T>,
    ) -> Result<Vec<Pair<T>>> {
        let head = |head| Pair::try_of(|side| read(side, &|part| self.key(side, l, head, part)));
        (0..geometry.n_kv_heads).map(head).collect()
    }
}

impl Kind for Million {
    fn check(&self, config: &Config) -> Result<()> {
        check_codes(self.codes, "million", config)
    }

    fn needs_profile(&self) -> bool {
        true
    }

    fn device_setting(&self) -> Option<&'static str> {
        self.pages.map(|_| "pages")
    }

    /// Trains codebooks for every head of every layer.
    fn calibrate(&self, samples: &Calibration<'_>, profile: &mut Profile) -> Result<()> {
        let geometry = Geometry::of(&samples.model.config);
        let options =
            TrainOptions { iterations: self.iterations, seed: SEED, encode: true, ..Default::default() };
        for (l, layer) in samples.layers.iter().enumerate() {
            for side in Side::ALL {
                let rows = |head| match side {
                    Side::Keys => rotated_keys(samples.rope.layer(l), &geometry.head_rows(head, &layer.keys)),
                    Side::Values => geometry.head_rows(head, &layer.values),
                };
                let mut sets: Vec<_> = (0..geometry.n_kv_heads).map(rows).collect();
                if self.outliers > 0 {
                    for (head, rows) in sets.iter_mut().enumerate() {
                        let centre = mean_row(rows, geometry.head_dim);
                        outliers::take(rows, &centre, 0, self.outliers)?;
                        profile.put_floats(self.key(side, l, head, "centre"), centre);
                    }
                }
                let sets: Vec<&[f32]> = sets.iter().map(Vec::as_slice).collect();
                let trained = train_batch(self.codes[side].shape(geometry.head_dim)?, &sets, &options)?;
                for (head, (trained, rows)) in trained.into_iter().zip(sets).enumerate() {
                    let squares: f64 = rows.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                    let error = if squares > 0.0 { trained.error / squares } else { 0.0 };
                    let n = layer.values.len() / geometry.kv_dim();
                    let error = unseen_error(error, n, self.codes[side].shape(geometry.head_dim)?.ksub());
                    profile.put_floats(self.key(side, l, head, "centroids"), trained.centroids);
                    profile.put_floats(self.key(side, l, head, "error"), vec![error as f32]);
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
        let geometry = context.geometry;
        let store = |l| -> Result<HeadStore<HeadCodes>> {
            let trained = self.trained(context.profile, geometry, l)?.into_iter();
            let books = trained.zip(self.errors(context.profile, geometry, l)?);
            let heads = books.map(|(Pair { keys, values }, errors)| {
                HeadCodes::new(HeadBooks::new(keys, values).with_expected_errors(errors).into())
            });
            let shared_size = |codes: &HeadCodes| codes.books().size();
            Ok(HeadStore { geometry, rope: context.rope(l), heads: heads.collect(), shared_size })
        };
        match self.outliers {
            0 => context.layers(store),
            percent => context.layers(|l| {
                let kept = self.kept(context.profile, geometry, l)?;
                Ok(OutlierStore::new(store(l)?, kept, percent))
            }),
        }
    }
}

#[cfg(feature = "cuda")]
impl DeviceKind for Million {
    fn limits(&self, window: pq_core::Window) -> Vec<Limit> {
        let mut limits = Limit::of_rings(window);
        limits.push(Limit::new(self.outliers > 0, "outliers=1", "a device codes all elements", "outliers=0"));
        limits
    }

    fn plan(&self, config: &Config, profile: Option<&Profile>) -> Result<Plan> {
        let geometry = Geometry::of(config);
        let quantizers = Pair::try_of(|side| self.codes[side].shape(geometry.head_dim))?;
        let trained = |profile| (0..config.n_layers).map(|l| self.trained(profile, geometry, l)).collect();
        let rows = CodedRows::Plain(profile.map(trained).transpose()?);
        Ok(Plan::Codes { quantizers, rows, pages: self.pages.map(Paging::memory) })
    }
}
