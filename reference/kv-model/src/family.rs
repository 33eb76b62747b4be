//! The model families and their differences from a Llama. The readers of `config.json` and of GGUF metadata
//! combine this table with a checkpoint's own settings into a [`Config`](crate::Config), which is all
//! that the loader and the forward pass see.

use serde::{Deserialize, Deserializer};

use crate::LayerAttention;
use crate::error::Quoted;

/// A family of models.
pub(crate) struct Family {
    /// Its `model_type` in `config.json`.
    pub name: &'static str,
    /// Its `general.architecture` in GGUF files, if it has its own.
    pub gguf: Option<&'static str>,
    /// The attention projections with biases.
    pub bias: AttentionBias,
    /// Whether each head of queries and keys is normalized before RoPE.
    pub qk_norm: bool,
    /// Whether GGUF files store the rows of Q and K with RoPE pairs adjacent.
    pub gguf_pairs: bool,
    /// What `transformers` assumes of keys that `config.json` leaves out.
    pub defaults: Defaults,
    /// How layer `l` attends.
    pub attention: fn(&AttentionKeys, &Self, l: usize) -> Result<LayerAttention, String>,
}

/// Settings of a family whose keys are missing.
#[derive(Clone, Copy)]
pub(crate) struct Defaults {
    /// Key and value heads; `None` for as many as heads of queries.
    pub n_kv_heads: Option<usize>,
    /// Components of a head; `None` for `hidden_size / n_heads`.
    pub head_dim: Option<usize>,
    pub max_seq_len: usize,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    pub eos_token: Option<u32>,
    /// The sliding window of the layers that have one.
    pub sliding_window: Option<usize>,
}

/// The attention projections with biases.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum AttentionBias {
    /// None, regardless of the configuration.
    None,
    /// Q, K and V.
    Qkv,
    /// All four if `attention_bias` is set.
    Configured,
}

const LLAMA: Family = Family {
    name: "llama",
    gguf: Some("llama"),
    bias: AttentionBias::Configured,
    qk_norm: false,
    gguf_pairs: true,
    defaults: Defaults {
        n_kv_heads: None,
        head_dim: None,
        max_seq_len: 2048,
        rope_theta: 10_000.0,
        tie_word_embeddings: false,
        eos_token: Some(2),
        sliding_window: None,
    },
    attention: no_window,
};

const QWEN: Defaults = Defaults {
    n_kv_heads: Some(32),
    max_seq_len: 32_768,
    eos_token: None,
    sliding_window: Some(4096),
    ..LLAMA.defaults
};

const FAMILIES: [Family; 5] = [
    LLAMA,
    Family {
        name: "mistral",
        gguf: None, // llama.cpp converts a Mistral to the architecture `llama`
        bias: AttentionBias::None,
        defaults: Defaults {
            n_kv_heads: Some(8),
            max_seq_len: 131_072,
            sliding_window: Some(4096),
            ..LLAMA.defaults
        },
        attention: one_window,
        ..LLAMA
    },
    Family {
        name: "qwen2",
        gguf: Some("qwen2"),
        bias: AttentionBias::Qkv,
        gguf_pairs: false,
        defaults: QWEN,
        attention: late_windows,
        ..LLAMA
    },
    Family {
        name: "qwen3",
        gguf: Some("qwen3"),
        qk_norm: true,
        gguf_pairs: false,
        defaults: Defaults { head_dim: Some(128), ..QWEN },
        attention: late_windows,
        ..LLAMA
    },
    Family {
        name: "smollm3",
        gguf: Some("smollm3"),
        defaults: Defaults {
            n_kv_heads: Some(4),
            max_seq_len: 32_768,
            rope_theta: 2_000_000.0,
            tie_word_embeddings: true,
            eos_token: Some(128_001),
            ..LLAMA.defaults
        },
        attention: some_layers_without_rope,
        ..LLAMA
    },
];

impl Family {
    /// The family of a `model_type`.
    pub fn of_model_type(name: &str) -> Result<&'static Self, String> {
        FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
            let names: Vec<_> = FAMILIES.iter().map(|family| family.name).collect();
            format!("model_type {} is not supported, only {}", Quoted(name), names.join(", "))
        })
    }

    /// The family of a GGUF architecture.
    pub fn of_architecture(name: &str) -> Result<&'static Self, String> {
        FAMILIES.iter().find(|family| family.gguf == Some(name)).ok_or_else(|| {
            let names: Vec<_> = FAMILIES.iter().filter_map(|family| family.gguf).collect();
            format!("architecture {} is not supported, only {}", Quoted(name), names.join(", "))
        })
    }
}

