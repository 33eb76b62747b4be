//! GGUF files.
//!
//! The container is parsed here because none of the published crates (gguf, gguf-rs, gguf-rs-lib, ggus,
//! candle-core) survives a hostile file: they allocate from lengths in the header, recurse into nested arrays
//! without a limit, or slice past the end. The format is
//! <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, versions 2 and 3.

mod blocks;
mod header;

use std::io::BufReader;
use std::path::Path;

use sha2::{Digest as _, Sha256};

use crate::error::Quoted;
use crate::family::{AttentionBias, AttentionKeys, Family};
use crate::source::Source;
use crate::tensors::{Tensors, check_finite, not_finite};
use crate::{Config, Matrix, RopeScaling, Yarn};
use crate::{Error, Result};
pub(crate) use blocks::{DotBlocks, Layout};
pub use blocks::{FixedPoint, decode_q4_0, decode_q8_0};
use header::{Header, List, TEXT, Value};

/// Maximum entries of a vocabulary and of its parallel lists.
const MOST_ITEMS: u64 = 1 << 24;

/// Maximum bytes of a token. sentencepiece trains tokens of up to 512 characters; the longest known ones have
/// a few hundred bytes.
const LONGEST_TOKEN: usize = 1024;

/// An open GGUF file: metadata and tensor locations.
pub(crate) struct Gguf {
    source: Source,
    header: Header,
    family: &'static Family,
    heads: (usize, usize), // (n_heads, n_kv_heads), to restore the row order of Q and K
}

impl Gguf {
    pub fn open(path: &Path) -> Result<Self> {
        let source = Source::open(path)?;
        let input = BufReader::with_capacity(1 << 16, source.reader()?);
        let header = header::parse(input, source.len()).map_err(|what| source.error(what))?;
        if let Some(&Value::Int(count)) = header.metadata.get("split.count")
            && count > 1
        {
            let what = format!(
                "is one of {count} files of a split model: merge them with `llama-gguf-split --merge`"
            );
            return Err(source.error(what));
        }
        // The architecture is read first: it is the prefix of other metadata keys.
        let architecture = text(&source, &header, "general.architecture")?;
        let family = Family::of_architecture(&architecture).map_err(|what| source.error(what))?;
        let mut gguf = Self { source, header, family, heads: (1, 1) };
        let n_heads = gguf.int(&gguf.key("attention.head_count"))?;
        gguf.heads = (n_heads, gguf.int_or(&gguf.key("attention.head_count_kv"), n_heads)?);
        Ok(gguf)
    }

