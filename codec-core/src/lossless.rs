//! Lossless coding of 16-bit floats: the distance of an exponent from the largest one of its channel, with the
//! sign, is a symbol; the mantissa is low bits. FORMAT.md, "Block of a lossless frame", specifies the bytes.
//!
//! N.B. Signs in the symbols gain most on keys before RoPE, whose channels have means. With the mantissa's
//! first bit in the symbols, too, rows are slightly smaller, but a decoder compares with twice as many symbols;
//! with its second bit, an alphabet of 64 symbols is too small and rows grow.

#[cfg(feature = "alloc")]
pub(crate) mod owned;

#[cfg(feature = "alloc")]
use alloc::vec::Vec;

use crate::block::BlockBytes;
#[cfg(feature = "alloc")]
use crate::block::MAX_BLOCK_TOKENS;
use crate::error::check_len;
use crate::model::TABLE_LEN;
use crate::model::tables::{ESCAPE, LANES, Row, TileTables};
use crate::simd::Kernel;
use crate::tile::CHUNK;
#[cfg(feature = "alloc")]
use crate::tile::encode::pad;
use crate::{Backend, ElementType, Error, Models, rans};

const STORED: u8 = 0;
const CODED: u8 = 1;

/// The models of the exponents of one plane of 16-bit elements; borrowed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LosslessPlane<'a> {
    mantissa: u32,  // bits
    tops: &'a [u8], // (channels,): the exponent that is symbol 0
    models: Models<'a>,
    id: u32,
}

impl<'a> LosslessPlane<'a> {
    /// Models of `tops.len()` channels of f16 or bf16 elements.
    ///
    /// # Shapes
    /// `tops` (channels,): the biased exponent of the first symbols; smaller exponents have the next ones.
    /// `tables` as in [`Models::tables`], with at most 11 low bits for f16 and 8 for bf16: sign and mantissa,
    /// the sign highest. With fewer low bits, the highest of these bits belong to the symbol.
    /// # Errors
    /// [`Error::ElementNot16Bit`] for f32, [`Error::Zero`], [`Error::Length`], [`Error::BadModel`].
    pub fn new(element: ElementType, tops: &'a [u8], tables: &'a [u16]) -> Result<Self, Error> {
        let mantissa = mantissa_bits(element)?;
        if tops.is_empty() {
            return Err(Error::Zero { what: "channels" });
        }
        let models = Models::tables(tops.len(), tables)?;
        let wrong = |table: &[u16]| u32::from(table[0]) > mantissa + 1;
        if let Some(channel) = tables.chunks_exact(TABLE_LEN).position(wrong) {
            return Err(Error::BadModel { channel });
        }
        let mut hasher = crc32fast::Hasher::new();
        hasher.update(&[mantissa as u8]);
        hasher.update(tops);
        models.hash(&mut hasher);
        Ok(Self { mantissa, tops, models, id: hasher.finalize() })
    }

    /// Elements per token.
    #[must_use]
    pub const fn channels(&self) -> usize {
        self.tops.len()
    }

    /// The element type.
    #[must_use]
    pub const fn element(&self) -> ElementType {
        element_of(self.mantissa)
    }

    /// A checksum (CRC-32) of everything that determines the meaning of a stream.
    #[must_use]
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// The lanes of the tile that begins at channel `first`.
    fn tile(&self, first: usize) -> TileLanes {
        let lanes = LANES.min(self.channels() - first);
        let mut tops = [0; LANES];
        tops.iter_mut().zip(&self.tops[first..][..lanes]).for_each(|(top, &of)| *top = of.into());
        TileLanes { mantissa: self.mantissa, channels: self.channels(), first, lanes, tops }
    }
}

/// The channels of a tile and the codes of their elements: the distance from the top exponent, the sign, the
/// mantissa, from the highest bit down.
#[derive(Clone, Copy)]
struct TileLanes {
    mantissa: u32, // bits
    channels: usize,
    first: usize,
    lanes: usize,
    tops: Row,
}

