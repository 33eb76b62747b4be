//! The transport of chunks.

use bytes::Bytes;

use crate::{RequestChunk, Result};

/// The transport of chunks: one transfer at a time.
pub trait Link {
    /// Seconds on the link's clock.
    fn now(&self) -> f64;

    /// Starts the transfer of a chunk at a level.
    ///
    /// # Errors
    /// Any error of the link.
    fn start(&mut self, chunk: RequestChunk, level: usize) -> Result<()>;

    /// Waits until the transfer has ended or the clock reaches `until`; returns the bytes received so far.
    ///
    /// # Errors
    /// Any error of the link.
    fn wait(&mut self, until: f64) -> Result<u64>;

    /// The bytes received so far of those that [`Self::take`] will return, in the same memory; none if they
    /// are available only at the end.
    ///
    /// # Errors
    /// Any error of the link.
    fn arrived(&self) -> Result<Option<Bytes>> {
        Ok(None)
    }

    /// Ends the transfer and drops its bytes.
    fn cancel(&mut self);

    /// The bytes of a completed transfer.
    ///
    /// # Errors
    /// [`Error::Damage`](crate::Error::Damage) to this chunk; any other error of the link.
    fn take(&mut self) -> Result<Bytes>;
}
