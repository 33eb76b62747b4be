//! Serde traits for serialized types: one byte string, the same in every format.

use alloc::vec::Vec;
use core::fmt;

pub use serde_core;
use serde_core::{Deserializer, de};

/// Implements serde's traits for types, given their `from_bytes` and a function to bytes.
#[macro_export]
macro_rules! serde_as_bytes {
    ($($type:ident: $to_bytes:expr),+ $(,)?) => {$(
        impl $crate::owner::serde::serde_core::Serialize for $type {
            fn serialize<S: $crate::owner::serde::serde_core::Serializer>(
                &self,
                serializer: S,
            ) -> Result<S::Ok, S::Error> {
                serializer.serialize_bytes(&$to_bytes(self))
            }
        }

        impl<'de> $crate::owner::serde::serde_core::Deserialize<'de> for $type {
            fn deserialize<D: $crate::owner::serde::serde_core::Deserializer<'de>>(
                deserializer: D,
            ) -> Result<Self, D::Error> {
                let bytes = $crate::owner::serde::bytes(deserializer)?;
                Self::from_bytes(&bytes).map_err($crate::owner::serde::serde_core::de::Error::custom)
            }
        }
    )+};
}

/// Reads a byte string, or a sequence of integers in formats without byte strings.
///
/// # Errors
/// Those of the format.
pub fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    deserializer.deserialize_byte_buf(Bytes)
}

struct Bytes;

impl<'de> de::Visitor<'de> for Bytes {
    type Value = Vec<u8>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("bytes")
    }

    fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<Vec<u8>, E> {
        Ok(bytes.to_vec())
    }

    fn visit_byte_buf<E: de::Error>(self, bytes: Vec<u8>) -> Result<Vec<u8>, E> {
        Ok(bytes)
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, mut sequence: A) -> Result<Vec<u8>, A::Error> {
        let mut bytes = Vec::new(); // no `with_capacity`: the length is untrusted
        while let Some(byte) = sequence.next_element()? {
            bytes.push(byte);
        }
        Ok(bytes)
    }
}
