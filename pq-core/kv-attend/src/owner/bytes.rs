//! The serialized format: four magic bytes, a version, then little-endian fields without padding. With the
//! top bit of the version, a CRC-32 of all preceding bytes follows the fields.
//!
//! The reader checks every length against the bytes left before it allocates, so hostile input cannot
//! allocate more than its own size.

use alloc::vec::Vec;
use core::any::TypeId;

use half::{bf16, f16};

use crate::{Element, Error, Window};

/// The bit of the version that announces a checksum.
const CHECKED: u32 = 1 << 31;

/// The tag of an element type.
fn tag<E: Element>() -> u32 {
    let id = TypeId::of::<E>();
    [TypeId::of::<f32>(), TypeId::of::<f16>()].iter().position(|&other| other == id).unwrap_or(2) as u32
}

/// Serializes fields in the order of the calls.
///
/// # Examples
/// ```
/// use kv_attend::Error;
/// use kv_attend::owner::{Reader, Writer};
/// let mut writer = Writer::new(*b"ROWS", 1);
/// writer.usize(3);
/// writer.elements([1.0_f32, 2.0, 3.0].into_iter());
/// let mut bytes = writer.finish();
/// let read = |bytes: &[u8]| {
///     let mut reader = Reader::new("rows", *b"ROWS", 1, bytes)?;
///     let n = reader.usize()?;
///     let rows = reader.elements::<f32>(n)?; // no allocation beyond the bytes that are there
///     reader.finish()?;
///     Ok(rows)
/// };
/// assert_eq!(read(&bytes), Ok(vec![1.0, 2.0, 3.0]));
/// bytes[8..16].fill(0x1f);
/// assert_eq!(read(&bytes), Err(Error::Truncated { what: "rows" }));
/// ```
#[derive(Debug)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Begins with magic and version.
    #[must_use]
    pub fn new(magic: [u8; 4], version: u32) -> Self {
        let mut writer = Self(magic.to_vec());
        writer.u32(version);
        writer
    }

    /// Writes a `u32`.
    pub fn u32(&mut self, x: u32) {
        self.0.extend(x.to_le_bytes());
    }

    /// Writes a `u64`.
    pub fn u64(&mut self, x: u64) {
        self.0.extend(x.to_le_bytes());
    }

    /// Writes a length as 8 bytes.
    pub fn usize(&mut self, x: usize) {
        self.u64(x as u64);
    }

    /// Writes a window as 24 bytes.
    pub fn window(&mut self, Window { sinks, recent, batch }: Window) {
        [sinks, recent, batch].into_iter().for_each(|x| self.usize(x));
    }

    /// Writes the tag of an element type as 4 bytes.
    pub fn tag<E: Element>(&mut self) {
        self.u32(tag::<E>());
    }

    /// Writes elements, without a count.
    pub fn elements<E: Element>(&mut self, elements: impl Iterator<Item = E>) {
        match tag::<E>() {
            0 => elements.for_each(|x| self.0.extend(x.to_f32().to_le_bytes())),
            1 => elements.for_each(|x| self.0.extend(f16::from_f32(x.to_f32()).to_le_bytes())),
            _ => elements.for_each(|x| self.0.extend(bf16::from_f32(x.to_f32()).to_le_bytes())),
        }
    }

    /// Writes bytes, without a count.
    pub fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// The bytes that have been written.
    #[must_use]
    pub fn finish(self) -> Vec<u8> {
        self.0
    }

    /// All bytes with a checksum, which [`Reader::new`] compares.
    ///
    /// # Cost
    /// 4 more bytes, and one pass over all of them.
    #[must_use]
    pub fn finish_checked(mut self) -> Vec<u8> {
        self.0[7] |= (CHECKED >> 24) as u8; // of the version
        self.u32(crc32fast::hash(&self.0));
        self.0
    }
}

