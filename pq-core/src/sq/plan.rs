//! Where the vector form of the dot products finds the codes: to find it out for every block would take as
//! long as the products with a few tokens.

use super::field::Field;
use super::shape::{COLUMNS, LANES, MAX_DIM, MAX_QUADS, Shape};

/// Consecutive bits of the codes of a quad, of both halves of a tile's tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Place {
    pub quad: u32,
    /// Words of the tile before the vector of each half.
    pub words: [u32; 2],
    /// By how many bits a shift to the right brings each half's bits to their place in the code: -7 to 7.
    pub shifts: [i32; 2],
    /// Their place in the code, in each byte.
    pub mask: u32,
}

/// At most two stages of 16 quads, and 19 ends of rows, in each column.
const MAX_PLACES: usize = COLUMNS * (2 * MAX_QUADS / COLUMNS + 19);

/// What the dot products need to know of a shape of keys.
#[derive(Clone, Debug)]
pub(super) struct KeyPlan {
    places: [Place; MAX_PLACES],
    len: usize,
    /// `1 - 2^bits` of every component: twice the level of code 0.
    pub twice_lowest: [i32; MAX_DIM],
}

impl KeyPlan {
    pub fn new(shape: &Shape) -> Self {
        let (mut places, mut len) = ([Place::default(); MAX_PLACES], 0);
        shape.key_fields(|field| {
            let unit = 2 * (field.part % COLUMNS);
            let halves = [field.place(unit), field.place(unit + 1)];
            places[len] = Place {
                quad: field.part as u32,
                words: halves.map(|(vector, _)| (LANES * vector) as u32),
                shifts: halves.map(|(_, shift)| shift),
                mask: u32::from(field.mask) * 0x0101_0101,
            };
            len += 1;
        });
        let mut twice_lowest = [0; MAX_DIM];
        for (i, lowest) in twice_lowest.iter_mut().enumerate().take(shape.padded_dim()) {
            *lowest = 1 - (1 << shape.width(i));
        }
        Self { places, len, twice_lowest }
    }

    pub fn places(&self) -> &[Place] {
        &self.places[..self.len]
    }
}

/// At most two stages of 16 groups, and 19 ends of rows.
const MAX_FIELDS: usize = 2 * MAX_QUADS / COLUMNS + 19;

/// The fields of a shape of values.
#[derive(Clone, Debug)]
pub(super) struct ValuePlan {
    fields: [Field; MAX_FIELDS],
    len: usize,
}

impl ValuePlan {
    pub fn new(shape: &Shape) -> Self {
        let (mut fields, mut len) = ([Field::default(); MAX_FIELDS], 0);
        shape.value_fields(|field| {
            fields[len] = field;
            len += 1;
        });
        Self { fields, len }
    }

    /// The fields of every row of a tile.
    pub fn rows(&self) -> impl Iterator<Item = &[Field]> {
        self.fields[..self.len].chunk_by(|a, b| a.row() == b.row())
    }
}
