use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::family::{AttentionBias, AttentionKeys, Family, Given};
use crate::error::Quoted;
use crate::{Error, Result, files};

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

/// A part of the configuration; errors name the key.
fn named<'a, T: Deserialize<'a>>(value: &'a Value) -> std::result::Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|e| e.to_string())
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

    /// Reads the `config.json` of a Hugging Face folder, and the tokens that end a text from its
    /// `generation_config.json`.
    pub(crate) fn from_folder(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let value: Value = serde_json::from_slice(&files::read(&path)?).map_err(|e| Error::file(&path, e))?;
        let config = Self::from_value(&value).and_then(Self::validated);
        let mut config = config.map_err(|what| Error::file(&path, what))?;
        let path = dir.join("generation_config.json");
        if path.exists() {
            let value: Value = serde_json::from_slice(&files::read(&path)?).map_err(|e| Error::file(&path, e))?;
            let ends = token_ids("eos_token_id", &value["eos_token_id"]);
            config.eos_tokens.extend(ends.map_err(|what| Error::file(&path, what))?);
        }
        Ok(config)
    }

    /// The family is read first, since other families name their fields differently.
    fn from_value(value: &Value) -> std::result::Result<Self, String> {
        let Some(name) = value["model_type"].as_str() else {
            return Err("has no model_type: not the configuration of a model".into());
        };
        let family = Family::of_model_type(name)?;
        if let Some(quantized) = value.get("quantization_config").filter(|value| !value.is_null()) {
            let method = quantized["quant_method"].as_str().unwrap_or("none");
            return Err(format!("quant_method {}: quantized weights are not supported", Quoted(method)));
        }
        let keys: AttentionKeys = named(value)?;
        named::<RawConfig>(value)?.check(family, &keys)
    }

    /// How the layers of a model of `family` attend.
    ///
    /// Their number is limited as in [`Self::validated`], since `n_layers` may come from a file.
    pub(super) fn attention(
        family: &Family,
        keys: &AttentionKeys,
        n_layers: usize,
    ) -> std::result::Result<Vec<LayerAttention>, String> {
        (0..n_layers.min(MOST_LAYERS)).map(|l| (family.attention)(keys, family, l)).collect()
    }

    /// Rejects shapes beyond any model, so that products of sizes cannot overflow later.
    pub(crate) fn validated(self) -> std::result::Result<Self, String> {
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
        match factors.iter().find(|x| !(x.is_finite() && **x > 0.0)) {
            Some(x) => Err(format!("rope scaling: {x} is not a positive number")),
            None => Ok(self),
        }
    }
}

/// Maximum layers of a model.
const MOST_LAYERS: usize = 1 << 12;

/// `config.json` as parsed, before validation.
#[derive(Deserialize)]
struct RawConfig {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    #[serde(default)]
    num_key_value_heads: Given<usize>,
    #[serde(default)]
    head_dim: Given<usize>,
    max_position_embeddings: Option<usize>,
    original_max_position_embeddings: Option<f64>,
    rms_norm_eps: Option<f32>,
    rope_theta: Option<f64>,
    rope_scaling: Option<Value>,
    rope_parameters: Option<Value>, // transformers 5 moved rope_theta and rope_scaling here
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    #[serde(default)]
    eos_token_id: Given<Value>,
    #[serde(default)]
    bos_token_id: Value, // only validated: the tokenizer's file decides
}

impl RawConfig {
    fn check(self, family: &Family, keys: &AttentionKeys) -> std::result::Result<Config, String> {
        if let Some(act) = self.hidden_act.as_deref().filter(|&act| act != "silu") {
            return Err(format!("hidden_act {} is not supported, only `silu`", Quoted(act)));
        }
        token_ids("bos_token_id", &self.bos_token_id)?;
        let defaults = &family.defaults;
        let n_heads = self.num_attention_heads;
        let head_dim = self.head_dim.or(defaults.head_dim);
        let configured = family.bias == AttentionBias::Configured && self.attention_bias;
        let max_seq_len = self.max_position_embeddings.unwrap_or(defaults.max_seq_len);
        let (theta, rope_scaling) = self.rope(max_seq_len)?;
        let eos_token = defaults.eos_token.map(Value::from);
        Ok(Config {
            family: family.name,
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            intermediate_size: self.intermediate_size,
            n_layers: self.num_hidden_layers,
            n_heads,
            n_kv_heads: self.num_key_value_heads.or(defaults.n_kv_heads).unwrap_or(n_heads),
            head_dim: head_dim.or(self.hidden_size.checked_div(n_heads)).unwrap_or(0),
            max_seq_len: rope_scaling.stretched(max_seq_len),
            rms_norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            rope_theta: theta.unwrap_or(defaults.rope_theta),
            rope_scaling,
            attention_bias: configured || family.bias == AttentionBias::Qkv,
            output_bias: configured,
            mlp_bias: self.mlp_bias,
            tie_word_embeddings: self.tie_word_embeddings.unwrap_or(defaults.tie_word_embeddings),
            qk_norm: family.qk_norm,
            attention: Config::attention(family, keys, self.num_hidden_layers)?,
            eos_tokens: token_ids("eos_token_id", &self.eos_token_id.or(eos_token).unwrap_or_default())?,
        })
    }

