//! MILLION's offline codebooks: one per layer, head, and keys or values (the released code
//! shares one over all layers and heads).

use pq_core::{CodebookBuf, TrainOptions, train};

use super::PqCode;
use super::build::SEED;
use crate::cache::{Geometry, HeadCodebooks};
use crate::calibrate::Calibration;
use crate::model::Model;
use crate::{Error, Profile, Result};

fn key(which: char, code: PqCode, l: usize, head: usize) -> String {
    format!("million/{code}/{which}/{l}/{head}/centroids")
}

/// Trains codebooks for every head.
pub(super) fn calibrate(
    model: &Model,
    samples: &Calibration,
    k: PqCode,
    v: PqCode,
    iterations: usize,
    profile: &mut Profile,
) -> Result<()> {
    let geometry = Geometry::of(&model.config);
    let options = TrainOptions { iterations, seed: SEED, ..Default::default() };
    for (l, layer) in samples.layers.iter().enumerate() {
        for head in 0..geometry.n_kv_heads {
            for (which, code, rows) in [('k', k, &layer.rotated_keys), ('v', v, &layer.values)] {
                let trained =
                    train(code.shape(geometry.head_dim)?, &geometry.head_rows(head, rows), &options)?;
                profile.put_floats(key(which, code, l, head), trained.centroids);
            }
        }
    }
    Ok(())
}

/// The codebooks of layer `l`, one pair per kv head.
pub(super) fn codebooks(
    profile: &Profile,
    geometry: Geometry,
    k: PqCode,
    v: PqCode,
    l: usize,
) -> Result<Vec<HeadCodebooks>> {
    let codebook = |code: PqCode, which, head| -> Result<_> {
        let shape = code.shape(geometry.head_dim)?;
        let centroids = profile.floats(&key(which, code, l, head))?;
        CodebookBuf::new(shape, centroids).map_err(|e| Error::Profile(e.to_string()))
    };
    (0..geometry.n_kv_heads)
        .map(|head| Ok(HeadCodebooks { keys: codebook(k, 'k', head)?, values: codebook(v, 'v', head)? }))
        .collect()
}
