//! An object store whose requests have timeouts, are retried, and return the requested bytes or an error.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::path::Path;
use object_store::{
    GetOptions, GetRange, GetResult, GetResultPayload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode,
    PutPayload,
};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tracing::{debug, warn};

use crate::outage::Outage;
use crate::{Error, Result, backend_text};

/// Limits on requests.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// How long the store may be away: the time in which requests fail or get no answer before the first one
    /// is given up. Later requests have one short attempt each, until time without failures restores it.
    pub retry: Duration,
    /// Called once in an outage of some seconds, with the error and the time that is left.
    pub on_outage: Option<fn(&Error, Duration)>,
    /// Attempts of a read whose bytes are wrong, at least one: a read may be stale, or corrupted in transit.
    pub attempts: u32,
    /// Time limit of an attempt, in addition to that of its bytes.
    pub timeout: Duration,
    /// Bytes per second below which an attempt is abandoned.
    pub least_rate: u64,
    /// Backoff before the second attempt. It doubles with each attempt, up to `most_backoff`; a random part
    /// of up to a half is subtracted.
    pub backoff: Duration,
    /// Maximum backoff.
    pub most_backoff: Duration,
    /// Maximum concurrent requests.
    pub parallel: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            retry: Duration::from_secs(60),
            on_outage: None,
            attempts: 5,
            timeout: Duration::from_secs(10),
            least_rate: 1 << 20,
            backoff: Duration::from_millis(100),
            most_backoff: Duration::from_secs(5),
            parallel: 16,
        }
    }
}

/// Time limit of an attempt, without that of its bytes, if the store has been away for too long.
const LAST: Duration = Duration::from_secs(1);

#[derive(Clone, Debug)]
pub(crate) struct Remote {
    store: Arc<dyn ObjectStore>,
    root: Path,
    options: Options,
    permits: Arc<Semaphore>,
    outage: Arc<Outage>,
}

impl Remote {
    pub fn new(store: Arc<dyn ObjectStore>, root: Path, options: Options) -> Self {
        let parallel = options.parallel.clamp(1, Semaphore::MAX_PERMITS);
        let outage = Arc::new(Outage::new(options.retry));
        Self { store, root, options, permits: Arc::new(Semaphore::new(parallel)), outage }
    }

    pub const fn options(&self) -> &Options {
        &self.options
    }