    /// Base and scaling of RoPE: from `rope_parameters`, where transformers 5 has them, or from `rope_theta` and
    /// `rope_scaling`.
    fn rope(&self, max_seq_len: usize) -> std::result::Result<(Option<f64>, RopeScaling), String> {
        let places = [&self.rope_parameters, &self.rope_scaling];
        let places: Vec<&Value> = places.into_iter().flatten().filter(|value| !value.is_null()).collect();
        let partial = places.iter().map(|place| place["partial_rotary_factor"].as_f64());
        if partial.chain([self.partial_rotary_factor]).flatten().any(|x| x != 1.0) {
            return Err("a partial_rotary_factor is not supported".into());
        }
        let thetas = places.iter().map(|place| place["rope_theta"].as_f64()).chain([self.rope_theta]);
        let thetas: Vec<f64> = thetas.flatten().collect();
        if thetas.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err("`rope_theta` differs from that of `rope_parameters`".into());
        }
        let original = self.original_max_position_embeddings;
        let scalings = places.iter().map(|place| rope_scaling(place, max_seq_len, original));
        let scalings = scalings.collect::<std::result::Result<Vec<_>, _>>()?;
        if scalings.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err("`rope_scaling` differs from `rope_parameters`".into());
        }
        Ok((thetas.first().copied(), scalings.into_iter().next().unwrap_or(RopeScaling::None)))
    }
}

/// The scaling in `rope_parameters` or `rope_scaling`. `original` is the original context length that the
/// configuration has outside of them, which has precedence.
fn rope_scaling(
    value: &Value,
    max_seq_len: usize,
    original: Option<f64>,
) -> std::result::Result<RopeScaling, String> {
    let Some(fields) = value.as_object() else { return Err("rope scaling is not an object".into()) };
    if let Some((name, _)) = fields.iter().find(|(_, field)| field.is_object()) {
        return Err(format!("rope scaling of its own for {} is not supported", Quoted(name)));
    }
    let given = |key: &str| match &value[key] {
        Value::Null => Ok(None),
        given => given.as_f64().map(Some).ok_or_else(|| format!("rope scaling: `{key}` is not a number")),
    };
    let number = |key: &str| given(key)?.ok_or_else(|| format!("rope scaling: `{key}` is missing"));
    let original_max_seq_len = || -> std::result::Result<f64, String> {
        let inside = given("original_max_position_embeddings")?;
        Ok(original.or(inside).unwrap_or(max_seq_len as f64))
    };
    match value["rope_type"].as_str().or(value["type"].as_str()) {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: number("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_max_seq_len: original_max_seq_len()?,
        }),
        Some("yarn") => {
            let original = original_max_seq_len()?;
            let factor = given("factor")?.unwrap_or(max_seq_len as f64 / original);
            yarn(value, given, factor, original).map(RopeScaling::Yarn)
        }
        Some(other) => {
            let supported = "only `linear`, `llama3` and `yarn`";
            Err(format!("rope scaling {} is not supported, {supported}", Quoted(other)))
        }
    }
}

/// YaRN's settings with the defaults of `transformers`.
fn yarn(
    value: &Value,
    given: impl Fn(&str) -> std::result::Result<Option<f64>, String>,
    factor: f64,
    original_max_seq_len: f64,
) -> std::result::Result<Yarn, String> {
    let truncate = match &value["truncate"] {
        Value::Null => true,
        given => given.as_bool().ok_or("rope scaling: `truncate` is neither true nor false")?,
    };
    let mscales = given("mscale")?.zip(given("mscale_all_dim")?).filter(|&(a, b)| a != 0.0 && b != 0.0);
    let attention_factor = match (given("attention_factor")?, mscales) {
        (Some(given), _) => given,
        (None, Some((mscale, all))) => {
            Yarn::attention_factor_of(factor, mscale) / Yarn::attention_factor_of(factor, all)
        }
        (None, None) => Yarn::attention_factor_of(factor, 1.0),
    };
    // Zero counts as missing.
    let beta = |key: &str, default: f64| -> std::result::Result<f64, String> {
        Ok(given(key)?.filter(|&beta| beta != 0.0).unwrap_or(default))
    };
    Ok(Yarn {
        factor,
        beta_fast: beta("beta_fast", 32.0)?,
        beta_slow: beta("beta_slow", 1.0)?,
        original_max_seq_len,
        truncate,
        attention_factor,
    })
}

/// A token or a list of tokens; none for null.
fn token_ids(key: &str, value: &Value) -> std::result::Result<Vec<u32>, String> {
    let one = |value: &Value| {
        let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
        id.ok_or_else(|| format!("{key}: {} is no token", Quoted(&value.to_string())))
    };
    match value {
        Value::Null => Ok(vec![]),
        Value::Array(ids) => ids.iter().map(one).collect(),
        value => Ok(vec![one(value)?]),
    }
}
