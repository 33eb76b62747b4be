//! The Llama here is candle's, bit for bit.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama as theirs;
use kv_candle::{Dense, llama};

const CONFIG: &str = r#"{"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "max_position_embeddings": 128, "tie_word_embeddings": false}"#;

/// Random weights of the configuration.
fn weights() -> HashMap<String, Tensor> {
    let mut state = 1_u32;
    let mut tensor = |rows: usize, columns: usize| {
        let mut noise = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            ((state >> 8) as f32 / 8e6 - 1.0) / (columns as f32).sqrt()
        };
        let data: Vec<f32> = (0..rows * columns).map(|_| noise()).collect();
        Tensor::from_vec(data, (rows, columns), &Device::Cpu).unwrap()
    };
    let mut weights = HashMap::from([
        ("model.embed_tokens.weight".to_string(), tensor(128, 64)),
        ("lm_head.weight".to_string(), tensor(128, 64)),
        ("model.norm.weight".to_string(), Tensor::ones(64, DType::F32, &Device::Cpu).unwrap()),
    ]);
    for layer in 0..3 {
        let mut put =
            |name: &str, tensor| weights.insert(format!("model.layers.{layer}.{name}.weight"), tensor);
        for (name, rows, columns) in [
            ("self_attn.q_proj", 64, 64),
            ("self_attn.k_proj", 32, 64),
            ("self_attn.v_proj", 32, 64),
            ("self_attn.o_proj", 64, 64),
            ("mlp.gate_proj", 96, 64),
            ("mlp.up_proj", 96, 64),
            ("mlp.down_proj", 64, 96),
        ] {
            put(name, tensor(rows, columns));
        }
        for name in ["input_layernorm", "post_attention_layernorm"] {
            put(name, Tensor::ones(64, DType::F32, &Device::Cpu).unwrap());
        }
    }
    weights
}

#[test]
fn the_llama_is_candles() {
    for dtype in [DType::F32, DType::BF16] {
        let vb = || VarBuilder::from_tensors(weights(), dtype, &Device::Cpu);
        let config: theirs::LlamaConfig = serde_json::from_str(CONFIG).unwrap();
        let config = config.into_config(false);
        let candles = theirs::Llama::load(vb(), &config).unwrap();
        let mut cache = theirs::Cache::new(true, dtype, &config, &Device::Cpu).unwrap();
        let config: llama::Config = serde_json::from_str(CONFIG).unwrap();
        let ours = llama::Llama::load(vb(), &config).unwrap();
        let mut caches = vec![Dense::default(); config.layers()];

        let tokens: Vec<u32> = (0..2 * 40).map(|i| i * 37 % 128).collect();
        let tokens = Tensor::from_vec(tokens, (2, 40), &Device::Cpu).unwrap();
        for (position, n) in [(0, 30), (30, 1), (31, 1), (32, 8)] {
            let part = tokens.narrow(1, position, n).unwrap().contiguous().unwrap();
            let expected = candles.forward(&part, position, &mut cache).unwrap().to_vec2::<f32>().unwrap();
            let logits = ours.forward(&part, position, &mut caches).unwrap().to_vec2::<f32>().unwrap();
            assert_eq!(logits, expected, "{dtype:?}, {n} tokens from {position}");
        }
    }
}

#[test]
fn what_a_llama_does_not_have_is_refused() {
    let scaled = CONFIG.replace("\"vocab", "\"rope_scaling\": {\"factor\": 8.0}, \"vocab");
    let config: llama::Config = serde_json::from_str(&scaled).unwrap();
    let vb = || VarBuilder::from_tensors(weights(), DType::F32, &Device::Cpu);
    assert!(llama::Llama::load(vb(), &config).is_err());
    let config: llama::Config = serde_json::from_str(CONFIG).unwrap();
    let llama = llama::Llama::load(vb(), &config).unwrap();
    let token = Tensor::new(&[[1_u32]], &Device::Cpu).unwrap();
    assert!(llama.forward(&token, 0, &mut [Dense::default()]).is_err());
    assert!(llama.forward(&token, 128, &mut vec![Dense::default(); 3]).is_err());
}