    /// The name of a metadata entry of the architecture.
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.family.gguf.unwrap_or(self.family.name))
    }

    /// The model's shape from the metadata.
    pub fn config(&self) -> Result<Config> {
        let (family, (n_heads, n_kv_heads)) = (self.family, self.heads);
        let experts = self.int_or(&self.key("expert_count"), 0)?;
        if experts > 0 {
            return Err(self.error(format!("has {experts} experts: mixtures of experts are not supported")));
        }
        let hidden_size = self.int(&self.key("embedding_length"))?;
        let head_dim = self.int_or(&self.key("attention.key_length"), hidden_size / n_heads.max(1))?;
        for key in ["attention.value_length", "rope.dimension_count"].map(|name| self.key(name)) {
            if self.int_or(&key, head_dim)? != head_dim {
                return Err(self.error(format!("{key} differs from the head's length {head_dim}")));
            }
        }
        // llama.cpp reads no window for these architectures.
        let window = self.key("attention.sliding_window");
        if self.int_or(&window, 0)? > 0 {
            return Err(self.error(format!("metadata `{window}` is not supported")));
        }
        let max_seq_len = self.int(&self.key("context_length"))?;
        let n_layers = self.int(&self.key("block_count"))?;
        let attention = Config::attention(family, &AttentionKeys::default(), n_layers);
        let has = |name: &str| self.header.tensors.contains_key(name);
        let has_bias = |name: &str| family.bias != AttentionBias::None && has(name);
        let config = Config {
            family: family.name,
            vocab_size: self.list_len("tokenizer.ggml.tokens")?,
            hidden_size,
            intermediate_size: self.int(&self.key("feed_forward_length"))?,
            n_layers,
            n_heads,
            n_kv_heads,
            head_dim,
            max_seq_len,
            rms_norm_eps: self.float_or(&self.key("attention.layer_norm_rms_epsilon"), 1e-5)? as f32,
            rope_theta: self.float_or(&self.key("rope.freq_base"), 10_000.0)?,
            rope_scaling: self.rope_scaling(head_dim, max_seq_len)?,
            attention_bias: family.bias == AttentionBias::Qkv || has_bias("blk.0.attn_q.bias"),
            output_bias: has_bias("blk.0.attn_output.bias"),
            mlp_bias: has("blk.0.ffn_up.bias"),
            tie_word_embeddings: !has("output.weight"),
            qk_norm: family.qk_norm,
            attention: attention.map_err(|what| self.error(what))?,
            eos_tokens: self.eos_tokens()?,
        };
        config.validated().map_err(|what| self.error(what))
    }

    /// Ends of a sequence, a turn or a message, and of files in models that fill in code.
    fn eos_tokens(&self) -> Result<Vec<u32>> {
        let n = self.list_len("tokenizer.ggml.tokens")?;
        let mut ends = vec![];
        for name in ["eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"] {
            for suffix in ["id", "ids"] {
                ends.extend(self.token_ids(&format!("tokenizer.ggml.{name}_token_{suffix}"))?);
            }
        }
        ends.retain(|&id| (id as usize) < n);
        Ok(ends)
    }

    /// Scaling of RoPE, by the keys of every age: without a type a factor is linear, and the oldest files
    /// have `rope.scale_linear` instead of `rope.scaling.factor`.
    fn rope_scaling(&self, head_dim: usize, max_seq_len: usize) -> Result<RopeScaling> {
        let key = |name: &str| self.key(&format!("rope.scaling.{name}"));
        let old = self.float_or(&self.key("rope.scale_linear"), 0.0)?;
        // A factor of 0 stands for none.
        let factor = Some(self.float_or(&key("factor"), old)?).filter(|&factor| factor != 0.0).unwrap_or(1.0);
        let number = |name: &str, default: f64| self.float_or(&key(name), default);
        let factor_of_scores = number("attn_factor", 1.0)?;
        let scaling = match self.text_or(&key("type"), "linear")?.as_str() {
            "none" => RopeScaling::None,
            "linear" if factor == 1.0 => RopeScaling::None,
            "linear" => RopeScaling::Linear { factor },
            "yarn" => RopeScaling::Yarn(Yarn {
                factor,
                beta_fast: number("yarn_beta_fast", 32.0)?,
                beta_slow: number("yarn_beta_slow", 1.0)?,
                original_max_seq_len: match self.int_or(&key("original_context_length"), 0)? {
                    0 => max_seq_len as f64,
                    original => original as f64,
                },
                truncate: true,
                // The paper's factor, times those of the file.
                attention_factor: Yarn::attention_factor_of(factor, 1.0)
                    / Yarn::attention_factor_of(factor, number("yarn_log_multiplier", 0.0)?)
                    * number("yarn_attn_factor", 1.0)?
                    * factor_of_scores,
            }),
            other => return Err(self.error(format!("rope scaling {} is not supported", Quoted(other)))),
        };
        if factor_of_scores != 1.0 && !matches!(scaling, RopeScaling::Yarn(_)) {
            let what = format!("metadata `{}` is supported with yarn only", key("attn_factor"));
            return Err(self.error(what));
        }
        // Llama 3.1 files carry divisors, which come on top of the scaling.
        const DIVISORS: &str = "rope_freqs.weight";
        if !self.header.tensors.contains_key(DIVISORS) {
            return Ok(scaling);
        }
        let mut divisors = self.load_raw(DIVISORS, &[head_dim / 2])?;
        match scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => divisors.iter_mut().for_each(|x| *x *= factor as f32),
            _ => return Err(self.error(format!("tensor `{DIVISORS}` together with yarn is not supported"))),
        }
        Ok(RopeScaling::Divisors(divisors))
    }

    /// The file.
    pub fn path(&self) -> &Path {
        self.source.path()
    }

    /// A text in the metadata.
    pub fn text(&self, key: &str) -> Result<String> {
        text(&self.source, &self.header, key)
    }

    /// A list of texts in the metadata.
    pub fn texts(&self, key: &str) -> Result<Vec<String>> {
        let Some(list) = self.list(key)?.filter(|list| list.kind == TEXT) else {
            return Err(self.missing(key, "list of texts"));
        };
        let bytes = self.source.read(list.bytes.clone())?;
        let mut rest = &bytes[..];
        let mut texts = vec![];
        // The header has been validated: a length that does not fit means that the file has changed since.
        while let Some((length, behind)) = rest.split_first_chunk::<8>() {
            let length = u64::from_le_bytes(*length);
            if length > LONGEST_TOKEN as u64 {
                let what =
                    format!("metadata `{key}` holds a text of {length} bytes, {LONGEST_TOKEN} at most");
                return Err(self.error(what));
            }
            let Some((text, behind)) = behind.split_at_checked(length as usize) else {
                return Err(self.error(format!("metadata `{key}` ends inside a text")));
            };
            texts.push(String::from_utf8_lossy(text).into_owned());
            rest = behind;
        }
        Ok(texts)
    }

    /// A text in the metadata, or a default.
    pub fn text_or(&self, key: &str, default: &str) -> Result<String> {
        if self.header.metadata.contains_key(key) { self.text(key) } else { Ok(default.to_owned()) }
    }

    /// A list of numbers in the metadata, if present.
    pub fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        let Ok(width) = header::width(list.kind) else { return Err(self.missing(key, "list of numbers")) };
        let bytes = self.source.read(list.bytes.clone())?;
        Ok(Some(bytes.chunks_exact(width).map(|bytes| header::number(list.kind, bytes)).collect()))
    }

    /// A list with at most one item per vocabulary entry.
    fn list(&self, key: &str) -> Result<Option<&List>> {
        match self.header.metadata.get(key) {
            Some(Value::List(list)) if list.len > MOST_ITEMS => {
                Err(self.error(format!("metadata `{key}` holds {} items, {MOST_ITEMS} at most", list.len)))
            }
            Some(Value::List(list)) => Ok(Some(list)),
            Some(_) => Err(self.missing(key, "list")),
            None => Ok(None),
        }
    }

    /// Items of a list of texts in the metadata.
    fn list_len(&self, key: &str) -> Result<usize> {
        match self.list(key)?.filter(|list| list.kind == TEXT) {
            Some(list) => Ok(list.len as usize),
            None => Err(self.missing(key, "list of texts")),
        }
    }

    /// A flag in the metadata, if present.
    pub fn flag(&self, key: &str) -> Result<Option<bool>> {
        match self.header.metadata.get(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.missing(key, "flag")),
        }
    }

    /// A token in the metadata, or a list of them; none if the key is missing. Numbers that are no tokens are
    /// left out: files write -1 for none.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        match self.header.metadata.get(key) {
            None => Ok(vec![]),
            Some(&Value::Int(id)) => Ok(u32::try_from(id).into_iter().collect()),
            Some(_) => {
                let ids = self.numbers(key)?.unwrap_or_default().into_iter();
                Ok(ids.filter(|id| (0.0..f64::from(u32::MAX)).contains(id)).map(|id| id as u32).collect())
            }
        }
    }

    fn int(&self, key: &str) -> Result<usize> {
        match self.header.metadata.get(key) {
            Some(&Value::Int(x)) if x >= 0 => Ok(x as usize),
            _ => Err(self.missing(key, "whole number")),
        }
    }

    fn int_or(&self, key: &str, default: usize) -> Result<usize> {
        if self.header.metadata.contains_key(key) { self.int(key) } else { Ok(default) }
    }

    /// A number in the metadata, whole or not, or a default.
    fn float_or(&self, key: &str, default: f64) -> Result<f64> {
        match self.header.metadata.get(key) {
            None => Ok(default),
            Some(&Value::Float(x)) => Ok(x),
            Some(&Value::Int(x)) => Ok(x as f64),
            Some(_) => Err(self.missing(key, "number")),
        }
    }

    fn missing(&self, key: &str, kind: &str) -> Error {
        missing(&self.source, key, kind)
    }

    /// An error about this file.
    pub fn error(&self, what: impl ToString) -> Error {
        self.source.error(what)
    }

    /// The layout and the bytes of a tensor, if it has exactly this shape.
    fn blocks(&self, name: &str, shape: &[usize]) -> Result<(Layout, Vec<u8>)> {
        let Some(info) = self.header.tensors.get(name) else {
            return Err(self.error(format!("tensor `{name}` is missing")));
        };
        if info.shape != shape {
            let what = format!("tensor `{name}` has shape {:?}, the metadata ask for {shape:?}", info.shape);
            return Err(self.error(what));
        }
        let error = |what| self.tensor_error(name, what);
        let layout = Layout::of(info.kind).map_err(error)?;
        let len = layout.bytes(shape.iter().product()).map_err(error)?;
        let start = self.header.data_start.checked_add(info.offset);
        let range = start.and_then(|start| Some(start..start.checked_add(len as u64)?));
        let range = range.filter(|range| range.end <= self.source.len());
        let range = range.ok_or_else(|| error("the file ends inside it".into()))?;
        Ok((layout, self.source.read(range)?))
    }

    fn load_raw(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let (layout, bytes) = self.blocks(name, shape)?;
        let values = layout.decoded(&bytes).map_err(|what| self.tensor_error(name, what))?;
        check_finite(self.source.path(), name, values)
    }

    fn tensor_error(&self, name: &str, what: String) -> Error {
        self.error(format!("tensor `{name}`: {what}"))
    }

    /// The heads whose rows the file has in pairs.
    fn paired_heads(&self, name: &str) -> Option<usize> {
        let heads = [("q_proj", self.heads.0), ("k_proj", self.heads.1)];
        heads
            .into_iter()
            .find(|(part, _)| self.family.gguf_pairs && name.contains(part))
            .map(|(_, heads)| heads)
    }

    /// The name of a tensor in the file.
    fn name_of(&self, name: &str) -> Result<String> {
        gguf_name(name).ok_or_else(|| self.error(format!("GGUF has no name for tensor `{name}`")))
    }
}

