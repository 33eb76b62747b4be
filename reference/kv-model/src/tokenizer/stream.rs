//! Text of tokens as they arrive.

use super::Tokenizer;
use crate::Result;

/// The text of tokens as they arrive. Every token is decoded once; the bytes of an incomplete character, which
/// may take several tokens, are held back until it is complete.
///
/// The parts that [`Self::push`] and [`Self::finish`] return are together what [`Tokenizer::decode`] returns.
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    last: Option<u32>, // the last token with a text
    held: Vec<u8>,     // at most 3 bytes between calls
}

impl<'a> TextStream<'a> {
    /// A stream at the beginning of a text.
    #[must_use]
    pub const fn new(tokenizer: &'a Tokenizer) -> Self {
        Self { tokenizer, last: None, held: vec![] }
    }

    /// The text that the token completes.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) when the token has no text.
    pub fn push(&mut self, token: u32) -> Result<String> {
        if let Some(bytes) = self.tokenizer.vocabulary.bytes(token, self.last)? {
            self.last = Some(token);
            self.held.extend(bytes);
        }
        Ok(complete(&mut self.held))
    }

    /// The bytes that the token would add to the text: none for a special token.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) when the token has no text.
    pub fn bytes(&self, token: u32) -> Result<Vec<u8>> {
        Ok(self.tokenizer.vocabulary.bytes(token, self.last)?.unwrap_or_default())
    }

    /// The rest: U+FFFD if the text ends inside a character.
    #[must_use]
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.held).into_owned()
    }
}

/// Takes the text from `held`, lossily, up to an incomplete character at the end.
fn complete(held: &mut Vec<u8>) -> String {
    let incomplete = match held.utf8_chunks().last() {
        // No error length: more bytes could complete it.
        Some(last) if str::from_utf8(last.invalid()).is_err_and(|e| e.error_len().is_none()) => {
            last.invalid().len()
        }
        _ => 0,
    };
    let rest = held.split_off(held.len() - incomplete);
    String::from_utf8_lossy(&std::mem::replace(held, rest)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_any_size_make_the_lossy_text() {
        let cases: [&[u8]; 7] = [
            b"plain",
            "caf\u{e9} \u{6f22}\u{1f600}\u{fffd}".as_bytes(),
            b"\xf0\x9f\x98",
            b"\x80\x80\x80\x80\x80",
            b"a\xf0\x9f\x98b\xe2\x82",
            b"\xf0\x9f\xf0\x9f\x98\x80\xc3",
            b"\xc0\xaf\xed\xa0\x80\xf5\xff",
        ];
        for bytes in cases {
            let whole = String::from_utf8_lossy(bytes);
            for size in 1..=bytes.len() {
                let (mut held, mut text) = (vec![], String::new());
                for part in bytes.chunks(size) {
                    held.extend(part);
                    text.push_str(&complete(&mut held));
                    assert!(held.len() < 4);
                }
                text.push_str(&String::from_utf8_lossy(&held));
                assert_eq!(text, whole, "parts of {size}");
            }
        }
    }
}
