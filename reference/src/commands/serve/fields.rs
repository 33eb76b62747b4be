//! The fields of a request's JSON.

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::error::ApiError;

/// Fields that have not been taken yet.
pub struct Fields(Map<String, Value>);

impl Fields {
    /// Those of a JSON object.
    pub fn parse(body: &[u8]) -> Result<Self, ApiError> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Self(fields)),
            Ok(_) => Err(ApiError::invalid("the body is not a JSON object")),
            Err(e) => Err(ApiError::invalid(format!("the body is not JSON: {e}"))),
        }
    }

    /// Takes a field; absent and null are the same.
    pub fn take<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<Option<T>, ApiError> {
        match self.0.remove(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => serde_json::from_value(value).map(Some).map_err(|e| ApiError::field(name, e)),
        }
    }

    /// Takes a field that must be there.
    pub fn required<T: DeserializeOwned>(&mut self, name: &'static str) -> Result<T, ApiError> {
        self.take(name)?.ok_or_else(|| ApiError::field(name, "is missing"))
    }

    /// Takes a field that may only have the value which changes nothing.
    pub fn neutral(&mut self, name: &'static str, value: impl Into<Value>) -> Result<(), ApiError> {
        let value = value.into();
        let same =
            |given: &Value| *given == value || given.as_f64().is_some_and(|x| Some(x) == value.as_f64());
        match self.take::<Value>(name)?.is_none_or(|given| same(&given)) {
            true => Ok(()),
            false => Err(ApiError::field(name, format!("only {value} is supported"))),
        }
    }

    /// Rejects a field that nobody has taken, and which would be without effect.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.0.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((name, _)) => {
                let name: String = name.chars().take(LONGEST_NAME).collect();
                Err(ApiError::invalid(format!("the field {name:?} is not known here")))
            }
        }
    }
}

/// Characters of an unknown field's name in a message.
const LONGEST_NAME: usize = 64;
