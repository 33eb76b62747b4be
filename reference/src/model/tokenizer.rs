mod from_gguf;
mod from_json;
mod library;

use std::path::Path;

use crate::model::gguf::Gguf;
use crate::{Error, Result};
use library::guarded;

/// Text to tokens and back.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bos: Option<u32>, // prepended to a text, if the model expects it
    space: char,      // the vocabulary's marker of a space before a word
}

/// A space in byte-level BPE (GPT-2).
const BYTE_LEVEL_SPACE: char = 'Ġ';
/// A space in sentencepiece.
const SENTENCEPIECE_SPACE: char = '\u{2581}';

impl Tokenizer {
    /// Reads the `tokenizer.json` of a Hugging Face folder, if there is one.
    pub(crate) fn of_folder(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join("tokenizer.json");
        match path.exists() {
            true => Ok(Some(Self::new(from_json::load(&path)?, None))), // its post-processor adds special tokens
            false => Ok(None),
        }
    }

    /// Builds the tokenizer from a GGUF file's metadata.
    pub(crate) fn of_gguf(gguf: &Gguf) -> Result<Option<Self>> {
        let (inner, bos) = from_gguf::load(gguf)?;
        Ok(Some(Self::new(inner, bos)))
    }

    fn new(inner: tokenizers::Tokenizer, bos: Option<u32>) -> Self {
        let vocabulary = inner.get_vocab(false);
        let count = |space| vocabulary.keys().filter(|token| token.starts_with(space)).count();
        let sentencepiece = count(SENTENCEPIECE_SPACE) > count(BYTE_LEVEL_SPACE);
        Self { inner, bos, space: if sentencepiece { SENTENCEPIECE_SPACE } else { BYTE_LEVEL_SPACE } }
    }

    /// Tokens of a text, with the model's BOS token if it has one.
    ///
    /// # Errors
    /// [`Error::Argument`] when the text cannot be tokenized.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let ids = self.encode_plain(text, true)?;
        Ok(self.bos.into_iter().chain(ids).collect())
    }

    /// Tokens of a piece inside a text: without BOS, and without sentencepiece's leading space.
    ///
    /// # Errors
    /// [`Error::Argument`] when the text cannot be tokenized.
    pub fn encode_piece(&self, text: &str) -> Result<Vec<u32>> {
        let plain = self.encode_plain(text, false)?;
        if self.space != SENTENCEPIECE_SPACE {
            return Ok(plain);
        }
        // The leading space then precedes the line break, which merges with nothing.
        let (before, mut all) =
            (self.encode_plain("\n", false)?, self.encode_plain(&format!("\n{text}"), false)?);
        Ok(if all.starts_with(&before) { all.split_off(before.len()) } else { plain })
    }

    fn encode_plain(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = guarded(|| self.inner.encode(text, special)).map_err(tokenizer_error)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens.
    ///
    /// # Errors
    /// [`Error::Argument`] when a token has no text.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        guarded(|| self.inner.decode(tokens, true)).map_err(tokenizer_error)
    }

    /// The tokens that consist of a space and a word of at least three ASCII letters: names for retrieval
    /// tests.
    #[must_use]
    pub fn words(&self) -> Vec<u32> {
        let is_word = |token: &str| {
            token
                .strip_prefix(self.space)
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

    /// The token of a chat template marker, if the vocabulary has it.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }
}

fn tokenizer_error(what: String) -> Error {
    Error::Argument(format!("tokenizer: {what}"))
}
