//! The store for callers that do not run tokio, or whose threads may block.

use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use codec_core::{Encoding, Profile};
use futures_util::StreamExt;
use futures_util::future::{BoxFuture, Either, select};
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;

use crate::{
    Arrival, AsyncStore, Check, ChunkId, ChunkKey, Error, ListedChunk, Listing, LoadProgress, Options,
    Orphan, ProfileId, Put, Result, Space, StoredChunk,
};

/// Caches in an object store. Calls block; they may be made from any thread, including one that runs tokio.
#[derive(Debug)]
pub struct KvStore {
    store: AsyncStore,
    runtime: Option<Runtime>, // taken when dropped
    handle: Handle,
    cancel: Cancel,
}

/// Ends the calls of a store, from another thread.
#[derive(Clone, Debug)]
pub struct Cancel(Arc<watch::Sender<bool>>);

impl Cancel {
    /// Makes blocked calls, and all later ones, return [`Error::Cancelled`].
    pub fn cancel(&self) {
        self.0.send_replace(true);
    }

    async fn cancelled(&self) {
        // The sender lives as long as `self`, so this cannot fail.
        let _ = self.0.subscribe().wait_for(|cancelled| *cancelled).await;
    }
}

/// Threads that move and verify bytes.
const THREADS: usize = 2;

impl KvStore {
    /// Opens the store that a URL names, also a folder that does not exist yet: see [`open`](crate::open).
    ///
    /// # Errors
    /// [`Error::Url`]; [`Error::System`] if no threads can be started.
    pub fn open(url: &str, options: Options) -> Result<Self> {
        let (store, root) = crate::open(url, true)?;
        Self::new(AsyncStore::new(store, root, options))
    }

    /// As [`Self::open`], but a folder must exist.
    ///
    /// # Errors
    /// As there.
    pub fn open_existing(url: &str, options: Options) -> Result<Self> {
        let (store, root) = crate::open(url, false)?;
        Self::new(AsyncStore::new(store, root, options))
    }

    /// The store, with its own threads.
    ///
    /// # Errors
    /// [`Error::System`] if no threads can be started.
    pub fn new(store: AsyncStore) -> Result<Self> {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(THREADS).thread_name("kv-store").enable_all().build();
        let runtime = runtime.map_err(|source| Error::System { what: "threads", source })?;
        let handle = runtime.handle().clone();
        Ok(Self {
            store,
            runtime: Some(runtime),
            handle,
            cancel: Cancel(Arc::new(watch::Sender::new(false))),
        })
    }

    /// A handle that cancels the calls of this store.
    #[must_use]
    pub fn cancel(&self) -> Cancel {
        self.cancel.clone()
    }

