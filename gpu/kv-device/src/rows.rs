//! Tokens of a batch, and where their rows are.

use cudarc::driver::result;
use kv_attend::owner::Side;
use kv_gpu::{AnyElement, DevicePtr};

use crate::Result;
use crate::gpu::{Gpu, driver};

/// The sequences of a batch in device memory, `u32` (batch,) each: the state of the next step, or of the one
/// that runs. The engine advances it; all are constant from a step's first launch to its last.
#[derive(Clone, Copy, Debug)]
pub struct Sequences {
    /// Position of the token that the step feeds: the number of tokens before it.
    pub positions: DevicePtr<u32>,
    /// Exact tokens, this one included ([`SlotMapping::exact`]): the first `sinks` and the last ones.
    pub exact_lengths: DevicePtr<u32>,
    /// Tokens that are not exact.
    pub coded_lengths: DevicePtr<u32>,
}

impl Sequences {
    /// The positions of `batch` sequences. Waits for the stream.
    ///
    /// # Safety
    /// The device has as many.
    pub(crate) unsafe fn read_positions(&self, gpu: &Gpu, batch: usize) -> Result<Vec<usize>> {
        let mut positions = vec![0_u32; batch];
        gpu.bind_to_thread()?;
        // SAFETY: the caller's contract; they are plain numbers.
        unsafe { result::memcpy_dtoh_async(&mut positions, self.positions.address(), gpu.stream()) }
            .map_err(|e| driver("copy positions to the host", e))?;
        gpu.synchronize()?;
        Ok(positions.into_iter().map(|position| position as usize).collect())
    }
}

/// Consecutive tokens of one sequence of a batch that run at once: a prompt, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The sequence.
    pub sequence: usize,
    /// Position of the first token: the number of tokens before the chunk.
    pub position: usize,
    /// Tokens.
    pub count: usize,
}

impl Chunk {
    /// Length of the sequence, the chunk included.
    #[must_use]
    pub const fn end(&self) -> usize {
        self.position + self.count
    }
}

/// Rows of a layer's exact tokens: elements (pages or batch, heads, capacity, head_dim).
#[derive(Clone, Copy, Debug)]
pub struct Rows {
    /// Keys, rotated.
    pub keys: DevicePtr<AnyElement>,
    /// Values.
    pub values: DevicePtr<AnyElement>,
    /// Rows per head, in a sequence or a page.
    pub capacity: usize,
}

impl Rows {
    /// The rows of one side.
    #[must_use]
    pub const fn side(&self, side: Side) -> DevicePtr<AnyElement> {
        match side {
            Side::Keys => self.keys,
            Side::Values => self.values,
        }
    }
}

/// Which tokens of a sequence have exact rows, and the slot of each: its row of a head of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMapping {
    /// First tokens, whose rows stay exact.
    pub sinks: usize,
    /// Exact rows that later tokens share; 0 if all tokens are sinks.
    pub ring: usize,
    /// Tokens that leave these rows at once. One by one, the rows are a ring; otherwise those behind the
    /// tokens that have left move up.
    pub leaving: usize,
}

impl SlotMapping {
    /// The row of a sequence's last token, at a position, of a head: sinks keep theirs, later tokens share
    /// the rows after them.
    #[must_use]
    pub fn slot(&self, position: usize) -> usize {
        match position.checked_sub(self.sinks) {
            Some(after) if self.ring > 0 => {
                let moved = if self.leaving > 1 { self.coded(position + 1) } else { 0 };
                self.sinks + (after - moved) % self.ring
            }
            _ => position,
        }
    }

    /// Exact tokens in a sequence of `tokens`.
    #[must_use]
    pub fn exact(&self, tokens: usize) -> usize {
        tokens - self.coded(tokens)
    }

    /// Tokens after the sinks that are not exact in a sequence of `tokens`.
    #[must_use]
    pub const fn coded(&self, tokens: usize) -> usize {
        let kept = self.sinks + self.ring + 1 - self.leaving; // at least
        tokens.saturating_sub(kept) / self.leaving * self.leaving
    }
}

#[cfg(test)]
mod tests {
    use super::SlotMapping;

    #[test]
    fn exact_rows_hold_sinks_and_the_last_tokens() {
        for (sinks, recent, leaving) in [(3, 5, 1), (0, 1, 1), (3, 5, 8), (0, 1, 4), (2, 9, 4)] {
            let mapping = SlotMapping { sinks, ring: recent + leaving - 1, leaving };
            let mut rows = vec![usize::MAX; sinks + mapping.ring];
            for position in 0..100 {
                let (left, coded) = (mapping.coded(position), mapping.coded(position + 1));
                if leaving > 1 && coded > left {
                    rows.copy_within(sinks + leaving.., sinks);
                }
                rows[mapping.slot(position)] = position;
                let mut exact = rows[..mapping.exact(position + 1)].to_vec();
                exact.sort_unstable();
                let expected: Vec<usize> =
                    (0..sinks.min(position + 1)).chain(sinks + coded..=position).collect();
                assert_eq!(exact, expected, "{mapping:?} at {position}");
                assert!(
                    coded % leaving == 0 && position + 1 - sinks.min(position + 1) - coded < recent + leaving
                );
            }
        }
    }
}
