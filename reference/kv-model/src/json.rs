//! JSON in which no object has a key twice. Of two entries of one key parsers take the first or the last, so that
//! such a file is another one to each of them.

use std::collections::HashSet;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeOwned, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, de};

use crate::error::Quoted;
use crate::{Error, Result, files};

/// Parses the bytes of a file.
///
/// # Errors
/// What is wrong, and where.
pub(crate) fn parse<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    serde_json::from_slice::<Distinct>(bytes)?;
    serde_json::from_slice(bytes)
}

/// Reads a file.
///
/// # Errors
/// [`Error::Io`] and [`Error::File`].
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Result<T> {
    /// Ten times the largest tokenizers.
    const MOST: usize = 1 << 28;
    let (text, more) = files::read_text_start(path, MOST)?;
    if more {
        return Err(Error::file(path, format!("has more than {MOST} bytes")));
    }
    parse(text.as_bytes()).map_err(|e| Error::file(path, e))
}

/// As [`read`], of a file that may be missing.
///
/// # Errors
/// As there.
pub(crate) fn read_optional<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    files::exists(path)?.then(|| read(path)).transpose()
}

/// Any value whose objects have distinct keys.
struct Distinct;

impl<'de> Deserialize<'de> for Distinct {
    fn deserialize<D: Deserializer<'de>>(value: D) -> std::result::Result<Self, D::Error> {
        value.deserialize_any(Self)
    }
}

impl<'de> Visitor<'de> for Distinct {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<Self>()?;
            if let Some(key) = keys.replace(key) {
                return Err(A::Error::custom(format_args!("key {} appears twice", Quoted(&key))));
            }
        }
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<Self, A::Error> {
        while list.next_element::<Self>()?.is_some() {}
        Ok(self)
    }

    fn visit_unit<E: de::Error>(self) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E: de::Error>(self, _: bool) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E: de::Error>(self, _: i64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E: de::Error>(self, _: u64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E: de::Error>(self, _: f64) -> std::result::Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E: de::Error>(self, _: &str) -> std::result::Result<Self, E> {
        Ok(self)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_key_twice_is_an_error_at_any_depth() {
        let parsed = |text: &str| parse::<Value>(text.as_bytes()).map_err(|e| e.to_string());
        for text in [
            r#"{"a": 1, "a": 1}"#,
            r#"[{"a": {}}, {"b": [{"a": 1, "c": 2, "a": null}]}]"#,
            r#"{"a": 1, "b": 2, "\u0061": 3}"#,
        ] {
            let error = parsed(text).unwrap_err();
            assert!(error.starts_with("key `a` appears twice at line 1 column "), "{error}");
        }
        for text in [r#"{"a": {"a": 1}, "b": {"a": 1}}"#, "[1, -1, 1.5, true, null, \"a\", [], {}]"] {
            assert_eq!(parsed(text), serde_json::from_str(text).map_err(|e| e.to_string()));
        }
        assert!(parsed("{\"a\": ").is_err() && parsed("{} {}").is_err());
        assert!(parsed(&"[".repeat(1 << 20)).unwrap_err().contains("recursion"));
    }
}
