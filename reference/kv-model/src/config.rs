//! The sizes and settings of a model, read from `config.json` or from GGUF keys.

mod from_json;

use crate::family::{AttentionKeys, Family};
use crate::rope::frequencies;

/// The shape of a model, and its differences from a Llama.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Family, as `config.json` calls it: `llama`, `mistral`, `qwen2`, `qwen3` or `smollm3`.
    pub family: &'static str,
    /// Entries of the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward block.
    pub intermediate_size: usize,
    /// Layers.
    pub n_layers: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Components of a head; even.
    pub head_dim: usize,
    /// Positions that the model was trained for.
    pub max_seq_len: usize,
    /// Added to the mean square before the root.
    pub rms_norm_eps: f32,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: RopeScaling,
    /// Whether the q, k and v projections have biases.
    pub attention_bias: bool,
    /// Whether the o projection has a bias.
    pub output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Whether the output projection is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether each head of queries and keys is normalized (RMS, with a weight per component) before RoPE.
    pub qk_norm: bool,
    /// How each layer attends: (n_layers,)
    pub attention: Vec<LayerAttention>,
    /// Tokens that end a text.
    pub eos_tokens: Vec<u32>,
}

/// How one layer attends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerAttention {
    /// Whether queries and keys are rotated to their positions; a layer without RoPE (NoPE) has no positions.
    pub rope: bool,
    /// Sliding window: most recent tokens that a query attends to, its own included; `None` for all.
    pub window: Option<usize>,
}

impl LayerAttention {
    /// RoPE, and attention to all tokens.
    pub const FULL: Self = Self { rope: true, window: None };

    /// The first position that a query at position `pos` attends to.
    #[must_use]
    pub const fn first_visible(self, pos: usize) -> usize {
        match self.window {
            Some(window) => (pos + 1).saturating_sub(window),
            None => 0,
        }
    }
}

