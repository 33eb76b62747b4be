//! Decoding of tiles: the bins of up to 32 channels of a block. FORMAT.md, "Tile", specifies the bytes.

#[cfg(feature = "alloc")]
pub(crate) mod encode;

use crate::model::slots::PRECISION;
use crate::model::tables::{ESCAPE, LANES, Row, TileTables};
use crate::quant::{bin_of_code, unzigzag};
use crate::simd::Kernel;
use crate::{Backend, Error, Models, range, rans};

/// The entropy coder of a plane's tiles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub enum Coder {
    /// 32 interleaved range-ANS (rANS) coders, which decode 32 symbols at a time.
    InterleavedRans,
    /// One range coder (arithmetic coding). It codes symbol by symbol, and tiles are about 45 bytes smaller.
    Range,
}

/// Rows decoded at a time, few enough that their codes and values stay in L1.
pub(crate) const CHUNK: usize = 32;

/// Bins of one token of a tile.
pub(crate) type Bins = [i32; LANES];

pub(crate) const FIXED: u8 = 0;
pub(crate) const PLANE_RANS: u8 = 1;
pub(crate) const OWN_RANS: u8 = 2;
pub(crate) const PLANE_RANGE: u8 = 3;

/// The largest exponent of the power of two that scales the step of a fixed-width tile. The largest `f32`
/// needs 113.
const MAX_EXPONENT: u8 = 128;

/// Bytes of the header that all kinds share.
const HEAD: usize = 4;

/// The parsed layout of a tile.
enum Kind<'a> {
    /// Bins of `width` bits, without prediction; the step is scaled by `2^exponent`.
    Fixed { width: u32, exponent: u8, bits: &'a [u8] },
    /// Codes under the plane's models or the tile's own families.
    Coded { own: Option<&'a [u8]>, coder: Coder, stream: &'a [u8], escapes: &'a [u8] },
}

impl<'a> Kind<'a> {
    fn parse(bytes: &'a [u8], rows: usize, lanes: usize) -> Result<Self, Error> {
        let (&[kind, a, b, c], body) = bytes.split_first_chunk::<HEAD>().ok_or(Error::Truncated)?;
        if kind == FIXED {
            let width = u32::from(a);
            if width > 16 || b > MAX_EXPONENT || c != 0 {
                return Err(Error::Corrupt);
            }
            // Tiles are padded to an even number of bytes.
            let len = (rows * lanes * width as usize).div_ceil(8).next_multiple_of(2);
            check_body(body.len(), len)?;
            return Ok(Self::Fixed { width, exponent: b, bits: body });
        }
        let (padding @ (0 | 1), escapes) = (usize::from(a), 2 * usize::from(u16::from_le_bytes([b, c])))
        else {
            return Err(Error::Corrupt);
        };
        let (own, coder, body) = match kind {
            PLANE_RANS => (None, Coder::InterleavedRans, body),
            OWN_RANS => {
                let (own, body) = body.split_at_checked(lanes.next_multiple_of(2)).ok_or(Error::Truncated)?;
                (Some(&own[..lanes]), Coder::InterleavedRans, body)
            }
            PLANE_RANGE => (None, Coder::Range, body),
            _ => return Err(Error::Corrupt),
        };
        let at = body.len().checked_sub(escapes + padding).ok_or(Error::Truncated)?;
        let (stream, escapes) = body.split_at(at);
        Ok(Self::Coded { own, coder, stream, escapes: &escapes[padding..] })
    }
}

fn check_body(actual: usize, expected: usize) -> Result<(), Error> {
    match actual {
        _ if actual < expected => Err(Error::Truncated),
        _ if actual > expected => Err(Error::TrailingBytes),
        _ => Ok(()),
    }
}

/// A tile to be decoded.
pub(crate) struct Tile<'a> {
    kind: Kind<'a>,
    rows: usize,
    lanes: usize,
}

/// The meaning of a tile's bins.
#[derive(Clone, Copy)]
pub(crate) enum Scale {
    /// Differences from a prediction, in steps.
    Predicted,
    /// Values in steps times `2^exponent`.
    Plain(u8),
}

impl<'a> Tile<'a> {
    pub fn parse(bytes: &'a [u8], rows: usize, lanes: usize) -> Result<Self, Error> {
        Ok(Self { kind: Kind::parse(bytes, rows, lanes)?, rows, lanes })
    }

    pub fn scale(&self) -> Scale {
        match self.kind {
            Kind::Fixed { exponent, .. } => Scale::Plain(exponent),
            Kind::Coded { .. } => Scale::Predicted,
        }
    }

    /// Decodes all rows under the models of channels from `first` on. `sink` receives up to [`CHUNK`] rows at
    /// a time.
    pub fn decode(
        &self,
        models: &Models<'_>,
        first: usize,
        backend: Backend,
        mut sink: impl FnMut(&[Bins]),
    ) -> Result<(), Error> {
        match self.kind {
            Kind::Fixed { width, bits, .. } => {
                let mut reader = BitReader { bytes: bits, buffer: 0, left: 0 };
                let mut bins = [[0; LANES]; CHUNK];
                for start in (0..self.rows).step_by(CHUNK) {
                    let bins = &mut bins[..CHUNK.min(self.rows - start)];
                    for bins in &mut *bins {
                        for bin in &mut bins[..self.lanes] {
                            *bin = unzigzag(reader.read(width));
                        }
                    }
                    sink(bins);
                }
                Ok(())
            }
            Kind::Coded { own: Some(own), stream, escapes, .. } => {
                let tables = TileTables::of_families(own);
                self.decode_rans(&tables, backend, stream, escapes, sink)
            }
            Kind::Coded { own: None, coder, stream, escapes } => match models.contexts() {
                1 => {
                    let tables = TileTables::<1>::new(models, first, self.lanes);
                    self.decode_coded(&tables, coder, backend, stream, escapes, sink)
                }
                _ => {
                    let tables = TileTables::<3>::new(models, first, self.lanes);
                    self.decode_coded(&tables, coder, backend, stream, escapes, sink)
                }
            },
        }
    }