/// A text in the metadata.
fn text(source: &Source, header: &Header, key: &str) -> Result<String> {
    const LONGEST: u64 = 1 << 16;
    match header.metadata.get(key) {
        Some(Value::Text(range)) if range.end - range.start <= LONGEST => {
            Ok(String::from_utf8_lossy(&source.read(range.clone())?).into_owned())
        }
        Some(Value::Text(_)) => Err(source.error(format!("metadata `{key}` is longer than {LONGEST} bytes"))),
        _ => Err(missing(source, key, "text")),
    }
}

fn missing(source: &Source, key: &str, kind: &str) -> Error {
    source.error(format!("metadata `{key}` is missing or no {kind}"))
}

impl Tensors for Gguf {
    fn contains(&self, name: &str) -> bool {
        gguf_name(name).is_some_and(|name| self.header.tensors.contains_key(&name))
    }

    fn load(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let values = self.load_raw(&self.name_of(name)?, shape)?;
        Ok(match self.paired_heads(name) {
            Some(heads) => halves_from_pairs(&values, shape[0], heads),
            None => values,
        })
    }

    fn load_matrix(&self, name: &str, [n_out, n_in]: [usize; 2]) -> Result<Matrix> {
        let stored = self.name_of(name)?;
        let (layout, mut bytes) = self.blocks(&stored, &[n_out, n_in])?;
        if let Some(heads) = self.paired_heads(name) {
            bytes = halves_from_pairs(&bytes, n_out, heads);
        }
        let matrix = match layout.saves_memory() {
            true => Matrix::of_blocks(layout, bytes, n_in),
            false => layout.decoded(&bytes).map(|numbers| Matrix::new(numbers, n_in)),
        };
        let matrix = matrix.map_err(|what| self.tensor_error(&stored, what))?;
        if matrix.is_finite() { Ok(matrix) } else { Err(not_finite(self.source.path(), &stored)) }
    }

