//! Reads a tokenizer from a GGUF file's metadata, with llama.cpp's defaults.

use std::cmp::Reverse;

use tokenizers::models::bpe::{BPE, Vocab};

use super::ggml::{Ggml, Kind, Model};
use super::library::guarded;
use super::pre_tokenizer::PreTokenizer;
use super::sentencepiece::Sentencepiece;
use super::stop;
use crate::error::Quoted;
use crate::gguf::Gguf;
use crate::{Error, Result};

/// What a kind of tokenizer assumes where the metadata are silent.
struct Defaults {
    bos: u32,
    eos: u32,
    adds_bos: bool,
    space_prefix: bool,
}

/// The tokenizer, and the tokens that end a text by their names.
pub(super) fn load(gguf: &Gguf) -> Result<(Ggml, Vec<u32>)> {
    let mut tokens = gguf.texts("tokenizer.ggml.tokens")?;
    for (id, token) in tokens.iter_mut().enumerate().filter(|(_, token)| token.is_empty()) {
        *token = format!("[EMPTY_{id}]");
    }
    let types = numbers(gguf, "tokenizer.ggml.token_type", tokens.len(), 1.0)?;
    let kinds: Vec<_> = tokens.iter().zip(types).map(|(token, number)| Kind::of(number, token)).collect();
    let (model, defaults) = match gguf.text("tokenizer.ggml.model")?.as_str() {
        "gpt2" => byte_level(gguf, &tokens)?,
        "llama" => sentencepiece(gguf, &tokens, &kinds)?,
        other => {
            let what = format!("tokenizer {} is not supported, only `gpt2` and `llama`", Quoted(other));
            return Err(gguf.error(what));
        }
    };
    let mut special: Vec<u32> =
        (0..).zip(&kinds).filter(|(_, kind)| kind.is_special()).map(|(id, _)| id).collect();
    special.sort_by_key(|&id| Reverse(tokens[id as usize].len()));
    // A token outside the vocabulary counts as not given.
    let exists = |id: &u32| (*id as usize) < tokens.len();
    let token = |key: &str, default: u32| -> Result<Option<u32>> {
        let given = gguf.token_ids(key)?.into_iter().find(exists);
        Ok(given.or(Some(default)).filter(exists))
    };
    let flag = |key: &str, default: bool| -> Result<bool> { Ok(gguf.flag(key)?.unwrap_or(default)) };
    let bos = token("tokenizer.ggml.bos_token_id", defaults.bos)?;
    let eos = token("tokenizer.ggml.eos_token_id", defaults.eos)?;
    let ends = stop::ends((0..).zip(tokens.iter().map(String::as_str)));
    let ggml = Ggml {
        bos: if flag("tokenizer.ggml.add_bos_token", defaults.adds_bos)? { bos } else { None },
        eos: if flag("tokenizer.ggml.add_eos_token", false)? { eos } else { None },
        space_prefix: flag("tokenizer.ggml.add_space_prefix", defaults.space_prefix)?,
        special,
        kinds,
        model,
        tokens,
    };
    Ok((ggml, ends.into_iter().collect()))
}

/// One number a token from a list, which may hold more; `default` for each without a list.
fn numbers(gguf: &Gguf, key: &str, n: usize, default: f64) -> Result<Vec<f64>> {
    match gguf.numbers(key)? {
        None => Ok(vec![default; n]),
        Some(numbers) if numbers.len() < n => {
            let given = numbers.len();
            Err(gguf.error(format!("metadata `{key}` has {given} entries for {n} tokens")))
        }
        Some(numbers) => Ok(numbers),
    }
}

/// sentencepiece: the scores of tokens order merges.
fn sentencepiece(gguf: &Gguf, tokens: &[String], kinds: &[Kind]) -> Result<(Model, Defaults)> {
    let scores = numbers(gguf, "tokenizer.ggml.scores", tokens.len(), 0.0)?;
    let scores = scores.into_iter().map(|score| score as f32).collect();
    let unknown = (0..).zip(kinds).find(|(_, kind)| **kind == Kind::Unknown).map(|(id, _)| id);
    let model = Model::Sentencepiece(Sentencepiece::new(tokens, scores, unknown));
    Ok((model, Defaults { bos: 1, eos: 2, adds_bos: true, space_prefix: true }))
}

/// GPT-2-style byte-level BPE: merges are stored.
fn byte_level(gguf: &Gguf, tokens: &[String]) -> Result<(Model, Defaults)> {
    let name = gguf.text_or("tokenizer.ggml.pre", "default")?;
    let pre_tokenizer = PreTokenizer::named(&name)
        .ok_or_else(|| gguf.error(format!("pre-tokenizer {} is not supported", Quoted(&name))))?;
    let merges = gguf.texts("tokenizer.ggml.merges")?;
    let merges = merges.iter().map(|merge| {
        let pair = merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
        pair.ok_or_else(|| gguf.error(format!("merge {} of the tokenizer is no pair", Quoted(merge))))
    });
    let vocab: Vocab = tokens.iter().cloned().zip(0..).collect();
    let bpe = BPE::builder()
        .vocab_and_merges(vocab, merges.collect::<Result<Vec<_>>>()?)
        .ignore_merges(pre_tokenizer.ignores_merges);
    let error = |e: String| -> Error { gguf.error(e) };
    let mut library = tokenizers::Tokenizer::new(guarded(|| bpe.build()).map_err(error)?);
    library.with_pre_tokenizer(Some(guarded(|| pre_tokenizer.build()).map_err(error)?));
    let adds_bos = pre_tokenizer.adds_bos;
    Ok((Model::ByteLevel(Box::new(library)), Defaults { bos: 11, eos: 11, adds_bos, space_prefix: false }))
}
