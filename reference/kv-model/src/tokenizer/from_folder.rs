//! The tokenizer of a Hugging Face folder: `tokenizer.json`, and the tokens that only its other files name.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;
use tokenizers::AddedToken;

use super::json::Json;
use super::library::guarded;
use super::{from_json, stop};
use crate::error::Quoted;
use crate::{Error, Result, files};

/// The keys of special tokens in `tokenizer_config.json` and `special_tokens_map.json`.
const SPECIAL: [&str; 9] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
    "extra_special_tokens",
];

/// The tokenizer, and the tokens that end a text; `None` for a folder without `tokenizer.json`.
pub(super) fn load(dir: &Path) -> Result<Option<(Json, Vec<u32>)>> {
    let path = dir.join("tokenizer.json");
    if !path.exists() {
        return Ok(None);
    }
    let mut library = from_json::load(&path)?;
    let [config, map, added] = ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]
        .map(|name| optional(&dir.join(name)));
    let (config, map, added) = (config?, map?, added?);
    let special: BTreeSet<&str> =
        [&config, &map].iter().flat_map(|file| SPECIAL.map(|key| contents(&file[key]))).flatten().collect();

    // As transformers does: tokens in the order of their numbers, then special tokens that are not among them.
    let mut numbered = described(&config["added_tokens_decoder"])
        .map_err(|what| Error::file(&dir.join("tokenizer_config.json"), what))?;
    for (token, id) in added.as_object().into_iter().flatten() {
        let token = AddedToken::from(token.clone(), special.contains(token.as_str())).normalized(false);
        numbered.extend(id.as_u64().map(|id| (id, token)));
    }
    numbered.sort_by_key(|(id, _)| *id);
    let of_special = special.iter().map(|token| AddedToken::from(*token, true));
    for (id, token) in
        numbered.into_iter().map(|(id, token)| (Some(id), token)).chain(of_special.map(|t| (None, t)))
    {
        let known = |token: &str| library.get_added_vocabulary().get_vocab().contains_key(token);
        if known(&token.content) {
            continue;
        }
        let new = library.token_to_id(&token.content).is_none();
        let (content, added) = (token.content.clone(), [token]);
        guarded(|| Ok(library.add_tokens(&added))).map_err(|what| Error::file(&path, what))?;
        // The library numbers new tokens itself.
        let got = library.token_to_id(&content).map(u64::from);
        if new && id.is_some_and(|id| got != Some(id)) {
            let what =
                format!("cannot give token {} its number {}", Quoted(&content), id.unwrap_or_default());
            return Err(Error::file(&path, what));
        }
    }

    let added = library.get_added_vocabulary().get_vocab();
    let mut ends = stop::ends(added.iter().map(|(token, &id)| (id, token.as_str())));
    let named = [&config, &map].map(|file| contents(&file["eos_token"]));
    ends.extend(named.into_iter().flatten().filter_map(|token| library.token_to_id(token)));
    Ok(Some((Json::new(library), ends.into_iter().collect())))
}

/// A JSON file, or null if there is none.
fn optional(path: &Path) -> Result<Value> {
    if !path.exists() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&files::read(path)?).map_err(|e| Error::file(path, e))
}

/// The texts of a token, which is a text or an object, or of a list or a map of tokens.
fn contents(value: &Value) -> Vec<&str> {
    match value {
        Value::String(text) => vec![text],
        Value::Object(token) => match token.get("content") {
            Some(content) => contents(content),
            None => token.values().flat_map(contents).collect(),
        },
        Value::Array(tokens) => tokens.iter().flat_map(contents).collect(),
        _ => vec![],
    }
}

/// Tokens by their numbers.
fn described(tokens: &Value) -> std::result::Result<Vec<(u64, AddedToken)>, String> {
    let tokens = tokens.as_object().into_iter().flatten();
    tokens
        .map(|(id, token)| {
            let id = id.parse().map_err(|_| format!("added_tokens_decoder: {} is no number", Quoted(id)))?;
            let token = serde_json::from_value(token.clone())
                .map_err(|e| format!("added_tokens_decoder: token {id}: {e}"))?;
            Ok((id, token))
        })
        .collect()
}
