//! Reads `config.json`, with the defaults that `transformers` has for each family.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::{Config, RopeScaling, Yarn};
use crate::error::Quoted;
use crate::family::{AttentionBias, AttentionKeys, Family, Given};
use crate::{Error, Result, json};

impl Config {
    /// Reads the `config.json` of a Hugging Face folder, and the tokens that end a text from its
    /// `generation_config.json`.
    pub(crate) fn from_folder(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let config = Self::from_value(&json::read(&path)?).and_then(Self::validated);
        let mut config = config.map_err(|what| Error::file(&path, what))?;
        let path = dir.join("generation_config.json");
        if let Some(generation) = json::read_optional::<Map<String, Value>>(&path)? {
            let ends = generation.get("eos_token_id").map(|ends| token_ids("eos_token_id", ends));
            let ends = ends.transpose().map_err(|what| Error::file(&path, what))?;
            config.eos_tokens.extend(ends.into_iter().flatten());
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
}

/// A part of the configuration; errors name the key.
fn named<'a, T: Deserialize<'a>>(value: &'a Value) -> std::result::Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|e| e.to_string())
}

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
        let original = self.original_max_position_embeddings;
        let scalings = places.iter().map(|place| rope_scaling(place, max_seq_len, original));
        let scalings = scalings.collect::<std::result::Result<Vec<_>, _>>()?;
        if scalings.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err("`rope_scaling` differs from `rope_parameters`".into());
        }
        let in_places = |key: &str| -> std::result::Result<Vec<_>, _> {
            places.iter().map(|place| given(place, key)).collect()
        };
        let partial = in_places("partial_rotary_factor")?.into_iter().chain([self.partial_rotary_factor]);
        if partial.flatten().any(|x| x != 1.0) {
            return Err("a partial_rotary_factor is not supported".into());
        }
        let thetas = in_places("rope_theta")?.into_iter().chain([self.rope_theta]);
        let thetas: Vec<f64> = thetas.flatten().collect();
        if thetas.windows(2).any(|pair| pair[0] != pair[1]) {
            return Err("`rope_theta` differs from that of `rope_parameters`".into());
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
    let given = |key: &str| given(value, key);
    let number = |key: &str| given(key)?.ok_or_else(|| format!("rope scaling: `{key}` is missing"));
    let original_max_seq_len = || -> std::result::Result<f64, String> {
        let inside = given("original_max_position_embeddings")?;
        Ok(original.or(inside).unwrap_or(max_seq_len as f64))
    };
    let kind = ["rope_type", "type"].map(|key| &value[key]).into_iter().find(|kind| !kind.is_null());
    let kind = kind.map(|kind| kind.as_str().ok_or("rope scaling: its type is not a text")).transpose()?;
    match kind {
        // `transformers` knows no such scaling either.
        None if fields.contains_key("factor") => Err("rope scaling has a `factor` but no `rope_type`".into()),
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

/// The number of a key of rotary embeddings, if it is given.
fn given(value: &Value, key: &str) -> std::result::Result<Option<f64>, String> {
    match &value[key] {
        Value::Null => Ok(None),
        given => given.as_f64().map(Some).ok_or_else(|| format!("rope scaling: `{key}` is not a number")),
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::LayerAttention;

    /// The configuration of a family with nothing but its sizes and `parts`.
    fn of(family: &str, parts: &Value) -> std::result::Result<Config, String> {
        let mut value = json!({
            "model_type": family, "vocab_size": 96, "hidden_size": 256, "intermediate_size": 96,
            "num_hidden_layers": 30, "num_attention_heads": 32,
        });
        value.as_object_mut().unwrap().extend(parts.as_object().unwrap().clone());
        Config::from_value(&value).and_then(Config::validated)
    }

    /// Key/value heads, head length, context, base, tied, stop tokens, window of layers 0 and 29: those of
    /// transformers' configuration classes.
    #[test]
    fn missing_keys_take_the_familys_defaults() {
        let cases = [
            ("llama", (32, 8, 2048, 10_000.0, false, vec![2]), [None; 2]),
            ("mistral", (8, 8, 131_072, 10_000.0, false, vec![2]), [Some(4096); 2]),
            ("qwen2", (32, 8, 32_768, 10_000.0, false, vec![]), [None; 2]),
            ("qwen3", (32, 128, 32_768, 10_000.0, false, vec![]), [None; 2]),
            ("smollm3", (4, 8, 32_768, 2_000_000.0, true, vec![128_001]), [None; 2]),
        ];
        for (family, right, windows) in cases {
            let config = of(family, &json!({})).unwrap();
            let Config { n_kv_heads, head_dim, max_seq_len, rope_theta, tie_word_embeddings, .. } = config;
            let got = (n_kv_heads, head_dim, max_seq_len, rope_theta, tie_word_embeddings, config.eos_tokens);
            assert_eq!(got, right, "{family}");
            assert_eq!([0, 29].map(|l| config.attention[l].window), windows, "{family}");
            assert_eq!((config.rms_norm_eps, config.rope_scaling), (1e-6, RopeScaling::None), "{family}");
            assert_eq!(config.attention[3].rope, family != "smollm3", "{family}");
        }
    }

    #[test]
    fn null_is_not_a_missing_key() {
        let null = json!({"num_key_value_heads": null, "head_dim": null, "sliding_window": null,
            "eos_token_id": null, "rope_scaling": null, "rope_parameters": null});
        for family in ["llama", "mistral", "qwen2", "qwen3", "smollm3"] {
            let config = of(family, &null).unwrap();
            assert_eq!((config.n_kv_heads, config.head_dim), (32, 8), "{family}");
            assert!(config.eos_tokens.is_empty() && config.attention[0].window.is_none(), "{family}");
        }
    }

    #[test]
    fn qwens_windows_begin_at_layer_28() {
        let windows = |parts: Value| {
            let attention = of("qwen2", &parts).unwrap().attention;
            [0, 27, 28].map(|l| attention[l].window)
        };
        assert_eq!(windows(json!({"use_sliding_window": true})), [None, None, Some(4096)]);
        assert_eq!(windows(json!({"use_sliding_window": true, "sliding_window": 7})), [None, None, Some(7)]);
        assert_eq!(windows(json!({"use_sliding_window": true, "sliding_window": null})), [None; 3]);
        assert_eq!(windows(json!({"use_sliding_window": false, "sliding_window": 7})), [None; 3]);
        let types = vec!["sliding_attention"; 30];
        let smollm3 = json!({"use_sliding_window": true, "layer_types": types});
        assert!(of("smollm3", &smollm3).unwrap_err().contains("there is no sliding_window"));
        assert_eq!(of("llama", &json!({})).unwrap().attention[29], LayerAttention::FULL);
    }

    #[test]
    fn types_of_layers_agree_with_the_other_keys() {
        let types = |family: &str, kind: &str, mut parts: Value| {
            parts["layer_types"] = vec![kind; 30].into();
            of(family, &parts).map(|config| config.attention[0].window)
        };
        let window = json!({"sliding_window": 7});
        let enabled = json!({"sliding_window": 7, "use_sliding_window": true});
        for family in ["llama", "qwen2", "qwen3", "smollm3"] {
            assert_eq!(types(family, "full_attention", json!({})), Ok(None), "{family}");
            let error = types(family, "sliding_attention", json!({})).unwrap_err();
            assert!(error.contains("gives layer 0 a window"), "{family}: {error}");
            assert!(types(family, "linear_attention", json!({})).unwrap_err().contains("linear_attention"));
        }
        assert!(types("qwen2", "sliding_attention", window.clone()).is_err());
        assert_eq!(types("qwen2", "sliding_attention", enabled), Ok(Some(7)));
        assert_eq!(types("mistral", "sliding_attention", window.clone()), Ok(Some(7)));
        let error = types("mistral", "full_attention", window).unwrap_err();
        assert!(error.contains("gives layer 0 no window"), "{error}");
    }

    #[test]
    fn rope_is_read_from_every_place() {
        let rope = |parts: Value| of("llama", &parts).map(|config| (config.rope_theta, config.rope_scaling));
        let linear = RopeScaling::Linear { factor: 4.0 };
        for parts in [
            json!({"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}}),
            json!({"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "type": "other", "factor": 4}}),
            json!({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
            json!({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
            json!({"rope_theta": 500.0, "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
        ] {
            assert_eq!(rope(parts.clone()).unwrap(), (500.0, linear.clone()), "{parts}");
        }
        let original = |parts: Value| match rope(parts).unwrap().1 {
            RopeScaling::Llama3 { original_max_seq_len, .. }
            | RopeScaling::Yarn(Yarn { original_max_seq_len, .. }) => original_max_seq_len,
            _ => 0.0,
        };
        for kind in ["llama3", "yarn"] {
            let scaling =
                json!({"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0});
            assert_eq!(original(json!({"rope_scaling": scaling})), 2048.0, "{kind}");
            let outside = json!({"rope_scaling": scaling, "original_max_position_embeddings": 64});
            assert_eq!(original(outside), 64.0, "{kind}");
        }
        for (parts, what) in [
            (json!({"rope_parameters": {"partial_rotary_factor": 0.5}}), "partial_rotary_factor"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
            (json!({"rope_parameters": {"full_attention": {"rope_type": "linear"}}}), "full_attention"),
            (
                json!({"rope_theta": 1e4, "rope_scaling": {"rope_type": "default", "rope_theta": 5e5}}),
                "rope_theta",
            ),
            (json!({"rope_scaling": {"type": "dynamic", "factor": 2.0}}), "dynamic"),
            (json!({"rope_scaling": {"type": "longrope"}}), "longrope"),
            (json!({"rope_scaling": {"factor": 4.0}}), "has a `factor` but no `rope_type`"),
            (json!({"rope_scaling": {"type": 3, "factor": 4.0}}), "its type is not a text"),
            (json!({"rope_parameters": {"rope_theta": "1e6"}}), "`rope_theta` is not a number"),
            (
                json!({"rope_scaling": {"partial_rotary_factor": "0.5"}}),
                "`partial_rotary_factor` is not a number",
            ),
            (json!({"rope_scaling": {"type": "linear", "factor": 1e-300}}), "frequencies"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 1e30}}), "of scores"),
            (json!({"rope_scaling": {"type": "yarn", "factor": 4, "attention_factor": 1e-30}}), "of scores"),
        ] {
            assert!(rope(parts.clone()).unwrap_err().contains(what), "{parts}");
        }
    }

    #[test]
    fn quantized_weights_are_refused_by_their_method() {
        for method in ["gptq", "awq", "bitsandbytes", "fp8", "mxfp4", "compressed-tensors"] {
            let error = of("llama", &json!({"quantization_config": {"quant_method": method}})).unwrap_err();
            assert!(error.contains(&format!("quant_method `{method}`")), "{error}");
        }
        assert!(of("llama", &json!({"quantization_config": null})).is_ok());
    }
}
