//! Samples of a model, from which codebooks and bases are made.

use std::sync::Arc;

use candle_core::{D, DType, Result as CandleResult, Tensor};
use kv_attend::Rows;
use kv_owners::sq::{Basis, Samples};
use pq_core::{HeadBooks, PqShape, TrainOptions};

use crate::{Dense, Error, Kv, Result};

/// Leading tokens that are no samples: caches keep them exact, and their norms are outliers.
const SINKS: usize = 4;

/// The cache of a layer that remembers what it is given: run a model over a few thousand tokens of any text with
/// one for each layer.
#[derive(Clone, Debug, Default)]
pub struct Recorder {
    dense: Dense,
    seen: Vec<[Tensor; 3]>, // queries, keys, values
}

impl Kv for Recorder {
    fn attend_new(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> CandleResult<Tensor> {
        self.seen.push([q.clone(), k.clone(), v.clone()]);
        self.dense.attend_new(q, k, v)
    }
}

impl Recorder {
    /// Bases of the layer's heads for scalar codes in blocks of `block` tokens. `frequencies` are the radians per
    /// position of each pair of components `i` and `i + dim / 2`: (dim / 2,).
    ///
    /// # Errors
    /// [`Error::Codes`], such as for no samples, and errors of candle.
    pub fn bases(&self, frequencies: &[f32], block: usize) -> Result<Vec<Basis>> {
        let ([queries, keys, values], heads, [dim, dim_v]) = self.rows()?;
        let group = queries.len() * dim_v / (values.len() * dim).max(1);
        let rows = |rows, components| Rows::contiguous(rows, components).map_err(kv_owners::Error::from);
        let samples = Samples {
            keys: rows(&keys, heads * dim)?,
            queries: rows(&queries, heads * group.max(1) * dim)?,
            values: rows(&values, heads * dim_v)?,
            frequencies,
            rotated_from: Some(SINKS),
        };
        Ok(Basis::fit_layer(&samples, heads, block)?)
    }

    /// Codebooks of the layer's heads for product codes, of keys and values.
    ///
    /// # Errors
    /// [`Error::Codes`], such as for no samples, and errors of candle.
    pub fn books(&self, shapes: [PqShape; 2], options: &TrainOptions<'_>) -> Result<Vec<Arc<HeadBooks>>> {
        let ([_, keys, values], heads, [dim, dim_v]) = self.rows()?;
        let rows = |rows, components| Rows::contiguous(rows, components).map_err(kv_owners::Error::from);
        let (keys, values) = (rows(&keys, heads * dim)?, rows(&values, heads * dim_v)?);
        Ok(HeadBooks::train_layer(keys, values, heads, shapes, options).map_err(kv_owners::Error::from)?)
    }

    /// Queries, keys and values of the first sequence, (tokens, heads, dim); KV heads; components.
    fn rows(&self) -> Result<([Vec<f32>; 3], usize, [usize; 2])> {
        let side = |i: usize| -> Result<Tensor> {
            let parts: Vec<&Tensor> = self.seen.iter().map(|seen| &seen[i]).collect();
            if parts.is_empty() {
                return Err(Error::Empty);
            }
            let all = Tensor::cat(&parts, 2)?.narrow(0, 0, 1)?;
            let tokens = all.dim(2)?;
            let after = all.narrow(2, SINKS.min(tokens), tokens - SINKS.min(tokens))?;
            Ok(after.transpose(1, 2)?.to_dtype(DType::F32)?.contiguous()?)
        };
        let [q, k, v] = [side(0)?, side(1)?, side(2)?];
        let (heads, dims) = (k.dim(2)?, [k.dim(D::Minus1)?, v.dim(D::Minus1)?]);
        let floats = |x: &Tensor| x.flatten_all()?.to_vec1::<f32>();
        Ok(([floats(&q)?, floats(&k)?, floats(&v)?], heads, dims))
    }
}
