use std::path::Path;

use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, PreTokenizerWrapper};

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

    /// Builds the byte-level BPE that a GGUF file describes.
    pub(crate) fn from_gguf(gguf: &Gguf) -> Result<Self> {
        let model = gguf.text("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(
                gguf.error(format!("tokenizer `{model}` is not supported, only byte-level BPE (`gpt2`)"))
            );
        }
        let tokens = gguf.texts("tokenizer.ggml.tokens")?;
        let merges = gguf.texts("tokenizer.ggml.merges")?;
        let vocab: tokenizers::models::bpe::Vocab =
            tokens.iter().zip(0..).map(|(token, id)| (token.clone(), id)).collect();
        let merges = merges
            .iter()
            .map(|merge| merge.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| gguf.error("a merge of the tokenizer is no pair"))?;
        let bpe: BPE = BPE::builder().vocab_and_merges(vocab, merges).build().map_err(|e| gguf.error(e))?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        inner.with_pre_tokenizer(Some(pre_tokenizer(gguf)?));
        inner.with_decoder(Some(ByteLevel::default()));
        const CONTROL: f64 = 3.0;
        let kinds = gguf.numbers("tokenizer.ggml.token_type").unwrap_or_default();
        let special: Vec<AddedToken> = tokens
            .iter()
            .zip(kinds)
            .filter(|&(_, &kind)| kind == CONTROL)
            .map(|(token, _)| AddedToken::from(token.clone(), true))
            .collect();
        inner.add_special_tokens(&special);
        let bos = gguf.flag("tokenizer.ggml.add_bos_token") == Some(true);
        let bos = bos.then(|| gguf.token_id("tokenizer.ggml.bos_token_id")).flatten();
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

/// How the text is cut before the merges, by the name llama.cpp gives it.
fn pre_tokenizer(gguf: &Gguf) -> Result<PreTokenizerWrapper> {
    let byte_level = ByteLevel::new(false, true, true);
    match gguf.text("tokenizer.ggml.pre").unwrap_or("default") {
        "smollm" => Ok(Sequence::new(vec![Digits::new(true).into(), byte_level.into()]).into()),
        "gpt-2" | "default" => Ok(byte_level.into()),
        "llama-bpe" => {
            let cut = tokenizers::pre_tokenizers::split::Split::new(
                tokenizers::pre_tokenizers::split::SplitPattern::Regex(LLAMA3_CUT.into()),
                tokenizers::SplitDelimiterBehavior::Isolated,
                false,
            )
            .map_err(|e| gguf.error(e))?;
            Ok(Sequence::new(vec![cut.into(), ByteLevel::new(false, true, false).into()]).into())
        }
        other => Err(gguf.error(format!("pre-tokenizer `{other}` is not supported"))),
    }
}

/// From the `tokenizer.json` of Llama 3.
const LLAMA3_CUT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
