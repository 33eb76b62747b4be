//! Checkpoints with changed bytes and changed JSON load as a model that works, or are an error: no panic, no hang,
//! no memory beyond a multiple of the files.
//!
//! `MUTATIONS=1000000 cargo test --release -p kv-model --test mutations` for more than the default; `SHOW=1`, with
//! `-- --nocapture`, names those that load.

#![cfg(feature = "tokenizers")]
#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests

#[path = "support/gguf.rs"]
mod gguf;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use allocation_counter::measure;
use fastrand::Rng;
use gguf::{Gguf, string};
use kv_model::{Model, Rope};
use serde_json::{Value, json};

/// Bytes that a load may take at most. The files have a few thousand, compiled expressions a few million.
const MOST_BYTES: u64 = 64 << 20;
/// Much longer than a load takes, even on a busy machine.
const LONGEST: Duration = Duration::from_secs(10);

/// Loads a checkpoint and uses what it holds; whether it is one.
fn exercise(case: &dyn Fn() -> String, path: &Path) -> bool {
    let (start, mut model) = (Instant::now(), None);
    let peak = measure(|| model = Model::load(path).ok()).bytes_max;
    assert!(peak < MOST_BYTES, "{}: {peak} bytes", case());
    if let Some(model) = &model {
        let config = &model.config;
        let rope = Rope::new(config, 4);
        assert!(rope.tables().0.iter().all(|x| x.is_finite()), "{}", case());
        assert_eq!(model.embedding.n_out(), config.vocab_size, "{}", case());
        assert_eq!(model.layers.len(), config.n_layers, "{}", case());
        if let Ok(tokenizer) = model.tokenizer() {
            for text in ["", "ab ba", "a<s>\u{e9}"] {
                let tokens = tokenizer.encode(text).unwrap_or_default();
                let _ = (tokenizer.decode(&tokens), tokenizer.encode_piece(text), tokenizer.words());
            }
        }
    }
    assert!(start.elapsed() < LONGEST, "{}: {:?}", case(), start.elapsed());
    model.is_some()
}

/// Changes bytes: single ones, lengths, and whole parts.
fn change_bytes(random: &mut Rng, bytes: &mut Vec<u8>) {
    if bytes.is_empty() {
        return;
    }
    let at = random.usize(..bytes.len());
    match random.usize(..8) {
        0 => bytes.truncate(at),
        1 => bytes.insert(at, random.u8(..)),
        2 => drop(bytes.remove(at)),
        3 => bytes[at] ^= 1 << random.usize(..8),
        4 | 5 => {
            let numbers = [0, 1, 3, 1 << 31, 1 << 32, 1 << 61, 1 << 63, u64::MAX, u64::MAX - 31];
            let number = random.choice(&numbers).unwrap().to_le_bytes();
            let width = *random.choice(&[4, 8]).unwrap();
            bytes[at..].iter_mut().zip(&number[..width]).for_each(|(byte, new)| *byte = *new);
        }
        // Copies a part to another place.
        kind => {
            let from = random.usize(..bytes.len());
            let part = bytes[from..(from + 1 + random.usize(..64)).min(bytes.len())].to_vec();
            let end = if kind == 6 { at } else { (at + part.len()).min(bytes.len()) };
            bytes.splice(at..end, part);
        }
    }
}

/// Changes a value of a JSON file, takes a key away, or writes it twice; what has been done.
fn change_json(random: &mut Rng, value: &Value) -> (String, String) {
    let mut places = vec![];
    find(value, String::new(), &mut places);
    let place = random.choice(&places).unwrap().clone();
    let mut changed = value.clone();
    let (parent, key) = place.rsplit_once('/').unwrap();
    let key = key.replace("~1", "/").replace("~0", "~");
    if random.usize(..4) > 0 {
        let new = random.choice(&hostile()).unwrap().clone();
        let what = format!("{place} = {new}");
        *changed.pointer_mut(&place).unwrap() = new;
        return (what, changed.to_string());
    }
    let inside = changed.pointer_mut(parent).unwrap();
    let Value::Object(fields) = inside else {
        let Value::Array(items) = inside else { panic!("{parent} has {key}") };
        items.remove(key.parse().unwrap());
        return (format!("without {place}"), changed.to_string());
    };
    let old = fields.remove(&key).unwrap();
    if random.usize(..2) == 0 {
        return (format!("without {place}"), changed.to_string());
    }
    // A marker, which becomes two entries.
    fields.insert("@twice".into(), Value::Null);
    let new = if random.usize(..2) == 0 { old.clone() } else { random.choice(&hostile()).unwrap().clone() };
    let key = Value::from(key);
    let text = changed.to_string().replacen("\"@twice\":null", &format!("{key}:{old},{key}:{new}"), 1);
    (format!("{place} twice"), text)
}

