//! A `tokenizer.json`, which the tokenizers library runs.

use super::library::guarded;
use super::spelling::Spelling;
use super::{BYTE_LEVEL_SPACE, SENTENCEPIECE_SPACE, Vocabulary};
use crate::{Error, Result};

/// The library's tokenizer.
pub(super) struct Json {
    library: tokenizers::Tokenizer,
    spelling: Spelling,
    space: char,
}

impl Json {
    pub fn new(library: tokenizers::Tokenizer) -> Self {
        let vocabulary = library.get_vocab(false);
        let count = |space| vocabulary.keys().filter(|token| token.starts_with(space)).count();
        let sentencepiece = count(SENTENCEPIECE_SPACE) > count(BYTE_LEVEL_SPACE);
        let space = if sentencepiece { SENTENCEPIECE_SPACE } else { BYTE_LEVEL_SPACE };
        Self { spelling: Spelling::of(library.get_decoder()), library, space }
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = guarded(|| self.library.encode(text, special)).map_err(error)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text that the library's decoder adds for a token after another one.
    fn decoded(&self, token: u32, after: Option<u32>) -> Result<String> {
        let decode = |tokens: &[u32]| guarded(|| self.library.decode(tokens, true)).map_err(error);
        let Some(after) = after else { return decode(&[token]) };
        let (before, both) = (decode(&[after])?, decode(&[after, token])?);
        match both.strip_prefix(before.as_str()) {
            Some(added) => Ok(added.to_owned()),
            None => decode(&[token]),
        }
    }
}

impl Vocabulary for Json {
    /// The file's post-processor adds the special tokens.
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    fn encode_chat(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, false)
    }

    fn encode_piece(&self, text: &str) -> Result<Vec<u32>> {
        let plain = self.encode_with(text, false)?;
        if self.space != SENTENCEPIECE_SPACE {
            return Ok(plain);
        }
        // The leading space then precedes the line break, which merges with nothing.
        let (before, mut all) =
            (self.encode_with("\n", false)?, self.encode_with(&format!("\n{text}"), false)?);
        Ok(if all.starts_with(&before) { all.split_off(before.len()) } else { plain })
    }

    fn bytes(&self, token: u32, after: Option<u32>) -> Result<Option<Vec<u8>>> {
        let added = self.library.get_added_vocabulary().get_added_tokens_decoder().get(&token);
        let text = match added {
            Some(added) if added.special => return Ok(None),
            // Its text is no alphabet of bytes.
            Some(added) if self.spelling == Spelling::ByteLevel => {
                return Ok(Some(added.content.clone().into()));
            }
            _ => self.library.id_to_token(token).unwrap_or_default(),
        };
        match self.spelling.bytes(&text, after.is_none()) {
            Some(bytes) => Ok(Some(bytes)),
            None => self.decoded(token, after).map(|text| Some(text.into_bytes())),
        }
    }

    fn tokens(&self) -> Vec<(u32, String)> {
        self.library.get_vocab(false).into_iter().map(|(token, id)| (id, token)).collect()
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        self.library.token_to_id(token)
    }

    fn space(&self) -> char {
        self.space
    }
}

fn error(what: String) -> Error {
    Error::Argument(format!("tokenizer: {what}"))
}
