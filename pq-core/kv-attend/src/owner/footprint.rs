//! The memory of a cache by purpose.

use core::ops::AddAssign;

/// Bytes of a cache by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// The representation of the tokens: rows, codes, bitstreams, scales, norms, codebooks trained for this
    /// sequence.
    pub kept: usize,
    /// Exact rows of which a step reads some (PQCache), in files or in memory of the host.
    pub offloaded: usize,
    /// Copies that could be recomputed: decoded rows (CacheGen), cached blocks of offloaded rows.
    pub working: usize,
    /// Computed once per model and shared by all its sequences: codebooks, rotations, probability models.
    pub shared: usize,
}

impl AddAssign for Footprint {
    fn add_assign(&mut self, other: Self) {
        self.kept += other.kept;
        self.offloaded += other.offloaded;
        self.working += other.working;
        self.shared += other.shared;
    }
}