fn hostile() -> Vec<Value> {
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    vec![
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(2),
        json!(-1),
        json!(0.5),
        json!(1e300),
        json!(1e-300),
        json!(i64::MIN),
        json!(u64::MAX),
        json!(1_u64 << 32),
        json!(""),
        json!("a"),
        json!("2"),
        json!("\u{0}\u{fffd}"),
        json!("a".repeat(5000)),
        json!([]),
        json!([1]),
        json!(["a", "b"]),
        json!({}),
        json!({"a": 1}),
        json!({"content": "a", "type": "Sequence"}),
        deep,
    ]
}

/// The pointers of all values but the root.
fn find(value: &Value, at: String, out: &mut Vec<String>) {
    if !at.is_empty() {
        out.push(at.clone());
    }
    match value {
        Value::Object(fields) => fields.iter().for_each(|(key, value)| {
            find(value, format!("{at}/{}", key.replace('~', "~0").replace('/', "~1")), out);
        }),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, value)| find(value, format!("{at}/{i}"), out));
        }
        _ => {}
    }
}

/// Names and shapes of a model of one layer.
fn tensors() -> Vec<(&'static str, Vec<usize>)> {
    let mut all = vec![("model.embed_tokens.weight", vec![8, 4]), ("model.norm.weight", vec![4])];
    all.extend([
        ("model.layers.0.input_layernorm.weight", vec![4]),
        ("model.layers.0.post_attention_layernorm.weight", vec![4]),
        ("model.layers.0.self_attn.q_proj.weight", vec![4, 4]),
        ("model.layers.0.self_attn.k_proj.weight", vec![2, 4]),
        ("model.layers.0.self_attn.v_proj.weight", vec![2, 4]),
        ("model.layers.0.self_attn.o_proj.weight", vec![4, 4]),
        ("model.layers.0.mlp.gate_proj.weight", vec![3, 4]),
        ("model.layers.0.mlp.up_proj.weight", vec![3, 4]),
        ("model.layers.0.mlp.down_proj.weight", vec![4, 3]),
    ]);
    all
}

/// The header of a safetensors file, and the length of its data.
fn header(tensors: &[(&str, Vec<usize>)]) -> (Value, usize) {
    let (mut header, mut end) = (json!({"__metadata__": {"format": "pt"}}), 0);
    for (name, shape) in tensors {
        let start = end;
        end += 2 * shape.iter().product::<usize>();
        header[*name] = json!({"dtype": "BF16", "shape": shape, "data_offsets": [start, end]});
    }
    (header, end)
}

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let numbers = (0..data).map(|i| if i % 2 == 0 { (i % 7) as u8 } else { 0x3e });
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &numbers.collect::<Vec<_>>()].concat()
}

/// The JSON files of a folder: all parts of configurations and tokenizers that the loader reads.
fn folder() -> BTreeMap<&'static str, Value> {
    let letters = ["a", "b", "Ġ", "ab", "Ġa"];
    let vocab: serde_json::Map<_, _> =
        (0..).zip(letters).map(|(id, token)| (token.into(), json!(id))).collect();
    let special = |content: &str| {
        json!({"content": content, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true})
    };
    let mut numbered = special("<s>");
    numbered["id"] = 5.into();
    let map: serde_json::Map<_, _> =
        tensors().iter().map(|(name, shape)| ((*name).into(), json!(shard_of(shape)))).collect();
    BTreeMap::from([
        (
            "config.json",
            json!({
                "model_type": "smollm3", "vocab_size": 8, "hidden_size": 4, "intermediate_size": 3,
                "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2,
                "max_position_embeddings": 16, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1,
                    "original_max_position_embeddings": 16, "attention_factor": 1.1, "truncate": false},
                "attention_bias": false, "mlp_bias": false, "tie_word_embeddings": true, "hidden_act": "silu",
                "eos_token_id": [2], "bos_token_id": 1, "use_sliding_window": true, "sliding_window": 4,
                "max_window_layers": 0, "no_rope_layers": [0], "no_rope_layer_interval": 4,
                "layer_types": ["sliding_attention"], "partial_rotary_factor": 1.0,
            }),
        ),
        ("generation_config.json", json!({"eos_token_id": [2, 3]})),
        ("model.safetensors.index.json", json!({"metadata": {"total_size": 1}, "weight_map": map})),
        (
            "tokenizer.json",
            json!({
                "version": "1.0", "truncation": null, "padding": null, "added_tokens": [numbered],
                "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]},
                "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                    "use_regex": true},
                "post_processor": {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}],
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}], "special_tokens": {}},
                "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
                "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                    "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "vocab": vocab,
                    "merges": [["a", "b"], ["Ġ", "a"]]},
            }),
        ),
        (
            "tokenizer_config.json",
            json!({"added_tokens_decoder": {"6": special("<x>")}, "eos_token": {"content": "<x>"}, "bos_token": "<s>"}),
        ),
        ("special_tokens_map.json", json!({"eos_token": "<x>", "additional_special_tokens": ["<x>"]})),
        ("added_tokens.json", json!({"<y>": 7})),
    ])
}

