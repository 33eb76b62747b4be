//! GGUF files of the Llama architecture.
//!
//! The container is read here, not by a crate: of those published (gguf, gguf-rs, gguf-rs-lib, ggus, candle-core) none
//! survives a hostile file. They allocate from lengths in the header, recurse into nested arrays without a limit, or slice
//! past the end. The format is <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use half::f16;
use memmap2::Mmap;
use sha2::{Digest, Sha256};

use crate::model::tensors::{Tensors, check_finite, map};
use crate::model::{Config, RopeScaling};
use crate::{Error, Result};

/// An open GGUF file: metadata and where each tensor lies.
pub(crate) struct Gguf {
    path: PathBuf,
    map: Mmap,
    metadata: HashMap<String, Value>,
    tensors: HashMap<String, TensorInfo>,
    data_start: usize,     // tensor offsets count from here
    heads: (usize, usize), // (n_heads, n_kv_heads), for the row order of Q and K
}

/// A metadata value. Numbers of all widths share two variants.
#[derive(Debug)]
pub(crate) enum Value {
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    Numbers(Vec<f64>),
}

struct TensorInfo {
    shape: Vec<usize>, // outermost first, as in safetensors; the file stores it innermost first
    kind: u32,         // ggml type
    offset: usize,
}

impl Gguf {
    pub fn open(path: &Path) -> Result<Self> {
        let map = map(path)?;
        let parsed = parse(&map).map_err(|what| Error::file(path, what))?;
        let (metadata, tensors, data_start) = parsed;
        let mut gguf = Self { path: path.to_owned(), map, metadata, tensors, data_start, heads: (1, 1) };
        let n_heads = gguf.int("llama.attention.head_count")?;
        gguf.heads = (n_heads, gguf.int_or("llama.attention.head_count_kv", n_heads)?);
        Ok(gguf)
    }

    /// The model's shape from the metadata.
    pub fn config(&self) -> Result<Config> {
        let architecture = self.text("general.architecture")?;
        if architecture != "llama" {
            return Err(self.error(format!("architecture `{architecture}` is not `llama`")));
        }
        let (n_heads, n_kv_heads) = self.heads;
        let hidden_size = self.int("llama.embedding_length")?;
        let head_dim = self.int_or("llama.attention.key_length", hidden_size / n_heads.max(1))?;
        for key in ["llama.attention.value_length", "llama.rope.dimension_count"] {
            if self.int_or(key, head_dim)? != head_dim {
                return Err(self.error(format!("{key} differs from the head's length {head_dim}")));
            }
        }
        let eos = self.int_or("tokenizer.ggml.eos_token_id", usize::MAX)?;
        let config = Config {
            vocab_size: self.texts("tokenizer.ggml.tokens")?.len(),
            hidden_size,
            intermediate_size: self.int("llama.feed_forward_length")?,
            n_layers: self.int("llama.block_count")?,
            n_heads,
            n_kv_heads,
            head_dim,
            max_seq_len: self.int("llama.context_length")?,
            rms_norm_eps: self.float_or("llama.attention.layer_norm_rms_epsilon", 1e-5) as f32,
            rope_theta: self.float_or("llama.rope.freq_base", 10_000.0),
            rope_scaling: self.rope_scaling(head_dim)?,
            attention_bias: self.tensors.contains_key("blk.0.attn_q.bias"),
            mlp_bias: self.tensors.contains_key("blk.0.ffn_up.bias"),
            tie_word_embeddings: !self.tensors.contains_key("output.weight"),
            eos_tokens: u32::try_from(eos).into_iter().collect(),
        };
        config.validated().map_err(|what| self.error(what))
    }

    fn rope_scaling(&self, head_dim: usize) -> Result<RopeScaling> {
        // Llama 3.1 files carry the divisors themselves and no scaling type.
        if self.tensors.contains_key("rope_freqs.weight") {
            return Ok(RopeScaling::Divisors(self.load_raw("rope_freqs.weight", &[head_dim / 2])?));
        }
        match self.metadata.get("llama.rope.scaling.type") {
            None => Ok(RopeScaling::None),
            Some(Value::Text(kind)) if kind == "none" => Ok(RopeScaling::None),
            Some(Value::Text(kind)) if kind == "linear" => {
                Ok(RopeScaling::Linear { factor: self.float_or("llama.rope.scaling.factor", 1.0) })
            }
            Some(kind) => Err(self.error(format!("rope scaling {kind:?} is not supported"))),
        }
    }

