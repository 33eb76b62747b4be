//! The widths of components, and where their bits are in a tile.

#[cfg(feature = "alloc")]
use kv_attend::owner::{Reader, Writer};

use super::field::{Field, fill};
use crate::Error;
use crate::error::check_len;

/// Tokens of a tile.
pub const TILE: usize = 32;
/// The most tokens of a block: integer sums of so many fit in 32 bits.
pub const MAX_BLOCK: usize = 256;
/// The most components of a row.
pub const MAX_DIM: usize = 256;

/// Components that share a width.
pub(super) const QUAD: usize = 4;
pub(super) const MAX_QUADS: usize = MAX_DIM / QUAD;
/// Word columns: the quads `c`, `c + 4`, ... share the words of column `c`.
pub(super) const COLUMNS: usize = 4;
/// Components of a group of values: the lanes of a vector.
pub(super) const LANES: usize = 16;

/// The bits of each component of a row.
///
/// Four consecutive components (a quad) have the same width. The widths of the quads of each of the four
/// columns `q % 4` add up to [`slots`](Self::slots), so a row takes `16 slots` bits. Rows whose length is not
/// a multiple of 16 are padded with components of code 0, which nothing reads: `4 ceil(dim / 16)` quads in
/// all.
///
/// # Examples
/// ```
/// use pq_core::sq::Shape;
/// let values = Shape::uniform(128, 3)?;
/// assert_eq!((values.slots(), values.bits(), values.tile_words()), (24, 3.0, 24 * 16));
/// let keys = Shape::new(32, &[4, 4, 3, 3, 0, 0, 1, 1])?; // widths of the eight quads
/// assert_eq!((keys.slots(), keys.bits()), (4, 2.0));
/// assert!(Shape::new(32, &[4, 4, 4, 3, 0, 0, 1, 1]).is_err()); // columns of 4, 4, 5 and 4 bits
/// # Ok::<(), pq_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    dim: usize,                // 1 to MAX_DIM
    slots: usize,              // sum of the widths of each column
    prefix_slots: usize,       // a multiple of 8; 0 unless embedded
    widths: [u8; MAX_QUADS],   // at most 8; 0 after the quads
    prefixes: [u8; MAX_QUADS], // leading bits in the first rows; at most `widths`
}

impl Shape {
    /// All components in `bits` bits, as values are coded.
    ///
    /// # Errors
    /// As for [`new`](Self::new).
    pub fn uniform(dim: usize, bits: u32) -> Result<Self, Error> {
        let width = u8::try_from(bits).map_err(|_| Error::NbitsOutOfRange { nbits: bits })?;
        Self::new(dim, [width; MAX_QUADS].get(..quads(dim)).ok_or(Error::TooLarge)?)
    }

    /// Takes the width of every quad, 0 to 8 bits.
    ///
    /// # Shapes
    /// `widths` (quads,), the padding's included.
    /// # Errors
    /// [`Error::Zero`] without components or bits; [`Error::TooLarge`] for more than [`MAX_DIM`] components;
    /// [`Error::Length`] for another number of widths; [`Error::NbitsOutOfRange`]; [`Error::ShapeMismatch`]
    /// if columns differ in their sums.
    pub fn new(dim: usize, widths: &[u8]) -> Result<Self, Error> {
        if dim == 0 {
            return Err(Error::Zero { what: "dim" });
        }
        if dim > MAX_DIM {
            return Err(Error::TooLarge);
        }
        check_len("widths", widths.len(), quads(dim))?;
        if let Some(&width) = widths.iter().find(|&&width| width > 8) {
            return Err(Error::NbitsOutOfRange { nbits: width.into() });
        }
        let slots = column_sums(widths)?;
        if slots == 0 {
            return Err(Error::Zero { what: "bits" });
        }
        let mut all = [0; MAX_QUADS];
        all[..widths.len()].copy_from_slice(widths);
        Ok(Self { dim, slots, prefix_slots: 0, widths: all, prefixes: [0; MAX_QUADS] })
    }

    /// The same codes with their `prefix` leading bits in the first rows, which are then readable alone: see
    /// [`prefix`](Self::prefix). Reading all of an embedded shape takes more operations, since more codes are
    /// split.
    ///
    /// # Shapes
    /// `prefix` (quads,), each at most the width of the quad.
    /// # Errors
    /// [`Error::Length`]; [`Error::ShapeMismatch`] if a prefix is longer than its width, or columns differ in
    /// their sums; [`Error::Unaligned`] if these sums are not a multiple of 8, whole rows; [`Error::Zero`].
    pub fn embedded(mut self, prefix: &[u8]) -> Result<Self, Error> {
        check_len("prefix", prefix.len(), self.quads())?;
        if prefix.iter().zip(&self.widths).any(|(prefix, width)| prefix > width) {
            return Err(Error::ShapeMismatch);
        }
        let slots = column_sums(prefix)?;
        if slots == 0 {
            return Err(Error::Zero { what: "prefix" });
        }
        if !slots.is_multiple_of(8) {
            return Err(Error::Unaligned { what: "slots of the prefix", at: slots, multiple: 8 });
        }
        self.prefix_slots = slots;
        self.prefixes[..prefix.len()].copy_from_slice(prefix);
        Ok(self)
    }

