//! The model families and their differences from a Llama. The readers of `config.json` and of GGUF metadata
//! combine this table with a checkpoint's own settings into a [`Config`](crate::model::Config), which is all
//! that the loader and the forward pass see.

use serde::{Deserialize, Deserializer};

use crate::error::Quoted;
use crate::model::LayerAttention;

/// A family of models.
pub(super) struct Family {
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
    /// How layer `l` attends.
    pub attention: fn(&AttentionKeys, l: usize) -> Result<LayerAttention, String>,
}

/// The attention projections with biases.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum AttentionBias {
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
    attention: no_window,
};

const FAMILIES: [Family; 5] = [
    LLAMA,
    // llama.cpp converts a Mistral to the architecture `llama`.
    Family { name: "mistral", gguf: None, bias: AttentionBias::None, attention: one_window, ..LLAMA },
    Family {
        name: "qwen2",
        gguf: Some("qwen2"),
        bias: AttentionBias::Qkv,
        gguf_pairs: false,
        attention: late_windows,
        ..LLAMA
    },
    Family {
        name: "qwen3",
        gguf: Some("qwen3"),
        qk_norm: true,
        gguf_pairs: false,
        attention: late_windows,
        ..LLAMA
    },
    Family { name: "smollm3", gguf: Some("smollm3"), attention: some_layers_without_rope, ..LLAMA },
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
pub(super) struct AttentionKeys {
    #[serde(deserialize_with = "given")]
    sliding_window: Option<Option<usize>>, // missing, `null` or a number
    use_sliding_window: bool,
    max_window_layers: usize,
    layer_types: Option<Vec<String>>,
    no_rope_layers: Option<Vec<u8>>,
    no_rope_layer_interval: usize,
}

impl Default for AttentionKeys {
    fn default() -> Self {
        Self {
            sliding_window: None,
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

    /// The window of the layers that have one.
    fn window(&self, l: usize) -> Result<usize, String> {
        self.sliding_window
            .unwrap_or(DEFAULT_WINDOW)
            .ok_or_else(|| format!("layer {l} has a window, but sliding_window is null"))
    }
}

/// The window of Mistral, Qwen2 and Qwen3 if `sliding_window` is missing.
const DEFAULT_WINDOW: Option<usize> = Some(4096);

fn given<'de, D: Deserializer<'de>>(value: D) -> Result<Option<Option<usize>>, D::Error> {
    Option::deserialize(value).map(Some)
}

/// Llama: every layer attends to all tokens.
fn no_window(keys: &AttentionKeys, _: usize) -> Result<LayerAttention, String> {
    match keys.sliding_window.flatten() {
        // `transformers` would ignore it, but its author expects an effect.
        Some(_) => Err("a `llama` has no sliding_window".into()),
        None => Ok(LayerAttention::FULL),
    }
}

/// Mistral: one window in all layers, or none.
fn one_window(keys: &AttentionKeys, _: usize) -> Result<LayerAttention, String> {
    let window = keys.sliding_window.unwrap_or(DEFAULT_WINDOW);
    Ok(LayerAttention { window, ..LayerAttention::FULL })
}

/// Qwen2 and Qwen3: windows, if enabled, from some layer on.
fn late_windows(keys: &AttentionKeys, l: usize) -> Result<LayerAttention, String> {
    if !keys.use_sliding_window {
        return Ok(LayerAttention::FULL);
    }
    let slides = keys.has_window(l, l >= keys.max_window_layers)?;
    let window = slides.then(|| keys.window(l)).transpose()?;
    Ok(LayerAttention { window, ..LayerAttention::FULL })
}

/// SmolLM3: listed layers, by default every fourth, have no RoPE (NoPE); windows, if enabled, apply to these.
fn some_layers_without_rope(keys: &AttentionKeys, l: usize) -> Result<LayerAttention, String> {
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
    let slides = keys.has_window(l, !rope && keys.sliding_window.flatten().is_some())?;
    Ok(LayerAttention { rope, window: slides.then(|| keys.window(l)).transpose()? })
}