/// The settings of windows and positions in `config.json`, with the defaults of `transformers` for missing
/// keys. GGUF files have none of them, so the defaults apply.
#[derive(Deserialize)]
#[serde(default)]
pub(crate) struct AttentionKeys {
    sliding_window: Given<usize>,
    use_sliding_window: bool,
    max_window_layers: usize,
    layer_types: Option<Vec<String>>,
    no_rope_layers: Option<Vec<u8>>,
    no_rope_layer_interval: usize,
}

impl Default for AttentionKeys {
    fn default() -> Self {
        Self {
            sliding_window: Given::Missing,
            use_sliding_window: false,
            max_window_layers: 28,
            layer_types: None,
            no_rope_layers: None,
            no_rope_layer_interval: 4,
        }
    }
}

impl AttentionKeys {
    /// Whether layer `l` has a window: by its entry in `layer_types`, or by `otherwise` without one.
    fn has_window(&self, l: usize, otherwise: bool) -> Result<bool, String> {
        let Some(types) = &self.layer_types else { return Ok(otherwise) };
        match types.get(l).map(String::as_str) {
            Some("full_attention") => Ok(false),
            Some("sliding_attention") => Ok(true),
            Some(other) => Err(format!("layer_types: {} is not supported", Quoted(other))),
            None => Err(format!("layer_types has no entry for layer {l}")),
        }
    }

    /// Rejects an entry of `layer_types` that says otherwise than the settings that decide.
    pub fn check_type(&self, l: usize, LayerAttention { window, .. }: LayerAttention) -> Result<(), String> {
        match (self.has_window(l, window.is_some())?, window) {
            (true, None) => Err(format!("layer_types gives layer {l} a window that the other keys do not")),
            (false, Some(_)) => Err(format!("layer_types gives layer {l} no window, unlike the other keys")),
            _ => Ok(()),
        }
    }

    /// The window of layer `l`, which has one.
    fn window(window: Option<usize>, l: usize) -> Result<usize, String> {
        window.ok_or_else(|| format!("layer {l} has a window, but there is no sliding_window"))
    }
}

/// A key of `config.json`: `null` and a missing key may differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Given<T> {
    #[default]
    Missing,
    Null,
    Value(T),
}

impl<T> Given<T> {
    /// The value, that of a missing key, or `None` for `null`.
    pub fn or(self, missing: Option<T>) -> Option<T> {
        match self {
            Self::Missing => missing,
            Self::Null => None,
            Self::Value(value) => Some(value),
        }
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Given<T> {
    fn deserialize<D: Deserializer<'de>>(value: D) -> Result<Self, D::Error> {
        Ok(Option::deserialize(value)?.map_or(Self::Null, Self::Value))
    }
}

/// Llama: every layer attends to all tokens.
fn no_window(keys: &AttentionKeys, _: &Family, _: usize) -> Result<LayerAttention, String> {
    match keys.sliding_window.or(None) {
        // `transformers` would ignore it, but its author expects an effect.
        Some(_) => Err("a `llama` has no sliding_window".into()),
        None => Ok(LayerAttention::FULL),
    }
}

/// Mistral: one window in all layers, or none.
fn one_window(keys: &AttentionKeys, family: &Family, _: usize) -> Result<LayerAttention, String> {
    let window = keys.sliding_window.or(family.defaults.sliding_window);
    Ok(LayerAttention { window, ..LayerAttention::FULL })
}

/// Qwen2 and Qwen3: windows, if enabled, from some layer on.
fn late_windows(keys: &AttentionKeys, family: &Family, l: usize) -> Result<LayerAttention, String> {
    if !keys.use_sliding_window {
        return Ok(LayerAttention::FULL);
    }
    let window = keys.sliding_window.or(family.defaults.sliding_window);
    let slides = keys.has_window(l, window.is_some() && l >= keys.max_window_layers)?;
    let window = slides.then(|| AttentionKeys::window(window, l)).transpose()?;
    Ok(LayerAttention { window, ..LayerAttention::FULL })
}

/// SmolLM3: listed layers, by default every fourth, have no RoPE (NoPE); windows, if enabled, apply to these.
fn some_layers_without_rope(
    keys: &AttentionKeys,
    family: &Family,
    l: usize,
) -> Result<LayerAttention, String> {
    let rope = match &keys.no_rope_layers {
        Some(layers) => {
            *layers.get(l).ok_or_else(|| format!("no_rope_layers has no entry for layer {l}"))? != 0
        }
        None if keys.no_rope_layer_interval == 0 => return Err("no_rope_layer_interval is 0".into()),
        None => !(l + 1).is_multiple_of(keys.no_rope_layer_interval),
    };
    if !keys.use_sliding_window {
        return Ok(LayerAttention { rope, window: None });
    }
    let window = keys.sliding_window.or(family.defaults.sliding_window);
    let slides = keys.has_window(l, !rope && window.is_some())?;
    Ok(LayerAttention { rope, window: slides.then(|| AttentionKeys::window(window, l)).transpose()? })
}
