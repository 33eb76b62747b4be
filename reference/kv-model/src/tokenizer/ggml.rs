//! A tokenizer as GGUF files store it, run by llama.cpp's rules.

use super::library::guarded;
use super::sentencepiece::Sentencepiece;
use super::special::{Part, cut};
use super::spelling::{Spelling, byte_of_code};
use super::{BYTE_LEVEL_SPACE, SENTENCEPIECE_SPACE, Vocabulary, stop};
use crate::{Error, Result};

/// A vocabulary with its rules.
pub(super) struct Ggml {
    pub tokens: Vec<String>,
    pub kinds: Vec<Kind>,  // (tokens,)
    pub special: Vec<u32>, // tokens that a text is cut at, in this order
    pub model: Model,
    pub bos: Option<u32>,   // prepended to a text
    pub eos: Option<u32>,   // appended
    pub space_prefix: bool, // whether text at the beginning, or after a special token, gets a leading space
}

/// How a text without special tokens is cut into tokens.
pub(super) enum Model {
    /// GPT-2-style byte-level BPE, with its pre-tokenizer.
    ByteLevel(Box<tokenizers::Tokenizer>),
    Sentencepiece(Sentencepiece),
}

/// The type of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Byte,
    /// Unused or undefined: a token without a text.
    Unused,
}

impl Kind {
    /// The type that a number in the metadata gives to a token, unless its name says more.
    pub fn of(number: f64, token: &str) -> Self {
        // Markers of the channels of a message, which are always shown.
        const SHOWN: [&str; 4] = ["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];
        match number as u32 {
            _ if SHOWN.contains(&token) => Self::UserDefined,
            _ if stop::is_end(token) => Self::Control,
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            6 => Self::Byte,
            _ => Self::Unused,
        }
    }

    /// Whether a text is cut at such tokens.
    pub const fn is_special(self) -> bool {
        matches!(self, Self::Control | Self::UserDefined | Self::Unknown)
    }
}

impl Ggml {
    fn append(&self, text: &str, mut after_special: bool, out: &mut Vec<u32>) -> Result<()> {
        let special = self.special.iter().map(|&id| (id, self.tokens[id as usize].as_str()));
        for part in cut(text, special) {
            match (part, &self.model) {
                (Part::Token(id), _) => out.push(id),
                (Part::Text(text), Model::ByteLevel(library)) => {
                    let encoding = guarded(|| library.encode_fast(text, false));
                    let encoding = encoding.map_err(|what| Error::Argument(format!("tokenizer: {what}")))?;
                    out.extend(encoding.get_ids());
                }
                (Part::Text(text), Model::Sentencepiece(model)) => {
                    let prefix = if self.space_prefix && after_special { " " } else { "" };
                    let mut space = [0; 4];
                    let space = SENTENCEPIECE_SPACE.encode_utf8(&mut space);
                    model.encode(&format!("{prefix}{text}").replace(' ', space), out);
                }
            }
            after_special = matches!(part, Part::Token(_));
        }
        Ok(())
    }
}

impl Vocabulary for Ggml {
    fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut out: Vec<u32> = self.bos.into_iter().collect();
        self.append(text, true, &mut out)?;
        out.extend(self.eos);
        Ok(out)
    }

    fn encode_chat(&self, text: &str) -> Result<Vec<u32>> {
        let mut out = vec![];
        self.append(text, true, &mut out)?;
        Ok(out)
    }

    fn encode_piece(&self, text: &str) -> Result<Vec<u32>> {
        let mut out = vec![];
        self.append(text, false, &mut out)?;
        Ok(out)
    }

    fn bytes(&self, token: u32, after: Option<u32>) -> Result<Option<Vec<u8>>> {
        let Some(text) = self.tokens.get(token as usize) else { return Ok(None) };
        let spelling = match self.model {
            Model::ByteLevel(_) => Spelling::ByteLevel,
            Model::Sentencepiece(_) => Spelling::Sentencepiece { bytes: false, prefixed: self.space_prefix },
        };
        Ok(match self.kinds[token as usize] {
            Kind::Normal => spelling.bytes(text, after.is_none()),
            Kind::UserDefined => Some(text.clone().into()),
            Kind::Byte => byte_of_code(text).map(|byte| vec![byte]),
            Kind::Unknown | Kind::Control | Kind::Unused => None,
        })
    }

    fn tokens(&self) -> Vec<(u32, String)> {
        (0..).zip(self.tokens.iter().cloned()).collect()
    }

    fn token_id(&self, token: &str) -> Option<u32> {
        self.tokens.iter().rposition(|text| text == token).map(|id| id as u32)
    }

    fn space(&self) -> char {
        match self.model {
            Model::ByteLevel(_) => BYTE_LEVEL_SPACE,
            Model::Sentencepiece(_) => SENTENCEPIECE_SPACE,
        }
    }
}
