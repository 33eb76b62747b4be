//! Where the codes of keys are in a tile, as the kernel reads it.

use pq_core::sq::Shape;

use crate::Error;
use crate::launch::Operation;

/// Columns of quads: `COLUMNS` of the kernel.
const COLUMNS: usize = 4;

const OPERATION: Operation = Operation("sq::KeyTable");

/// The layout of the tables that [`Attend`](super::Attend) reads, one for every head: `KeyTable` of the
/// kernel.
///
/// A table has the number of steps of each row of a tile, `1 - 2^bits` of each quad of components, and for
/// every step and column two fields: how far to rotate a word to the right, the quad, and which bits of a byte
/// belong to the code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyTable {
    dim: usize,
    slots: usize,
}

impl KeyTable {
    /// The layout for keys of `dim` components and `slots` bits of each byte lane of a tile
    /// ([`Shape::slots`]), which all heads share.
    #[must_use]
    pub const fn new(dim: usize, slots: usize) -> Self {
        Self { dim, slots }
    }

    /// The rows of a tile: first vector, and steps in the table.
    fn rows(self) -> impl Iterator<Item = (usize, usize)> {
        let full = self.slots / 8;
        let rest = [4_usize, 2, 1].into_iter().filter(move |size| self.slots & size != 0);
        std::iter::repeat_n(8, full).chain(rest).scan(0_usize, |first, size| {
            *first += size;
            Some((*first - size, size.div_ceil(2)))
        })
    }

    /// The number of rows of a tile.
    fn row_count(self) -> usize {
        self.rows().count()
    }

    /// Words before the steps.
    fn header_len(self) -> usize {
        self.row_count().next_multiple_of(4) + self.dim / 4
    }

    /// Elements of a table.
    #[must_use]
    pub fn table_len(&self) -> usize {
        let steps: usize = self.rows().map(|(_, steps)| steps).sum();
        self.header_len() + steps * COLUMNS * 4
    }

    /// Writes the table of a head's keys.
    ///
    /// # Shapes
    /// `table` [`Self::table_len`], fully written.
    /// # Errors
    /// [`Error::Argument`] for keys of other sizes, or another length.
    pub fn table_into(&self, keys: &Shape, table: &mut [u32]) -> Result<(), Error> {
        if (keys.dim(), keys.slots()) != (self.dim, self.slots) {
            let (dim, slots) = (keys.dim(), keys.slots());
            return Err(
                OPERATION.error(format!("{dim} components in {slots} slots in a layout for {self:?}"))
            );
        }
        if table.len() != self.table_len() {
            let (len, expected) = (table.len(), self.table_len());
            return Err(OPERATION.error(format!("{len} elements where {expected} are wanted")));
        }
        table.fill(0);
        let (header, steps) = table.split_at_mut(self.header_len());
        let (counts, offsets) = header.split_at_mut(self.row_count().next_multiple_of(4));
        for (offset, &width) in offsets.iter_mut().zip(keys.widths()) {
            *offset = (1 - (1_i32 << width)) as u32;
        }
        // Absent fields have no bits.
        for (column, field) in steps.chunks_exact_mut(4).enumerate() {
            (field[0], field[2]) = (rotation(0, column % COLUMNS), rotation(0, column % COLUMNS));
        }
        keys.key_fields(|field| {
            let (column, mut before) = (field.part % COLUMNS, 0);
            let (vector, shift) = field.place(2 * column);
            for (row, (first, of_row)) in self.rows().enumerate() {
                let last = self.rows().nth(row + 1).is_none_or(|(next, _)| vector < next);
                if vector >= first && last {
                    let place = (0..2 * of_row)
                        .map(|i| ((before + i / 2) * COLUMNS + column) * 4 + i % 2 * 2)
                        .enumerate()
                        .find(|&(_, at)| steps[at + 1] == 0);
                    if let Some((i, at)) = place {
                        steps[at] = rotation(shift, field.part);
                        steps[at + 1] = u32::from(field.mask) * 0x0101_0101;
                        counts[row] = counts[row].max(i as u32 / 2 + 1);
                    }
                    return;
                }
                before += of_row;
            }
        });
        Ok(())
    }
}

