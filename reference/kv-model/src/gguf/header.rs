//! The header of a GGUF file: metadata and tensor locations.

use std::collections::HashMap;
use std::io::{Read, Seek};
use std::ops::Range;

use super::blocks::Layout;
use crate::error::Quoted;

/// The metadata and the tensors of a file.
pub(super) struct Header {
    pub metadata: HashMap<String, Value>,
    pub tensors: HashMap<String, TensorInfo>,
    pub data_start: u64, // tensor offsets count from here
}

/// A metadata value. Numbers of all widths share two variants. Texts and lists stay in the file until they
/// are read: they may be as long as the file, and most are never read.
pub(super) enum Value {
    Int(i64),
    Float(f64),
    Bool(bool),
    Text(Range<u64>),
    List(List),
}

/// The location of a list's items.
pub(super) struct List {
    pub kind: u32, // metadata type of the items
    pub len: u64,  // items
    pub bytes: Range<u64>,
}

pub(super) struct TensorInfo {
    pub shape: Vec<usize>, // outermost first, as in safetensors; the file stores it innermost first
    pub kind: u32,         // ggml type
    pub offset: u64,
}

impl TensorInfo {
    /// The bytes behind the header that hold the tensor, unless there are none or its type is not supported.
    pub fn range(&self) -> Option<Range<u64>> {
        let elements = self.shape.iter().try_fold(1_usize, |product, &n| product.checked_mul(n))?;
        let len = Layout::of(self.kind).and_then(|layout| layout.bytes(elements)).ok()? as u64;
        (len > 0).then(|| self.offset..self.offset.saturating_add(len))
    }
}

/// The metadata type of texts.
pub(super) const TEXT: u32 = 8;

/// Real files have fewer than a hundred metadata entries, and a dozen tensors per layer.
const MOST_METADATA: usize = 1 << 16;
const MOST_TENSORS: usize = 1 << 18;

/// The format's limit on the bytes of a key; names of tensors are shorter.
const LONGEST_NAME: u64 = (1 << 16) - 1;

type Result<T> = std::result::Result<T, String>;

/// Reads the header of a file of `len` bytes.
pub(super) fn parse(input: impl Read + Seek, len: u64) -> Result<Header> {
    let mut reader = Reader { input, at: 0, len };
    if &reader.array()? != b"GGUF" {
        return Err("not a GGUF file".into());
    }
    let version = reader.u32()?;
    if !(2..=3).contains(&version) {
        return Err(format!("GGUF version {version} is not supported, only 2 and 3"));
    }
    let (n_tensors, n_values) = (reader.u64()?, reader.u64()?);
    let mut metadata = HashMap::new();
    for _ in 0..n_values {
        let key = reader.name()?;
        let kind = reader.u32()?;
        let value = reader.value(kind)?;
        if metadata.contains_key(&key) {
            return Err(format!("metadata {} appears twice", Quoted(&key)));
        }
        metadata.insert(key, value);
        if metadata.len() > MOST_METADATA {
            return Err(format!("holds more than {MOST_METADATA} metadata"));
        }
    }
    let alignment = match metadata.get("general.alignment") {
        None => 32,
        Some(&Value::Int(x)) if (1..=1 << 20).contains(&x) => x as u64,
        Some(_) => return Err("`general.alignment` is no whole number of 1 to 1048576".into()),
    };
    let mut tensors = HashMap::new();
    for _ in 0..n_tensors {
        let name = reader.name()?;
        let n_dims = reader.u32()?;
        if n_dims > 4 {
            return Err(format!("tensor {} has {n_dims} dimensions", Quoted(&name)));
        }
        let mut shape = (0..n_dims).map(|_| reader.size()).collect::<Result<Vec<_>>>()?;
        shape.reverse();
        let info = TensorInfo { shape, kind: reader.u32()?, offset: reader.u64()? };
        if tensors.contains_key(&name) {
            return Err(format!("tensor {} appears twice", Quoted(&name)));
        }
        if !info.offset.is_multiple_of(alignment) {
            let offset = info.offset;
            return Err(format!("tensor {} is at {offset}, not a multiple of {alignment}", Quoted(&name)));
        }
        tensors.insert(name, info);
        if tensors.len() > MOST_TENSORS {
            return Err(format!("holds more than {MOST_TENSORS} tensors"));
        }
    }
    check_apart(&tensors)?;
    let data_start = reader.at.next_multiple_of(alignment);
    let ends = tensors.values().filter_map(TensorInfo::range).map(|range| range.end);
    let needed = ends.max().map_or(0, |end| data_start.saturating_add(end));
    if needed > len {
        return Err(format!("the file ends after {len} bytes, its tensors need {needed}: it is not whole"));
    }
    Ok(Header { metadata, tensors, data_start })
}