    /// The shape of the leading bits of an embedded shape. Its tiles are the first
    /// [`tile_words`](Self::tile_words) of the whole shape's.
    #[must_use]
    pub fn prefix(&self) -> Option<Self> {
        let prefix = Self { slots: self.prefix_slots, widths: self.prefixes, ..*self };
        (self.prefix_slots > 0).then_some(Self { prefix_slots: 0, prefixes: [0; MAX_QUADS], ..prefix })
    }

    /// Writes the shape.
    #[cfg(feature = "alloc")]
    pub(super) fn write(&self, writer: &mut Writer) {
        writer.usize(self.dim);
        writer.bytes(self.widths());
        writer.bytes(&self.prefixes[..self.quads()]);
    }

    /// Reads what [`write`](Self::write) wrote.
    #[cfg(feature = "alloc")]
    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, Error> {
        let dim = reader.usize()?;
        if dim > MAX_DIM {
            return Err(Error::TooLarge);
        }
        let shape = Self::new(dim, reader.bytes(quads(dim))?)?;
        let prefix = reader.bytes(quads(dim))?;
        if prefix.iter().all(|&bits| bits == 0) { Ok(shape) } else { shape.embedded(prefix) }
    }

    /// Components of a row.
    #[must_use]
    pub const fn dim(&self) -> usize {
        self.dim
    }

    /// Components up to the last that has bits, in groups of 16, without padding.
    #[cfg(feature = "alloc")]
    pub(super) fn coded(&self) -> usize {
        let quads = self.widths.iter().rposition(|&width| width > 0).map_or(0, |last| last + 1);
        (QUAD * quads).next_multiple_of(LANES).min(self.dim)
    }

    /// Components of a row and of its padding: a multiple of 16.
    pub(super) const fn padded_dim(&self) -> usize {
        self.dim.next_multiple_of(LANES)
    }

    /// Bits of each byte lane of a tile; a row takes 16 times as many.
    #[must_use]
    pub const fn slots(&self) -> usize {
        self.slots
    }

    /// Mean bits per component, those of the padding included, without scales or norms.
    #[must_use]
    pub fn bits(&self) -> f32 {
        (16 * self.slots) as f32 / self.dim as f32
    }

    /// Width of every quad: (quads,).
    #[must_use]
    pub fn widths(&self) -> &[u8] {
        &self.widths[..self.quads()]
    }

    /// Width of component `i`, in bits.
    pub(super) fn width(&self, i: usize) -> u32 {
        self.widths[i / QUAD].into()
    }

    /// The width of all components, if they have the same.
    pub(super) fn uniform_width(&self) -> Option<u32> {
        let widths = self.widths();
        widths.iter().all(|width| *width == widths[0]).then_some(widths[0].into())
    }

    /// Words of a tile.
    #[must_use]
    pub const fn tile_words(&self) -> usize {
        LANES * self.slots
    }

    /// Words of `n` tokens: whole tiles.
    #[must_use]
    pub const fn words_len(&self, n: usize) -> usize {
        n.div_ceil(TILE).saturating_mul(self.tile_words())
    }

    const fn quads(&self) -> usize {
        quads(self.dim)
    }

    /// Calls `f` with the fields of the codes of keys, column by column; the part of a field is its quad.
    pub fn key_fields(&self, mut f: impl FnMut(Field)) {
        for column in 0..COLUMNS {
            let quads = || (column..self.quads()).step_by(COLUMNS);
            self.fill_stages(quads().map(|q| (q, self.prefixes[q], self.widths[q])), &mut f);
        }
    }

    /// Calls `f` with the fields of the codes of values; the part of a field is its group of 16 components.
    /// The shape is uniform.
    pub(super) fn value_fields(&self, mut f: impl FnMut(Field)) {
        let groups =
            (0..self.padded_dim() / LANES).map(|p| (p, self.prefixes[COLUMNS * p], self.widths[COLUMNS * p]));
        self.fill_stages(groups, &mut f);
    }

    /// Fills the rows of the prefix, then the others.
    fn fill_stages(&self, parts: impl Iterator<Item = (usize, u8, u8)> + Clone, f: &mut impl FnMut(Field)) {
        let leading = parts.clone().map(|(part, prefix, width)| (part, width, width - prefix));
        fill(self.slots, 0, leading, f);
        fill(self.slots, self.prefix_slots, parts.map(|(part, prefix, width)| (part, width - prefix, 0)), f);
    }
}

/// Quads of a row of `dim` components.
pub(super) const fn quads(dim: usize) -> usize {
    COLUMNS * dim.div_ceil(LANES)
}

/// The sum of the widths of every column, which must be the same.
fn column_sums(widths: &[u8]) -> Result<usize, Error> {
    let sum = |c: usize| widths.iter().skip(c).step_by(COLUMNS).map(|&width| usize::from(width)).sum();
    let first: usize = sum(0);
    if (1..COLUMNS).all(|c| sum(c) == first) { Ok(first) } else { Err(Error::ShapeMismatch) }
}

/// Whole chunks of 16, over which the compiler vectorizes loops.
#[inline(always)]
pub(super) fn chunks<T>(x: &[T]) -> &[[T; LANES]] {
    x.as_chunks().0
}

/// Checks the number of tokens of a block.
pub(super) fn check_block(n: usize) -> Result<(), Error> {
    match n {
        0 => Err(Error::Zero { what: "tokens of a block" }),
        _ if n > MAX_BLOCK => Err(Error::TooLarge),
        _ => Ok(()),
    }
}
