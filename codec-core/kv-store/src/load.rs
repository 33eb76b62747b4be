//! Loading a prefix: the choice of each chunk's encoding, and its transfer.

use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use codec_core::{Encoding, Frame};
use futures_util::{Stream, StreamExt, stream};
use kv_stream::check_tokens;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tracing::info;

use crate::manifest::piece_digest;
use crate::{AsyncStore, Error, Result, Space, StoredChunk};

/// The transfer of a chunk.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    /// Bytes of the frame.
    pub bytes: u64,
    /// From the first request to the last verified byte.
    pub time: Duration,
}

impl Transfer {
    /// Bytes per second; none for an empty transfer.
    #[must_use]
    pub fn throughput(&self) -> Option<f64> {
        let seconds = self.time.as_secs_f64();
        (self.bytes > 0 && seconds > 0.0).then(|| self.bytes as f64 / seconds)
    }
}

/// The inputs to the choice of a chunk's encoding.
#[derive(Clone, Copy, Debug)]
pub struct LoadProgress<'a> {
    /// All chunks of the prefix.
    pub chunks: &'a [StoredChunk],
    /// The index of the chunk to choose for. Those before it have been chosen.
    pub chunk: usize,
    /// Time since loading began.
    pub elapsed: Duration,
    /// The last completed transfer.
    pub last: Option<Transfer>,
}

/// A chunk with its chosen encoding.
#[derive(Clone, Debug)]
pub struct Arrival {
    /// Its index in the prefix.
    pub chunk: usize,
    /// Positions of its tokens.
    pub tokens: Range<usize>,
    /// The choice.
    pub encoding: Encoding,
    /// The verified bytes of that level's frame; none for text, from which the caller recomputes.
    pub frame: Bytes,
    /// Its transfer.
    pub transfer: Transfer,
}

impl AsyncStore {
    /// Fetches the chunks of a prefix in order, each in the encoding that `choose` returns just before its
    /// transfer begins. `ahead` chunks are in flight at once: 1 gives every choice the throughput of the
    /// previous chunk, more keep a link of high latency busy.
    ///
    /// The transfer of a chunk runs in its own tasks; dropping the stream cancels them.
    ///
    /// # Errors
    /// Items are [`Error::Argument`] for a level that does not exist; [`Error::Missing`], [`Error::Length`]
    /// and [`Error::Digest`] for frames that differ from those written; [`Error::Backend`] and
    /// [`Error::Timeout`]. The caller stops at the first error.
    pub fn load<'a>(
        &'a self,
        space: &'a Space,
        chunks: &'a [StoredChunk],
        ahead: usize,
        mut choose: impl FnMut(&LoadProgress<'_>) -> Encoding + Send + 'a,
    ) -> impl Stream<Item = Result<Arrival>> + Send + 'a {
        let begin = Instant::now();
        let last = Arc::new(Mutex::new(None::<Transfer>));
        let transfers = stream::iter(chunks.iter().enumerate()).map(move |(i, chunk)| {
            let known = last.lock().map_or(None, |last| *last);
            let progress = LoadProgress { chunks, chunk: i, elapsed: begin.elapsed(), last: known };
            let encoding = choose(&progress);
            let last = last.clone();
            async move {
                let start = Instant::now();
                let frame = match encoding {
                    Encoding::Text => Bytes::new(),
                    Encoding::Level(level) => self.frame(space, chunk, level, &Arc::default()).await?,
                };
                let transfer = Transfer { bytes: frame.len() as u64, time: start.elapsed() };
                if let (Encoding::Level(_), Ok(mut last)) = (encoding, last.lock()) {
                    *last = Some(transfer);
                }
                let tokens = chunk.key().tokens.clone();
                info!(chunk = i, ?encoding, bytes = transfer.bytes, time = ?transfer.time, "loaded");
                Ok(Arrival { chunk: i, tokens, encoding, frame, transfer })
            }
        });
        transfers.buffered(ahead.max(1))
    }

    /// The frame of a level, verified piece by piece as the pieces arrive. `received` counts its bytes.
    pub(crate) async fn frame(
        &self,
        space: &Space,
        chunk: &StoredChunk,
        level: usize,
        received: &Arc<AtomicU64>,
    ) -> Result<Bytes> {
        let manifest = chunk.manifest();
        let found =
            manifest.levels.get(level).ok_or(Error::Argument("a level that the chunk does not have"))?;
        let path = self.data_path(space.name(), manifest);
        let mut tasks = JoinSet::new();
        for (i, (range, expected)) in found.pieces().enumerate() {
            let (remote, path, received) = (self.remote().clone(), path.clone(), received.clone());
            tasks.spawn(async move {
                let verified = |bytes: &[u8]| piece_digest(bytes) == expected;
                remote.get_range(&path, &range, &received, verified).await.map(|piece| (i, piece))
            });
        }
        let mut pieces = vec![Bytes::new(); tasks.len()];
        while let Some(done) = tasks.join_next().await {
            let failed = |e: tokio::task::JoinError| Error::System { what: "a task", source: e.into() };
            let (i, piece) = done.map_err(failed)??;
            pieces[i] = piece;
        }
        let frame = match <[Bytes; 1]>::try_from(pieces) {
            Ok([piece]) => piece,
            Err(pieces) => pieces.concat().into(),
        };
        // The digest proves the bytes, not their writer.
        match check_tokens(Frame::parse(&frame, usize::MAX)?.info(), &chunk.key().tokens, level) {
            Ok(()) => Ok(frame),
            Err(_) => Err(Error::Digest { path: path.to_string() }),
        }
    }
}
