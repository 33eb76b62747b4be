//! The default methods run on checkpoints unlike the shipped one: narrow heads, and a vocabulary without
//! words.

use std::fs;
use std::path::Path;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::{Value, json};

use crate::support::kv::{kv, refused, run, text};

const VOCAB: usize = 512;
const HIDDEN: usize = 32;
const INNER: usize = 48;
const N_LAYERS: usize = 2;
const N_HEADS: usize = 4;
const MAX_SEQ_LEN: usize = 512;

/// A random Llama whose tokens are numbers, and a text of `tokens` tokens.
fn checkpoint(folder: &Path, head_dim: usize, n_kv_heads: usize, tokens: usize) {
    let mut rng = fastrand::Rng::with_seed(1);
    let mut uniform = || 2.0 * rng.f32() - 1.0;
    let mut shapes: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens.weight".into(), vec![VOCAB, HIDDEN]),
        ("model.norm.weight".into(), vec![HIDDEN]),
    ];
    for l in 0..N_LAYERS {
        for (name, shape) in [
            ("input_layernorm", vec![HIDDEN]),
            ("self_attn.q_proj", vec![N_HEADS * head_dim, HIDDEN]),
            ("self_attn.k_proj", vec![n_kv_heads * head_dim, HIDDEN]),
            ("self_attn.v_proj", vec![n_kv_heads * head_dim, HIDDEN]),
            ("self_attn.o_proj", vec![HIDDEN, N_HEADS * head_dim]),
            ("post_attention_layernorm", vec![HIDDEN]),
            ("mlp.gate_proj", vec![INNER, HIDDEN]),
            ("mlp.up_proj", vec![INNER, HIDDEN]),
            ("mlp.down_proj", vec![HIDDEN, INNER]),
        ] {
            shapes.push((format!("model.layers.{l}.{name}.weight"), shape));
        }
    }
    let bytes: Vec<Vec<u8>> = shapes
        .iter()
        .map(|(_, shape)| {
            let value = |norm: bool, x: f32| if norm { 1.0 + 0.1 * x } else { 0.2 * x };
            let n = shape.iter().product();
            (0..n).flat_map(|_| value(shape.len() == 1, uniform()).to_le_bytes()).collect()
        })
        .collect();
    let views = shapes
        .iter()
        .zip(&bytes)
        .map(|((name, shape), bytes)| (name, TensorView::new(Dtype::F32, shape.clone(), bytes).unwrap()));
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    let config = json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER,
        "num_hidden_layers": N_LAYERS, "num_attention_heads": N_HEADS, "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim, "max_position_embeddings": MAX_SEQ_LEN, "tie_word_embeddings": true,
    });
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let vocab: serde_json::Map<_, _> = (0..VOCAB).map(|id| (id.to_string(), id.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "0"},
    });
    fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let words: Vec<String> = (0..tokens).map(|i| ((i * i + 7 * i) % VOCAB).to_string()).collect();
    fs::write(folder.join("text"), words.join(" ")).unwrap();
}

#[test]
fn every_default_method_runs_on_narrow_heads_without_words() {
    for (head_dim, n_kv_heads) in [(8, 2), (8, 1), (10, 4)] {
        let case = format!("{n_kv_heads} heads of {head_dim}");
        let folder = tempfile::tempdir().unwrap();
        checkpoint(folder.path(), head_dim, n_kv_heads, 700);
        let json = folder.path().join("json");
        let (model, tokens) = (folder.path(), folder.path().join("text"));
        let args =
            ["compare", "--model", text(model), "--text", text(&tokens), "--context", "360", "--decode", "6"];
        let output = run(&case, kv(&[&args[..], &["--json", text(&json), "--device", "cpu"]].concat()));
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{case}: {stderr}");
        let kept = "nothing is compressed: sinks and window hold all tokens of streaming:window=1280\n";
        assert!(stderr.contains("too few plain words") && stderr.contains(kept), "{case}: {stderr}");
        // Codebooks of 128 random tokens need not fit the others.
        let others = stderr.lines().filter(|line| !line.contains("do not fit this text"));
        assert_eq!(others.count(), 2, "{case}: {stderr}");
        let result: Value = serde_json::from_slice(&fs::read(&json).unwrap()).unwrap();
        let rows = result["methods"].as_array().unwrap();
        assert_eq!(rows.len(), 30);
        for row in rows {
            let what = format!("{case}: {} {}", row["name"], row["setting"]);
            assert!(row["kl"].as_f64().unwrap() < 1.0 && row["perplexity"].as_f64().unwrap() > 1.0, "{what}");
            assert!(row["needle"].is_null() && row["needle_trials"] == 0, "{what}");
        }
        // The same bits per component as with 128 components, if the head allows it.
        let million = rows.iter().filter(|row| row["name"] == "million").map(|row| &row["setting"]);
        let narrow = |components: usize| {
            let m = head_dim / if head_dim == 10 && components == 4 { 2 } else { components };
            format!("k={m}x8:v={m}x8:iterations=8")
        };
        assert!(million.eq(&[narrow(2), narrow(4)]), "{case}");
        let eval =
            ["eval", "--model", text(model), "--text", text(&tokens), "--lengths", "160", "--decode", "6"];
        for trials in ["0", "2"] {
            let output = run(&case, kv(&[&eval[..], &["--trials", trials]].concat()));
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{case}: {stderr}");
            assert_eq!(stderr.contains("too few plain words"), trials != "0", "{case}: {stderr}");
        }
    }
}

#[test]
fn a_text_or_context_that_is_too_short_names_the_numbers_and_the_option() {
    let folder = tempfile::tempdir().unwrap();
    checkpoint(folder.path(), 8, 2, 200);
    let (model, tokens) = (folder.path(), folder.path().join("text"));
    let args = ["--model", text(model), "--text", text(&tokens), "--decode", "10"];
    for (command, option) in [("compare", "--context"), ("eval", "--lengths")] {
        let with = |n| [&[command], &args[..], &[option, n, "--methods", "int4,million"]].concat();
        refused(command, &with("250"), "the text has 200 tokens, 261 are needed: pass a longer --text");
        refused(
            command,
            &with("180"),
            "too few tokens to calibrate on: 9 of at least 64: pass a longer --text",
        );
        refused(command, &with("480"), "exceed the context of 512");
        refused(command, &with("480"), option);
    }
}
