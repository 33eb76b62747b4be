//! A stored prefix as the link of a stream.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use kv_stream::{ChunkCost, Clock, Link, RealClock, RequestChunk, Speeds};
use tokio::task::AbortHandle;
use tracing::info;

use crate::{Error, KvStore, Result, Space, StoredChunk};

/// The chunks of a prefix as a [`Link`] of one request. Ranges of a frame are read in parallel on the threads
/// of the store.
pub struct StoreLink<'a> {
    store: &'a KvStore,
    space: &'a Space,
    chunks: &'a [StoredChunk],
    clock: RealClock,
    transfer: Option<Transfer>,
}

struct Transfer {
    total: u64,               // bytes
    received: Arc<AtomicU64>, // bytes so far
    task: AbortHandle,
    answer: Receiver<Result<Bytes>>,
    frame: Option<Result<Bytes>>, // once it has ended
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<'a> StoreLink<'a> {
    /// The chunks of a prefix, as [`KvStore::find`] returned them, on `clock`.
    #[must_use]
    pub const fn new(
        store: &'a KvStore,
        space: &'a Space,
        chunks: &'a [StoredChunk],
        clock: RealClock,
    ) -> Self {
        Self { store, space, chunks, clock, transfer: None }
    }

    /// The costs of its chunks on a machine of these speeds.
    #[must_use]
    pub fn costs(&self, speeds: &Speeds) -> Vec<ChunkCost> {
        let values = self.space.values_per_token();
        let cost = |chunk: &StoredChunk| speeds.cost(&chunk.key().tokens, values, chunk.sizes().collect());
        self.chunks.iter().map(cost).collect()
    }
}

impl Link for StoreLink<'_> {
    fn now(&self) -> f64 {
        self.clock.now()
    }

    fn start(&mut self, chunk: RequestChunk, level: usize) -> kv_stream::Result<()> {
        let stored = self.chunks.get(chunk.index);
        let Some((stored, total)) = stored.and_then(|stored| Some((stored, stored.sizes().nth(level)?)))
        else {
            return Err(kv_stream::Error::NoChunk { chunk: chunk.index, level });
        };
        let received = Arc::<AtomicU64>::default();
        let (space, stored, counter) = (*self.space, stored.clone(), received.clone());
        let (task, answer) = self
            .store
            .begin(|store| async move { store.frame(&space, &stored, level, &counter).await }.boxed());
        self.transfer = Some(Transfer { total, received, task, answer, frame: None });
        Ok(())
    }

    fn wait(&mut self, until: f64) -> kv_stream::Result<u64> {
        let left = Duration::try_from_secs_f64(until - self.now()).unwrap_or_default();
        let transfer = self.transfer.as_mut().ok_or(kv_stream::Error::NoTransfer)?;
        if transfer.frame.is_none() {
            match transfer.answer.recv_timeout(left) {
                // Damage to this chunk alone is an answer, too.
                Ok(Err(e)) if !e.is_damage() => return Err(e.into()),
                Ok(frame) => {
                    let bytes = frame.as_ref().map_or(0, Bytes::len);
                    info!(bytes, ok = frame.is_ok(), "transferred");
                    transfer.frame = Some(frame);
                }
                // Bytes count as received once they are verified; the last byte stands for the whole frame.
                Err(RecvTimeoutError::Timeout) => {
                    let received = transfer.received.load(Ordering::Relaxed);
                    return Ok(received.min(transfer.total.saturating_sub(1)));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(Error::Cancelled.into()),
            }
        }
        Ok(transfer.total)
    }

    fn cancel(&mut self) {
        self.transfer = None;
    }

    fn take(&mut self) -> kv_stream::Result<Bytes> {
        let frame = self.transfer.take().and_then(|mut transfer| transfer.frame.take());
        Ok(frame.ok_or(kv_stream::Error::NoTransfer)??)
    }
}