/// Rejects tensors that share bytes. Those of unsupported types have no known length, and loading them fails.
fn check_apart(tensors: &HashMap<String, TensorInfo>) -> Result<()> {
    let mut places: Vec<_> = tensors.iter().filter_map(|(name, info)| Some((info.range()?, name))).collect();
    places.sort_unstable_by_key(|(range, name)| (range.start, *name));
    match places.windows(2).find(|pair| pair[0].0.end > pair[1].0.start) {
        Some([(_, a), (_, b)]) => Err(format!("tensor {} overlaps {}", Quoted(a), Quoted(b))),
        _ => Ok(()),
    }
}

/// A cursor that never reads past the end and buffers at most a name.
struct Reader<R> {
    input: R,
    at: u64,
    len: u64,
}

impl<R: Read + Seek> Reader<R> {
    /// Skips `n` bytes, which must exist, and returns their range.
    fn advance(&mut self, n: u64) -> Result<Range<u64>> {
        let start = self.at;
        let end = start.checked_add(n).filter(|&end| end <= self.len);
        self.at = end.ok_or("the file ends inside its header")?;
        Ok(start..self.at)
    }

    fn skip(&mut self, n: u64) -> Result<Range<u64>> {
        let range = self.advance(n)?;
        let n = i64::try_from(n).map_err(|e| e.to_string())?;
        self.input.seek_relative(n).map_err(|e| e.to_string())?;
        Ok(range)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.advance(N as u64)?;
        let mut out = [0; N];
        self.input.read_exact(&mut out).map_err(|e| e.to_string())?;
        Ok(out)
    }

    fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn size(&mut self) -> Result<usize> {
        usize::try_from(self.u64()?).map_err(|_| "a size does not fit this machine".into())
    }

