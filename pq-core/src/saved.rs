//! Serde for what is saved as bytes: a byte string, the same in every format.

use alloc::vec::Vec;
use core::fmt;

use serde_core::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::{CodebookBuf, CodesBuf, HeadBooks};

macro_rules! as_bytes {
    ($type:ident, $to_bytes:expr) => {
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_bytes(&$to_bytes(self))
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                Self::from_bytes(&deserializer.deserialize_byte_buf(Bytes)?).map_err(de::Error::custom)
            }
        }
    };
}

as_bytes!(CodesBuf, CodesBuf::to_bytes);
as_bytes!(CodebookBuf, CodebookBuf::to_bytes::<f32>);
as_bytes!(HeadBooks, HeadBooks::to_bytes::<f32>);

/// Takes a byte string, or the sequence of numbers that it is in formats without byte strings.
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
        let mut bytes = Vec::new(); // a length from outside is not reserved
        while let Some(byte) = sequence.next_element()? {
            bytes.push(byte);
        }
        Ok(bytes)
    }
}
