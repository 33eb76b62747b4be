//! How many blocks share a row of a selection kernel.

use crate::Error;
use crate::device::Kernel;

/// Cluster sizes of a kernel with a cluster of blocks for each row, and how many clusters of each size run at
/// the same time. Largest first.
pub(super) struct Clusters(Vec<(usize, usize)>);

impl Clusters {
    /// For a kernel with blocks of `threads` threads; `sizes` in blocks, largest first, are those that the
    /// kernel supports in addition to one.
    pub(super) fn new(
        kernel: &Kernel,
        threads: u32,
        sizes: impl IntoIterator<Item = usize>,
    ) -> Result<Self, Error> {
        let with_active = |blocks| Ok((blocks, kernel.active_clusters(blocks as u32, threads)?));
        Ok(Self(sizes.into_iter().map(with_active).collect::<Result<_, Error>>()?))
    }

    /// Whether the device runs clusters of `blocks` blocks.
    pub(super) fn run_with(&self, blocks: usize) -> bool {
        blocks == 1 || self.0.iter().any(|&(size, active)| size == blocks && active > 0)
    }

    /// The largest size with which the clusters of all rows run at the same time, otherwise one block.
    pub(super) fn largest(&self, rows: usize) -> usize {
        self.0.iter().find(|&&(_, active)| rows <= active).map_or(1, |&(blocks, _)| blocks)
    }
}

#[cfg(test)]
mod tests {
    use super::Clusters;

    #[test]
    fn more_rows_take_smaller_clusters() {
        let clusters = Clusters(vec![(16, 0), (8, 16), (4, 32), (2, 66)]); // an H100 without clusters of 16
        for (rows, blocks) in [(1, 8), (16, 8), (17, 4), (32, 4), (33, 2), (66, 2), (67, 1), (10_000, 1)] {
            assert_eq!(clusters.largest(rows), blocks, "{rows} rows");
        }
        for (blocks, runs) in [(16, false), (8, true), (3, false), (1, true)] {
            assert_eq!(clusters.run_with(blocks), runs, "{blocks} blocks");
        }
    }
}
