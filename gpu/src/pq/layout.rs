//! The layout of codes and centroids on the device for attention: the order in which the lanes of a warp read
//! them.

use half::f16;
use kv_attend::owner::Side;
use pq_core::{Codebook, Codes, PqShape};

use crate::{Error, Program};

/// Tokens of a tile, which a warp processes at a time.
pub const TILE: usize = 32;

/// The memory layout of a sequence's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// Contiguous, in whole tiles.
    Contiguous,
    /// In pages of whole tiles: a multiple of 32 tokens each.
    Tiles,
    /// In pages of half tiles: a multiple of 16 tokens each. [`CodeLayout::half_tiles`] is their layout.
    HalfTiles,
}

impl Paging {
    /// Whether there is a page table.
    pub(crate) const fn has_pages(self) -> bool {
        !matches!(self, Self::Contiguous)
    }

    /// Defines the kernels' symbols.
    pub(crate) fn define(self, program: Program) -> Program {
        let program = program.define_if(self.has_pages(), "PAGED");
        program.define_if(self == Self::HalfTiles, "HALF_TILES")
    }
}

/// The device layout of the codes of one KV head, and of its codebook. Attention reads keys along tokens and
/// values along elements.
///
/// Codes are in tiles of [`TILE`] tokens, with exactly `nbits` bits per code. A vector is `dim / 2` words of
/// two halves. A code decodes to `dsub / 2` words, `m` words apart. If a subspace has one element, two codes
/// together decode to one word and are stored as one code of `2 nbits` bits.
///
/// A tile has `W` 32-bit words for each of the 32 lanes of a warp, as (load, lane, width): a lane reads them
/// in loads of up to four words. The codes of a lane are those of its tokens, in the order of their use.
/// Tokens 0 to 15 map to the same lanes as tokens 16 to 31, so that a half tile ([`CodeLayout::half_tiles`])
/// has the same layout with 16 tokens and `W / 2` words per lane, and the kernel can load the two halves of a
/// tile from two pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeLayout {
    shape: PqShape,
    side: Side,
    joined: bool,
    tokens: usize, // of a tile, or of a half tile
}

impl CodeLayout {
    /// The layout for a shape.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a shape that the attention kernel does not support.
    pub fn new(shape: PqShape, side: Side) -> Result<Self, Error> {
        let layout = Self { shape, side, joined: shape.dsub() == 1, tokens: TILE };
        let fits = matches!(shape.dim(), 64 | 128)
            && matches!(layout.bits(), 4 | 6 | 8)
            && (shape.dsub() == 1 || layout.m() >= if layout.bits() == 6 { 16 } else { 8 });
        if fits && layout.components().is_power_of_two() {
            return Ok(layout);
        }
        Err(Error::Unsupported {
            operation: format!("device layout of {shape:?}"),
            supported: "dim 64 or 128, 8 subspaces or more with 4 or 8 bits (16 with 6 bits) of 2 elements \
                        or more, or subspaces of 1 element with 2, 3 or 4 bits",
        })
    }

    /// The layout of half tiles of 16 tokens: a page of 16 tokens has one for each head. All tiles of this
    /// layout are half tiles.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a shape whose half tile does not have a whole number of words per lane.
    pub fn half_tiles(self) -> Result<Self, Error> {
        let half = Self { tokens: TILE / 2, ..self };
        let words = half.tile_len() / 4;
        if words.is_multiple_of(if self.bits() == 6 { 3 * 32 } else { 32 }) {
            return Ok(half);
        }
        Err(Error::Unsupported {
            operation: format!("half tiles of {:?}", self.shape),
            supported: "16 stored codes or more with 4 bits, 32 with 6 bits, 8 with 8 bits",
        })
    }

    /// The layout of the tiles, or half tiles, of codes in memory.
    pub(crate) fn of(shape: PqShape, side: Side, paging: Paging) -> Result<Self, Error> {
        let layout = Self::new(shape, side)?;
        if paging == Paging::HalfTiles { layout.half_tiles() } else { Ok(layout) }
    }

    /// The shape of the quantizer.
    #[must_use]
    pub const fn shape(&self) -> PqShape {
        self.shape
    }

    /// Tokens of a tile: [`TILE`], or half as many.
    #[must_use]
    pub const fn tokens(&self) -> usize {
        self.tokens
    }

    /// Keys or values.
    pub(crate) const fn side(&self) -> Side {
        self.side
    }

    /// Bits of a stored code.
    pub(crate) fn bits(&self) -> usize {
        self.shape.nbits() as usize * if self.joined { 2 } else { 1 }
    }

    /// Elements that a stored code decodes to.
    pub(crate) fn components(&self) -> usize {
        self.shape.dim() / self.m()
    }

    /// Stored codes of a vector.
    fn m(&self) -> usize {
        if self.joined { self.shape.m() / 2 } else { self.shape.m() }
    }

