//! Small GGUF files, written byte by byte.

#![allow(dead_code)] // not every test needs every helper

use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

/// The parts of a GGUF file.
#[derive(Clone, Default)]
pub struct Gguf {
    metadata: Vec<u8>,
    n_metadata: u64,
    tensors: Vec<u8>,
    n_tensors: u64,
    data: u64,                   // bytes of all tensors, padded
    filled: Vec<(u64, Vec<u8>)>, // tensors that are not zero, by their offsets
}

pub fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

impl Gguf {
    pub fn value(&mut self, key: &str, kind: u32, value: &[u8]) {
        self.metadata.extend([&string(key.as_bytes())[..], &kind.to_le_bytes(), value].concat());
        self.n_metadata += 1;
    }

    pub fn int(&mut self, key: &str, value: u32) {
        self.value(key, 4, &value.to_le_bytes());
    }

    pub fn text(&mut self, key: &str, text: &str) {
        self.value(key, 8, &string(text.as_bytes()));
    }

    pub fn flag(&mut self, key: &str, flag: bool) {
        self.value(key, 7, &[flag.into()]);
    }

    pub fn float(&mut self, key: &str, value: f32) {
        self.value(key, 6, &value.to_le_bytes());
    }

    pub fn ints(&mut self, key: &str, values: &[i32]) {
        let items: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.list(key, 5, values.len(), &items);
    }

    pub fn list(&mut self, key: &str, kind: u32, len: usize, items: &[u8]) {
        self.value(key, 9, &[&kind.to_le_bytes()[..], &(len as u64).to_le_bytes(), items].concat());
    }

    pub fn tensor(&mut self, name: &str, shape: &[usize]) {
        self.tensors.extend([&string(name.as_bytes())[..], &(shape.len() as u32).to_le_bytes()].concat());
        shape.iter().rev().for_each(|&n| self.tensors.extend((n as u64).to_le_bytes()));
        self.tensors.extend([&0_u32.to_le_bytes()[..], &self.data.to_le_bytes()].concat());
        self.data += (4 * shape.iter().product::<usize>() as u64).next_multiple_of(32);
        self.n_tensors += 1;
    }

    /// A tensor of these numbers.
    pub fn numbers(&mut self, name: &str, values: &[f32]) {
        let bytes = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.filled.push((self.data, bytes));
        self.tensor(name, &[values.len()]);
    }

    /// A Llama of one layer with this vocabulary; every token of kind `kind` and with a score of 0.
    pub fn model(tokenizer: &str, tokens: &[Vec<u8>], kind: u32) -> Self {
        let n = tokens.len();
        let mut gguf = Self::without_tokenizer(n);
        gguf.value("tokenizer.ggml.model", 8, &string(tokenizer.as_bytes()));
        gguf.list("tokenizer.ggml.tokens", 8, n, &tokens.iter().flat_map(|x| string(x)).collect::<Vec<_>>());
        gguf.list("tokenizer.ggml.scores", 6, n, &vec![0; 4 * n]);
        gguf.list("tokenizer.ggml.token_type", 4, n, &kind.to_le_bytes().repeat(n));
        gguf.list("tokenizer.ggml.merges", 8, 0, &[]);
        gguf
    }

    /// A Llama of one layer with heads of two components, for a vocabulary of `n` tokens.
    pub fn without_tokenizer(n: usize) -> Self {
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
    pub fn write(&self, path: &Path) {
        let counts = [self.n_tensors.to_le_bytes(), self.n_metadata.to_le_bytes()].concat();
        let header = [b"GGUF\x03\0\0\0", &counts[..], &self.metadata, &self.tensors].concat();
        let len = (header.len() as u64).next_multiple_of(32) + self.data;
        fs::write(path, header).unwrap();
        let start = len - self.data;
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(len).unwrap();
        for (offset, bytes) in &self.filled {
            (&file).seek(SeekFrom::Start(start + offset)).unwrap();
            (&file).write_all(bytes).unwrap();
        }
    }
}