impl TileLanes {
    /// The code of an element's bits.
    #[cfg(feature = "alloc")]
    #[inline(always)]
    fn code(&self, lane: usize, bits: u16) -> u16 {
        let exponents = ESCAPE >> (self.mantissa + 1); // mask of the exponent bits
        let distance = self.tops[lane].wrapping_sub(bits >> self.mantissa) & exponents;
        distance << (self.mantissa + 1) | (bits >> 15) << self.mantissa | bits & ((1 << self.mantissa) - 1)
    }

    /// The bits of an element with this code.
    #[inline(always)]
    fn bits(&self, lane: usize, code: u16) -> u16 {
        let exponents = ESCAPE >> (self.mantissa + 1);
        let exponent = self.tops[lane].wrapping_sub(code >> (self.mantissa + 1)) & exponents;
        (code >> self.mantissa) << 15 | exponent << self.mantissa | code & ((1 << self.mantissa) - 1)
    }
}

/// Computes the codes of a tile's elements, escapes included; returns whether any of them is an escape.
#[cfg(feature = "alloc")]
struct CodesOfBits<'a, 'b> {
    tile: TileLanes,
    tables: &'a TileTables<1>,
    rows: &'a [u16],      // (tokens, channels)
    codes: &'b mut [Row], // (tokens,); lanes after the last are not written
}

#[cfg(feature = "alloc")]
impl Kernel for CodesOfBits<'_, '_> {
    type Output = bool;

    #[inline(always)]
    fn scalar(self) -> bool {
        let Self { tile, tables, rows, codes } = self;
        let mut any = false;
        for (codes, row) in codes.iter_mut().zip(rows.chunks_exact(tile.channels)) {
            codes[..tile.lanes].copy_from_slice(&row[tile.first..][..tile.lanes]);
            for (lane, code) in codes.iter_mut().enumerate() {
                *code = tile.code(lane, *code);
                any |= *code >> tables.low_bits[lane] >= tables.escape[0][lane];
            }
        }
        any
    }
}

/// Writes the elements of a tile's codes; returns whether any of them is an escape, whose element is then
/// wrong.
struct BitsOfCodes<'a, 'b> {
    tile: TileLanes,
    codes: &'a [Row],
    out: &'b mut [u16], // (tokens, channels)
}

impl Kernel for BitsOfCodes<'_, '_> {
    type Output = bool;

    #[inline(always)]
    fn scalar(self) -> bool {
        let Self { tile, codes, out } = self;
        let mut any = false;
        for (row, codes) in out.chunks_exact_mut(tile.channels).zip(codes) {
            let mut bits = *codes;
            for (lane, bits) in bits.iter_mut().enumerate() {
                any |= *bits == ESCAPE;
                *bits = tile.bits(lane, *bits);
            }
            row[tile.first..][..tile.lanes].copy_from_slice(&bits[..tile.lanes]);
        }
        any
    }
}

fn mantissa_bits(element: ElementType) -> Result<u32, Error> {
    match element {
        ElementType::F16 => Ok(10),
        ElementType::Bf16 => Ok(7),
        ElementType::F32 => Err(Error::ElementNot16Bit),
    }
}

/// The type with this many bits of mantissa, the inverse of [`mantissa_bits`].
const fn element_of(mantissa: u32) -> ElementType {
    if mantissa == 7 { ElementType::Bf16 } else { ElementType::F16 }
}

/// Encodes rows as `block::encode::encode` does.
#[cfg(feature = "alloc")]
pub(crate) fn encode(
    plane: &LosslessPlane<'_>,
    backend: Backend,
    rows: &[u16],
    out: &mut Vec<u8>,
    lengths: &mut Vec<u16>,
) -> Result<(), Error> {
    let channels = plane.channels();
    let tokens = rows.len() / channels;
    if tokens > MAX_BLOCK_TOKENS {
        return Err(Error::TooLarge);
    }
    let mut codes = alloc::vec![[0; LANES]; tokens];
    for first in (0..channels).step_by(LANES) {
        let tile = plane.tile(first);
        let lanes = tile.lanes;
        let tables = TileTables::<1>::new(&plane.models, first, lanes);
        let mut escapes: Vec<u16> = Vec::new();
        if backend.run(CodesOfBits { tile, tables: &tables, rows, codes: &mut codes }) {
            for (lane, code) in codes.iter_mut().flat_map(|row| row[..lanes].iter_mut().enumerate()) {
                if *code >> tables.low_bits[lane] >= tables.escape[0][lane] {
                    escapes.push(core::mem::replace(code, ESCAPE));
                }
            }
        }
        let start = out.len();
        out.extend_from_slice(&[CODED, 0]);
        out.extend_from_slice(&(escapes.len() as u16).to_le_bytes());
        rans::encode(&tables, backend, &codes, out);
        pad(start, out);
        escapes.iter().for_each(|code| out.extend_from_slice(&code.to_le_bytes()));
        if out.len() - start > 4 + 2 * lanes * tokens {
            out.truncate(start);
            out.extend_from_slice(&[STORED, 0, 0, 0]);
            let columns = rows.chunks_exact(channels).flat_map(|row| &row[first..first + lanes]);
            columns.for_each(|bits| out.extend_from_slice(&bits.to_le_bytes()));
        }
        lengths.push(u16::try_from((out.len() - start) / 2).map_err(|_| Error::TooLarge)?);
    }
    Ok(())
}