const SHARDS: [&str; 2] = ["a.safetensors", "b.safetensors"];

fn shard_of(shape: &[usize]) -> &'static str {
    SHARDS[shape.len() - 1]
}

/// How many changed checkpoints of each form a test loads.
fn mutations() -> usize {
    std::env::var("MUTATIONS").map_or(300, |n| n.parse().unwrap())
}

#[test]
fn changed_checkpoints_load_or_are_errors() {
    folders();
    gguf_files();
}

/// The headers of the shards, and the lengths of their data.
fn shards() -> [(Value, usize); 2] {
    SHARDS.map(|shard| {
        let of_shard: Vec<_> = tensors().into_iter().filter(|(_, shape)| shard_of(shape) == shard).collect();
        header(&of_shard)
    })
}

/// Writes the whole checkpoint.
fn write(path: &Path) {
    folder().iter().for_each(|(name, value)| fs::write(path.join(name), value.to_string()).unwrap());
    for (name, (header, data)) in SHARDS.iter().zip(shards()) {
        fs::write(path.join(name), safetensors(&header.to_string(), data)).unwrap();
    }
}

/// What programs read differently, or as another model than the files say.
#[test]
fn contradictions_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    let refused = |name: &str, from: &str, to: &str, what: &str| {
        write(path);
        let bytes = fs::read(path.join(name)).unwrap();
        let at = bytes.windows(from.len()).position(|part| part == from.as_bytes());
        let at = at.unwrap_or_else(|| panic!("{name} has no {from}"));
        let mut changed = [&bytes[..at], to.as_bytes(), &bytes[at + from.len()..]].concat();
        if name.ends_with("safetensors") {
            let longer = to.len() as i64 - from.len() as i64;
            let len = u64::from_le_bytes(changed[..8].try_into().unwrap()).wrapping_add_signed(longer);
            changed[..8].copy_from_slice(&len.to_le_bytes());
        }
        fs::write(path.join(name), changed).unwrap();
        let error = Model::load(path).err().map(|e| e.to_string()).unwrap_or_default();
        // The library's numbers are those of the tokenizer.
        let named = if what.starts_with("cannot give") { "tokenizer.json" } else { name };
        assert!(error.contains(named) && error.contains(what), "{name}, {from}: {error}");
    };
    let twice = |key: &str| format!("key `{key}` appears twice");
    // Both entries of the tensor have its bytes, as numbers of another type.
    let (norm, place) =
        ("\"model.norm.weight\":", "\"data_offsets\":[16,24],\"dtype\":\"F16\",\"shape\":[4]");
    refused("a.safetensors", norm, &format!("{norm}{{{place}}},{norm}"), &twice("model.norm.weight"));
    refused("a.safetensors", "\"dtype\"", "\"dtype\":\"F16\",\"dtype\"", &twice("dtype"));
    let index = "model.safetensors.index.json";
    refused(index, norm, &format!("{norm}\"b.safetensors\",{norm}"), &twice("model.norm.weight"));
    refused("config.json", "\"head_dim\"", "\"head_dim\":4,\"head_dim\"", &twice("head_dim"));
    refused("config.json", "\"factor\"", "\"factor\":2,\"factor\"", &twice("factor"));
    refused("generation_config.json", "{", "{\"eos_token_id\":[],", &twice("eos_token_id"));
    refused("generation_config.json", "{\"eos_token_id\":[2,3]}", "[2,3]", "a map");
    refused("tokenizer.json", "\"ab\":3", "\"ab\":3,\"ab\":4", &twice("ab"));
    refused("tokenizer.json", "\"ab\":3", "\"ab\":1", "tokens `ab` and `b` both have the number 1");
    refused("tokenizer.json", "\"id\":5", "\"id\":6", "cannot give token `<s>` its number 6");
    refused("tokenizer_config.json", "\"6\":", "\"7\":", "cannot give token `<x>` its number 7");
    refused("tokenizer_config.json", "{\"content\":\"<x>\"}", "3", "eos_token is neither a token");
    refused(
        "tokenizer_config.json",
        "\"added_tokens_decoder\":",
        "\"added_tokens_decoder\":7,\"x\":",
        "no object",
    );
    refused("special_tokens_map.json", "[\"<x>\"]", "[1e300]", "additional_special_tokens is neither");
    refused("added_tokens.json", "7", "\"7\"", "invalid type");
}

