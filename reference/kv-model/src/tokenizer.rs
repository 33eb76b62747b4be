//! Texts to tokens and back, by `tokenizer.json` or by a GGUF vocabulary.

mod chat;
mod from_folder;
mod from_gguf;
mod from_json;
mod ggml;
mod json;
mod library;
mod pre_tokenizer;
mod sentencepiece;
mod special;
mod spelling;
mod stop;
mod stream;

use std::path::Path;

use crate::Result;
use crate::gguf::Gguf;
pub use chat::ChatTemplate;
pub use stream::TextStream;

/// Text to tokens and back.
pub struct Tokenizer {
    vocabulary: Box<dyn Vocabulary>,
    stop_tokens: Vec<u32>, // ascending
}

/// What differs between the tokenizers of Hugging Face folders and of GGUF files.
trait Vocabulary: Send + Sync {
    /// As [`Tokenizer::encode`].
    fn encode(&self, text: &str) -> Result<Vec<u32>>;
    /// As [`Tokenizer::encode_chat`].
    fn encode_chat(&self, text: &str) -> Result<Vec<u32>>;
    /// As [`Tokenizer::encode_piece`].
    fn encode_piece(&self, text: &str) -> Result<Vec<u32>>;
    /// The bytes that a token adds to a text after another token, or at its beginning (`None`). `None` if it
    /// is no part of texts, such as a special token: the beginning is still to come after it.
    fn bytes(&self, token: u32, after: Option<u32>) -> Result<Option<Vec<u8>>>;
    /// All tokens but those added to the model's own.
    fn tokens(&self) -> Vec<(u32, String)>;
    /// The token with this name.
    fn token_id(&self, token: &str) -> Option<u32>;
    /// The marker of a space before a word.
    fn space(&self) -> char;
}

/// A space in byte-level BPE (GPT-2).
const BYTE_LEVEL_SPACE: char = 'Ġ';
/// A space in sentencepiece.
const SENTENCEPIECE_SPACE: char = '\u{2581}';

impl Tokenizer {
    /// Reads the `tokenizer.json` of a Hugging Face folder, and the special tokens that other files of the
    /// folder name. `None` for a folder without one.
    pub(crate) fn of_folder(dir: &Path) -> Result<Option<Self>> {
        let loaded = from_folder::load(dir)?;
        Ok(loaded.map(|(json, stop_tokens)| Self { vocabulary: Box::new(json), stop_tokens }))
    }

    /// Builds the tokenizer from a GGUF file's metadata.
    pub(crate) fn of_gguf(gguf: &Gguf) -> Result<Option<Self>> {
        let (ggml, stop_tokens) = from_gguf::load(gguf)?;
        Ok(Some(Self { vocabulary: Box::new(ggml), stop_tokens }))
    }

    /// The tokens that end a text, as the tokenizer's files name them: ends of a sequence, a turn, a message.
    pub(crate) fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    /// Tokens of a text, with the BOS and EOS tokens that the tokenizer adds.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) when the text cannot be tokenized.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.vocabulary.encode(text)
    }

    /// Tokens of a text that a chat template has written: the special tokens are those of the text.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) when the text cannot be tokenized.
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>> {
        self.vocabulary.encode_chat(text)
    }

    /// Tokens of a piece inside a text: without BOS and EOS, and without sentencepiece's leading space.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) when the text cannot be tokenized.
    pub fn encode_piece(&self, text: &str) -> Result<Vec<u32>> {
        self.vocabulary.encode_piece(text)
    }

    /// Whether tokens begin with two BOS tokens: the one that [`Self::encode`] adds, and one that the text
    /// begins with.
    ///
    /// # Errors
    /// Those of [`Self::encode`].
    pub fn has_two_bos(&self, tokens: &[u32]) -> Result<bool> {
        Ok(tokens.len() > 1 && tokens[0] == tokens[1] && self.encode("")?.first() == tokens.first())
    }

    /// The text of tokens. Special tokens have none; bytes that are not UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) when the tokenizer cannot decode a token.
    pub fn decode(&self, tokens: &[u32]) -> Result<String> {
        let mut stream = TextStream::new(self);
        let mut text = tokens.iter().map(|&token| stream.push(token)).collect::<Result<String>>()?;
        text.push_str(&stream.finish());
        Ok(text)
    }

    /// The tokens that consist of a space and a word of at least three ASCII letters: names for retrieval
    /// tests.
    #[must_use]
    pub fn words(&self) -> Vec<u32> {
        let is_word = |token: &str| {
            token
                .strip_prefix(self.vocabulary.space())
                .is_some_and(|w| w.len() >= 3 && w.bytes().all(|b| b.is_ascii_alphabetic()))
        };
        let tokens = self.vocabulary.tokens().into_iter();
        let mut ids: Vec<u32> = tokens.filter(|(_, token)| is_word(token)).map(|(id, _)| id).collect();
        ids.sort_unstable();
        ids
    }

    /// The token of a chat template marker, if the vocabulary has it.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.vocabulary.token_id(token)
    }
}
