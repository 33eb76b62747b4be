//! MILLION's offline codebooks: one per layer, head, and keys or values (the released code
//! shares one over all layers and heads).

use pq_core::{CodebookBuf, TrainOptions, train_batch};

use super::PqCode;
use super::build::SEED;
use crate::cache::{Geometry, HeadCodebooks, mean_row, take_outliers};
use crate::calibrate::Calibration;
use crate::model::Model;
use crate::{Error, Profile, Result};

/// The setting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Million {
    pub k: PqCode,
    pub v: PqCode,
    pub iterations: usize,
    pub outliers: usize, // percent
}

impl Million {
    fn key(&self, which: usize, l: usize, head: usize) -> String {
        let (side, code) = [("k", self.k), ("v", self.v)][which];
        format!("million/{code}/{}/{side}/{l}/{head}/centroids", self.outliers)
    }

    /// Trains codebooks for every head of every layer.
    pub fn calibrate(&self, model: &Model, samples: &Calibration, profile: &mut Profile) -> Result<()> {
        let geometry = Geometry::of(&model.config);
        let options = TrainOptions { iterations: self.iterations, seed: SEED, ..Default::default() };
        for (which, code) in [self.k, self.v].into_iter().enumerate() {
            let (mut keys, mut sets) = (vec![], vec![]);
            for (l, layer) in samples.layers.iter().enumerate() {
                for head in 0..geometry.n_kv_heads {
                    let rows = [&layer.rotated_keys, &layer.values][which];
                    let mut rows = geometry.head_rows(head, rows);
                    if self.outliers > 0 {
                        let centre = mean_row(&rows, geometry.head_dim);
                        take_outliers(&mut rows, &centre, self.outliers)?;
                    }
                    keys.push(self.key(which, l, head));
                    sets.push(rows);
                }
            }
            let sets: Vec<&[f32]> = sets.iter().map(Vec::as_slice).collect();
            let trained = train_batch(code.shape(geometry.head_dim)?, &sets, &options)?;
            keys.into_iter()
                .zip(trained)
                .for_each(|(key, trained)| profile.put_floats(key, trained.centroids));
        }
        Ok(())
    }

    /// The codebooks of layer `l`, one pair per kv head.
    pub fn codebooks(&self, profile: &Profile, geometry: Geometry, l: usize) -> Result<Vec<HeadCodebooks>> {
        let codebook = |which: usize, head| -> Result<_> {
            let shape = [self.k, self.v][which].shape(geometry.head_dim)?;
            let centroids = profile.floats(&self.key(which, l, head))?;
            CodebookBuf::new(shape, centroids).map_err(|e| Error::Profile(e.to_string()))
        };
        (0..geometry.n_kv_heads)
            .map(|head| Ok(HeadCodebooks { keys: codebook(0, head)?, values: codebook(1, head)? }))
            .collect()
    }
}
