//! A minimal Llama that shows where a cache is called: no batch, no sampling, f32.

use std::collections::HashMap;
use std::path::Path;

use candle_core::{DType, Device, Error, Result, Tensor};
use candle_nn::ops::{rms_norm, silu, softmax_last_dim};
use candle_nn::rotary_emb::rope;
use pq_candle::PqLayer;

/// The KV cache of a layer.
pub trait Kv {
    /// Appends the keys and values (1, kv heads, n, dim) of `n` tokens, after RoPE.
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()>;
    /// Attention of the last token's query heads (1, heads, 1, dim) over all cached tokens.
    fn attend(&mut self, q: &Tensor) -> Result<Tensor>;
}

impl Kv for PqLayer {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        PqLayer::append(self, k, v)
    }

    fn attend(&mut self, q: &Tensor) -> Result<Tensor> {
        PqLayer::attend(self, q)
    }
}

/// Exact keys and values in growing tensors, as candle's own models have them.
#[derive(Default)]
pub struct Dense(Option<(Tensor, Tensor)>);

impl Kv for Dense {
    fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<()> {
        self.0 = Some(match self.0.take() {
            Some((keys, values)) => (Tensor::cat(&[&keys, k], 2)?, Tensor::cat(&[&values, v], 2)?),
            None => (k.clone(), v.clone()),
        });
        Ok(())
    }

    fn attend(&mut self, q: &Tensor) -> Result<Tensor> {
        let (k, v) = self.0.as_ref().ok_or_else(|| Error::msg("no token is cached"))?;
        attention(q, k, v, None)
    }
}

#[derive(serde::Deserialize)]
pub struct Config {
    pub num_hidden_layers: usize,
    pub head_dim: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    rms_norm_eps: f32,
    rope_theta: f32,
}

pub struct Llama {
    pub config: Config,
    tensors: HashMap<String, Tensor>,
    cos: Tensor,
    sin: Tensor,
}

impl Llama {
    /// A checkpoint with tied embeddings, for `context` tokens at most.
    pub fn load(folder: &Path, context: usize) -> Result<Self> {
        let config: Config = serde_json::from_str(&std::fs::read_to_string(folder.join("config.json"))?)
            .map_err(Error::wrap)?;
        let mut tensors = candle_core::safetensors::load(folder.join("model.safetensors"), &Device::Cpu)?;
        for tensor in tensors.values_mut() {
            *tensor = tensor.to_dtype(DType::F32)?;
        }
        let exponents = (0..config.head_dim).step_by(2).map(|i| i as f32 / config.head_dim as f32);
        let frequencies: Vec<f32> = exponents.map(|x| config.rope_theta.powf(-x)).collect();
        let positions =
            Tensor::arange(0, context as u32, &Device::Cpu)?.to_dtype(DType::F32)?.unsqueeze(1)?;
        let angles = positions.matmul(&Tensor::new(frequencies, &Device::Cpu)?.unsqueeze(0)?)?;
        Ok(Self { config, tensors, cos: angles.cos()?, sin: angles.sin()? })
    }

    /// Logits (1, vocabulary) of the last of `tokens`, which start at `position`. Several tokens are a
    /// prefill: they attend to each other exactly, and their keys and values are appended to the caches.
    pub fn forward(&self, tokens: &[u32], position: usize, caches: &mut [impl Kv]) -> Result<Tensor> {
        let ids = Tensor::new(tokens, &Device::Cpu)?;
        let mut x = self.tensor("model.embed_tokens.weight")?.index_select(&ids, 0)?;
        for (i, cache) in caches.iter_mut().enumerate() {
            let name = |part: &str| format!("model.layers.{i}.{part}");
            let normed = self.norm(&x, &name("input_layernorm"))?;
            let heads = self.attend(&normed, position, cache, &name("self_attn"))?;
            x = (x + self.linear(&heads, &name("self_attn.o_proj"))?)?;
            let normed = self.norm(&x, &name("post_attention_layernorm"))?;
            let gate = silu(&self.linear(&normed, &name("mlp.gate_proj"))?)?;
            let up = self.linear(&normed, &name("mlp.up_proj"))?;
            x = (x + self.linear(&(gate * up)?, &name("mlp.down_proj"))?)?;
        }
        let last = self.norm(&x.narrow(0, tokens.len() - 1, 1)?, "model.norm")?;
        self.linear(&last, "model.embed_tokens")
    }

    fn attend(&self, x: &Tensor, position: usize, cache: &mut impl Kv, name: &str) -> Result<Tensor> {
        let tokens = x.dim(0)?;
        let (heads, kv_heads) = (self.config.num_attention_heads, self.config.num_key_value_heads);
        let project = |part: &str, heads| {
            let rows = self.linear(x, &format!("{name}.{part}"))?;
            rows.reshape((1, tokens, heads, self.config.head_dim))?.transpose(1, 2)?.contiguous()
        };
        let (cos, sin) = (self.cos.narrow(0, position, tokens)?, self.sin.narrow(0, position, tokens)?);
        let q = rope(&project("q_proj", heads)?, &cos, &sin)?;
        let k = rope(&project("k_proj", kv_heads)?, &cos, &sin)?;
        let v = project("v_proj", kv_heads)?;
        cache.append(&k, &v)?;
        let out =
            if tokens == 1 { cache.attend(&q)? } else { attention(&q, &k, &v, Some(&causal(tokens)?))? };
        out.transpose(1, 2)?.reshape((tokens, ()))
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        rms_norm(x, self.tensor(&format!("{name}.weight"))?, self.config.rms_norm_eps)
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        x.matmul(&self.tensor(&format!("{name}.weight"))?.t()?)
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors.get(name).ok_or_else(|| Error::msg(format!("the checkpoint has no `{name}`")))
    }
}

/// Grouped-query attention of (1, heads, m, dim) on (1, kv heads, n, dim).
fn attention(q: &Tensor, k: &Tensor, v: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let (_, heads, m, dim) = q.dims4()?;
    let kv_heads = k.dim(1)?;
    let q = q.reshape((1, kv_heads, heads / kv_heads * m, dim))?;
    let mut scores = (q.matmul(&k.transpose(2, 3)?.contiguous()?)? / (dim as f64).sqrt())?;
    if let Some(mask) = mask {
        scores = scores.reshape((heads, m, ()))?.broadcast_add(mask)?.reshape(scores.shape())?;
    }
    softmax_last_dim(&scores)?.matmul(v)?.reshape((1, heads, m, dim))
}

/// Minus infinity above the diagonal.
fn causal(tokens: usize) -> Result<Tensor> {
    let rows = Tensor::arange(0, tokens as u32, &Device::Cpu)?;
    let later = rows.unsqueeze(1)?.broadcast_lt(&rows.unsqueeze(0)?)?;
    let (no, yes) = (Tensor::new(0f32, &Device::Cpu)?, Tensor::new(f32::NEG_INFINITY, &Device::Cpu)?);
    later.where_cond(&yes.broadcast_as(later.shape())?, &no.broadcast_as(later.shape())?)
}
