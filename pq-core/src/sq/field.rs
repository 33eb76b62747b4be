//! Where the bits of codes are in a tile.

/// Consecutive bits of the codes of a part (a quad of keys, a group of values) in the slots of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Field {
    /// The quad or the group.
    pub part: usize,
    first: usize, // first vector of the row
    slots: usize, // of the row: 8, 4, 2 or 1
    offset: u32,  // slot of its lowest bit
    /// Bits of the code below the field.
    pub below: u32,
    /// The field's bits of the code.
    pub mask: u8,
}

impl Field {
    /// The vector of a unit, and by how many bits a shift to the right brings the field to its place in the
    /// code: -7 to 7.
    #[must_use]
    #[inline(always)]
    pub const fn place(&self, unit: usize) -> (usize, i32) {
        let up = self.slots * (unit / self.slots);
        (self.first + unit % self.slots, up as i32 + self.offset as i32 - self.below as i32)
    }

    /// The first vector of its row, and the slots of the row.
    #[inline(always)]
    pub(super) const fn row(&self) -> (usize, usize) {
        (self.first, self.slots)
    }

    /// Moves the field's bits of a code to byte `j` of a word of a unit.
    #[inline(always)]
    pub(super) fn put(&self, unit: usize, j: usize, code: u8) -> u32 {
        let code = u32::from(code & self.mask) << (8 * j);
        let shift = self.place(unit).1;
        if shift < 0 { code >> -shift } else { code << shift }
    }

    /// The field's bits in byte `j` of a word of a unit, at their place in the code.
    #[inline(always)]
    pub(super) fn get(&self, unit: usize, j: usize, word: u32) -> u8 {
        let shift = self.place(unit).1;
        let word = if shift < 0 { word << -shift } else { word >> shift };
        (word >> (8 * j)) as u8 & self.mask
    }
}

/// Fills the slots of a tile of `slots` slots from `slot` on with codes: (part, bits of it up to here, bits
/// of these that come later). Calls `f` with the fields.
pub(super) fn fill(
    slots: usize,
    mut slot: usize,
    parts: impl Iterator<Item = (usize, u8, u8)>,
    f: &mut impl FnMut(Field),
) {
    for (part, width, later) in parts {
        let mut left = u32::from(width - later);
        while left > 0 {
            let (first, row) = row_of(slots, slot);
            let offset = (slot - first) as u32;
            let taken = left.min(row as u32 - offset);
            left -= taken;
            let below = left + u32::from(later);
            let mask = (((1_u32 << taken) - 1) << below) as u8;
            f(Field { part, first, slots: row, offset, below, mask });
            slot += taken as usize;
        }
    }
}

/// The first slot of a slot's row, which is also its first vector, and the slots of the row.
fn row_of(slots: usize, slot: usize) -> (usize, usize) {
    let full = slots / 8 * 8;
    if slot < full {
        return (slot / 8 * 8, 8);
    }
    let mut first = full;
    let mut row = 4;
    loop {
        if slots & row != 0 {
            if slot < first + row || row == 1 {
                return (first, row);
            }
            first += row;
        }
        row /= 2;
    }
}