    /// A text in the metadata.
    pub fn text(&self, key: &str) -> Result<&str> {
        match self.metadata.get(key) {
            Some(Value::Text(text)) => Ok(text),
            _ => Err(self.missing(key, "text")),
        }
    }

    /// A list of texts in the metadata.
    pub fn texts(&self, key: &str) -> Result<&[String]> {
        match self.metadata.get(key) {
            Some(Value::Texts(texts)) => Ok(texts),
            _ => Err(self.missing(key, "list of texts")),
        }
    }

    /// A list of numbers in the metadata, if it is there.
    pub fn numbers(&self, key: &str) -> Option<&[f64]> {
        match self.metadata.get(key) {
            Some(Value::Numbers(numbers)) => Some(numbers),
            _ => None,
        }
    }

    /// A flag in the metadata, if it is there.
    pub fn flag(&self, key: &str) -> Option<bool> {
        match self.metadata.get(key) {
            Some(Value::Bool(flag)) => Some(*flag),
            _ => None,
        }
    }

    /// A token in the metadata, if it is there.
    pub fn token_id(&self, key: &str) -> Option<u32> {
        self.int(key).ok().and_then(|id| u32::try_from(id).ok())
    }

    fn int(&self, key: &str) -> Result<usize> {
        match self.metadata.get(key) {
            Some(&Value::Int(x)) if x >= 0 => Ok(x as usize),
            _ => Err(self.missing(key, "whole number")),
        }
    }

    fn int_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.metadata.contains_key(key) { self.int(key) } else { Ok(default) }
    }

    fn float_or(&self, key: &str, default: f64) -> f64 {
        match self.metadata.get(key) {
            Some(&Value::Float(x)) => x,
            _ => default,
        }
    }

    fn missing(&self, key: &str, kind: &str) -> Error {
        self.error(format!("metadata `{key}` is missing or no {kind}"))
    }

    /// An error about this file.
    pub fn error(&self, what: impl ToString) -> Error {
        Error::file(&self.path, what)
    }

    fn load_raw(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(info) = self.tensors.get(name) else {
            return Err(self.error(format!("tensor `{name}` is missing")));
        };
        if info.shape != shape {
            let what = format!("tensor `{name}` has shape {:?}, the metadata ask for {shape:?}", info.shape);
            return Err(self.error(what));
        }
        let n = shape.iter().product();
        let start = self.data_start.checked_add(info.offset);
        let data = start.and_then(|start| self.map.get(start..)).unwrap_or_default();
        let values =
            dequantize(info.kind, data, n).map_err(|what| self.error(format!("tensor `{name}`: {what}")))?;
        check_finite(&self.path, name, values)
    }
}

impl Tensors for Gguf {
    fn contains(&self, name: &str) -> bool {
        gguf_name(name).is_some_and(|name| self.tensors.contains_key(&name))
    }

    fn load(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let Some(stored) = gguf_name(name) else {
            return Err(self.error(format!("GGUF has no name for tensor `{name}`")));
        };
        let values = self.load_raw(&stored, shape)?;
        Ok(if name.contains("q_proj") {
            halves_from_pairs(&values, shape[0], self.heads.0)
        } else if name.contains("k_proj") {
            halves_from_pairs(&values, shape[0], self.heads.1)
        } else {
            values
        })
    }

    fn digest(&self, hasher: &mut Sha256) {
        hasher.update(&self.map);
    }
}

/// GGUF stores the rows of Q and K so that RoPE pairs are neighbours (2i, 2i + 1); this restores the halves
/// (i, i + head_dim / 2) of the original checkpoint.
fn halves_from_pairs(values: &[f32], rows: usize, heads: usize) -> Vec<f32> {
    let columns = values.len() / rows;
    let half = rows / heads / 2;
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks_exact(2 * half * columns) {
        for parity in 0..2 {
            for i in 0..half {
                out.extend_from_slice(&head[(2 * i + parity) * columns..][..columns]);
            }
        }
    }
    out
}

fn gguf_name(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        "lm_head.weight" => return Some("output.weight".into()),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, parameter) = part.rsplit_once('.')?;
    let stored = match module {
        "input_layernorm" => "attn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "post_attention_layernorm" => "ffn_norm",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
        _ => return None,
    };
    Some(format!("blk.{layer}.{stored}.{parameter}"))
}

