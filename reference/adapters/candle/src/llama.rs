//! Candle's Llama over caches of any kind.
//!
//! `candle_transformers::models::llama` (0.11.1) has a concrete cache with private tensors, and attention follows
//! inline, so no other cache can be passed to it. This is its code with the same operations in the same order, where
//! the cache is a [`Kv`] and heads may have any `head_dim`. `tests/llama.rs` compares the two bit for bit.

use candle_core::{DType, Device, Error, IndexOp, Module, Result, Tensor};
use candle_nn::{Embedding, Linear, RmsNorm, VarBuilder, embedding, linear_no_bias, rms_norm};

use crate::Kv;

/// The fields of a checkpoint's `config.json` that are used.
#[derive(Clone, Debug, serde::Deserialize)]
pub struct Config {
    hidden_size: usize,
    intermediate_size: usize,
    vocab_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    rms_norm_eps: f64,
    #[serde(default = "default_theta")]
    rope_theta: f32,
    rope_scaling: Option<serde::de::IgnoredAny>,
    max_position_embeddings: usize,
    #[serde(default)]
    tie_word_embeddings: bool,
}

fn default_theta() -> f32 {
    10_000.0
}

impl Config {
    /// Number of layers.
    #[must_use]
    pub const fn layers(&self) -> usize {
        self.num_hidden_layers
    }

    /// Components of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Radians per position of each pair of components `i` and `i + head_dim / 2`: (head_dim / 2,).
    #[must_use]
    pub fn frequencies(&self) -> Vec<f32> {
        let dim = self.head_dim();
        (0..dim).step_by(2).map(|i| 1.0 / self.rope_theta.powf(i as f32 / dim as f32)).collect()
    }
}

/// A Llama.
#[derive(Clone, Debug)]
pub struct Llama {
    wte: Embedding,
    blocks: Vec<Block>,
    ln_f: RmsNorm,
    lm_head: Linear,
    cos: Tensor,
    sin: Tensor,
}

#[derive(Clone, Debug)]
struct Block {
    rms_1: RmsNorm,
    attn: Attention,
    rms_2: RmsNorm,
    mlp: Mlp,
}

#[derive(Clone, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

#[derive(Clone, Debug)]
struct Mlp {
    c_fc1: Linear,
    c_fc2: Linear,
    c_proj: Linear,
}

impl Llama {
    /// Loads the weights, in the type and on the device of `vb`.
    ///
    /// # Errors
    /// Those of candle for missing tensors and other shapes; a scaled RoPE, which is not implemented here.
    pub fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        if config.rope_scaling.is_some() {
            return Err(Error::msg("a scaled RoPE is not implemented"));
        }
        let wte = embedding(config.vocab_size, config.hidden_size, vb.pp("model.embed_tokens"))?;
        let lm_head = match config.tie_word_embeddings {
            true => Linear::new(wte.embeddings().clone(), None),
            false => linear_no_bias(config.hidden_size, config.vocab_size, vb.pp("lm_head"))?,
        };
        let block = |i| Block::load(vb.pp(format!("model.layers.{i}")), config);
        let blocks = (0..config.num_hidden_layers).map(block).collect::<Result<_>>()?;
        let ln_f = rms_norm(config.hidden_size, config.rms_norm_eps, vb.pp("model.norm"))?;
        let (cos, sin) = tables(config, vb.dtype(), vb.device())?;
        Ok(Self { wte, blocks, ln_f, lm_head, cos, sin })
    }

    /// The logits (batch, vocabulary) after the last of `tokens` (batch, tokens), the first of which is at
    /// `position`; `caches` has one for each layer.
    ///
    /// # Errors
    /// Those of candle and of the caches.
    pub fn forward(&self, tokens: &Tensor, position: usize, caches: &mut [impl Kv]) -> Result<Tensor> {
        if caches.len() != self.blocks.len() {
            return Err(Error::msg(format!("{} caches for {} layers", caches.len(), self.blocks.len())));
        }
        let (_, n) = tokens.dims2()?;
        let (cos, sin) = (self.cos.narrow(0, position, n)?, self.sin.narrow(0, position, n)?);
        let mut x = self.wte.forward(tokens)?;
        for (block, cache) in self.blocks.iter().zip(caches) {
            x = block.forward(&x, &cos, &sin, cache)?;
        }
        let x = self.ln_f.forward(&x)?.i((.., n - 1, ..))?.contiguous()?;
        self.lm_head.forward(&x)?.to_dtype(DType::F32)
    }
}

/// Cosines and sines of every position.
fn tables(config: &Config, dtype: DType, device: &Device) -> Result<(Tensor, Tensor)> {
    let theta = Tensor::new(config.frequencies(), device)?;
    let positions = Tensor::arange(0, config.max_position_embeddings as u32, device)?
        .to_dtype(DType::F32)?
        .reshape((config.max_position_embeddings, 1))?;
    let angles = positions.matmul(&theta.reshape((1, theta.elem_count()))?)?;
    Ok((angles.cos()?.to_dtype(dtype)?, angles.sin()?.to_dtype(dtype)?))
}

impl Block {
    fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let norm = |name: &str| rms_norm(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            rms_1: norm("input_layernorm")?,
            attn: Attention::load(vb.pp("self_attn"), config)?,
            rms_2: norm("post_attention_layernorm")?,
            mlp: Mlp::load(vb.pp("mlp"), config)?,
        })
    }

    fn forward(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, cache: &mut impl Kv) -> Result<Tensor> {
        let x = (self.attn.forward(&self.rms_1.forward(x)?, cos, sin, cache)? + x)?;
        self.mlp.forward(&self.rms_2.forward(&x)?)? + x
    }
}

impl Attention {
    fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (heads, head_dim) = (config.num_attention_heads, config.head_dim());
        let kv_heads = config.num_key_value_heads.unwrap_or(heads);
        let linear = |from, to, name| linear_no_bias(from, to, vb.pp(name));
        Ok(Self {
            q_proj: linear(config.hidden_size, heads * head_dim, "q_proj")?,
            k_proj: linear(config.hidden_size, kv_heads * head_dim, "k_proj")?,
            v_proj: linear(config.hidden_size, kv_heads * head_dim, "v_proj")?,
            o_proj: linear(heads * head_dim, config.hidden_size, "o_proj")?,
            heads,
            kv_heads,
            head_dim,
        })
    }

    fn forward(&self, x: &Tensor, cos: &Tensor, sin: &Tensor, cache: &mut impl Kv) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        let project = |linear: &Linear, heads| {
            linear.forward(x)?.reshape((batch, tokens, heads, self.head_dim))?.transpose(1, 2)
        };
        let q = candle_nn::rotary_emb::rope(&project(&self.q_proj, self.heads)?.contiguous()?, cos, sin)?;
        let k = candle_nn::rotary_emb::rope(&project(&self.k_proj, self.kv_heads)?.contiguous()?, cos, sin)?;
        let v = project(&self.v_proj, self.kv_heads)?;
        let y = cache.attend_new(&q, &k, &v)?;
        self.o_proj.forward(&y.transpose(1, 2)?.reshape((batch, tokens, self.heads * self.head_dim))?)
    }
}

impl Mlp {
    fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            c_fc1: linear_no_bias(hidden, inner, vb.pp("gate_proj"))?,
            c_fc2: linear_no_bias(hidden, inner, vb.pp("up_proj"))?,
            c_proj: linear_no_bias(inner, hidden, vb.pp("down_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (candle_nn::ops::silu(&self.c_fc1.forward(x)?)? * self.c_fc2.forward(x)?)?;
        self.c_proj.forward(&x)
    }
}
