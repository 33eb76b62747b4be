//! Builds a tokenizer from a GGUF file's metadata.

use tokenizers::decoders::byte_fallback::ByteFallback;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::strip::Strip;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::{Prepend, Replace};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior, decoders,
    normalizers,
};

use super::library::guarded;
use crate::Result;
use crate::error::Quoted;
use crate::model::gguf::Gguf;

/// The tokenizer and its BOS token.
pub(super) fn load(gguf: &Gguf) -> Result<(tokenizers::Tokenizer, Option<u32>)> {
    const CONTROL: f64 = 3.0;
    let tokens = gguf.texts("tokenizer.ggml.tokens")?;
    let kinds = gguf.numbers("tokenizer.ggml.token_type")?.unwrap_or_default();
    let (mut inner, bos_by_default) = match gguf.text("tokenizer.ggml.model")?.as_str() {
        "gpt2" => (byte_level_bpe(gguf, &tokens)?, false),
        "llama" => (sentencepiece_bpe(gguf, &tokens, &kinds)?, true),
        other => {
            let what = format!("tokenizer {} is not supported, only `gpt2` and `llama`", Quoted(other));
            return Err(gguf.error(what));
        }
    };
    let special = tokens.iter().zip(&kinds).filter(|&(_, &kind)| kind == CONTROL);
    let special: Vec<_> = special.map(|(token, _)| AddedToken::from(token.clone(), true)).collect();
    guarded(|| Ok(inner.add_special_tokens(&special))).map_err(|e| gguf.error(e))?;
    let adds_bos = gguf.flag("tokenizer.ggml.add_bos_token").unwrap_or(bos_by_default);
    let bos = adds_bos.then(|| gguf.token_id("tokenizer.ggml.bos_token_id")).flatten();
    Ok((inner, bos))
}

/// GPT-2-style byte-level BPE: merges are stored.
fn byte_level_bpe(gguf: &Gguf, tokens: &[String]) -> Result<tokenizers::Tokenizer> {
    let merges = gguf.texts("tokenizer.ggml.merges")?;
    let merges = merges.iter().map(|merge| {
        let pair = merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
        pair.ok_or_else(|| gguf.error(format!("merge {} of the tokenizer is no pair", Quoted(merge))))
    });
    let bpe = BPE::builder().vocab_and_merges(vocab(tokens), merges.collect::<Result<Vec<_>>>()?);
    let mut inner = tokenizers::Tokenizer::new(guarded(|| bpe.build()).map_err(|e| gguf.error(e))?);
    inner.with_pre_tokenizer(Some(pre_tokenizer(gguf)?));
    inner.with_decoder(Some(ByteLevel::default()));
    Ok(inner)
}

/// Llama 2's tokenizer: sentencepiece BPE over spaces written as `\u{2581}`, with bytes as the fallback.
/// Merges are not stored: any two tokens whose concatenation is a token may merge, the highest score first.
fn sentencepiece_bpe(gguf: &Gguf, tokens: &[String], kinds: &[f64]) -> Result<tokenizers::Tokenizer> {
    const UNKNOWN: f64 = 2.0;
    let vocab = vocab(tokens);
    let scores = gguf.numbers("tokenizer.ggml.scores")?.unwrap_or_default();
    for (key, n) in [("tokenizer.ggml.scores", scores.len()), ("tokenizer.ggml.token_type", kinds.len())] {
        if n != tokens.len() {
            let what = format!("metadata `{key}` is missing or not one number a token");
            return Err(gguf.error(what));
        }
    }
    let mut merges = vec![];
    for (token, score) in tokens.iter().zip(&scores) {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let pairs = cuts.filter(|(a, b)| vocab.contains_key(*a) && vocab.contains_key(*b));
        merges.extend(pairs.map(|pair| (score, pair)));
        if merges.len() > MOST_MERGES {
            return Err(gguf.error(format!("the tokens can merge in more than {MOST_MERGES} ways")));
        }
    }
    merges.sort_by(|a, b| b.0.total_cmp(a.0));
    let merges = merges.into_iter().map(|(_, (a, b))| (a.to_owned(), b.to_owned())).collect();
    let mut bpe = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = kinds.iter().position(|&kind| kind == UNKNOWN) {
        bpe = bpe.unk_token(tokens[unknown].clone());
    }
    let mut inner = tokenizers::Tokenizer::new(guarded(|| bpe.build()).map_err(|e| gguf.error(e))?);
    let error = |e: tokenizers::Error| gguf.error(e);
    let spaces: Vec<NormalizerWrapper> =
        vec![Prepend::new(SPACE.into()).into(), Replace::new(" ", SPACE).map_err(error)?.into()];
    inner.with_normalizer(Some(normalizers::Sequence::new(spaces)));
    let decoders: Vec<DecoderWrapper> = vec![
        Replace::new(SPACE, " ").map_err(error)?.into(),
        ByteFallback::new().into(),
        Fuse::new().into(),
        Strip::new(' ', 1, 0).into(),
    ];
    inner.with_decoder(Some(decoders::sequence::Sequence::new(decoders)));
    Ok(inner)
}

/// sentencepiece's space marker.
const SPACE: &str = "\u{2581}";

/// Maximum number of splits of tokens into two tokens. Gemma, with the largest vocabulary of this kind
/// (256,000), has 580,000.
const MOST_MERGES: usize = 1 << 21;

fn vocab(tokens: &[String]) -> Vocab {
    tokens.iter().zip(0..).map(|(token, id)| (token.clone(), id)).collect()
}

/// The pre-tokenizer, by llama.cpp's name for it.
fn pre_tokenizer(gguf: &Gguf) -> Result<PreTokenizerWrapper> {
    let byte_level = ByteLevel::new(false, true, true);
    match gguf.text("tokenizer.ggml.pre").as_deref().unwrap_or("default") {
        "smollm" => Ok(Sequence::new(vec![Digits::new(true).into(), byte_level.into()]).into()),
        "gpt-2" | "default" => Ok(byte_level.into()),
        "llama-bpe" | "smaug-bpe" => cut(gguf, LLAMA3_CUT),
        "qwen2" => cut(gguf, QWEN2_CUT),
        other => Err(gguf.error(format!("pre-tokenizer {} is not supported", Quoted(other)))),
    }
}

/// Splits by a pattern, then into bytes.
fn cut(gguf: &Gguf, pattern: &str) -> Result<PreTokenizerWrapper> {
    let pattern = SplitPattern::Regex(pattern.into());
    let cut = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(|e| gguf.error(e))?;
    Ok(Sequence::new(vec![cut.into(), ByteLevel::new(false, true, false).into()]).into())
}

/// From the `tokenizer.json` of Qwen 2 and 3: as Llama 3's, but with single digits.
const QWEN2_CUT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// From the `tokenizer.json` of Llama 3, which SmolLM3 shares (llama.cpp's `smaug-bpe`).
const LLAMA3_CUT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
