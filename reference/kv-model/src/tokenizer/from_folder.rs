//! The tokenizer of a Hugging Face folder: `tokenizer.json`, and the tokens that only its other files name.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::json::Json;
use super::library::guarded;
use super::{from_json, stop};
use crate::error::Quoted;
use crate::{Error, Result, files, json};

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
    if !files::exists(&path)? {
        return Ok(None);
    }
    let mut library = from_json::load(&path)?;
    let (config, map) =
        (Settings::read(dir, "tokenizer_config.json")?, Settings::read(dir, "special_tokens_map.json")?);
    let mut special = BTreeSet::new();
    for (file, key) in [&config, &map].into_iter().flat_map(|file| SPECIAL.map(|key| (file, key))) {
        special.extend(file.tokens(key)?);
    }

    // As transformers does: tokens in the order of their numbers, then special tokens that are not among
    // them.
    let mut numbered = config.numbered_tokens()?;
    let added = json::read_optional::<BTreeMap<String, u64>>(&dir.join("added_tokens.json"))?;
    for (token, id) in added.into_iter().flatten() {
        let is_special = special.contains(token.as_str());
        numbered.push((id, AddedToken::from(token, is_special).normalized(false)));
    }
    numbered.sort_by_key(|(id, _)| *id);
    let numbered = numbered.into_iter().map(|(id, token)| (Some(id), token));
    let of_special = special.iter().map(|token| (None, AddedToken::from(*token, true)));
    let mut known: HashSet<String> = library.get_added_vocabulary().get_vocab().keys().cloned().collect();
    let unknown = numbered.chain(of_special).filter(|(_, token)| known.insert(token.content.clone()));
    let (ids, tokens): (Vec<_>, Vec<_>) = unknown.unzip();
    // Tokens that the model does not have are numbered by the library.
    let is_new = |token: &AddedToken| library.token_to_id(&token.content).is_none();
    let new: Vec<bool> = tokens.iter().map(is_new).collect();
    guarded(|| Ok(library.add_tokens(&tokens))).map_err(|what| Error::file(&path, what))?;
    for ((id, token), _) in ids.into_iter().zip(&tokens).zip(new).filter(|(_, new)| *new) {
        if let Some(id) = id.filter(|&id| library.token_to_id(&token.content).map(u64::from) != Some(id)) {
            let what = format!("cannot give token {} its number {id}", Quoted(&token.content));
            return Err(Error::file(&path, what));
        }
    }

    let added = library.get_added_vocabulary().get_vocab();
    let mut ends = stop::ends(added.iter().map(|(token, &id)| (id, token.as_str())));
    let named = [config.tokens("eos_token")?, map.tokens("eos_token")?].concat();
    ends.extend(named.into_iter().filter_map(|token| library.token_to_id(token)));
    Ok(Some((Json::new(library), ends.into_iter().collect())))
}

/// A file that names tokens.
pub(super) struct Settings {
    path: PathBuf,
    fields: Map<String, Value>, // none if there is no such file
}

impl Settings {
    pub fn read(dir: &Path, name: &str) -> Result<Self> {
        let path = dir.join(name);
        let fields = json::read_optional(&path)?.unwrap_or_default();
        Ok(Self { path, fields })
    }

    pub fn error(&self, what: impl ToString) -> Error {
        Error::file(&self.path, what)
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key)
    }

    /// The texts of the tokens of a key.
    pub fn tokens(&self, key: &str) -> Result<Vec<&str>> {
        let mut texts = vec![];
        match self.fields.get(key).is_none_or(|value| add_texts(value, &mut texts)) {
            true => Ok(texts),
            false => Err(self.error(format!("{key} is neither a token nor a list of tokens"))),
        }
    }

    /// The added tokens by their numbers.
    fn numbered_tokens(&self) -> Result<Vec<(u64, AddedToken)>> {
        const KEY: &str = "added_tokens_decoder";
        let tokens = match self.fields.get(KEY) {
            None | Some(Value::Null) => return Ok(vec![]),
            Some(tokens) => tokens.as_object().ok_or_else(|| self.error(format!("{KEY} is no object")))?,
        };
        let token = |(id, token): (&String, &Value)| {
            let id = id.parse().map_err(|_| self.error(format!("{KEY}: {} is not a number", Quoted(id))))?;
            let token = serde_json::from_value(token.clone());
            Ok((id, token.map_err(|e| self.error(format!("{KEY}: token {id}: {e}")))?))
        };
        tokens.iter().map(token).collect()
    }
}

/// Adds the texts of a token, which is a text or an object, or of a list or a map of tokens; false for what
/// is none of these.
fn add_texts<'a>(value: &'a Value, texts: &mut Vec<&'a str>) -> bool {
    match value {
        Value::Null => {}
        Value::String(text) => texts.push(text),
        Value::Object(token) => {
            return match token.get("content") {
                Some(content) => add_texts(content, texts),
                None => token.values().all(|value| add_texts(value, texts)),
            };
        }
        Value::Array(tokens) => return tokens.iter().all(|token| add_texts(token, texts)),
        Value::Bool(_) | Value::Number(_) => return false,
    }
    true
}
