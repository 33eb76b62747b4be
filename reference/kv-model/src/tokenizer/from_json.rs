//! A Hugging Face `tokenizer.json`, with the checks that the tokenizers library omits.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::library::guarded;
use crate::error::Quoted;
use crate::{Error, Result, json};

/// Maximum factor by which the steps around the model may lengthen a text. Real files stay below 10: spaces
/// become three bytes, bytes become characters of two.
const MOST_GROWTH: f64 = 4096.0;

pub(super) fn load(path: &Path) -> Result<tokenizers::Tokenizer> {
    let error = |e: serde_json::Error| Error::file(path, e);
    // The whole file is validated as JSON before the library sees it. Values stay text, so that numbers reach
    // the library unchanged.
    let mut fields: BTreeMap<String, Box<RawValue>> = json::read(path)?;
    // Settings saved from training. transformers disables both in every call: a prompt is neither truncated
    // nor padded.
    fields.remove("truncation");
    fields.remove("padding");
    for name in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        let Some(part) = fields.get(name) else { continue };
        let part: Value = serde_json::from_str(part.get()).map_err(error)?;
        let growth = growth(&part).map_err(|what| Error::file(path, format!("{name}: {what}")))?;
        if growth > MOST_GROWTH {
            return Err(Error::file(path, format!("{name} makes a text {growth:.1e} times longer")));
        }
    }
    let text = serde_json::to_vec(&fields).map_err(error)?;
    let library = guarded(|| tokenizers::Tokenizer::from_bytes(text));
    let library = library.map_err(|what| Error::file(path, what))?;
    let added = fields.get("added_tokens").map(|added| serde_json::from_str(added.get()));
    let added: Option<Vec<Added>> = added.transpose().map_err(error)?.flatten();
    check_numbers(&library, &added.unwrap_or_default()).map_err(|what| Error::file(path, what))?;
    Ok(library)
}

/// What the file says about an added token.
#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

/// Rejects tokens of one number, and added tokens that the library numbers otherwise than the file: it numbers those
/// that the model does not have in their order.
fn check_numbers(library: &tokenizers::Tokenizer, added: &[Added]) -> std::result::Result<(), String> {
    let mut all: Vec<_> = library.get_vocab(true).into_iter().map(|(token, id)| (id, token)).collect();
    all.sort_unstable();
    if let Some([(id, a), (_, b)]) = all.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(format!("tokens {} and {} both have the number {id}", Quoted(a), Quoted(b)));
    }
    // The library leaves out tokens without a text.
    let named = added.iter().filter(|token| !token.content.is_empty());
    let wrong = |token: &&Added| library.token_to_id(&token.content) != Some(token.id);
    match { named }.find(wrong) {
        Some(Added { id, content }) => Err(format!("cannot give token {} its number {id}", Quoted(content))),
        None => Ok(()),
    }
}

/// Upper bound of the factor by which a step, with all its nested steps in sequence, lengthens a text.
fn growth(step: &Value) -> std::result::Result<f64, String> {
    let inner = match step {
        Value::Object(fields) => fields.values().map(growth).product::<std::result::Result<f64, _>>()?,
        Value::Array(steps) => steps.iter().map(growth).product::<std::result::Result<f64, _>>()?,
        _ => return Ok(1.0),
    };
    let chars = |value: &Value| value.as_str().map_or(0, |text| text.chars().count()) as f64;
    let own = match step["type"].as_str() {
        Some("ByteLevel") => 2.0,
        Some("Replace") => match &step["pattern"]["String"] {
            Value::Null => chars(&step["content"]) + 1.0, // an expression may match between any two characters
            pattern => chars(&step["content"]) / chars(pattern).max(1.0),
        },
        Some("Prepend") => 1.0 + chars(&step["prepend"]),
        Some("TemplateProcessing") => template_growth(step),
        _ => step["precompiled_charsmap"].as_str().map_or(Ok(1.0), charsmap_growth)?,
    };
    Ok(own.max(1.0) * inner)
}

/// The growth of a single-text template: repetitions of the text and added tokens.
fn template_growth(step: &Value) -> f64 {
    let ids = |id: &Value| {
        let token = id.as_str().map_or(&Value::Null, |id| &step["special_tokens"][id]);
        token["ids"].as_array().map_or(0, Vec::len)
    };
    let pieces = step["single"].as_array().into_iter().flatten();
    pieces
        .map(|piece| if piece["Sequence"].is_null() { ids(&piece["SpecialToken"]["id"]) } else { 1 } as f64)
        .sum()
}

/// A sentencepiece character map: the length of a trie (little-endian `u32`), the trie, and zero-terminated
/// replacements.
fn charsmap_growth(charsmap: &str) -> std::result::Result<f64, String> {
    let bytes = base64(charsmap).ok_or("precompiled_charsmap is not base64")?;
    let (length, rest) =
        bytes.split_first_chunk::<4>().ok_or("precompiled_charsmap ends inside its header")?;
    let length = u32::from_le_bytes(*length);
    // The library allocates the trie before it reads it.
    let replacements = rest
        .get(length as usize..)
        .ok_or_else(|| format!("precompiled_charsmap ends inside a trie of {length} bytes"))?;
    Ok(replacements.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(0) as f64)
}

fn base64(text: &str) -> Option<Vec<u8>> {
    let digits = text.trim_end_matches('=').bytes().map(|byte| match byte {
        b'A'..=b'Z' => Some(byte - b'A'),
        b'a'..=b'z' => Some(byte - b'a' + 26),
        b'0'..=b'9' => Some(byte - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    });
    let mut bytes = Vec::with_capacity(text.len() / 4 * 3);
    for group in digits.collect::<Option<Vec<u8>>>()?.chunks(4) {
        let bits =
            group.iter().fold(0, |bits, &digit| bits << 6 | u32::from(digit)) << (6 * (4 - group.len()));
        bytes.extend_from_slice(&bits.to_be_bytes()[1..group.len()]);
    }
    Some(bytes)
}