/// `n` numbers of a ggml type from the front of `data`. Nothing is allocated before the bytes are known to be there.
fn dequantize(kind: u32, data: &[u8], n: usize) -> std::result::Result<Vec<f32>, String> {
    let half = |bytes: &[u8]| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32();
    // (numbers, bytes) of a block, and what a block holds.
    type Unpack<'a> = &'a dyn Fn(&[u8], &mut Vec<f32>);
    let (block, size, unpack): (usize, usize, Unpack<'_>) = match kind {
        0 => (1, 4, &|b, out| out.push(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        1 => (1, 2, &|b, out| out.push(half(b))),
        30 => (1, 2, &|b, out| out.push(half::bf16::from_le_bytes([b[0], b[1]]).to_f32())),
        // Q4_0, Q4_1: the low nibbles are the first half of the block, the high nibbles the second.
        2 => (32, 18, &|b, out| {
            let d = half(b);
            let nibbles = b[2..].iter().map(|x| x & 15).chain(b[2..].iter().map(|x| x >> 4));
            out.extend(nibbles.map(|q| (f32::from(q) - 8.0) * d));
        }),
        3 => (32, 20, &|b, out| {
            let (d, m) = (half(b), half(&b[2..]));
            let nibbles = b[4..].iter().map(|x| x & 15).chain(b[4..].iter().map(|x| x >> 4));
            out.extend(nibbles.map(|q| f32::from(q) * d + m));
        }),
        8 => (32, 34, &|b, out| {
            let d = half(b);
            out.extend(b[2..].iter().map(|&q| f32::from(q as i8) * d));
        }),
        _ => {
            return Err(format!("ggml type {kind} is not supported (only F32, F16, BF16, Q8_0, Q4_0, Q4_1)"));
        }
    };
    if !n.is_multiple_of(block) {
        return Err(format!("{n} numbers are no whole number of blocks of {block}"));
    }
    let bytes =
        (n / block).checked_mul(size).and_then(|len| data.get(..len)).ok_or("the file ends inside it")?;
    let mut out = Vec::with_capacity(n);
    bytes.chunks_exact(size).for_each(|block| unpack(block, &mut out));
    Ok(out)
}

type Parsed = (HashMap<String, Value>, HashMap<String, TensorInfo>, usize);

fn parse(bytes: &[u8]) -> std::result::Result<Parsed, String> {
    let mut reader = Reader { bytes, at: 0 };
    if reader.take(4)? != b"GGUF" {
        return Err("not a GGUF file".into());
    }
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        return Err(format!("GGUF version {version} is not supported, only 2 and 3"));
    }
    let (n_tensors, n_values) = (reader.u64()?, reader.u64()?);
    let mut metadata = HashMap::new();
    for _ in 0..n_values {
        let key = reader.text()?;
        let kind = reader.u32()?;
        let value = reader.value(kind)?;
        if metadata.insert(key.clone(), value).is_some() {
            return Err(format!("metadata `{key}` appears twice"));
        }
    }
    let mut tensors = HashMap::new();
    for _ in 0..n_tensors {
        let name = reader.text()?;
        let n_dims = reader.u32()?;
        if n_dims > 4 {
            return Err(format!("tensor `{name}` has {n_dims} dimensions"));
        }
        let mut shape = (0..n_dims).map(|_| reader.size()).collect::<std::result::Result<Vec<_>, _>>()?;
        shape.reverse();
        let info = TensorInfo { shape, kind: reader.u32()?, offset: reader.size()? };
        if tensors.insert(name.clone(), info).is_some() {
            return Err(format!("tensor `{name}` appears twice"));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(&Value::Int(x)) if (1..=1 << 20).contains(&x) => x as usize,
        Some(value) => return Err(format!("alignment {value:?} is not possible")),
    };
    Ok((metadata, tensors, reader.at.next_multiple_of(alignment)))
}

/// A cursor that never reads past the end. Every item of a list takes at least a byte, so a list cannot grow beyond the file
/// whatever length it claims.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> std::result::Result<&'a [u8], String> {
        let slice = self.at.checked_add(n).and_then(|end| self.bytes.get(self.at..end));
        self.at += n.min(self.bytes.len());
        slice.ok_or_else(|| "the file ends inside its header".into())
    }

    fn array<const N: usize>(&mut self) -> std::result::Result<[u8; N], String> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N)?);
        Ok(out)
    }

    fn u32(&mut self) -> std::result::Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> std::result::Result<u64, String> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn size(&mut self) -> std::result::Result<usize, String> {
        usize::try_from(self.u64()?).map_err(|_| "a size does not fit this machine".into())
    }

    fn text(&mut self) -> std::result::Result<String, String> {
        let n = self.size()?;
        Ok(String::from_utf8_lossy(self.take(n)?).into_owned())
    }

    fn value(&mut self, kind: u32) -> std::result::Result<Value, String> {
        Ok(match kind {
            0..=5 | 10 | 11 => Value::Int(self.number(kind)? as i64),
            6 | 12 => Value::Float(self.number(kind)?),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            8 => Value::Text(self.text()?),
            9 => {
                let (item, n) = (self.u32()?, self.u64()?);
                if item == 8 {
                    Value::Texts((0..n).map(|_| self.text()).collect::<std::result::Result<_, _>>()?)
                } else {
                    Value::Numbers((0..n).map(|_| self.number(item)).collect::<std::result::Result<_, _>>()?)
                }
            }
            _ => return Err(format!("metadata type {kind} does not exist")),
        })
    }

    /// A number of any width; whole numbers are exact to 2^53.
    fn number(&mut self, kind: u32) -> std::result::Result<f64, String> {
        Ok(match kind {
            0 | 7 => f64::from(self.array::<1>()?[0]),
            1 => f64::from(i8::from_le_bytes(self.array()?)),
            2 => f64::from(u16::from_le_bytes(self.array()?)),
            3 => f64::from(i16::from_le_bytes(self.array()?)),
            4 => f64::from(self.u32()?),
            5 => f64::from(i32::from_le_bytes(self.array()?)),
            6 => f64::from(f32::from_le_bytes(self.array()?)),
            10 => self.u64()? as f64,
            11 => i64::from_le_bytes(self.array()?) as f64,
            12 => f64::from_le_bytes(self.array()?),
            _ => return Err(format!("a list of metadata type {kind} is not supported")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_follow_ggml() {
        let d = f16::from_f32(0.5).to_le_bytes();
        let m = f16::from_f32(-1.0).to_le_bytes();
        let quants: Vec<u8> = (0..16).map(|i| i | ((15 - i) << 4)).collect();
        let q4_0 = dequantize(2, &[&d[..], &quants].concat(), 32).unwrap();
        assert_eq!((q4_0[0], q4_0[1], q4_0[16]), (-4.0, -3.5, 3.5));
        let q4_1 = dequantize(3, &[&d[..], &m, &quants].concat(), 32).unwrap();
        assert_eq!((q4_1[0], q4_1[2], q4_1[31]), (-1.0, 0.0, -1.0));
        let q8_0 = dequantize(8, &[&d[..], &[254; 32]].concat(), 32).unwrap();
        assert_eq!(q8_0, [-1.0; 32]);
        assert!(dequantize(8, &[0; 33], 32).is_err());
        assert!(dequantize(8, &[0; 34], 31).is_err());
        assert!(dequantize(12, &[0; 256], 256).is_err());
    }

    #[test]
    fn pairs_become_halves() {
        // One head of four rows, one column: pairs (0, 1), (2, 3) become rows 0, 2 | 1, 3.
        assert_eq!(halves_from_pairs(&[0.0, 1.0, 2.0, 3.0], 4, 1), [0.0, 2.0, 1.0, 3.0]);
    }

    #[test]
    fn hostile_headers_end_quickly() {
        let header = |n_tensors: u64, n_values: u64, rest: &[u8]| {
            [b"GGUF", &3_u32.to_le_bytes()[..], &n_tensors.to_le_bytes(), &n_values.to_le_bytes(), rest]
                .concat()
        };
        let nested: Vec<u8> = [1_u64.to_le_bytes().as_slice(), b"k", &9_u32.to_le_bytes()].concat();
        let nested = [&nested[..], &[9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0].repeat(1000)].concat();
        for bytes in [
            header(u64::MAX, u64::MAX, &[]),
            header(0, 1, &u64::MAX.to_le_bytes()),
            header(0, 1, &nested),
            b"GGUF".to_vec(),
            b"GGML0000".to_vec(),
        ] {
            assert!(parse(&bytes).is_err());
        }
    }
}
