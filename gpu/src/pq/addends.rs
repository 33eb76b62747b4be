//! Terms of scores that are computed before attention, in the layout of its tiles.

use half::f16;

use crate::pointer::DevicePtr;

/// Terms that are added to the scores of coded tokens, such as those of a mean that was subtracted from the
/// keys ([`RopeMeanScores`](super::RopeMeanScores)).
///
/// They are in units of the final score: any scale is included, and weights are powers of e. An addend is
/// rounded to `f16` once, when it is written; the addition is in `f32`.
#[derive(Clone, Copy, Debug)]
pub struct Addends {
    /// `f16` (batch, heads, tiles, group, [`TILE`](super::TILE)), the tokens of a tile in order. Kernels read
    /// whole tiles, up to a sequence's length. Addends are contiguous even if the codes are in pages.
    pub values: DevicePtr<f16>,
    /// Capacity of a sequence in tiles of [`TILE`](super::TILE) tokens.
    pub tiles: usize,
}