    fn names(&self) -> Vec<&str> {
        self.header.tensors.keys().map(String::as_str).collect()
    }

    fn stored_name(&self, name: &str) -> Option<String> {
        gguf_name(name)
    }

    fn digest(&self, stored_name: &str, hasher: &mut Sha256) -> Result<()> {
        let Some(info) = self.header.tensors.get(stored_name) else { return Ok(()) };
        hasher.update(format!(" {} {:?} ", info.kind, info.shape));
        let ends_inside = || self.error(format!("tensor `{stored_name}`: the file ends inside it"));
        let start = self.header.data_start;
        let range =
            info.range().and_then(|at| Some(start.checked_add(at.start)?..start.checked_add(at.end)?));
        self.source.digest(range.ok_or_else(ends_inside)?, hasher)
    }
}

/// GGUF stores the rows of Q and K with RoPE pairs adjacent (2i, 2i + 1); this restores the half-split layout
/// (i, i + head_dim / 2) of the original checkpoint.
fn halves_from_pairs<T: Copy>(values: &[T], rows: usize, heads: usize) -> Vec<T> {
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
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_become_halves() {
        // One head of four rows, one column: pairs (0, 1), (2, 3) become rows 0, 2 | 1, 3.
        assert_eq!(halves_from_pairs(&[0.0, 1.0, 2.0, 3.0], 4, 1), [0.0, 2.0, 1.0, 3.0]);
    }
}