    fn name(&mut self) -> Result<String> {
        let n = self.u64()?;
        self.advance(n)?;
        if n > LONGEST_NAME {
            return Err(format!("a name of {n} bytes is longer than {LONGEST_NAME}"));
        }
        let mut bytes = vec![0; n as usize];
        self.input.read_exact(&mut bytes).map_err(|e| e.to_string())?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn value(&mut self, kind: u32) -> Result<Value> {
        Ok(match kind {
            0..=5 | 10 | 11 => Value::Int(self.number(kind)? as i64),
            6 | 12 => Value::Float(self.number(kind)?),
            7 => Value::Bool(self.array::<1>()?[0] != 0),
            TEXT => {
                let n = self.u64()?;
                Value::Text(self.skip(n)?)
            }
            9 => {
                let (kind, len) = (self.u32()?, self.u64()?);
                let start = self.at;
                if kind == TEXT {
                    for _ in 0..len {
                        let n = self.u64()?;
                        self.skip(n)?;
                    }
                } else {
                    let bytes = len.checked_mul(width(kind)? as u64);
                    self.skip(bytes.ok_or("the file ends inside its header")?)?;
                }
                Value::List(List { kind, len, bytes: start..self.at })
            }
            _ => return Err(format!("metadata type {kind} does not exist")),
        })
    }

    fn number(&mut self, kind: u32) -> Result<f64> {
        let mut bytes = [0; 8];
        let bytes = &mut bytes[..width(kind)?];
        self.advance(bytes.len() as u64)?;
        self.input.read_exact(bytes).map_err(|e| e.to_string())?;
        Ok(number(kind, bytes))
    }
}

/// Bytes of a number.
pub(super) fn width(kind: u32) -> Result<usize> {
    match kind {
        0 | 1 | 7 => Ok(1),
        2 | 3 => Ok(2),
        4..=6 => Ok(4),
        10..=12 => Ok(8),
        _ => Err(format!("a list of metadata type {kind} is not supported")),
    }
}

/// A number of any width from its bytes; integers are exact up to 2^53.
pub(super) fn number(kind: u32, bytes: &[u8]) -> f64 {
    let mut wide = [0; 8];
    wide[..bytes.len()].copy_from_slice(bytes);
    let bits = u64::from_le_bytes(wide);
    match kind {
        1 => f64::from(bits as i8),
        3 => f64::from(bits as i16),
        5 => f64::from(bits as i32),
        6 => f64::from(f32::from_bits(bits as u32)),
        11 => bits as i64 as f64,
        12 => f64::from_bits(bits),
        _ => bits as f64,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn header(n_tensors: u64, n_values: u64, rest: &[u8]) -> Vec<u8> {
        [b"GGUF", &3_u32.to_le_bytes()[..], &n_tensors.to_le_bytes(), &n_values.to_le_bytes(), rest].concat()
    }

    fn parsed(bytes: &[u8]) -> Result<Header> {
        parse(Cursor::new(bytes), bytes.len() as u64)
    }

    #[test]
    fn hostile_headers_end_quickly() {
        let nested: Vec<u8> = [1_u64.to_le_bytes().as_slice(), b"k", &9_u32.to_le_bytes()].concat();
        let nested = [&nested[..], &[9, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0].repeat(1000)].concat();
        for bytes in [
            header(u64::MAX, u64::MAX, &[]),
            header(0, 1, &u64::MAX.to_le_bytes()),
            header(0, 1, &nested),
            b"GGUF".to_vec(),
            b"GGML0000".to_vec(),
        ] {
            assert!(parsed(&bytes).is_err());
        }
    }

    #[test]
    fn tensors_are_aligned_and_apart() {
        let tensors = |of: &[(&str, u64, u32, u64)]| {
            let entries = of.iter().map(|&(name, len, kind, offset)| {
                let [name_len, len, offset] = [name.len() as u64, len, offset].map(u64::to_le_bytes);
                let [dims, kind] = [1, kind].map(u32::to_le_bytes);
                [&name_len[..], name.as_bytes(), &dims, &len, &kind, &offset].concat()
            });
            let header = header(of.len() as u64, 0, &entries.collect::<Vec<_>>().concat());
            parse(Cursor::new(header), u64::MAX).err() // in a file that has their bytes
        };
        let [f32, q8_0, unknown] = [0, 8, 99];
        assert_eq!(tensors(&[("b", 8, f32, 32), ("a", 8, f32, 0), ("c", 32, q8_0, 64)]), None);
        for offset in [1, 31, 33] {
            let error = tensors(&[("a", 8, f32, 0), ("b", 8, f32, offset)]).unwrap();
            assert_eq!(error, format!("tensor `b` is at {offset}, not a multiple of 32"));
        }
        for of in [
            [("a", 8, f32, 0), ("b", 8, f32, 0)],
            [("b", 8, f32, 32), ("a", 9, f32, 0)],
            [("a", 32, q8_0, 0), ("b", 1, f32, 32)], // 34 bytes
            [("a", 100, f32, 0), ("b", 1, f32, 96)],
        ] {
            assert_eq!(tensors(&of).unwrap(), "tensor `a` overlaps `b`");
        }
        // No bytes, or no known ones.
        let empty = [("a", 0, f32, 0), ("b", 100, f32, 0), ("c", 0, f32, 32), ("d", u64::MAX, f32, 0)];
        assert_eq!(tensors(&empty), None);
        assert_eq!(tensors(&[("a", 8, f32, 0), ("b", 8, unknown, 0)]), None);
    }

    #[test]
    fn numbers_of_all_widths() {
        let value = |kind: u32, bytes: &[u8]| {
            let entry = [&1_u64.to_le_bytes()[..], b"k", &kind.to_le_bytes(), bytes].concat();
            parsed(&header(0, 1, &entry)).unwrap().metadata.remove("k").unwrap()
        };
        let ints: [(u32, &[u8], i64); 8] = [
            (0, &[255], 255),
            (1, &[255], -1),
            (2, &[255, 255], 65535),
            (3, &[254, 255], -2),
            (4, &[255; 4], u32::MAX.into()),
            (5, &[253, 255, 255, 255], -3),
            (10, &7_u64.to_le_bytes(), 7),
            (11, &(-7_i64).to_le_bytes(), -7),
        ];
        for (kind, bytes, expected) in ints {
            assert!(matches!(value(kind, bytes), Value::Int(x) if x == expected), "type {kind}");
        }
        assert!(matches!(value(6, &0.5_f32.to_le_bytes()), Value::Float(0.5)));
        assert!(matches!(value(12, &(-0.1_f64).to_le_bytes()), Value::Float(-0.1)));
    }
}
