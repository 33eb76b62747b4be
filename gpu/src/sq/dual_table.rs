//! The dual of the keys' basis, as the kernel reads it.

use crate::Error;
use crate::launch::Operation;

/// Components of a warp's product, and numbers of the waves of a position in a step of it.
const TILE: usize = 16;
/// Lanes of a warp.
const LANES: usize = 32;
/// Numbers that a lane reads together: of two components, those of two pairs.
const OF_LANE: usize = 8;

const OPERATION: Operation = Operation("sq::DualTable");

/// The layout of the dual bases that [`Queries`](super::Queries) reads, one for every head.
///
/// The product of a query with the dual of the basis in which the keys of a head are coded has with the
/// components of a key the product that the query has with the key. Columns are divided by a power of two, so
/// that their largest magnitude is in 1 to 2; the logarithms (to base 2) of these follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DualTable {
    dim: usize,
}

impl DualTable {
    /// The layout for heads of `dim` components.
    #[must_use]
    pub const fn new(dim: usize) -> Self {
        Self { dim }
    }

    /// Elements of a table.
    #[must_use]
    pub const fn table_len(&self) -> usize {
        self.dim * self.dim + self.dim
    }

    /// Writes the table of a head.
    ///
    /// # Shapes
    /// `dual` (dim, dim): row `i` has what component `i` of a query adds to every product; `table`
    /// [`Self::table_len`], fully written.
    /// # Errors
    /// [`Error::Argument`] for other lengths, sizes that are no multiple of 16, or numbers that are not
    /// finite.
    pub fn table_into(&self, dual: &[f32], table: &mut [f32]) -> Result<(), Error> {
        let dim = self.dim;
        if !dim.is_multiple_of(TILE) || (dual.len(), table.len()) != (dim * dim, self.table_len()) {
            let (map, len) = (dual.len(), table.len());
            return Err(OPERATION.error(format!("{map} elements and a table of {len} for {self:?}")));
        }
        if !dual.iter().all(|x| x.is_finite()) {
            return Err(OPERATION.error("a basis with numbers that are not finite"));
        }
        let (numbers, logs) = table.split_at_mut(dim * dim);
        for (column, log) in logs.iter_mut().enumerate() {
            let largest = dual.iter().skip(column).step_by(dim).fold(0.0_f32, |max, x| max.max(x.abs()));
            *log = floor_log2(largest);
        }
        for (i, number) in numbers.iter_mut().enumerate() {
            let (row, column) = self.place(i);
            *number = (f64::from(dual[row * dim + column]) * f64::from(-logs[column]).exp2()) as f32;
        }
        Ok(())
    }

    /// The row and the column of a number: `fill_maps` of the kernel reads them in this order.
    const fn place(&self, i: usize) -> (usize, usize) {
        let (of_lane, lane) = (i % OF_LANE, i / OF_LANE % LANES);
        let of_parts = i / (OF_LANE * LANES);
        let (step, part) = (of_parts / (self.dim / TILE), of_parts % (self.dim / TILE));
        let (g, l) = (lane / 4, lane % 4);
        let pair = step * TILE / 2 + of_lane / 2 % 2 * 4 + l;
        let column = part * TILE + g / 2 * 4 + of_lane / 4 * 2 + g % 2;
        (of_lane % 2 * (self.dim / 2) + pair, column)
    }
}

/// The largest integer that does not exceed the logarithm to base 2 of a magnitude, at least that of the
/// smallest normal number; 0 for zero.
fn floor_log2(magnitude: f32) -> f32 {
    let exponent = (magnitude.to_bits() >> 23) as i32;
    if magnitude == 0.0 { 0.0 } else { (exponent.max(1) - 127) as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_of_a_basis_is_in_its_table_once() {
        for dim in [64, 96, 128, 256] {
            let table = DualTable::new(dim);
            let mut places: Vec<_> = (0..dim * dim).map(|i| table.place(i)).collect();
            places.sort_unstable();
            assert_eq!(places, (0..dim * dim).map(|i| (i / dim, i % dim)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn columns_are_near_to_one() {
        let (dim, table) = (64, DualTable::new(64));
        let size = |column: usize| (4.0 * column as f32 - 128.0).exp2();
        let element = |i: usize| size(i % dim) * if i / dim == i % dim { 1.5 } else { 0.25 };
        let dual: Vec<f32> = (0..dim * dim).map(element).collect();
        let mut numbers = vec![f32::NAN; table.table_len()];
        table.table_into(&dual, &mut numbers).unwrap();
        for (i, number) in numbers[..dim * dim].iter().enumerate() {
            let (row, column) = table.place(i);
            // Below the smallest normal number the factor is larger than the column.
            let factor = size(column).max(f32::MIN_POSITIVE);
            assert_eq!(*number, dual[row * dim + column] / factor, "{row}, {column}");
        }
        for (column, log) in numbers[dim * dim..].iter().enumerate() {
            assert_eq!(*log, (4.0 * column as f32 - 128.0).max(-126.0));
        }
    }

    #[test]
    fn bases_of_other_sizes_are_errors() {
        let table = DualTable::new(64);
        let mut numbers = vec![0.0; table.table_len()];
        assert!(table.table_into(&[0.0; 64], &mut numbers).is_err());
        assert!(table.table_into(&[0.0; 64 * 64], &mut numbers[1..]).is_err());
        assert!(table.table_into(&[f32::NAN; 64 * 64], &mut numbers).is_err());
        assert!(DualTable::new(8).table_into(&[0.0; 64], &mut [0.0; 72]).is_err());
        assert!(table.table_into(&[0.0; 64 * 64], &mut numbers).is_ok());
        assert!(numbers.iter().all(|&x| x == 0.0));
    }
}