    /// The longest stored prefix of `tokens`: see [`AsyncStore::find`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn find(&self, space: &Space, tokens: &[u32]) -> Result<Vec<StoredChunk>> {
        self.wait(self.store.find(space, tokens))
    }

    /// As [`Self::find`], and the first damage: see [`AsyncStore::find_or_damage`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn find_or_damage(&self, space: &Space, tokens: &[u32]) -> Result<(Vec<StoredChunk>, Option<Error>)> {
        self.wait(self.store.find_or_damage(space, tokens))
    }

    /// A chunk, if it is stored: see [`AsyncStore::stat`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn stat(&self, space: &Space, key: ChunkKey) -> Result<Option<StoredChunk>> {
        self.wait(self.store.stat(space, key))
    }

    /// The verified frame of a level: see [`AsyncStore::load`].
    pub(crate) fn frame(&self, space: &Space, chunk: &StoredChunk, level: usize) -> Result<Bytes> {
        self.wait(async { self.store.frame(space, chunk, level, &Arc::default()).await })
    }

    /// Stores a chunk: see [`AsyncStore::put_chunk`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn put_chunk(&self, space: &Space, key: &ChunkKey, object: Bytes) -> Result<Put> {
        self.wait(self.store.put_chunk(space, key, object))
    }

    /// Stores a chunk, also over a damaged one: see [`AsyncStore::replace_chunk`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn replace_chunk(&self, space: &Space, key: &ChunkKey, object: Bytes) -> Result<()> {
        self.wait(self.store.replace_chunk(space, key, object))
    }

    /// Deletes a chunk: see [`AsyncStore::delete`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn delete(&self, space: ChunkId, id: ChunkId) -> Result<()> {
        self.wait(self.store.delete(space, id))
    }

    /// The stored profile of this name: see [`AsyncStore::profile`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn stored_profile(&self, id: ProfileId) -> Result<Option<Profile>> {
        self.wait(self.store.profile(id))
    }

    /// The profiles that cannot be used: see [`AsyncStore::faulty_profiles`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn faulty_profiles(&self) -> Result<Vec<(ProfileId, Error)>> {
        self.wait(self.store.faulty_profiles())
    }

    /// The profile of this name: the stored one, or, if there is none or it is damaged, that of `make`, which
    /// is then stored.
    ///
    /// # Errors
    /// As [`AsyncStore::put_profile`]; the errors of `make`; [`Error::Cancelled`].
    pub fn profile<E: From<Error>>(
        &self,
        id: ProfileId,
        make: impl FnOnce() -> Result<Profile, E>,
    ) -> Result<Profile, E> {
        match self.stored_profile(id) {
            Ok(Some(stored)) => Ok(stored),
            Err(e) if !e.is_torn() => Err(e.into()),
            _ => {
                let made = make()?;
                Ok(self.wait(self.store.put_profile(id, &made))?)
            }
        }
    }

    /// The names of the spaces: see [`AsyncStore::spaces`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn spaces(&self) -> Result<Vec<ChunkId>> {
        self.wait(self.store.spaces())
    }

    /// Writes the description of a space: see [`AsyncStore::describe`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn describe(&self, space: ChunkId, about: &str) -> Result<()> {
        self.wait(self.store.describe(space, about))
    }

    /// The description of a space: see [`AsyncStore::about`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn about(&self, space: ChunkId) -> Result<Option<String>> {
        self.wait(self.store.about(space))
    }

    /// Deletes it: see [`AsyncStore::delete_about`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn delete_about(&self, space: ChunkId) -> Result<()> {
        self.wait(self.store.delete_about(space))
    }

    /// Whether a failure concerns one object: see [`AsyncStore::isolate`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn isolate(&self, e: Error) -> Result<Error> {
        self.wait(self.store.isolate(e))
    }

    /// The contents of a space: see [`AsyncStore::list`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn list(&self, space: ChunkId) -> Result<Listing> {
        self.wait(self.store.list(space))
    }

    /// The indices of damaged chunks: see [`AsyncStore::damaged`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn damaged(&self, space: &Space, chunks: &[StoredChunk], check: Check) -> Result<Vec<usize>> {
        self.wait(self.store.damaged(space, chunks, check))
    }

    /// Verifies the frames of a chunk: see [`AsyncStore::verify`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn verify(&self, space: ChunkId, chunk: &ListedChunk) -> Result<()> {
        self.wait(self.store.verify(space, chunk))
    }

    /// Deletes a space: see [`AsyncStore::delete_space`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn delete_space(&self, space: ChunkId) -> Result<()> {
        self.wait(self.store.delete_space(space))
    }

    /// Deletes old orphans: see [`AsyncStore::sweep`].
    ///
    /// # Errors
    /// As there; [`Error::Cancelled`].
    pub fn sweep(&self, orphans: &[Orphan], age: Duration) -> Result<usize> {
        self.wait(self.store.sweep(orphans, age))
    }

    /// Fetches the chunks of a prefix as [`AsyncStore::load`] does and passes them to `take` on this thread,
    /// while the next ones are transferred. At most two are queued.
    ///
    /// # Errors
    /// As there, [`Error::Cancelled`], and the errors of `take`; transfers then end.
    pub fn load<E: From<Error>>(
        &self,
        space: &Space,
        chunks: &[StoredChunk],
        ahead: usize,
        choose: impl FnMut(&LoadProgress<'_>) -> Encoding + Send,
        mut take: impl FnMut(Arrival) -> Result<(), E>,
    ) -> Result<(), E> {
        let (send, receive) = sync_channel(1);
        let (stop, stopped) = oneshot::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                self.handle.block_on(async {
                    let mut arrivals = pin!(self.store.load(space, chunks, ahead, choose));
                    let cancelled = pin!(self.cancel.cancelled());
                    let mut end = pin!(select(cancelled, stopped));
                    loop {
                        let next = match select(end.as_mut(), arrivals.next()).await {
                            Either::Left((Either::Left(_), _)) => Some(Err(Error::Cancelled)),
                            Either::Left(_) => None,
                            Either::Right((next, _)) => next,
                        };
                        let Some(next) = next else { break };
                        let last = next.is_err();
                        if send.send(next).is_err() || last {
                            break;
                        }
                    }
                });
            });
            let taken = receive.iter().try_for_each(|arrival| take(arrival?));
            // The other thread may be blocked on a full channel, or on a transfer.
            drop((receive, stop));
            taken
        })
    }

    /// Starts a call on the threads of the store. The answer is sent to the channel, as is
    /// [`Error::Cancelled`] when the store is cancelled.
    pub(crate) fn begin<T: Send + 'static>(
        &self,
        call: impl FnOnce(AsyncStore) -> BoxFuture<'static, Result<T>>,
    ) -> (AbortHandle, Receiver<Result<T>>) {
        let (send, receive) = sync_channel(1);
        let (call, cancel) = (call(self.store.clone()), self.cancel());
        let task = self.handle.spawn(async move {
            let result = match select(pin!(cancel.cancelled()), call).await {
                Either::Left(_) => Err(Error::Cancelled),
                Either::Right((result, _)) => result,
            };
            // The receiver may be gone.
            let _ = send.send(result);
        });
        (task.abort_handle(), receive)
    }

    /// Runs a call to its end, or until the store is cancelled.
    pub(crate) fn wait<T: Send>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let call = async {
            match select(pin!(self.cancel.cancelled()), pin!(call)).await {
                Either::Left(_) => Err(Error::Cancelled),
                Either::Right((result, _)) => result,
            }
        };
        // A separate thread: `block_on` panics on one that already runs tokio.
        thread::scope(|scope| match scope.spawn(|| self.handle.block_on(call)).join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    }
}

/// Dropping a runtime blocks, which panics on a thread that runs tokio.
impl Drop for KvStore {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