/// A link to nothing is no missing file.
#[cfg(unix)]
#[test]
fn links_to_nothing_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    for name in folder_names() {
        write(path);
        fs::remove_file(path.join(name)).unwrap();
        std::os::unix::fs::symlink("nowhere", path.join(name)).unwrap();
        let error = Model::load(path).err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(name), "{name}: {error}");
        fs::remove_file(path.join(name)).unwrap();
    }
    write(path);
    std::os::unix::fs::symlink("nowhere", path.join("model.safetensors")).unwrap();
    assert!(Model::load(path).err().unwrap().to_string().contains("model.safetensors"));
}

#[cfg(unix)]
fn folder_names() -> impl Iterator<Item = &'static str> {
    folder().into_keys().chain(SHARDS)
}

/// Thousands of tokens that only the other files of a folder name take no longer than those of the model.
#[test]
fn many_added_tokens_load_in_time() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    write(path);
    let all: serde_json::Map<_, _> = (0..20_000).map(|i| (format!("<{i}>"), json!(7 + i))).collect();
    fs::write(path.join("added_tokens.json"), Value::Object(all).to_string()).unwrap();
    let start = Instant::now();
    Model::load(path).unwrap();
    assert!(start.elapsed() < LONGEST, "{:?}", start.elapsed());
}

fn folders() {
    let folder_path = tempfile::tempdir().unwrap();
    let path = folder_path.path();
    let (files, shards) = (folder(), shards());
    let write_all = || write(path);
    write_all();
    assert!(exercise(&|| "whole".into(), path), "{}", Model::load(path).err().unwrap());
    let mut random = Rng::with_seed(7);
    let (mut taken, names) = (0, files.keys().copied().collect::<Vec<_>>());
    for i in 0..mutations() {
        let shard = random.usize(..2 + SHARDS.len());
        let (name, what, bytes) = match SHARDS.get(shard) {
            Some(name) => {
                let (header, data) = &shards[shard];
                let (what, text) = change_json(&mut random, header);
                (*name, what, safetensors(&text, *data))
            }
            None => {
                let name = *random.choice(&names).unwrap();
                let (what, text) = change_json(&mut random, &files[name]);
                (name, what, text.into_bytes())
            }
        };
        let (what, bytes) = match random.usize(..4) {
            0 => {
                let mut bytes = fs::read(path.join(name)).unwrap();
                (0..=random.usize(..3)).for_each(|_| change_bytes(&mut random, &mut bytes));
                ("bytes".into(), bytes)
            }
            _ => (what, bytes),
        };
        fs::write(path.join(name), bytes).unwrap();
        let loads = exercise(&|| format!("mutation {i}: {name}: {what}"), path);
        if loads && std::env::var("SHOW").is_ok() {
            eprintln!("{name}: {what}");
        }
        taken += usize::from(loads);
        write_all();
    }
    assert!(taken > mutations() / 50 && taken < mutations(), "{taken}");
}

/// A file with every kind of value, a tokenizer of each kind, and blocks.
fn gguf_file(tokenizer: &str) -> Gguf {
    let tokens =
        ["a", "b", "Ġ", "\u{2581}", "ab", "<s>", "</s>", "<0x20>"].map(|token| token.as_bytes().to_vec());
    let mut gguf = Gguf::model(tokenizer, &tokens, 1);
    gguf.float("llama.rope.freq_base", 1e4);
    gguf.float("llama.rope.scaling.factor", 2.0);
    gguf.int("general.alignment", 32);
    gguf.int("tokenizer.ggml.eos_token_id", 6);
    gguf.flag("tokenizer.ggml.add_bos_token", true);
    gguf.list("general.tags", 8, 1, &string(b"tag"));
    gguf.numbers("rope_freqs.weight", &[2.0]);
    gguf
}

fn gguf_files() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let (mut random, mut taken) = (Rng::with_seed(9), 0);
    for tokenizer in ["gpt2", "llama"] {
        gguf_file(tokenizer).write(&path);
        assert!(exercise(&|| "whole".into(), &path), "{}", Model::load(&path).err().unwrap());
        let whole = fs::read(&path).unwrap();
        for i in 0..mutations() / 2 {
            let mut bytes = whole.clone();
            (0..=random.usize(..3)).for_each(|_| change_bytes(&mut random, &mut bytes));
            fs::write(&path, bytes).unwrap();
            taken += usize::from(exercise(&|| format!("mutation {i} of {tokenizer}"), &path));
        }
    }
    assert!(taken > mutations() / 50 && taken < mutations(), "{taken}");
}
