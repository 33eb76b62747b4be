//! Models that are shapes only.

use kv_model::{Config, LayerAttention, RopeScaling};

use crate::{Error, Result};

/// Models that are shapes only; their weights are hashes of their index and need no storage.
pub const RANDOM_MODELS: [&str; 4] = ["llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-70b/8"];

/// The shape of one of [`RANDOM_MODELS`].
///
/// # Errors
/// [`Error::Argument`] for another name.
pub fn random_config(name: &str) -> Result<Config> {
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_seq_len: 8192.0,
    };
    // hidden, intermediate, layers, heads, key/value heads, vocabulary
    let (sizes, rope_theta, rope_scaling) = match name {
        "llama-2-7b" => ([4096, 11008, 32, 32, 32, 32000], 10_000.0, RopeScaling::None),
        "llama-3.1-8b" => ([4096, 14336, 32, 32, 8, 128_256], 500_000.0, llama3),
        "llama-3.1-70b" => ([8192, 28672, 80, 64, 8, 128_256], 500_000.0, llama3),
        "llama-3.1-70b/8" => ([8192, 3584, 80, 8, 1, 16032], 500_000.0, llama3),
        _ => {
            return Err(Error::Argument(format!(
                "no random model `{name}`, only {}",
                RANDOM_MODELS.join(", ")
            )));
        }
    };
    let [hidden_size, intermediate_size, n_layers, n_heads, n_kv_heads, vocab_size] = sizes;
    Ok(Config {
        family: "llama",
        vocab_size,
        hidden_size,
        intermediate_size,
        n_layers,
        n_heads,
        n_kv_heads,
        head_dim: 128,
        max_seq_len: 1 << 21,
        rms_norm_eps: 1e-5,
        rope_theta,
        rope_scaling,
        attention_bias: false,
        output_bias: false,
        mlp_bias: false,
        tie_word_embeddings: false,
        qk_norm: false,
        attention: vec![LayerAttention::FULL; n_layers],
        eos_tokens: vec![],
    })
}
