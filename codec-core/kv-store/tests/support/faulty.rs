//! An in-memory object store that fails by a seeded schedule.

use std::collections::HashMap;
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use bytes::Bytes;
use fastrand::Rng;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// The rate of each fault, 0 to 1.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// An answer that says "503".
    pub unavailable: f32,
    /// A request that is executed and answered with "503".
    pub lost: f32,
    /// No answer.
    pub hang: f32,
    /// An answer after up to 5 s.
    pub slow: f32,
    /// A write that is rejected.
    pub full: f32,
    /// A truncated body.
    pub cut: f32,
    /// A body with a wrong bit.
    pub corrupt: f32,
    /// The body of another object.
    pub swap: f32,
    /// An object as it was before its last write.
    pub stale: f32,
    /// Whether conditional writes overwrite, as some servers do.
    pub ignores_conditions: bool,
    /// Whether writes are acknowledged and not kept.
    pub forgets: bool,
    /// Whether conditional writes are answered as if the object existed.
    pub claims_all: bool,
    /// Whether conditional writes are not implemented.
    pub lacks_conditions: bool,
    /// Whether deletions are acknowledged and not done.
    pub keeps_deleted: bool,
    /// Whether a listing is that of the request before it.
    pub lists_late: bool,
}

impl Faults {
    /// Some faults, each at its own rate.
    pub fn draw(random: &mut Rng) -> Self {
        let mut rate = || if random.bool() { 0.0 } else { random.f32() * 0.3 };
        Self {
            unavailable: rate(),
            lost: rate(),
            hang: rate() / 3.0,
            slow: rate(),
            full: rate(),
            cut: rate(),
            corrupt: rate(),
            swap: rate(),
            stale: rate(),
            ignores_conditions: random.u8(..4) == 0,
            ..Self::default()
        }
    }
}

#[derive(Debug)]
struct State {
    random: Rng,
    faults: Faults,
    before: Vec<(Path, Option<Bytes>)>, // the object replaced by each write
    refused: Option<Path>,
    listed: HashMap<Option<Path>, Vec<ObjectMeta>>, // the last listing of each folder
}

#[derive(Debug)]
pub struct Faulty {
    inner: InMemory,
    state: Mutex<State>,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a store that fails")
    }
}

impl Faulty {
    pub fn new(seed: u64, faults: Faults) -> Self {
        let state = State {
            random: Rng::with_seed(seed),
            faults,
            before: vec![],
            refused: None,
            listed: HashMap::new(),
        };
        Self { inner: InMemory::new(), state: Mutex::new(state) }
    }

    pub fn change(&self, faults: Faults) {
        self.state.lock().unwrap().faults = faults;
    }

    /// Refuses to read an object.
    pub fn refuse(&self, path: Option<&Path>) {
        self.state.lock().unwrap().refused = path.cloned();
    }

    /// Ends all faults.
    pub fn heal(&self) {
        self.change(Faults::default());
    }

    /// All objects, without faults.
    pub async fn objects(&self) -> Vec<(Path, Vec<u8>)> {
        let listed: Vec<ObjectMeta> = self.inner.list(None).try_collect().await.unwrap();
        let mut objects = vec![];
        for meta in listed {
            let bytes = self.inner.get(&meta.location).await.unwrap().bytes().await.unwrap();
            objects.push((meta.location, bytes.to_vec()));
        }
        objects
    }

    /// Replaces or removes an object.
    pub async fn set(&self, path: &Path, bytes: Option<Vec<u8>>) {
        match bytes {
            Some(bytes) => drop(self.inner.put(path, bytes.into()).await.unwrap()),
            None => self.inner.delete(path).await.unwrap(),
        }
    }

    /// Whether a fault of this rate happens now.
    fn happens(&self, rate: impl Fn(&Faults) -> f32) -> bool {
        let mut state = self.state.lock().unwrap();
        let rate = rate(&state.faults);
        rate > 0.0 && state.random.f32() < rate
    }

    fn below(&self, n: u64) -> u64 {
        self.state.lock().unwrap().random.u64(..n)
    }

    async fn delay(&self) {
        if self.happens(|faults| faults.hang) {
            std::future::pending::<()>().await;
        }
        if self.happens(|faults| faults.slow) {
            tokio::time::sleep(Duration::from_millis(self.below(5_000))).await;
        }
    }

