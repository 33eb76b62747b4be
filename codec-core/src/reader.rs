//! Reads fields of serialized forms, which may be truncated or hostile.

use alloc::vec::Vec;

use crate::Error;

/// Reads from the front, and allocates only for bytes that exist.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Opens a form that starts with `magic` and `version` and ends with its CRC-32; the reader gets the
    /// fields between.
    pub fn open(bytes: &'a [u8], magic: [u8; 4], version: u8) -> Result<Self, Error> {
        Ok(Self::open_any(bytes, magic, &[version])?.1)
    }

    /// The same for a form that has several versions, with the one found.
    pub fn open_any(bytes: &'a [u8], magic: [u8; 4], versions: &[u8]) -> Result<(u8, Self), Error> {
        let (body, checksum) = bytes.split_last_chunk::<4>().ok_or(Error::Truncated)?;
        let (&[a, b, c, d, found], fields) = body.split_first_chunk::<5>().ok_or(Error::Truncated)?;
        if [a, b, c, d] != magic {
            return Err(Error::BadMagic);
        }
        if !versions.contains(&found) {
            return Err(Error::BadVersion { version: found });
        }
        if crc32fast::hash(body) != u32::from_le_bytes(*checksum) {
            return Err(Error::BadChecksum);
        }
        Ok((found, Self { bytes: fields }))
    }

    pub fn take(&mut self, n: usize) -> Result<&'a [u8], Error> {
        let (part, rest) = self.bytes.split_at_checked(n).ok_or(Error::Truncated)?;
        self.bytes = rest;
        Ok(part)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (part, rest) = self.bytes.split_first_chunk().ok_or(Error::Truncated)?;
        self.bytes = rest;
        Ok(*part)
    }

    pub fn size(&mut self) -> Result<usize, Error> {
        Ok(u32::from_le_bytes(self.array()?) as usize)
    }

    pub fn floats(&mut self, n: usize) -> Result<Vec<f32>, Error> {
        let bytes = self.take(n.checked_mul(4).ok_or(Error::TooLarge)?)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&x| f32::from_le_bytes(x)).collect())
    }

    pub fn words(&mut self, n: usize) -> Result<Vec<u16>, Error> {
        let bytes = self.take(n.checked_mul(2).ok_or(Error::TooLarge)?)?;
        Ok(bytes.as_chunks::<2>().0.iter().map(|&x| u16::from_le_bytes(x)).collect())
    }

    /// Checks that all bytes have been read.
    pub fn finish(self) -> Result<(), Error> {
        if self.bytes.is_empty() { Ok(()) } else { Err(Error::TrailingBytes) }
    }
}

/// Appends the CRC-32 of all bytes, which [`Reader::open`] compares.
pub(crate) fn seal(mut bytes: Vec<u8>) -> Vec<u8> {
    let checksum = crc32fast::hash(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes
}