/// Scaling of rotary frequencies for long contexts.
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All frequencies divided by the factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Llama 3.1: low frequencies divided, high ones kept, a ramp between.
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original_max_seq_len / low_freq_factor` are low.
        low_freq_factor: f64,
        /// Wavelengths below `original_max_seq_len / high_freq_factor` are high.
        high_freq_factor: f64,
        /// Original context length.
        original_max_seq_len: f64,
    },
    /// YaRN (arXiv 2309.00071).
    Yarn(Yarn),
    /// A divisor per frequency, as GGUF files store it.
    Divisors(
        /// (head_dim / 2,)
        Vec<f32>,
    ),
}

/// YaRN: like [`RopeScaling::Llama3`], but with a ramp linear in the index of the frequency, and with scaled
/// scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// Frequencies with more turns than this in `original_max_seq_len` positions are kept.
    pub beta_fast: f64,
    /// Frequencies with fewer turns than this are divided.
    pub beta_slow: f64,
    /// Original context length.
    pub original_max_seq_len: f64,
    /// Whether the ends of the ramp are rounded outwards to frequency indices.
    pub truncate: bool,
    /// Factor of rotated queries and keys.
    pub attention_factor: f64,
}

impl Yarn {
    /// The paper's `attention_factor` for `factor`, its logarithm weighted by `mscale`.
    #[must_use]
    pub fn attention_factor_of(factor: f64, mscale: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 }
    }
}

impl RopeScaling {
    /// Factor of the scores of rotated queries and keys.
    #[must_use]
    pub fn score_factor(&self) -> f64 {
        match self {
            Self::Yarn(yarn) => yarn.attention_factor * yarn.attention_factor,
            _ => 1.0,
        }
    }

    /// Context length after scaling, at least `max_seq_len`. Configurations with YaRN leave
    /// `max_position_embeddings` at the original length.
    fn stretched(&self, max_seq_len: usize) -> usize {
        match self {
            Self::Yarn(yarn) => max_seq_len.max((yarn.original_max_seq_len * yarn.factor) as usize),
            _ => max_seq_len,
        }
    }
}

impl Config {
    /// Query heads per KV head.
    #[must_use]
    pub const fn gqa_group(&self) -> usize {
        self.n_heads / self.n_kv_heads
    }

    /// Elements of one token's keys (or values) in a layer: `n_kv_heads * head_dim`.
    #[must_use]
    pub const fn kv_dim(&self) -> usize {
        self.n_kv_heads * self.head_dim
    }

    /// Elements of one token's queries in a layer: `n_heads * head_dim`.
    #[must_use]
    pub const fn q_dim(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Elements of the cache per token: keys and values of all layers.
    #[must_use]
    pub const fn kv_values_per_token(&self) -> usize {
        2 * self.n_layers * self.kv_dim()
    }

    /// How the layers of a model of `family` attend.
    ///
    /// Their number is limited as in [`Self::validated`], since `n_layers` may come from a file.
    pub(crate) fn attention(
        family: &Family,
        keys: &AttentionKeys,
        n_layers: usize,
    ) -> std::result::Result<Vec<LayerAttention>, String> {
        let layer = |l: usize| {
            let attention = (family.attention)(keys, family, l)?;
            keys.check_type(l, attention)?;
            Ok(attention)
        };
        (0..n_layers.min(MOST_LAYERS)).map(layer).collect()
    }

    /// Rejects shapes beyond any model, so that products of sizes cannot overflow later.
    ///
    /// # Errors
    /// What is wrong.
    pub fn validated(self) -> std::result::Result<Self, String> {
        let sizes = [
            ("vocab_size", self.vocab_size, 1 << 24),
            ("hidden_size", self.hidden_size, 1 << 20),
            ("intermediate_size", self.intermediate_size, 1 << 22),
            ("num_hidden_layers", self.n_layers, MOST_LAYERS),
            ("num_attention_heads", self.n_heads, 1 << 12),
            ("num_key_value_heads", self.n_kv_heads, 1 << 12),
            ("head_dim", self.head_dim, 1 << 12),
            ("max_position_embeddings", self.max_seq_len, 1 << 24),
        ];
        for (name, size, limit) in sizes {
            if size == 0 || size > limit {
                return Err(format!("{name} is {size}, outside 1..={limit}"));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(format!("{} key/value heads do not divide {} heads", self.n_kv_heads, self.n_heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {}, an odd number", self.head_dim));
        }
        if self.attention.len() != self.n_layers {
            let entries = self.attention.len();
            return Err(format!("{entries} entries say how {} layers attend", self.n_layers));
        }
        if self.attention.iter().any(|layer| layer.window == Some(0)) {
            return Err("sliding_window is 0".into());
        }
        if !(self.rms_norm_eps > 0.0 && self.rms_norm_eps < 1.0) {
            return Err(format!("rms_norm_eps is {}, outside 0..1", self.rms_norm_eps));
        }
        if !(self.rope_theta.is_finite() && self.rope_theta > 1.0) {
            return Err(format!("rope_theta is {}, not a number above 1", self.rope_theta));
        }
        let factors: Vec<f64> = match &self.rope_scaling {
            RopeScaling::None => vec![],
            RopeScaling::Linear { factor } => vec![*factor],
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_seq_len } => {
                if low_freq_factor >= high_freq_factor {
                    return Err("rope scaling: low_freq_factor is not below high_freq_factor".into());
                }
                vec![*factor, *low_freq_factor, *high_freq_factor, *original_max_seq_len]
            }
            RopeScaling::Yarn(yarn) => {
                if yarn.beta_slow > yarn.beta_fast {
                    return Err("rope scaling: beta_slow is above beta_fast".into());
                }
                let Yarn { factor, beta_fast, beta_slow, original_max_seq_len, attention_factor, .. } = *yarn;
                vec![factor, beta_fast, beta_slow, original_max_seq_len, attention_factor]
            }
            RopeScaling::Divisors(divisors) => divisors.iter().map(|&x| f64::from(x)).collect(),
        };
        if let Some(x) = factors.iter().find(|x| !(x.is_finite() && **x > 0.0)) {
            return Err(format!("rope scaling: {x} is not a positive number"));
        }
        // Quotients and squares of positive numbers may be none in single precision.
        let factor = self.rope_scaling.score_factor();
        if !(factor as f32).is_normal() {
            return Err(format!("rope scaling: {factor} is no factor of scores"));
        }
        match frequencies(&self).into_iter().find(|&x| !(x as f32).is_finite()) {
            Some(x) => {
                Err(format!("rope scaling: frequencies of {x} radians per position are not supported"))
            }
            None => Ok(self),
        }
    }
}

/// Maximum layers of a model.
const MOST_LAYERS: usize = 1 << 12;