    fn decode_coded<const C: usize>(
        &self,
        tables: &TileTables<C>,
        coder: Coder,
        backend: Backend,
        stream: &[u8],
        escapes: &[u8],
        sink: impl FnMut(&[Bins]),
    ) -> Result<(), Error> {
        match coder {
            Coder::InterleavedRans => self.decode_rans(tables, backend, stream, escapes, sink),
            Coder::Range => {
                let mut decoder = RangeDecoder::new(tables, stream)?;
                self.decode_chunks(tables, backend, escapes, sink, |rows| decoder.decode(rows))?;
                decoder.coder.finish()
            }
        }
    }

    fn decode_rans<const C: usize>(
        &self,
        tables: &TileTables<C>,
        backend: Backend,
        stream: &[u8],
        escapes: &[u8],
        sink: impl FnMut(&[Bins]),
    ) -> Result<(), Error> {
        let mut decoder = rans::Decoder::new(tables, backend, self.rows, stream)?;
        self.decode_chunks(tables, backend, escapes, sink, |rows| decoder.decode(rows))?;
        decoder.finish()
    }

    fn decode_chunks<const C: usize>(
        &self,
        tables: &TileTables<C>,
        backend: Backend,
        mut escapes: &[u8],
        mut sink: impl FnMut(&[Bins]),
        mut decode: impl FnMut(&mut [Row]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut codes = [[0; LANES]; CHUNK];
        let mut bins = [[0; LANES]; CHUNK];
        for start in (0..self.rows).step_by(CHUNK) {
            let n = CHUNK.min(self.rows - start);
            let (codes, bins) = (&mut codes[..n], &mut bins[..n]);
            decode(codes)?;
            backend.run(BinsOfCodes { codes, low_bits: &tables.low_bits, bins });
            if codes.as_flattened().contains(&ESCAPE) {
                for (bin, _) in bins
                    .as_flattened_mut()
                    .iter_mut()
                    .zip(codes.as_flattened())
                    .filter(|(_, code)| **code == ESCAPE)
                {
                    let (word, rest) = escapes.split_first_chunk::<2>().ok_or(Error::Corrupt)?;
                    *bin = i16::from_le_bytes(*word).into();
                    escapes = rest;
                }
            }
            sink(bins);
        }
        if escapes.is_empty() { Ok(()) } else { Err(Error::TrailingBytes) }
    }
}

struct BinsOfCodes<'a> {
    codes: &'a [Row],
    low_bits: &'a [u32; LANES],
    bins: &'a mut [Bins],
}

impl Kernel for BinsOfCodes<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        for (codes, bins) in self.codes.iter().zip(self.bins) {
            for ((&code, &bits), bin) in codes.iter().zip(self.low_bits).zip(bins) {
                *bin = bin_of_code(code, bits);
            }
        }
    }
}

/// The range coder over rows of codes.
struct RangeDecoder<'a, const C: usize> {
    tables: &'a TileTables<C>,
    coder: range::Decoder<'a>,
    last: Row, // codes of the previous row
}

impl<'a, const C: usize> RangeDecoder<'a, C> {
    fn new(tables: &'a TileTables<C>, stream: &'a [u8]) -> Result<Self, Error> {
        Ok(Self { tables, coder: range::Decoder::new(stream)?, last: [0; LANES] })
    }

    fn decode(&mut self, rows: &mut [Row]) -> Result<(), Error> {
        let tables = self.tables;
        for row in rows {
            row.fill(0);
            for (lane, code) in row[..tables.lanes].iter_mut().enumerate() {
                let bits = tables.low_bits[lane];
                let context = TileTables::<C>::context_after(self.last[lane], bits);
                let symbol = self.coder.decode(PRECISION, |slot| {
                    let symbol = tables.find(context, lane, slot);
                    (symbol, tables.slots(context, symbol, lane))
                })?;
                *code = if symbol as u16 == tables.escape[context][lane] {
                    ESCAPE
                } else {
                    (symbol as u16) << bits | self.coder.decode_bits(bits)? as u16
                };
            }
            self.last = *row;
        }
        Ok(())
    }
}

/// Reads integers of up to 16 bits, lowest bits first, and zeros past the end.
struct BitReader<'a> {
    bytes: &'a [u8],
    buffer: u32,
    left: u32,
}

impl BitReader<'_> {
    fn read(&mut self, width: u32) -> u32 {
        while self.left < width {
            let (byte, rest) = self.bytes.split_first().unwrap_or((&0, &[]));
            self.buffer |= u32::from(*byte) << self.left;
            self.bytes = rest;
            self.left += 8;
        }
        let x = self.buffer & ((1 << width) - 1);
        self.buffer >>= width;
        self.left -= width;
        x
    }
}
