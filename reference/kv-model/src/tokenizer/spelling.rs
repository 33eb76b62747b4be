//! How the tokens of a vocabulary spell bytes.

use serde_json::{Value, json};
use tokenizers::DecoderWrapper;

use super::SENTENCEPIECE_SPACE;

/// The spelling of a vocabulary: what its decoder does to one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2's: a character per byte.
    ByteLevel,
    /// sentencepiece's: a marker for spaces, and `<0x0A>` for a byte if `bytes` is set. The first token of a text
    /// loses a leading space if `prefixed` is set.
    Sentencepiece { bytes: bool, prefixed: bool },
    /// Another one, which only the library knows.
    Other,
}

impl Spelling {
    /// The spelling that a decoder of the library reads.
    pub fn of(decoder: Option<&DecoderWrapper>) -> Self {
        let decoder = decoder.and_then(|decoder| serde_json::to_value(decoder).ok()).unwrap_or_default();
        let mut steps = vec![];
        flatten(&decoder, &mut steps);
        let is = |step: &Value, kind: &str| step["type"] == kind;
        if steps.iter().any(|step| is(step, "ByteLevel")) {
            return if steps.len() == 1 { Self::ByteLevel } else { Self::Other };
        }
        let marker = SENTENCEPIECE_SPACE.to_string();
        let replace = json!({"type": "Replace", "pattern": {"String": marker}, "content": " "});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let (mut spaces, mut prefixed) = (false, false);
        for step in &steps {
            if *step == replace {
                spaces = true;
            } else if is(step, "Metaspace") && step["replacement"] == marker {
                spaces = true;
                prefixed |= step["prepend_scheme"] != "never";
            } else if *step == strip {
                prefixed = true;
            } else if !is(step, "ByteFallback") && !is(step, "Fuse") {
                return Self::Other;
            }
        }
        let bytes = steps.iter().any(|step| is(step, "ByteFallback"));
        if spaces { Self::Sentencepiece { bytes, prefixed } } else { Self::Other }
    }

    /// The bytes of a token, at the beginning of a text or inside; `None` if only the library knows them.
    pub fn bytes(self, token: &str, first: bool) -> Option<Vec<u8>> {
        match self {
            Self::ByteLevel => {
                let bytes: Option<Vec<u8>> = token.chars().map(byte_of).collect();
                Some(bytes.unwrap_or_else(|| token.as_bytes().to_vec()))
            }
            Self::Sentencepiece { bytes, prefixed } => {
                if let Some(byte) = byte_of_code(token).filter(|_| bytes) {
                    return Some(vec![byte]);
                }
                let mut text = token.replace(SENTENCEPIECE_SPACE, " ");
                if first && prefixed && text.starts_with(' ') {
                    text.remove(0);
                }
                Some(text.into_bytes())
            }
            Self::Other => None,
        }
    }
}

/// The steps of nested sequences.
fn flatten(decoder: &Value, steps: &mut Vec<Value>) {
    match decoder["decoders"].as_array() {
        Some(inner) => inner.iter().for_each(|step| flatten(step, steps)),
        None => steps.push(decoder.clone()),
    }
}

/// The byte that a character of GPT-2's alphabet stands for: bytes that print stand for themselves, the others
/// follow from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    match u32::from(c) {
        x @ (33..=126 | 161..=172 | 174..=255) => Some(x as u8),
        x @ 0x100..=0x120 => Some((x - 0x100) as u8),
        x @ 0x121..=0x142 => Some((x - 0x121 + 127) as u8),
        0x143 => Some(173),
        _ => None,
    }
}

/// The byte of a token such as `<0x0A>`.
pub(super) fn byte_of_code(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let hexadecimal = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    hexadecimal.then(|| u8::from_str_radix(digits, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    use super::*;

    #[test]
    fn the_alphabet_of_bytes_is_gpt2s() {
        let mut bytes: Vec<u8> = ByteLevel::alphabet().into_iter().map(|c| byte_of(c).unwrap()).collect();
        bytes.sort_unstable();
        assert!(bytes.into_iter().eq(0..=255));
        assert_eq!(['Ġ', 'Ċ', '\u{a0}', '\u{144}'].map(byte_of), [Some(b' '), Some(b'\n'), None, None]);
    }

    #[test]
    fn codes_of_bytes_are_two_digits() {
        let codes = ["<0x0A>", "<0xff>", "<0x+1>", "<0x1>", "<0x100>", "0x0A", "<0x>"].map(byte_of_code);
        assert_eq!(codes, [Some(10), Some(255), None, None, None, None, None]);
    }

    #[test]
    fn decoders_of_sentencepiece_are_known_in_every_form() {
        let of = |decoder: Value| Spelling::of(Some(&serde_json::from_value(decoder).unwrap()));
        let replace = json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "});
        let fallback = json!({"type": "ByteFallback"});
        let strip = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        let sequence = |steps: Value| json!({"type": "Sequence", "decoders": steps});
        let llama = sequence(json!([replace, fallback, {"type": "Fuse"}, strip]));
        assert_eq!(of(llama.clone()), Spelling::Sentencepiece { bytes: true, prefixed: true });
        assert_eq!(of(sequence(json!([llama]))), Spelling::Sentencepiece { bytes: true, prefixed: true });
        let gemma = sequence(json!([replace, fallback, {"type": "Fuse"}]));
        assert_eq!(of(gemma), Spelling::Sentencepiece { bytes: true, prefixed: false });
        let metaspace =
            |scheme: &str| json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": scheme});
        assert_eq!(of(metaspace("always")), Spelling::Sentencepiece { bytes: false, prefixed: true });
        assert_eq!(of(metaspace("never")), Spelling::Sentencepiece { bytes: false, prefixed: false });
        let bytes =
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
        assert_eq!(of(sequence(json!([bytes]))), Spelling::ByteLevel);
        assert_eq!(of(json!({"type": "WordPiece", "prefix": "##", "cleanup": true})), Spelling::Other);
        assert_eq!(of(fallback), Spelling::Other);
        assert_eq!(Spelling::of(None), Spelling::Other);
    }
}
