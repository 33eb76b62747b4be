use std::path::Path;

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

use crate::model::gguf::Gguf;
use crate::{Error, Result};

/// Text to tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bos: Option<u32>, // put before a text, if the model was trained so
}

impl Tokenizer {
    /// Reads a Hugging Face `tokenizer.json`.
    pub(crate) fn from_json(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|e| Error::io(path, e))?;
        let inner = tokenizers::Tokenizer::from_bytes(text).map_err(|e| Error::file(path, e))?;
        Ok(Self { inner, bos: None }) // its post-processor adds what is to be added
    }

    /// Builds the tokenizer that a GGUF file describes.
    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<Self> {
        const CONTROL: f64 = 3.0;
        let (mut inner, bos_by_default) = match gguf.text("tokenizer.ggml.model")? {
            "gpt2" => (byte_level_bpe(gguf)?, false),
            "llama" => (sentencepiece_bpe(gguf)?, true),
            other => {
                return Err(
                    gguf.error(format!("tokenizer `{other}` is not supported, only `gpt2` and `llama`"))
                );
            }
        };
        let kinds = gguf.numbers("tokenizer.ggml.token_type").unwrap_or_default();
        let tokens = gguf.texts("tokenizer.ggml.tokens")?.iter().zip(kinds);
        let special = tokens
            .filter(|&(_, &kind)| kind == CONTROL)
            .map(|(token, _)| AddedToken::from(token.clone(), true));
        inner.add_special_tokens(&special.collect::<Vec<_>>());
        let adds_bos = gguf.flag("tokenizer.ggml.add_bos_token").unwrap_or(bos_by_default);
        let bos = adds_bos.then(|| gguf.token_id("tokenizer.ggml.bos_token_id")).flatten();
        Ok(Self { inner, bos })
    }

    /// Tokens of a text; with the model's own start token where it has one.
    ///
    /// # Errors
    /// [`Error::Argument`] when the text cannot be tokenized.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.encode_plain(text, true)?;
        Ok(self.bos.into_iter().chain(ids).collect())
    }

    /// Tokens of a piece inside a text: no start token.
    ///
    /// # Errors
    /// [`Error::Argument`] when the text cannot be tokenized.
    pub fn encode_piece(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_plain(text, false)
    }

    fn encode_plain(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding =
            self.inner.encode(text, special).map_err(|e| Error::argument(format!("tokenizer: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// [`Error::Argument`] when a token has no text.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        self.inner.decode(tokens, true).map_err(|e| Error::argument(format!("tokenizer: {e}")))
    }

    /// The tokens that are a space and a word of at least three ASCII letters: names for retrieval tests.
    #[must_use]
    pub fn words(&self) -> Vec<u32> {
        let is_word = |token: &str| {
            token
                .strip_prefix('Ġ')
                .is_some_and(|w| w.len() >= 3 && w.bytes().all(|b| b.is_ascii_alphabetic()))
        };
        let mut ids: Vec<u32> = self
            .inner
            .get_vocab(false)
            .into_iter()
            .filter(|(token, _)| is_word(token))
            .map(|(_, id)| id)
            .collect();
        ids.sort_unstable();
        ids
    }

    /// The token of a chat template's marker, if the vocabulary has it.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }
}

/// GPT-2's tokenizer and its kin: merges are stored.
fn byte_level_bpe(gguf: &Gguf) -> Result<tokenizers::Tokenizer> {
    let merges = gguf.texts("tokenizer.ggml.merges")?.iter().map(|merge| {
        let pair = merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned()));
        pair.ok_or_else(|| gguf.error(format!("merge `{merge}` of the tokenizer is no pair")))
    });
    let bpe = BPE::builder().vocab_and_merges(vocab(gguf)?, merges.collect::<Result<Vec<_>>>()?);
    let mut inner = tokenizers::Tokenizer::new(bpe.build().map_err(|e| gguf.error(e))?);
    inner.with_pre_tokenizer(Some(pre_tokenizer(gguf)?));
    inner.with_decoder(Some(ByteLevel::default()));
    Ok(inner)
}

/// Llama 2's tokenizer: sentencepiece BPE over spaces written as `\u{2581}`, with single bytes for what is left over. Merges are
/// not stored: any two tokens whose concatenation is a token may merge, the highest score first.
fn sentencepiece_bpe(gguf: &Gguf) -> Result<tokenizers::Tokenizer> {
    const UNKNOWN: f64 = 2.0;
    let (vocab, tokens) = (vocab(gguf)?, gguf.texts("tokenizer.ggml.tokens")?);
    let numbers = |key: &str| {
        let found = gguf.numbers(key).filter(|x| x.len() == tokens.len());
        found.ok_or_else(|| gguf.error(format!("metadata `{key}` is missing or not one number a token")))
    };
    let (scores, kinds) = (numbers("tokenizer.ggml.scores")?, numbers("tokenizer.ggml.token_type")?);
    let mut merges = vec![];
    for (token, score) in tokens.iter().zip(scores) {
        let cuts = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        let pairs = cuts.filter(|(a, b)| vocab.contains_key(*a) && vocab.contains_key(*b));
        merges.extend(pairs.map(|pair| (score, pair)));
    }
    merges.sort_by(|a, b| b.0.total_cmp(a.0));
    let merges = merges.into_iter().map(|(_, (a, b))| (a.to_owned(), b.to_owned())).collect();
    let mut bpe = BPE::builder().vocab_and_merges(vocab, merges).byte_fallback(true).fuse_unk(true);
    if let Some(unknown) = kinds.iter().position(|&kind| kind == UNKNOWN) {
        bpe = bpe.unk_token(tokens[unknown].clone());
    }
    let mut inner = tokenizers::Tokenizer::new(bpe.build().map_err(|e| gguf.error(e))?);
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

/// How sentencepiece writes a space.
const SPACE: &str = "\u{2581}";

fn vocab(gguf: &Gguf) -> Result<Vocab> {
    Ok(gguf.texts("tokenizer.ggml.tokens")?.iter().zip(0..).map(|(token, id)| (token.clone(), id)).collect())
}

/// How the text is cut before the merges, by the name llama.cpp gives it.
fn pre_tokenizer(gguf: &Gguf) -> Result<PreTokenizerWrapper> {
    let byte_level = ByteLevel::new(false, true, true);
    match gguf.text("tokenizer.ggml.pre").unwrap_or("default") {
        "smollm" => Ok(Sequence::new(vec![Digits::new(true).into(), byte_level.into()]).into()),
        "gpt-2" | "default" => Ok(byte_level.into()),
        "llama-bpe" => {
            let pattern = SplitPattern::Regex(LLAMA3_CUT.into());
            let cut =
                Split::new(pattern, SplitDelimiterBehavior::Isolated, false).map_err(|e| gguf.error(e))?;
            Ok(Sequence::new(vec![cut.into(), ByteLevel::new(false, true, false).into()]).into())
        }
        other => Err(gguf.error(format!("pre-tokenizer `{other}` is not supported"))),
    }
}

/// From the `tokenizer.json` of Llama 3.
const LLAMA3_CUT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
