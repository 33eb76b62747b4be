//! Keys or values, and their bits.

use pq_core::sq;

/// Keys or values, and their bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Keys of some slots ([`Shape::slots`](pq_core::sq::Shape::slots)), the same for all heads.
    Keys {
        /// Bits of each byte lane of a tile.
        slots: usize,
    },
    /// Values of some bits per component, 1 to 8.
    Values {
        /// Bits of a component.
        bits: usize,
    },
}

impl Side {
    /// Definitions of the kernels for blocks of `block` tokens of `dim` components, or what they support.
    pub(super) fn defines(
        self,
        dim: usize,
        block: usize,
    ) -> Result<[(&'static str, usize); 3], &'static str> {
        let (bits_fit, bits) = match self {
            Self::Keys { slots } => ((1..=dim / 2).contains(&slots), ("KEY_SLOTS", slots)),
            Self::Values { bits } => ((1..=8).contains(&bits), ("VALUE_BITS", bits)),
        };
        if !matches!(dim, 64 | 96 | 128 | 256) {
            Err("64, 96, 128 or 256 components")
        } else if !bits_fit {
            Err("1 to 8 bits per component")
        } else if !block.is_multiple_of(sq::TILE) || !(1..=sq::MAX_BLOCK).contains(&block) {
            Err("blocks of a multiple of 32 tokens, at most 256")
        } else {
            Ok([("HEAD_DIM", dim), bits, ("BLOCK", block)])
        }
    }
}
