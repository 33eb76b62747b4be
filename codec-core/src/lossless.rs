//! Lossless coding of 16-bit floats: the distance of an exponent from the largest one of its channel, with
//! the sign where that saves bits, is a symbol; the rest is low bits. FORMAT.md, "Block of a lossless frame",
//! specifies the bytes.
//!
//! N.B. Signs in the symbols gain most on keys before RoPE, whose channels have means. With the mantissa's
//! first bit in the symbols, too, rows are slightly smaller, but a decoder compares with twice as many
//! symbols; with its second bit, an alphabet of 64 symbols is too small and rows grow.

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
/// Symbols and low bits in one rANS stream, as in tiles of a frame with loss.
const CODED: u8 = 1;
/// Low bits, the same number for all lanes, before the rANS stream of the symbols.
const PACKED: u8 = 2;

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

    /// The smallest code of each lane's escapes in the tile that begins at channel `first`, the largest code
    /// for a lane that is not used.
    #[cfg(feature = "alloc")]
    fn first_escapes(&self, first: usize) -> Row {
        let mut escapes = [ESCAPE; LANES];
        for (channel, escape) in (first..self.channels()).zip(&mut escapes) {
            let (low_bits, starts) = self.models.channel(channel, 0);
            *escape = ((starts.symbols() - 1) << low_bits) as u16; // below `ESCAPE`
        }
        escapes
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

/// The codes of a tile before they are coded.
#[cfg(feature = "alloc")]
struct TileCodes<'a> {
    tile: TileLanes,
    first_escapes: Row,   // the smallest code of each lane's escapes
    codes: &'a mut [Row], // (tokens,); lanes after the last are not defined
    escapes: Vec<u16>,    // codes
}

/// Computes the codes of all tiles. Those of escapes are [`ESCAPE`], and move to the tile's escapes.
///
/// N.B. Tile by tile, the strided loads of rows wait for memory: that took a fifth of the time. A second pass
/// over the codes of tiles with escapes, which most have, took a third.
#[cfg(feature = "alloc")]
struct CodesOfBits<'a, 'b> {
    rows: &'a [u16], // (tokens, channels)
    channels: usize,
    tiles: &'b mut [TileCodes<'a>],
}

#[cfg(feature = "alloc")]
impl Kernel for CodesOfBits<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        for (t, row) in self.rows.chunks_exact(self.channels).enumerate() {
            for (tile, bits) in self.tiles.iter_mut().zip(row.chunks(LANES)) {
                let TileCodes { tile, first_escapes, codes, escapes } = tile;
                let mut row: Row = bits.first_chunk().copied().unwrap_or_else(|| padded(bits));
                let mut any = false;
                for (lane, code) in row.iter_mut().enumerate() {
                    *code = tile.code(lane, *code);
                    any |= *code >= first_escapes[lane];
                }
                if any {
                    let escaped = row[..tile.lanes].iter_mut().zip(first_escapes);
                    for (code, _) in escaped.filter(|(code, first)| **code >= **first) {
                        escapes.push(core::mem::replace(code, ESCAPE));
                    }
                }
                codes[t] = row;
            }
        }
    }
}

/// Writes the elements of a tile's codes, and takes those of escapes from `escapes`.
struct BitsOfCodes<'a, 'b> {
    tile: TileLanes,
    codes: &'b [Row], // symbols, if their low bits are packed
    low: Packed<'a>,
    escapes: &'b mut &'a [u8],
    out: &'b mut [u16], // (tokens, channels)
}

impl Kernel for BitsOfCodes<'_, '_> {
    type Output = Result<(), Error>;

    #[inline(always)]
    fn scalar(self) -> Result<(), Error> {
        let Self { tile, codes, low, escapes, out } = self;
        for (t, (row, codes)) in out.chunks_exact_mut(tile.channels).zip(codes).enumerate() {
            let (mut bits, mut any) = (low.low(t), false);
            for ((lane, bits), &code) in bits.iter_mut().enumerate().zip(codes) {
                any |= code == ESCAPE;
                *bits = tile.bits(lane, code << low.bits | *bits);
            }
            if any {
                for lane in (0..tile.lanes).filter(|&lane| codes[lane] == ESCAPE) {
                    let (code, rest) = escapes.split_first_chunk().ok_or(Error::Corrupt)?;
                    *escapes = rest;
                    bits[lane] = tile.bits(lane, u16::from_le_bytes(*code));
                }
            }
            let row = &mut row[tile.first..][..tile.lanes];
            match row.first_chunk_mut() {
                Some(row) => *row = bits,
                None => copy_part(&bits, row),
            }
        }
        Ok(())
    }
}

/// Rows of words that the low bits of `rows` rows fill. All lanes have `bits` low bits: the first row has the
/// lowest bits of the first word, and a word that is full is continued in the next one.
const fn packed_rows(rows: usize, bits: u32) -> usize {
    (rows * bits as usize).div_ceil(u16::BITS as usize)
}

/// Moves the low bits of codes, which become symbols, to words.
#[cfg(feature = "alloc")]
struct Pack<'a> {
    bits: u32,
    codes: &'a mut [Row],
    words: &'a mut [Row], // `packed_rows`
}

