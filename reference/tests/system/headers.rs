//! Long, deep or sparse headers of weight files: loading takes time and memory in proportion to the file.

use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use kv_reference::Result;
use kv_reference::model::Model;

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

/// The parts of a GGUF file.
#[derive(Default)]
struct Gguf {
    metadata: Vec<u8>,
    n_metadata: u64,
    tensors: Vec<u8>,
    n_tensors: u64,
    data: u64, // bytes of all tensors, padded
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

impl Gguf {
    fn value(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.metadata.extend([&string(key.as_bytes())[..], &kind.to_le_bytes(), value].concat());
        self.n_metadata += 1;
    }

    fn int(&mut self, key: &str, value: u32) {
        self.value(key, 4, &value.to_le_bytes());
    }

    fn list(&mut self, key: &str, kind: u32, len: usize, items: &[u8]) {
        self.value(key, 9, &[&kind.to_le_bytes()[..], &(len as u64).to_le_bytes(), items].concat());
    }

    fn tensor(&mut self, name: &str, shape: &[usize]) {
        self.tensors.extend([&string(name.as_bytes())[..], &(shape.len() as u32).to_le_bytes()].concat());
        shape.iter().rev().for_each(|&n| self.tensors.extend((n as u64).to_le_bytes()));
        self.tensors.extend([&0_u32.to_le_bytes()[..], &self.data.to_le_bytes()].concat());
        self.data += (4 * shape.iter().product::<usize>() as u64).next_multiple_of(32);
        self.n_tensors += 1;
    }

    /// A Llama of one layer with this vocabulary; every token of kind `kind` and with a score of 0.
    fn model(tokenizer: &str, tokens: &[Vec<u8>], kind: u32) -> Self {
        let mut gguf = Self::default();
        gguf.value("general.architecture", 8, &string(b"llama"));
        for (key, value) in [
            ("embedding_length", 2),
            ("feed_forward_length", 1),
            ("block_count", 1),
            ("context_length", 8),
            ("attention.head_count", 1),
        ] {
            gguf.int(&format!("llama.{key}"), value);
        }
        let n = tokens.len();
        gguf.value("tokenizer.ggml.model", 8, &string(tokenizer.as_bytes()));
        gguf.list("tokenizer.ggml.tokens", 8, n, &tokens.iter().flat_map(|x| string(x)).collect::<Vec<_>>());
        gguf.list("tokenizer.ggml.scores", 6, n, &vec![0; 4 * n]);
        gguf.list("tokenizer.ggml.token_type", 4, n, &kind.to_le_bytes().repeat(n));
        gguf.list("tokenizer.ggml.merges", 8, 0, &[]);
        gguf.tensor("token_embd.weight", &[n, 2]);
        gguf.tensor("output_norm.weight", &[2]);
        let square: &[usize] = &[2, 2];
        for (name, shape) in [
            ("attn_norm", &square[..1]),
            ("ffn_norm", &square[..1]),
            ("attn_q", square),
            ("attn_k", square),
            ("attn_v", square),
            ("attn_output", square),
            ("ffn_gate", &[1, 2]),
            ("ffn_up", &[1, 2]),
            ("ffn_down", &[2, 1]),
        ] {
            gguf.tensor(&format!("blk.0.{name}.weight"), shape);
        }
        gguf
    }

    /// Writes the file; its tensors are a hole of zeros.
    fn write(&self, path: &Path) {
        let counts = [self.n_tensors.to_le_bytes(), self.n_metadata.to_le_bytes()].concat();
        let header = [b"GGUF\x03\0\0\0", &counts[..], &self.metadata, &self.tensors].concat();
        let len = (header.len() as u64).next_multiple_of(32) + self.data;
        fs::write(path, header).unwrap();
        fs::OpenOptions::new().write(true).open(path).unwrap().set_len(len).unwrap();
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
    // All pieces of one text: every cut of every token is a pair of tokens.
    let digits: Vec<u8> = (0..1000_u32).flat_map(|i| i.to_string().into_bytes()).take(500).collect();
    let pieces = (1..=digits.len()).flat_map(|n| digits.windows(n).map(<[u8]>::to_vec).collect::<Vec<_>>());
    let error = load("all pieces", "llama", &pieces.collect::<Vec<_>>(), 1).err().unwrap();
    assert!(error.to_string().contains("can merge"), "{error}");
}

/// Sparse files: 1 GiB long, with a few bytes on the disk.
#[cfg(unix)]
#[test]
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