/// Decodes a block as `block::decode_into` does.
pub(crate) fn decode_into(
    plane: &LosslessPlane<'_>,
    backend: Backend,
    block: &BlockBytes<'_>,
    out: &mut [u16],
) -> Result<(), Error> {
    let channels = plane.channels();
    let mut rest = block.bytes;
    let lengths = block.lengths.as_chunks::<2>().0;
    for (first, length) in (0..channels).step_by(LANES).zip(lengths) {
        let (tile, after) =
            rest.split_at_checked(2 * usize::from(u16::from_le_bytes(*length))).ok_or(Error::Truncated)?;
        rest = after;
        decode_tile(plane, backend, tile, first, out)?;
    }
    if rest.is_empty() { Ok(()) } else { Err(Error::TrailingBytes) }
}

fn decode_tile(
    plane: &LosslessPlane<'_>,
    backend: Backend,
    tile: &[u8],
    first: usize,
    out: &mut [u16],
) -> Result<(), Error> {
    let channels = plane.channels();
    let lanes = LANES.min(channels - first);
    let rows = out.len() / channels;
    let (&[kind, padding, a, b], body) = tile.split_first_chunk::<4>().ok_or(Error::Truncated)?;
    let escapes = 2 * usize::from(u16::from_le_bytes([a, b]));
    let padding = usize::from(padding);
    match (kind, padding, escapes) {
        (STORED, 0, 0) => {
            check_len("stored tile", body.len(), 2 * lanes * rows).map_err(|_| Error::Corrupt)?;
            let stored = body.as_chunks::<2>().0.chunks_exact(lanes);
            for (row, stored) in out.chunks_exact_mut(channels).zip(stored) {
                for (bits, &stored) in row[first..].iter_mut().zip(stored) {
                    *bits = u16::from_le_bytes(stored);
                }
            }
            Ok(())
        }
        (CODED, 0 | 1, _) => {
            let at = body.len().checked_sub(escapes + padding).ok_or(Error::Truncated)?;
            let (stream, escapes) = body.split_at(at);
            let mut escapes = &escapes[padding..];
            let tables = TileTables::<1>::new(&plane.models, first, lanes);
            let mut decoder = rans::Decoder::new(&tables, backend, rows, stream)?;
            let mut codes = [[0; LANES]; CHUNK];
            let channels_of_tile = plane.tile(first);
            for rows in out.chunks_mut(CHUNK * channels) {
                let codes = &mut codes[..rows.len() / channels];
                decoder.decode(codes)?;
                if !backend.run(BitsOfCodes { tile: channels_of_tile, codes, out: &mut *rows }) {
                    continue;
                }
                for (row, codes) in rows.chunks_exact_mut(channels).zip(codes) {
                    let escaped = codes[..lanes].iter().enumerate().filter(|(_, code)| **code == ESCAPE);
                    for (lane, _) in escaped {
                        let (code, rest) = escapes.split_first_chunk::<2>().ok_or(Error::Corrupt)?;
                        escapes = rest;
                        row[first + lane] = channels_of_tile.bits(lane, u16::from_le_bytes(*code));
                    }
                }
            }
            if !escapes.is_empty() {
                return Err(Error::TrailingBytes);
            }
            decoder.finish()
        }
        _ => Err(Error::Corrupt),
    }
}