    /// Bytes of a tile.
    #[must_use]
    pub fn tile_len(&self) -> usize {
        self.tokens * self.m() * self.bits() / 8
    }

    /// Elements of a table (rows, dim).
    #[must_use]
    pub fn table_len(&self) -> usize {
        self.shape.dim() << self.bits()
    }

    /// The lane that reads a code, and the index of the code among those of the lane: `key_code` and
    /// `value_code` of the kernel.
    fn place(&self, token: usize, code: usize) -> (usize, usize) {
        let m = self.m();
        let parts = if m < 64 { 1 } else { 2 };
        let part = code / 32;
        match self.side {
            Side::Keys => {
                let (steps, middles) = (if m < 16 { 2 } else { 4 }, if m < 32 { 1 } else { 2 });
                let (half, high, g) = (token / 16, token / 8 % 2, token % 8);
                let (middle, step, l) = (code / 16 % 2, (code / 4 % steps) ^ (g % steps), code % 4);
                (4 * g + l, ((half * parts + part) * steps + step) * middles * 2 + middle * 2 + high)
            }
            Side::Values => {
                let steps = (m / 8).min(4);
                let (half, l, i, g) = (token / 4 % 2, token % 4, token / 8, code % 8);
                let step = (code / 8 + 4 - l) % 4 % steps;
                let highs = self.tokens / 16;
                (4 * g + l, (((half * steps + step) * highs + i / 2) * parts + part) * 2 + i % 2)
            }
        }
    }

    /// The pieces of a code in a tile: (byte, shift in the code, bits, shift in the byte).
    fn pieces(
        &self,
        token: usize,
        code: usize,
    ) -> impl Iterator<Item = (usize, usize, usize, usize)> + use<> {
        let (lane, place) = self.place(token, code);
        let words = self.tile_len() / 4 / 32; // 32-bit words of a lane
        let width = if self.bits() == 6 { words / 3 } else { words.min(4) };
        let byte = move |word: usize| ((word / width * 32 + lane) * width + word % width) * 4 + place % 4;
        let register = place / 4;
        let pieces = match self.bits() {
            8 => [Some((byte(register), 0, 8, 0)), None, None],
            4 => [Some((byte(register / 2), 0, 4, 4 * (register % 2))), None, None],
            // Three words hold four registers: the fourth lies in the high bits of the three.
            _ if register % 4 < 3 => [Some((byte(register / 4 * 3 + register % 4), 0, 6, 0)), None, None],
            _ => [0, 1, 2].map(|i| Some((byte(register / 4 * 3 + i), 2 * i, 2, 6))),
        };
        pieces.into_iter().flatten()
    }

    /// Packs codes of `pq-core` into tiles.
    ///
    /// # Shapes
    /// `tiles` `n / tokens` rounded up times [`Self::tile_len`] bytes, fully written, with zeros after the
    /// last token.
    /// # Errors
    /// [`Error::Argument`].
    pub fn pack_into(&self, codes: &Codes<'_>, tiles: &mut [u8]) -> Result<(), Error> {
        self.check("pack", codes.shape(), tiles.len(), codes.n().div_ceil(self.tokens) * self.tile_len())?;
        tiles.fill(0);
        for token in 0..codes.n() {
            let tile = &mut tiles[token / self.tokens * self.tile_len()..][..self.tile_len()];
            let mut codes = codes.iter_vector(token);
            for code in 0..self.m() {
                let first = codes.next().unwrap_or_default();
                let second = if self.joined { codes.next().unwrap_or_default() } else { 0 };
                let kept = first | second << self.shape.nbits();
                for (byte, from, bits, to) in self.pieces(token % self.tokens, code) {
                    tile[byte] |= ((kept >> from & ((1 << bits) - 1)) << to) as u8;
                }
            }
        }
        Ok(())
    }

    /// Unpacks tiles into codes of `pq-core`.
    ///
    /// # Shapes
    /// `tiles` as for [`Self::pack_into`]; `codes` [`PqShape::codes_len`] of `n`, fully written.
    /// # Errors
    /// [`Error::Argument`].
    pub fn unpack_into(&self, tiles: &[u8], n: usize, codes: &mut [u8]) -> Result<(), Error> {
        self.check(
            "unpack",
            self.shape,
            tiles.len(),
            n.div_ceil(self.tokens).saturating_mul(self.tile_len()),
        )?;
        let mut wide = Vec::with_capacity(n * self.shape.m());
        for token in 0..n {
            let tile = &tiles[token / self.tokens * self.tile_len()..][..self.tile_len()];
            for code in 0..self.m() {
                let kept: usize = self
                    .pieces(token % self.tokens, code)
                    .map(|(byte, from, bits, to)| (usize::from(tile[byte]) >> to & ((1 << bits) - 1)) << from)
                    .sum();
                wide.push((kept % self.shape.ksub()) as u16);
                if self.joined {
                    wide.push((kept / self.shape.ksub()) as u16);
                }
            }
        }
        pq_core::pack_codes_into(self.shape, &wide, codes)
            .map_err(|e| Error::Argument { operation: "device layout", problem: e.to_string() })
    }