/// A rotation to the right by `shift`, which may be negative, and the quad.
const fn rotation(shift: i32, quad: usize) -> u32 {
    (shift & 31) as u32 | (quad as u32) << 5
}

#[cfg(test)]
mod tests {
    use pq_core::sq::{self, Keys, TILE};

    use super::*;

    /// Decodes tiles as the kernel's lanes do.
    fn decode(table: &KeyTable, words: &[u32], of_head: &[u32]) -> Vec<u8> {
        let mut codes = vec![0; TILE * table.dim];
        let header = table.header_len();
        let mut before = 0;
        for (row, (first, of_row)) in table.rows().enumerate() {
            let size = table.rows().nth(row + 1).map_or(table.slots, |(next, _)| next) - first;
            for step in before..before + of_head[row] as usize {
                for (column, token, field) in
                    (0..COLUMNS).flat_map(|c| (0..TILE).flat_map(move |t| [(c, t, 0), (c, t, 2)]))
                {
                    let entry = &of_head[header + (step * COLUMNS + column) * 4 + field..][..2];
                    let (at, up) = match size {
                        1 => (token % 16, token / 16),
                        _ => (column % (size / 2) * 32 + token, 0),
                    };
                    let word = words[16 * first + at].rotate_right((entry[0] + up as u32) % 32) & entry[1];
                    for (j, byte) in word.to_le_bytes().into_iter().enumerate() {
                        codes[token * table.dim + 4 * (entry[0] >> 5) as usize + j] += byte;
                    }
                }
            }
            before += of_row;
        }
        codes
    }

    #[test]
    fn lanes_find_every_code() -> Result<(), Box<dyn std::error::Error>> {
        let mixed = [8, 7, 5, 6, 0, 1, 1, 0, 3, 3, 5, 5]; // columns of 11 slots
        let prefix = [5, 4, 4, 4, 0, 1, 1, 0, 3, 3, 3, 4]; // and of 8
        let shapes = [
            sq::Shape::uniform(128, 2)?,
            sq::Shape::uniform(64, 3)?,
            sq::Shape::uniform(96, 1)?,
            sq::Shape::new(48, &mixed)?,
            sq::Shape::new(32, &[3, 3, 3, 3, 0, 0, 0, 0])?,
            sq::Shape::new(48, &mixed)?.embedded(&prefix)?,
        ];
        for shape in shapes {
            let rows: Vec<f32> = (0..TILE * shape.dim()).map(|i| ((i * 7919) % 257) as f32 - 128.0).collect();
            let (mut steps, mut words) = (vec![0; shape.dim()], vec![0; shape.words_len(TILE)]);
            sq::encode_keys_into(&shape, &rows, &mut steps, &mut words)?;
            let table = KeyTable::new(shape.dim(), shape.slots());
            let mut of_head = vec![0; table.table_len()];
            table.table_into(&shape, &mut of_head)?;
            let codes = decode(&table, &words, &of_head);
            let mut expected = vec![0.0; rows.len()];
            sq::decode_keys_into(&Keys::new(shape, TILE, &steps, &words)?, &mut expected)?;
            for (i, (&code, &expected)) in codes.iter().zip(&expected).enumerate() {
                let component = i % shape.dim();
                let step = ((f32::from(steps[component]) - 128.0) / 8.0).exp2();
                let width = shape.widths()[component / 4];
                let level = f32::from(code) + 0.5 - (1 << width) as f32 / 2.0;
                assert!((level * step - expected).abs() <= 1e-5 * step, "{shape:?}: {i}");
            }
            assert!(table.table_into(&shape, &mut of_head[1..]).is_err());
            assert!(KeyTable::new(shape.dim(), 1).table_into(&shape, &mut []).is_err());
        }
        Ok(())
    }
}
