//! Checked sizes of a launch: 32-bit arguments and the grid.

use crate::Error;

/// Maximum number of blocks of a grid along x, y and z.
const MOST_BLOCKS: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Blocks of a launch along x, y and z, within the limits of CUDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid(pub(crate) [u32; 3]);

impl Grid {
    /// The grid of a launch of an [`own`](crate::Program::own) kernel.
    ///
    /// # Errors
    /// [`Error::Argument`] for more blocks than a launch can have.
    pub fn new([x, y, z]: [usize; 3]) -> Result<Self, Error> {
        Operation("launch").grid(&[("blocks along x", x), ("blocks along y", y), ("blocks along z", z)])
    }
}

/// The name of an operation, for errors about its arguments.
#[derive(Clone, Copy)]
pub(crate) struct Operation(pub(crate) &'static str);

impl Operation {
    pub(crate) fn error(self, problem: impl Into<String>) -> Error {
        Error::Argument { operation: self.0, problem: problem.into() }
    }

    /// Converts a size to 32 bits, as kernels take it.
    pub(crate) fn in_32_bits(self, what: &str, size: usize) -> Result<u32, Error> {
        self.at_most(u32::MAX, what, size)
    }

    /// The grid of a launch, from the name and number of the blocks along each axis. Missing axes have one
    /// block.
    pub(crate) fn grid(self, axes: &[(&str, usize)]) -> Result<Grid, Error> {
        let mut grid = [1; 3];
        for ((blocks, most), &(what, size)) in grid.iter_mut().zip(MOST_BLOCKS).zip(axes) {
            *blocks = self.at_most(most, what, size)?;
        }
        Ok(Grid(grid))
    }

    /// Converts a size that must not exceed `most`.
    pub(crate) fn at_most(self, most: u32, what: &str, size: usize) -> Result<u32, Error> {
        let fits = u32::try_from(size).ok().filter(|&size| size <= most);
        fits.ok_or_else(|| self.error(format!("{size} {what}, but at most {most} fit a launch")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPERATION: Operation = Operation("pq::Scan");

    #[test]
    fn grids_end_where_cuda_says() {
        let most = [i32::MAX as usize, 65_535, 65_535];
        for axis in 0..3 {
            let of = |size: usize| {
                let mut axes = [("chunks", 1), ("heads", 1), ("sequences", 1)];
                axes[axis].1 = size;
                OPERATION.grid(&axes)
            };
            let mut expected = [1; 3];
            expected[axis] = most[axis] as u32;
            assert_eq!(of(most[axis]), Ok(Grid(expected)));
            for size in [most[axis] + 1, 1 << 32, (1 << 32) + 1, usize::MAX] {
                let error = of(size).map_err(|error| error.to_string());
                let what = ["chunks", "heads", "sequences"][axis];
                let problem = format!("pq::Scan: {size} {what}, but at most {} fit a launch", most[axis]);
                assert_eq!(error, Err(problem));
            }
        }
        assert_eq!(OPERATION.grid(&[("heads", 3)]), Ok(Grid([3, 1, 1])));
    }

    #[test]
    fn sizes_end_at_32_bits() {
        assert_eq!(OPERATION.in_32_bits("tokens", 0), Ok(0));
        assert_eq!(OPERATION.in_32_bits("tokens", u32::MAX as usize), Ok(u32::MAX));
        assert!(matches!(OPERATION.in_32_bits("tokens", 1 << 32), Err(Error::Argument { .. })));
    }
}
