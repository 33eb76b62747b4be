//! MILLION's offline codebooks: one per layer, head, and keys or values (the released code
//! shares one over all layers and heads).

use pq_core::{CodebookBuf, TrainOptions, train_batch};

use super::PqCode;
use super::build::SEED;
use crate::cache::{Geometry, mean_row, take_outliers};
use crate::calibrate::Calibration;
use crate::model::Model;
use crate::side::{Pair, Side};
use crate::{Error, Profile, Result};

/// The setting.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Million {
    pub codes: Pair<PqCode>,
    pub iterations: usize,
    pub outliers: usize, // percent
}

impl Million {
    fn key(&self, side: Side, l: usize, head: usize) -> String {
        let (code, letter) = (self.codes[side], side.letter());
        format!("million/{code}/{}/{letter}/{l}/{head}/centroids", self.outliers)
    }

    /// Trains codebooks for every head of every layer.
    pub fn calibrate(&self, model: &Model, samples: &Calibration, profile: &mut Profile) -> Result<()> {
        let geometry = Geometry::of(&model.config);
        let options = TrainOptions { iterations: self.iterations, seed: SEED, ..Default::default() };
        for side in Side::ALL {
            let (mut keys, mut sets) = (vec![], vec![]);
            for (l, layer) in samples.layers.iter().enumerate() {
                for head in 0..geometry.n_kv_heads {
                    let rows = Pair::new(&layer.rotated_keys, &layer.values)[side];
                    let mut rows = geometry.head_rows(head, rows);
                    if self.outliers > 0 {
                        let centre = mean_row(&rows, geometry.head_dim);
                        take_outliers(&mut rows, &centre, self.outliers)?;
                    }
                    keys.push(self.key(side, l, head));
                    sets.push(rows);
                }
            }
            let sets: Vec<&[f32]> = sets.iter().map(Vec::as_slice).collect();
            let trained = train_batch(self.codes[side].shape(geometry.head_dim)?, &sets, &options)?;
            keys.into_iter()
                .zip(trained)
                .for_each(|(key, trained)| profile.put_floats(key, trained.centroids));
        }
        Ok(())
    }

    /// The codebooks of layer `l`, one pair per kv head.
    pub fn codebooks(
        &self,
        profile: &Profile,
        geometry: Geometry,
        l: usize,
    ) -> Result<Vec<Pair<CodebookBuf>>> {
        let codebook = |side: Side, head: usize| -> Result<_> {
            let shape = self.codes[side].shape(geometry.head_dim)?;
            let centroids = profile.floats(&self.key(side, l, head))?;
            CodebookBuf::new(shape, centroids).map_err(|e| Error::Profile(e.to_string()))
        };
        (0..geometry.n_kv_heads).map(|head| Pair::try_of(|side| codebook(side, head))).collect()
    }
}