    /// Arranges a codebook as the table that attention reads.
    ///
    /// # Shapes
    /// `table` [`Self::table_len`], fully written.
    /// # Errors
    /// [`Error::Argument`], also for a value that overflows `f16`; `table` is then partly written.
    pub fn table_into(&self, codebook: &Codebook<'_>, table: &mut [f16]) -> Result<(), Error> {
        self.check("make table", codebook.shape(), table.len(), self.table_len())?;
        let (dim, m, nbits) = (self.shape.dim(), self.m(), self.shape.nbits());
        for subspace in 0..self.shape.m() {
            for code in 0..self.shape.ksub() {
                for (i, exact) in codebook.centroid(subspace, code).enumerate() {
                    let x = f16::from_f32(exact);
                    if exact.is_finite() && !x.is_finite() {
                        let problem = format!("make table: {exact} in a codebook is beyond the range of f16");
                        return Err(Error::Argument { operation: "device layout", problem });
                    }
                    if self.joined {
                        // All rows in which this subspace's half of the bits is this code.
                        let shift = if subspace % 2 == 0 { 0 } else { nbits };
                        for other in 0..self.shape.ksub() {
                            let row = code << shift | other << (nbits - shift);
                            table[row * dim + subspace] = x;
                        }
                    } else {
                        let word = subspace + i / 2 * m;
                        table[code * dim + 2 * word + i % 2] = x;
                    }
                }
            }
        }
        Ok(())
    }

    fn check(&self, what: &str, shape: PqShape, len: usize, expected: usize) -> Result<(), Error> {
        if shape != self.shape {
            let problem = format!("{what}: {shape:?} in a layout for {:?}", self.shape);
            return Err(Error::Argument { operation: "device layout", problem });
        }
        if len != expected {
            let problem = format!("{what}: {len} elements where {expected} are wanted");
            return Err(Error::Argument { operation: "device layout", problem });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use pq_core::CodebookBuf;

    use super::*;

    #[test]
    fn centroids_beyond_f16_are_an_error() -> Result<(), Box<dyn std::error::Error>> {
        let shape = PqShape::new(128, 64, 8)?;
        let layout = CodeLayout::new(shape, Side::Keys)?;
        let mut centroids = vec![65_504.0_f32; shape.dim() * shape.ksub()];
        let mut table = vec![f16::ZERO; layout.table_len()];
        layout.table_into(&CodebookBuf::new(shape, &centroids)?.view(), &mut table)?;
        for x in [65_520.0, -1e9] {
            *centroids.last_mut().ok_or("no centroid")? = x;
            let error = layout.table_into(&CodebookBuf::new(shape, &centroids)?.view(), &mut table);
            assert!(matches!(error, Err(Error::Argument { .. })), "{error:?}");
        }
        Ok(())
    }

    #[test]
    fn packing_is_exact_and_reversible() -> Result<(), Box<dyn std::error::Error>> {
        for (dim, m, nbits) in [
            (128, 64, 8),
            (128, 64, 6),
            (128, 64, 4),
            (128, 128, 4),
            (128, 128, 3),
            (128, 32, 8),
            (128, 8, 8),
            (64, 8, 4),
            (64, 16, 6),
        ] {
            let shape = PqShape::new(dim, m, nbits)?;
            let n = 70;
            let bytes: Vec<u8> = (0..shape.codes_len(n)).map(|i| (i * 151 + i / 7) as u8).collect();
            let codes = Codes::new(shape, n, &bytes)?;
            let layouts = [Side::Keys, Side::Values].map(|side| CodeLayout::new(shape, side));
            let whole = layouts.into_iter().collect::<Result<Vec<_>, _>>()?;
            let halves = whole.iter().filter_map(|layout| layout.half_tiles().ok());
            for layout in whole.iter().copied().chain(halves) {
                let (tokens, bytes_len) = (layout.tokens(), layout.tile_len());
                assert_eq!(bytes_len * 8, tokens * m * nbits as usize, "no bit is lost");
                let mut tiles = vec![0xff; n.div_ceil(tokens) * bytes_len];
                layout.pack_into(&codes, &mut tiles)?;
                let mut back = vec![0xff; bytes.len()];
                layout.unpack_into(&tiles, n, &mut back)?;
                let back = Codes::new(shape, n, &back)?;
                for token in 0..n {
                    assert!(back.iter_vector(token).eq(codes.iter_vector(token)), "{layout:?} token {token}");
                }
                assert!(layout.pack_into(&codes, &mut tiles[1..]).is_err());
                assert!(layout.unpack_into(&tiles, usize::MAX, &mut []).is_err());
            }
        }
        Ok(())
    }
}