#[cfg(feature = "alloc")]
impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn scalar(self) {
        let Self { bits, codes, words } = self;
        let mut words = words.iter_mut();
        let (mut word, mut filled) = ([0; LANES], 0);
        for row in codes {
            let mut next = [0; LANES];
            for ((code, word), next) in row.iter_mut().zip(&mut word).zip(&mut next) {
                let low = *code & ((1 << bits) - 1);
                *code >>= bits;
                *word |= low << filled;
                *next = low >> (bits.min(u16::BITS - filled)); // what the word has no room for
            }
            filled += bits;
            if filled >= u16::BITS {
                words.next().into_iter().for_each(|out| *out = word);
                (word, filled) = (next, filled - u16::BITS);
            }
        }
        words.next().into_iter().for_each(|out| *out = word);
    }
}

/// The packed low bits of rows.
#[derive(Clone, Copy)]
struct Packed<'a> {
    bits: u32,
    lanes: usize,
    words: &'a [u8], // `packed_rows` of `lanes` words; empty without low bits
}

impl Packed<'_> {
    /// The low bits of row `t`; lanes after the last are not defined.
    ///
    /// N.B. Not by `map`, which the compiler does not inline: loads of whole rows then wait for stores of
    /// single lanes, which took a third of the time. So did words that are kept between rows.
    #[inline(always)]
    fn low(&self, t: usize) -> Row {
        let (bits, at) = (self.bits, t * self.bits as usize);
        let (word, shift) = (at / 16, at as u32 % 16);
        let mut low = self.word(word);
        low.iter_mut().for_each(|low| *low >>= shift);
        if shift + bits > 16 {
            let next = self.word(word + 1);
            low.iter_mut().zip(next).for_each(|(low, next)| *low |= next << (16 - shift));
        }
        low.iter_mut().for_each(|low| *low &= (1 << bits) - 1);
        low
    }

    #[inline(always)]
    fn word(&self, i: usize) -> Row {
        let bytes = self.words.get(2 * self.lanes * i..).unwrap_or(&[]);
        let bytes: [u8; 2 * LANES] = bytes.first_chunk().copied().unwrap_or_else(|| padded(bytes));
        let mut row = [0; LANES];
        let words = bytes.as_chunks::<2>().0;
        row.iter_mut().zip(words).for_each(|(row, &word)| *row = u16::from_le_bytes(word));
        row
    }
}

/// The elements followed by zeros. It is a call, lest the compiler make one out of the copies of whole rows.
#[cold]
#[inline(never)]
fn padded<T: Copy + Default, const N: usize>(elements: &[T]) -> [T; N] {
    let mut all = [T::default(); N];
    all.iter_mut().zip(elements).for_each(|(to, &from)| *to = from);
    all
}

/// Copies the first lanes, as [`padded`].
#[cold]
#[inline(never)]
fn copy_part(lanes: &Row, out: &mut [u16]) {
    out.copy_from_slice(&lanes[..out.len()]);
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
    let mut codes = alloc::vec![[0; LANES]; tokens * channels.div_ceil(LANES)];
    let mut tiles: Vec<TileCodes<'_>> = (0..channels)
        .step_by(LANES)
        .zip(codes.chunks_exact_mut(tokens.max(1)))
        .map(|(first, codes)| {
            let first_escapes = plane.first_escapes(first);
            TileCodes { tile: plane.tile(first), first_escapes, codes, escapes: Vec::new() }
        })
        .collect();
    backend.run(CodesOfBits { rows, channels, tiles: &mut tiles });
    let mut words = alloc::vec![[0; LANES]; tokens];
    for TileCodes { tile: TileLanes { first, lanes, .. }, codes, escapes, .. } in tiles {
        let mut tables = TileTables::<1>::new(&plane.models, first, lanes);
        let start = out.len();
        let packed = tables.take_low_bits();
        out.extend_from_slice(&[if packed.is_some() { PACKED } else { CODED }, 0]);
        out.extend_from_slice(&(escapes.len() as u16).to_le_bytes());
        if let Some(bits) = packed {
            let words = &mut words[..packed_rows(tokens, bits)];
            backend.run(Pack { bits, codes: &mut *codes, words: &mut *words });
            words.iter().for_each(|row| rans::put_words(&row[..lanes], out));
        }
        rans::encode(&tables, backend, codes, out);
        pad(start, out);
        rans::put_words(&escapes, out);
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
        (CODED | PACKED, 0 | 1, _) => {
            let mut tables = TileTables::<1>::new(&plane.models, first, lanes);
            let packed = if kind == PACKED { tables.take_low_bits() } else { None };
            if kind == PACKED && packed.is_none() {
                return Err(Error::Corrupt);
            }
            let words = packed.map_or(0, |bits| 2 * lanes * packed_rows(rows, bits));
            let (mut words, body) = body.split_at_checked(words).ok_or(Error::Truncated)?;
            let at = body.len().checked_sub(escapes + padding).ok_or(Error::Truncated)?;
            let (stream, escapes) = body.split_at(at);
            let mut escapes = &escapes[padding..];
            let mut decoder = rans::Decoder::new(&tables, backend, rows, stream)?;
            let mut codes = [[0; LANES]; CHUNK];
            let channels_of_tile = plane.tile(first);
            for rows in out.chunks_mut(CHUNK * channels) {
                let codes = &mut codes[..rows.len() / channels];
                decoder.decode(codes)?;
                let bits = packed.unwrap_or(0);
                let (of_rows, after) = words.split_at(2 * lanes * packed_rows(codes.len(), bits));
                words = after;
                let low = Packed { bits, lanes, words: of_rows };
                backend.run(BitsOfCodes {
                    tile: channels_of_tile,
                    codes,
                    low,
                    escapes: &mut escapes,
                    out: rows,
                })?;
            }
            if !escapes.is_empty() {
                return Err(Error::TrailingBytes);
            }
            decoder.finish()
        }
        _ => Err(Error::Corrupt),
    }
}
