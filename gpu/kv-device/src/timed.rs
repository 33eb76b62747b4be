//! Control over a cache for the timing of steps.

use crate::Result;
use crate::gpu::Gpu;

/// What the timing of steps needs of a cache: any length without a prefill, and control over what overlaps.
pub trait Timed {
    /// Fills the first `tokens` of every sequence with hashed rows or codes, to time steps at that length
    /// without a prefill.
    ///
    /// # Errors
    /// [`Error::Gpu`](crate::Error::Gpu); [`Error::Argument`](crate::Error::Argument) for more tokens than the
    /// capacity.
    fn fill_random(&mut self, gpu: &Gpu, tokens: usize) -> Result<()>;

    /// Bytes that a step reads with `tokens` in every sequence, at most the capacity.
    fn step_bytes(&self, tokens: usize) -> usize;

    /// Makes steps wait for the encoding of tokens that leave the window, for timing. Call it before the
    /// first step.
    fn encode_synchronously(&mut self) {}

    /// Counts this share of the rows that a step would read from the host as cache hits, for timing: random
    /// queries have no locality. With a share above 0, results are wrong. It applies to graphs that are
    /// captured later.
    fn force_hits(&mut self, _share: f32) {}
}
