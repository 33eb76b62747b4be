//! JSON as Python's `json.dumps` spaces it.

use std::io;

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};

/// With `, ` and `: ` between items, or on lines of this indent for each level: at most `most` bytes.
pub(super) fn python_style(
    value: &impl Serialize,
    indent: Option<usize>,
    most: usize,
) -> serde_json::Result<String> {
    let mut out = Limited { bytes: vec![], most };
    match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine))?,
        Some(n) => {
            let indent = " ".repeat(n);
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut out, formatter))?;
        }
    }
    Ok(String::from_utf8_lossy(&out.bytes).into_owned())
}

/// Takes a limited number of bytes: a small value may refer to another one many times.
struct Limited {
    bytes: Vec<u8>,
    most: usize,
}

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() > self.most - self.bytes.len() {
            return Err(io::Error::other(format!("more than {} bytes of JSON", self.most)));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// All on one line.
struct OneLine;

impl OneLine {
    fn separate<W: io::Write + ?Sized>(writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }
}

impl Formatter for OneLine {
    fn begin_array_value<W: io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_key<W: io::Write + ?Sized>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        Self::separate(writer, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
