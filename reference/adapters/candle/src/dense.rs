//! Exact keys and values in growing tensors, as candle's own models have them.

use candle_core::{D, DType, Result, Tensor};

use crate::Kv;

/// The cache and the attention of candle's Llama (`candle_transformers::models::llama`, 0.11.1): tensors that each
/// step concatenates, KV heads repeated for each query head, scores in `f32`.
#[derive(Clone, Debug, Default)]
pub struct Dense(Option<(Tensor, Tensor)>);

impl Kv for Dense {
    fn attend_new(&mut self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (k, v) = match self.0.take() {
            Some((keys, values)) => {
                (Tensor::cat(&[&keys, k], 2)?.contiguous()?, Tensor::cat(&[&values, v], 2)?.contiguous()?)
            }
            None => (k.clone(), v.clone()),
        };
        self.0 = Some((k.clone(), v.clone()));
        attention(q, &k, &v)
    }
}

/// Attention of the last tokens' queries.
pub(crate) fn attention(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let (group, (tokens, len), dtype) = (q.dim(1)? / k.dim(1)?.max(1), (q.dim(2)?, k.dim(2)?), q.dtype());
    let (k, v) = (repeat(k, group)?.to_dtype(DType::F32)?, repeat(v, group)?.to_dtype(DType::F32)?);
    let scale = (q.dim(D::Minus1)? as f64).sqrt();
    let scores = (q.to_dtype(DType::F32)?.matmul(&k.t()?)? / scale)?;
    let scores = match tokens {
        1 => scores,
        _ => {
            let mask: Vec<u8> =
                (0..tokens).flat_map(|i| (0..len).map(move |j| u8::from(j > i + len - tokens))).collect();
            let mask = Tensor::from_vec(mask, (tokens, len), q.device())?.broadcast_as(scores.shape())?;
            let never = Tensor::new(f32::NEG_INFINITY, q.device())?.broadcast_as(scores.shape())?;
            mask.where_cond(&never, &scores)?
        }
    };
    candle_nn::ops::softmax_last_dim(&scores)?.matmul(&v.contiguous()?)?.to_dtype(dtype)
}

/// Repeats every head `n` times.
fn repeat(x: &Tensor, n: usize) -> Result<Tensor> {
    if n == 1 {
        return Ok(x.clone());
    }
    let (batch, heads, tokens, dim) = x.dims4()?;
    Tensor::cat(&vec![x; n], 2)?.reshape((batch, heads * n, tokens, dim))
}