/// Reads fields in the order in which a [`Writer`] wrote them.
#[derive(Debug)]
pub struct Reader<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Checks magic and version, and the checksum if there is one; `what` names the content in errors.
    ///
    /// # Errors
    /// [`Error::BadMagic`], [`Error::Version`], [`Error::Truncated`], [`Error::BadChecksum`].
    pub fn new(what: &'static str, magic: [u8; 4], version: u32, bytes: &'a [u8]) -> Result<Self, Error> {
        let rest = bytes.strip_prefix(&magic).ok_or(Error::BadMagic { what })?;
        let mut reader = Self { what, rest };
        let found = reader.u32()?;
        if found & CHECKED != 0 {
            let (fields, checksum) = reader.rest.split_last_chunk().ok_or(Error::Truncated { what })?;
            if crc32fast::hash(&bytes[..bytes.len() - checksum.len()]) != u32::from_le_bytes(*checksum) {
                return Err(Error::BadChecksum { what });
            }
            reader.rest = fields;
        }
        match found & !CHECKED {
            found if found == version => Ok(reader),
            version => Err(Error::Version { what, version }),
        }
    }

    /// Reads `len` bytes.
    ///
    /// # Errors
    /// [`Error::Truncated`].
    pub fn bytes(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or(Error::Truncated { what: self.what })?;
        self.rest = rest;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (array, rest) = self.rest.split_first_chunk().ok_or(Error::Truncated { what: self.what })?;
        self.rest = rest;
        Ok(*array)
    }

    /// Reads a `u32`.
    ///
    /// # Errors
    /// [`Error::Truncated`].
    pub fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Reads a `u64`.
    ///
    /// # Errors
    /// [`Error::Truncated`].
    pub fn u64(&mut self) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a length. The bytes are not trusted: compare it with the bytes left before allocating.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::TooLarge`].
    pub fn usize(&mut self) -> Result<usize, Error> {
        usize::try_from(self.u64()?).map_err(|_| Error::TooLarge)
    }

    /// Reads a window.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::TooLarge`].
    pub fn window(&mut self) -> Result<Window, Error> {
        Ok(Window { sinks: self.usize()?, recent: self.usize()?, batch: self.usize()? })
    }

    /// Reads the tag of an element type, which must be `E`'s.
    ///
    /// # Errors
    /// [`Error::Truncated`], [`Error::BadField`].
    pub fn tag<E: Element>(&mut self) -> Result<(), Error> {
        if self.u32()? == tag::<E>() { Ok(()) } else { Err(Error::BadField { what: "element type" }) }
    }

    /// Reads `len` elements.
    ///
    /// # Errors
    /// [`Error::Truncated`] before anything is allocated, [`Error::TooLarge`].
    pub fn elements<E: Element>(&mut self, len: usize) -> Result<Vec<E>, Error> {
        let bytes = self.bytes(len.checked_mul(size_of::<E>()).ok_or(Error::TooLarge)?)?;
        Ok(match tag::<E>() {
            0 => bytes.as_chunks().0.iter().map(|&x| E::from_f32(f32::from_le_bytes(x))).collect(),
            1 => bytes.as_chunks().0.iter().map(|&x| E::from_f32(f16::from_le_bytes(x).to_f32())).collect(),
            _ => bytes.as_chunks().0.iter().map(|&x| E::from_f32(bf16::from_le_bytes(x).to_f32())).collect(),
        })
    }

    /// Reads the tag of an element type, then `len` elements of that type as `f32`.
    ///
    /// # Errors
    /// As for [`elements`](Self::elements), and [`Error::BadField`].
    pub fn tagged_elements(&mut self, len: usize) -> Result<Vec<f32>, Error> {
        match self.u32()? {
            0 => self.elements(len),
            1 => Ok(self.elements(len)?.into_iter().map(f16::to_f32).collect()),
            2 => Ok(self.elements(len)?.into_iter().map(bf16::to_f32).collect()),
            _ => Err(Error::BadField { what: "element type" }),
        }
    }

    /// Checks that nothing is left.
    ///
    /// # Errors
    /// [`Error::TrailingBytes`].
    pub fn finish(self) -> Result<(), Error> {
        match self.rest.len() {
            0 => Ok(()),
            extra => Err(Error::TrailingBytes { what: self.what, extra }),
        }
    }
}