    pub fn path<'a>(&self, parts: impl IntoIterator<Item = &'a str>) -> Path {
        parts.into_iter().fold(self.root.clone(), |path, part| path.join(part))
    }

    /// Retries `request`, which moves up to `bytes` bytes, until it succeeds, fails for good, has read wrong
    /// bytes in all of its attempts, or the store has been away for too long.
    async fn repeat<T, F: Future<Output = Result<T>>>(
        &self,
        path: &Path,
        bytes: u64,
        request: impl Fn() -> F,
    ) -> Result<T> {
        let Options { retry, on_outage, attempts, timeout: limit, least_rate, .. } = self.options;
        let of_bytes = Duration::from_secs(bytes / least_rate.max(1));
        let mut wait = self.options.backoff.min(self.options.most_backoff);
        let mut damaged = 0;
        loop {
            // The semaphore is never closed.
            let permit = self.permits.acquire().await;
            let start = Instant::now();
            let most = limit.min(self.outage.left(start).max(LAST)) + of_bytes;
            let answer = timeout(most, request()).await;
            drop(permit);
            let now = Instant::now();
            let (e, since) = match answer {
                Ok(Ok(done)) => return Ok(done),
                // Bytes may have arrived until shortly before.
                Ok(Err(e)) => (e, now.checked_sub(limit).map_or(start, |at| at.max(start))),
                Err(_) => {
                    let server = self.store.to_string();
                    (Error::Timeout { path: path.to_string(), server, budget: retry }, start)
                }
            };
            if !e.is_transient() {
                return Err(e);
            }
            let mut left = Duration::MAX;
            if e.is_failure() {
                let rest = self.outage.count(since, now);
                left = rest.left;
                if let Some(report) = on_outage.filter(|_| rest.is_news) {
                    report(&e, left);
                }
            } else {
                damaged += 1;
            }
            if damaged >= attempts || left.is_zero() {
                return Err(e);
            }
            warn!(%path, error = %e, "the request is repeated");
            sleep(jittered(wait).min(left)).await;
            wait = (2 * wait).min(self.options.most_backoff);
            if e.is_failure() {
                self.outage.count(now, Instant::now());
            }
        }
    }

    /// What `read` finds of an object that was written just before. The first reads may still miss it.
    ///
    /// # Errors
    /// [`Error::NotKept`] if none finds it; those of `read`.
    pub async fn kept<T, F: Future<Output = Result<Option<T>>>>(
        &self,
        path: &Path,
        read: impl Fn() -> F,
    ) -> Result<T> {
        self.settled(read).await?.ok_or_else(|| Error::NotKept { path: path.to_string() })
    }

    /// Succeeds if an object that was deleted just before is gone. The first reads may still find it.
    ///
    /// # Errors
    /// [`Error::NotDeleted`] if all find it; those of [`Self::size`].
    async fn gone(&self, path: &Path) -> Result<()> {
        let is_gone = async || Ok(self.size(path).await?.is_none().then_some(()));
        self.settled(is_gone).await?.ok_or_else(|| Error::NotDeleted { path: path.to_string() })
    }

    /// What `read` returns in the first of its attempts that returns something.
    async fn settled<T, F: Future<Output = Result<Option<T>>>>(
        &self,
        read: impl Fn() -> F,
    ) -> Result<Option<T>> {
        let mut wait = self.options.backoff.min(self.options.most_backoff);
        for attempt in 1.. {
            match read().await? {
                Some(found) => return Ok(Some(found)),
                None if attempt >= self.options.attempts => break,
                None => sleep(jittered(wait)).await,
            }
            wait = (2 * wait).min(self.options.most_backoff);
        }
        Ok(None)
    }

    /// Reads a whole object of at most `limit` bytes, if it exists, and parses it. A read that cannot be
    /// parsed is retried.
    pub async fn get<T>(
        &self,
        path: &Path,
        limit: usize,
        parse: impl Fn(&[u8]) -> Result<T, &'static str>,
    ) -> Result<Option<T>> {
        self.repeat(path, limit as u64, async || {
            let got = match self.store.get_opts(path, GetOptions::default()).await {
                Err(e) => return self.absent(path, e).await.map(|()| None),
                Ok(got) => got,
            };
            let (expected, limit) = (got.meta.size, limit as u64);
            if expected > limit {
                return Err(Error::TooLong { path: path.to_string(), actual: expected, limit });
            }
            let bytes = self.body(path, got, expected, |_| ()).await?;
            parse(&bytes).map(Some).map_err(|what| Error::Object { path: path.to_string(), what })
        })
        .await
    }

    /// A range of an object that passes `verify`; else it is read again. Bytes are counted as they arrive;
    /// those of a failed attempt are subtracted again.
    pub async fn get_range(
        &self,
        path: &Path,
        range: &Range<u64>,
        counter: &AtomicU64,
        verify: impl Fn(&[u8]) -> bool,
    ) -> Result<Bytes> {
        let expected = range.end - range.start;
        self.repeat(path, expected, async || {
            let mut count = Count { counter, bytes: 0 };
            let options =
                GetOptions { range: Some(GetRange::Bounded(range.clone())), ..GetOptions::default() };
            let got = match self.store.get_opts(path, options).await {
                Err(e @ object_store::Error::NotFound { .. }) => {
                    self.absent(path, e).await?;
                    return Err(Error::Missing { path: path.to_string() });
                }
                // A range beyond the end of a short object is an error like any other.
                Err(e) => match self.store.head(path).await {
                    Ok(meta) if meta.size < range.end => {
                        return Err(Error::Length {
                            path: path.to_string(),
                            expected: range.end,
                            actual: meta.size,
                        });
                    }
                    _ => return Err(backend(path, e)),
                },
                Ok(got) => got,
            };
            let bytes = self.body(path, got, expected, |n| count.add(n)).await?;
            match verify(&bytes) {
                true => {
                    count.keep();
                    Ok(bytes)
                }
                false => Err(Error::Digest { path: path.to_string() }),
            }
        })
        .await
    }

    /// The body of an answer, which must have `expected` bytes. No more are read. `arrived` gets the bytes of
    /// each part. A file is one part: its stream would read 8 KiB at a time, each on another thread.
    async fn body(
        &self,
        path: &Path,
        got: GetResult,
        expected: u64,
        mut arrived: impl FnMut(u64),
    ) -> Result<Bytes> {
        let length = |actual: u64| Error::Length { path: path.to_string(), expected, actual };
        let mut parts: Vec<Bytes> = vec![];
        let mut len = 0;
        let mut add = |part: Bytes| {
            len += part.len() as u64;
            arrived(part.len() as u64);
            parts.push(part);
            if len > expected { Err(length(len)) } else { Ok(()) }
        };
        if let GetResultPayload::File(..) = got.payload {
            // The whole range is allocated before it is read.
            let announced = got.range.end - got.range.start;
            if announced != expected {
                return Err(length(announced));
            }
            add(got.bytes().await.map_err(|e| backend(path, e))?)?;
        } else {
            let mut stream = got.into_stream();
            while let Some(part) = stream.try_next().await.map_err(|e| backend(path, e))? {
                add(part)?;
            }
        }
        if len < expected {
            return Err(length(len));
        }
        debug!(%path, bytes = len, "read");
        Ok(match <[Bytes; 1]>::try_from(parts) {
            Ok([part]) => part,
            Err(parts) => parts.concat().into(),
        })
    }

    /// Writes an object, and returns whether it was written: in mode [`PutMode::Create`] it is not if one
    /// exists.
    ///
    /// # Errors
    /// [`Error::NoConditions`] from a server without this mode.
    pub async fn put(&self, path: &Path, payload: Bytes, mode: PutMode) -> Result<bool> {
        let bytes = payload.len() as u64;
        self.repeat(path, bytes, async || {
            let payload = PutPayload::from_bytes(payload.clone());
            match self.store.put_opts(path, payload, mode.clone().into()).await {
                Ok(_) => {
                    debug!(%path, bytes, "written");
                    Ok(true)
                }
                Err(object_store::Error::AlreadyExists { .. }) if mode == PutMode::Create => Ok(false),
                Err(e) if mode == PutMode::Create && backend_text::is_not_implemented(&e) => {
                    Err(Error::NoConditions { server: self.store.to_string() })
                }
                Err(e) => Err(backend(path, e)),
            }
        })
        .await
    }

    /// Deletes an object, and asks whether it is gone. Deleting a missing one is not an error.
    ///
    /// # Errors
    /// [`Error::NotDeleted`] if the store still holds it.
    pub async fn delete(&self, path: &Path) -> Result<()> {
        self.request_deletion(path).await?;
        self.gone(path).await
    }

    /// Deletes objects, and lists the folders below the root that had them: one request for many objects. A
    /// listing may be of a moment before the deletions, so the store is asked for each object that it names.
    ///
    /// # Errors
    /// As [`Self::delete`]; [`Error::Limit`] if a folder has more than `limit` objects.
    pub async fn delete_all(&self, paths: HashSet<Path>, limit: usize) -> Result<()> {
        let deletions = stream::iter(paths.clone()).map(async |path| self.request_deletion(&path).await);
        let mut deletions = deletions.buffer_unordered(self.options.parallel.max(1));
        while let Some(deleted) = deletions.next().await {
            deleted?;
        }
        let folder = |path: &Path| Some(self.root.clone().join(path.prefix_match(&self.root)?.next()?));
        let folders: HashSet<Path> = paths.iter().filter_map(folder).collect();
        for folder in folders {
            for left in self.list(&folder, limit).await? {
                if paths.contains(&left.location) {
                    self.gone(&left.location).await?;
                }
            }
        }
        Ok(())
    }

    async fn request_deletion(&self, path: &Path) -> Result<()> {
        self.repeat(path, 0, async || match self.store.delete(path).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(e) => Err(backend(path, e)),
        })
        .await
    }

    /// The objects below a path, at most `limit`.
    pub async fn list(&self, path: &Path, limit: usize) -> Result<Vec<ObjectMeta>> {
        self.repeat(path, 0, async || {
            let listed = self.store.list(Some(path)).take(limit.saturating_add(1));
            let objects: Vec<_> = listed.try_collect().await.map_err(|e| backend(path, e))?;
            match objects.len() > limit {
                true => {
                    Err(Error::Limit { what: "objects", actual: objects.len() as u64, limit: limit as u64 })
                }
                false => Ok(objects),
            }
        })
        .await
    }

    /// The size of an object, if it exists.
    pub async fn size(&self, path: &Path) -> Result<Option<u64>> {
        self.repeat(path, 0, async || match self.store.head(path).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(e) => self.absent(path, e).await.map(|()| None),
        })
        .await
    }

    /// Succeeds if `e` says that the object does not exist. A missing bucket is an error: S3 returns 404 in
    /// both cases, distinguishes them only in the body of an answer to GET, and cannot list such a bucket.
    async fn absent(&self, path: &Path, e: object_store::Error) -> Result<()> {
        if !matches!(e, object_store::Error::NotFound { .. }) {
            return Err(backend(path, e));
        }
        if !backend_text::is_missing_key(&e) {
            self.store.list(Some(path)).try_next().await.map_err(|e| backend(path, e))?;
        }
        Ok(())
    }

    /// The names of the folders directly below the root.
    pub async fn folders(&self) -> Result<Vec<String>> {
        let root = &self.root;
        self.repeat(root, 0, async || {
            let listed = self.store.list_with_delimiter(Some(root)).await.map_err(|e| backend(root, e))?;
            let names = listed.common_prefixes.iter().filter_map(|path| path.filename());
            Ok(names.map(str::to_owned).collect())
        })
        .await
    }
}

/// The bytes of an attempt in a shared counter, until it has failed or was dropped.
struct Count<'a> {
    counter: &'a AtomicU64,
    bytes: u64,
}

impl Count<'_> {
    fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
        self.counter.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Ends the attempt with success.
    fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Count<'_> {
    fn drop(&mut self) {
        self.counter.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// A part of `wait`, from a half on, so that readers do not retry in step.
fn jittered(wait: Duration) -> Duration {
    let random = f64::from(getrandom::u32().unwrap_or(0)) / f64::from(u32::MAX);
    wait.mul_f64(1.0 - random / 2.0)
}

fn backend(path: &Path, source: object_store::Error) -> Error {
    Error::Backend { path: path.to_string(), source }
}
