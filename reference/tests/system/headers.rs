//! Long, deep or sparse headers of weight files: loading takes time and memory in proportion to the file.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kv_model::{Model, Result};

use crate::support::gguf::{Gguf, string};
use crate::support::kv::{refused_within, text};

/// A quadratic step over files of this size takes minutes.
const LONGEST: Duration = Duration::from_secs(20);

fn load_in_time(case: &str, path: &Path) -> Result<Model> {
    let start = Instant::now();
    let model = Model::load(path);
    assert!(start.elapsed() < LONGEST, "{case} took {:?}", start.elapsed());
    model
}

/// A safetensors folder of a model with all dimensions 1 except the heads.
fn layers(n: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"model_type": "llama", "vocab_size": 2, "hidden_size": 2, "intermediate_size": 1, "num_hidden_layers": {n},
        "num_attention_heads": 1, "head_dim": 2, "max_position_embeddings": 8, "tie_word_embeddings": true}}"#
    );
    fs::write(folder.path().join("config.json"), config).unwrap();
    let (mut header, mut end) = (String::from("{"), 0);
    let mut tensor = |name: &str, shape: &[usize]| {
        let start = end;
        end += 4 * shape.iter().product::<usize>();
        let comma = if start > 0 { "," } else { "" };
        let entry =
            format!(r#"{comma}"{name}":{{"dtype":"F32","shape":{shape:?},"data_offsets":[{start},{end}]}}"#);
        header.write_str(&entry).unwrap();
    };
    tensor("model.embed_tokens.weight", &[2, 2]);
    tensor("model.norm.weight", &[2]);
    for l in 0..n {
        let mut weight =
            |name: &str, shape: &[usize]| tensor(&format!("model.layers.{l}.{name}.weight"), shape);
        weight("input_layernorm", &[2]);
        weight("post_attention_layernorm", &[2]);
        ["q", "k", "v", "o"].iter().for_each(|x| weight(&format!("self_attn.{x}_proj"), &[2, 2]));
        weight("mlp.gate_proj", &[1, 2]);
        weight("mlp.up_proj", &[1, 2]);
        weight("mlp.down_proj", &[2, 1]);
    }
    header.push('}');
    let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; end]].concat();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

#[test]
fn thousands_of_layers_load_in_seconds() {
    for n in [1, 64, 4096] {
        let folder = layers(n);
        let model = load_in_time(&format!("{n} layers"), folder.path()).unwrap();
        assert_eq!(model.layers.len(), n);
    }
}

#[test]
fn long_and_nested_tokens_load_in_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let powers = |n: usize| (1..=n).map(|n| vec![b'a'; n]).collect::<Vec<_>>();
    let load = |case: &str, tokenizer: &str, tokens: &[Vec<u8>], kind: u32| {
        Gguf::model(tokenizer, tokens, kind).write(&path);
        load_in_time(case, &path)
    };
    for tokenizer in ["llama", "gpt2"] {
        for kind in [1, 3] {
            let one = |n: usize| vec![vec![b'a'; n], b"b".to_vec()];
            for n in [1 << 20, 10 << 20] {
                let error = load("a long token", tokenizer, &one(n), kind).err().unwrap();
                assert!(error.to_string().contains("1024 at most"), "{error}");
            }
            let model = load("powers of a letter", tokenizer, &powers(1024), kind).unwrap();
            let tokens = model.tokenizer().unwrap().encode_piece("aaa").unwrap();
            assert!(!tokens.is_empty());
            assert!(load("more powers of a letter", tokenizer, &powers(2000), kind).is_err());
        }
        // 40,000 unrelated tokens of 250 bytes: 10 MB.
        let words = (0..40_000_u32).map(|i| i.to_string().repeat(250 / i.to_string().len()).into_bytes());
        load("long words", tokenizer, &words.collect::<Vec<_>>(), 1).unwrap();
    }
    // All pieces of one text: every cut of every token is a pair of tokens, 20 million of them.
    let digits: Vec<u8> = (0..1000_u32).flat_map(|i| i.to_string().into_bytes()).take(500).collect();
    let pieces = (1..=digits.len()).flat_map(|n| digits.windows(n).map(<[u8]>::to_vec).collect::<Vec<_>>());
    let model = load("all pieces", "llama", &pieces.collect::<Vec<_>>(), 1).unwrap();
    let start = Instant::now();
    let tokens = model.tokenizer().unwrap().encode_piece(&String::from_utf8(digits).unwrap()).unwrap();
    assert!(!tokens.is_empty() && start.elapsed() < LONGEST);
}

/// Sparse files: 1 GiB long, with a few bytes on the disk.
#[cfg(unix)]
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn holes_take_no_memory() {
    const HOLE: u64 = 1 << 30;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let head = |n_tensors: u64, n_metadata: u64| {
        [b"GGUF\x03\0\0\0", &n_tensors.to_le_bytes()[..], &n_metadata.to_le_bytes()].concat()
    };
    let long = HOLE.to_le_bytes();
    let list = |kind: u32, width: u64| {
        let len = (HOLE / width).to_le_bytes();
        [&head(0, 1)[..], &string(b"k"), &9_u32.to_le_bytes(), &kind.to_le_bytes(), &len].concat()
    };
    let widths = [1, 1, 2, 2, 4, 4, 4, 1, 8, 0, 8, 8, 8];
    let lists = (0..13)
        .filter(|&kind| kind != 9)
        .map(|kind| (format!("a list of type {kind}"), list(kind, widths[kind as usize])));
    let others = [
        ("a key", [&head(0, 1)[..], &long].concat()),
        ("a text", [&head(0, 1)[..], &string(b"k"), &8_u32.to_le_bytes(), &long].concat()),
        ("a name of a tensor", [&head(1, 0)[..], &long].concat()),
        ("a list of lists", list(9, 12)),
    ];
    for (case, bytes) in lists.chain(others.map(|(case, bytes)| (case.to_owned(), bytes))) {
        fs::write(&path, &bytes).unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_len(bytes.len() as u64 + HOLE + 64).unwrap();
        let args = ["logits", "--tokens", "1", "--model", text(&path)];
        // Less than the hole, which nobody may read or map; and more, under which a copy of a few times its
        // length fails.
        for mib in [512, 4096] {
            refused_within(&case, mib, &args, "model.gguf: ");
        }
    }
}
