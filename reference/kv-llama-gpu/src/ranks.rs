//! Tensor parallelism: each rank has a device, its heads and its part of the feed-forward block.
//!
//! A layer has two exchanges, the sums over ranks of the products with `W_O` and `W_down`, and a step one
//! more, the parts of the logits. Caches are of a head each, so a rank's cache is that of a smaller model, of
//! any method; of fewer KV heads than ranks, several ranks hold the same one, each for its own query heads.
//! Every rank runs the same program on the same tokens ([`Lockstep`]); after an exchange all hold the same
//! numbers, so all pick the same token.

mod batches;
mod ends;
mod host_memory;
mod lockstep;
#[cfg(feature = "nccl")]
mod nccl;
mod rank;

use std::ops::Range;

use cudarc::driver::sys::CUstream;
use kv_gpu::DevicePtr;
use kv_model::Config;

use crate::{Error, Result};
pub use batches::Batches;
pub use host_memory::HostMemory;
pub use lockstep::{Lockstep, RankError};
#[cfg(feature = "nccl")]
pub use nccl::Nccl;
pub use rank::{Exchange, Rank};

/// One of the equal parts of a model that ranks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    rank: usize,
    ranks: usize,
}

impl Shard {
    /// The model in one piece.
    pub const WHOLE: Self = Self { rank: 0, ranks: 1 };

    /// Part `rank` of `ranks`.
    ///
    /// # Errors
    /// [`Error::Argument`] unless `rank < ranks`.
    pub fn new(rank: usize, ranks: usize) -> Result<Self> {
        match rank < ranks {
            true => Ok(Self { rank, ranks }),
            false => Err(Error::Argument(format!("rank {rank} of {ranks}"))),
        }
    }

    /// Its number.
    #[must_use]
    pub const fn rank(self) -> usize {
        self.rank
    }

    /// How many there are.
    #[must_use]
    pub const fn ranks(self) -> usize {
        self.ranks
    }

    /// The shape of the part: its heads and its part of the feed-forward block, over all of the residual
    /// stream and of the vocabulary.
    ///
    /// # Errors
    /// [`Error::Argument`] where query heads, the feed-forward block or the vocabulary are no multiple of the
    /// ranks, and where neither the KV heads are a multiple of the ranks nor the ranks one of the KV heads.
    pub fn config(self, config: &Config) -> Result<Config> {
        let (ranks, kv_heads) = (self.ranks, config.n_kv_heads);
        let refused = |size: usize, what: &str| {
            Err(Error::Argument(format!("{size} {what} are not divisible among {ranks} ranks")))
        };
        if !kv_heads.is_multiple_of(ranks) && !ranks.is_multiple_of(kv_heads) {
            return refused(kv_heads, "KV heads");
        }
        let sizes = [
            (config.n_heads, "query heads"),
            (config.intermediate_size, "components of the feed-forward block"),
            (config.vocab_size, "tokens of the vocabulary"),
        ];
        if let Some((size, what)) = sizes.into_iter().find(|(size, _)| !size.is_multiple_of(ranks)) {
            return refused(size, what);
        }
        Ok(Config {
            n_heads: config.n_heads / ranks,
            n_kv_heads: self.kv_heads(kv_heads).len(),
            intermediate_size: config.intermediate_size / ranks,
            ..config.clone()
        })
    }

    /// Its range of `len` items, a multiple of the ranks: query heads, for example.
    #[must_use]
    pub const fn of(self, len: usize) -> Range<usize> {
        let part = len / self.ranks;
        self.rank * part..(self.rank + 1) * part
    }

    /// Its range of `n` KV heads, a multiple of the ranks. Of fewer heads, of which the ranks are a multiple,
    /// the one that its query heads attend to: successive ranks hold the same one.
    #[must_use]
    pub const fn kv_heads(self, n: usize) -> Range<usize> {
        if n >= self.ranks {
            return self.of(n);
        }
        let head = self.rank * n / self.ranks;
        head..head + 1
    }
}

/// Exchanges between the ranks of a model, on a rank's stream. An engine with a communicator of its own
/// implements it.
pub trait Communicator: Send + Sync {
    /// This rank.
    fn shard(&self) -> Shard;

    /// Enqueues the sum over all ranks of `len` floats, in place. All ranks get the same bits.
    ///
    /// # Errors
    /// [`Error::Ranks`].
    ///
    /// # Safety
    /// The [contract of a launch](DevicePtr#launches) holds. All ranks exchange the same lengths in the same
    /// order.
    unsafe fn sum(&self, stream: CUstream, data: DevicePtr<f32>, len: usize) -> Result<()>;

    /// Enqueues the exchange of rows, (rows, len): every rank has [its part](Shard::of) of each row, and gets
    /// the others.
    ///
    /// # Errors
    /// [`Error::Ranks`].
    ///
    /// # Safety
    /// As [`Self::sum`]; `len` is a multiple of the ranks.
    unsafe fn gather(&self, stream: CUstream, data: DevicePtr<f32>, rows: usize, len: usize) -> Result<()>;

    /// Whether exchanges can be part of a graph. Steps are launched one kernel after the other if they
    /// cannot.
    fn is_capturable(&self) -> bool;

    /// Ends this rank's exchanges, pending ones too, with an error. Called from another thread when another
    /// rank has failed.
    fn abort(&self);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kv_heads_are_those_of_the_query_heads() {
        for (heads, kv_heads) in [(32, 8), (64, 8), (32, 32), (16, 1), (16, 2), (96, 8)] {
            for ranks in [1, 2, 4, 8, 16].into_iter().filter(|ranks| heads % ranks == 0) {
                for rank in 0..ranks {
                    let shard = Shard::new(rank, ranks).unwrap();
                    let (own, group) = (shard.kv_heads(kv_heads), heads / kv_heads);
                    let read: Vec<usize> = shard.of(heads).map(|head| head / group).collect();
                    assert_eq!((own.start, own.end - 1), (read[0], read[read.len() - 1]), "{shard:?}");
                }
            }
        }
    }
}