    fn check(&self, rate: impl Fn(&Faults) -> f32, what: &'static str) -> Result<()> {
        match self.happens(rate) {
            true => Err(Error::Generic { store: "faulty", source: what.into() }),
            false => Ok(()),
        }
    }

    async fn now(&self, path: &Path) -> Option<Bytes> {
        self.inner.get(path).await.ok()?.bytes().await.ok()
    }

    async fn remember(&self, path: &Path) {
        let now = self.now(path).await;
        self.state.lock().unwrap().before.push((path.clone(), now));
    }

    /// The object that an answer is made from: the requested one, or a wrong one.
    async fn object(&self, path: &Path) -> Option<Bytes> {
        if self.happens(|faults| faults.stale) {
            let state = self.state.lock().unwrap();
            if let Some((_, bytes)) = state.before.iter().rev().find(|(written, _)| written == path) {
                return bytes.clone();
            }
        }
        if self.happens(|faults| faults.swap) {
            let objects = self.objects().await;
            if !objects.is_empty() {
                return Some(objects[self.below(objects.len() as u64) as usize].1.clone().into());
            }
        }
        self.now(path).await
    }
}

#[async_trait::async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, path: &Path, payload: PutPayload, mut options: PutOptions) -> Result<PutResult> {
        self.delay().await;
        self.check(|faults| faults.unavailable, "503")?;
        self.check(|faults| faults.full, "no space left on device")?;
        let faults = self.state.lock().unwrap().faults;
        if options.mode == PutMode::Create && faults.claims_all {
            return Err(Error::AlreadyExists { path: path.to_string(), source: "412".into() });
        }
        if options.mode == PutMode::Create && faults.lacks_conditions {
            let source = "Server returned non-2xx status code: 501 Not Implemented: ".into();
            return Err(Error::Generic { store: "S3", source });
        }
        if faults.forgets {
            return Ok(PutResult { e_tag: None, version: None, extensions: Default::default() });
        }
        if faults.ignores_conditions {
            options.mode = PutMode::Overwrite;
        }
        self.remember(path).await;
        let result = self.inner.put_opts(path, payload, options).await;
        self.check(|faults| faults.lost, "503 after the write")?;
        result
    }

    async fn put_multipart_opts(
        &self,
        path: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(path, options).await
    }

    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        self.delay().await;
        self.check(|faults| faults.unavailable, "503")?;
        if self.state.lock().unwrap().refused.as_ref() == Some(path) {
            return Err(Error::PermissionDenied { path: path.to_string(), source: "403".into() });
        }
        let bytes = self.object(path).await;
        let Some(bytes) = bytes else {
            return Err(Error::NotFound { path: path.to_string(), source: "not there".into() });
        };
        // Through a separate store, so that ranges behave as in any store.
        let answer = InMemory::new();
        answer.put(path, bytes.into()).await?;
        let mut result = answer.get_opts(path, options).await?;
        let range = result.range.clone();
        let meta = result.meta.clone();
        let mut body = result.bytes().await?.to_vec();
        if self.happens(|faults| faults.corrupt) && !body.is_empty() {
            let bit = self.below(8 * body.len() as u64) as usize;
            body[bit / 8] ^= 1 << (bit % 8);
        }
        let mut parts: Vec<Result<Bytes>> = vec![];
        if self.happens(|faults| faults.cut) {
            body.truncate(self.below(body.len() as u64 + 1) as usize);
            if self.below(2) == 0 {
                parts.push(Err(Error::Generic { store: "faulty", source: "connection reset".into() }));
            }
        }
        let middle = self.below(body.len() as u64 + 1) as usize;
        parts.splice(0..0, [Ok(body[..middle].to_vec().into()), Ok(body[middle..].to_vec().into())]);
        result = GetResult {
            payload: GetResultPayload::Stream(stream::iter(parts).boxed()),
            meta,
            range,
            attributes: Default::default(),
            extensions: Default::default(),
        };
        Ok(result)
    }

    fn delete_stream(&self, paths: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        match self.state.lock().unwrap().faults.keeps_deleted {
            true => paths,
            false => self.inner.delete_stream(paths),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let listed = self.inner.list(prefix).try_collect().now_or_never();
        let now: Vec<ObjectMeta> = listed.unwrap().unwrap(); // memory answers at once
        let mut state = self.state.lock().unwrap();
        let before = state.listed.insert(prefix.cloned(), now.clone());
        let objects = before.filter(|_| state.faults.lists_late).unwrap_or(now);
        stream::iter(objects.into_iter().map(Ok)).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.delay().await;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
