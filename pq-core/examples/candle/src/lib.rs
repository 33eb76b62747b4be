//! The attention of a candle model on a product-quantized cache.

use candle_core::{DType, Error, Result, Tensor};
use pq_core::{Attention, HeadBooks, LayerCache, PqShape, Rows, TrainOptions, Window, Workspace};

/// One layer's cache of one sequence. It replaces the tensors of keys and values that candle's models
/// concatenate.
pub struct PqLayer {
    shape: PqShape,
    cache: Option<LayerCache<f32>>, // created by the prompt
    workspace: Workspace,
}

impl PqLayer {
    pub fn new(shape: PqShape) -> Self {
        Self { shape, cache: None, workspace: Workspace::default() }
    }

    /// Caches `k` and `v` (1, kv heads, n, dim), after RoPE. The first call, with the prompt, trains the
    /// codebooks.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        let (row, heads) = (k.dim(1)? * k.dim(3)?, k.dim(1)?);
        let (k, v) = (tokens_first(k)?, tokens_first(v)?);
        let keys = Rows::contiguous(&k, row).map_err(Error::wrap)?;
        let values = Rows::contiguous(&v, row).map_err(Error::wrap)?;
        if self.cache.is_none() {
            let options = TrainOptions { iterations: 8, ..Default::default() };
            let books = HeadBooks::train_layer(keys, values, heads, [self.shape; 2], &options)
                .map_err(Error::wrap)?;
            let window = Window { sinks: 4, recent: 64, batch: 32 };
            self.cache = Some(LayerCache::new(&books, window).map_err(Error::wrap)?);
        }
        let Some(cache) = &mut self.cache else { return Ok(()) };
        cache.append(keys, values).map(drop).map_err(Error::wrap)
    }

    /// Attention of one token's query heads `q` (1, heads, 1, dim) on all cached tokens.
    pub fn attend(&mut self, q: &Tensor) -> Result<Tensor> {
        let (queries, scale) = (tokens_first(q)?, 1.0 / (q.dim(3)? as f32).sqrt());
        let mut out = vec![0.0; queries.len()];
        let Some(cache) = &self.cache else { return q.zeros_like() };
        let (attention, queries) = (Attention::scaled(scale), Rows::from(&queries[..]));
        cache.attend_into(&attention, queries, &mut self.workspace, &mut out).map_err(Error::wrap)?;
        Tensor::from_vec(out, q.shape(), q.device())?.to_dtype(q.dtype())
    }
}

fn tokens_first(x: &Tensor) -> Result<Vec<f32>> {
    x.transpose(1, 2)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()
}
