//! The store of caches on a real S3 server, which is killed and restarted.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use codec_core::{Encoding, FitOptions, ModelInfo, Place, PlaneBuf, Profile};
use futures_util::StreamExt;
use futures_util::future::join_all;
use kv_store::{AsyncStore, ChunkKey, Error, Grid, KvStore, Options, Put, Space, encode_chunk};
use kv_stream::LayerKv;
use object_store::path::Path;
use object_store::{PutMode, PutPayload};

use crate::support::weed::{Server, weed};

const TOKENS: usize = 1000;

/// Four layers with eight heads of 64: a frame of 500 tokens has several pieces at the first level.
fn profile() -> Profile {
    let channels = 512;
    let rows: Vec<f32> = (0..64 * channels).map(|i| ((i * i % 977) as f32).sin()).collect();
    let plane = |step| {
        let options = FitOptions { steps: codec_core::Steps::Deviations(step), ..FitOptions::default() };
        PlaneBuf::fit(&rows, channels, None, &options).unwrap()
    };
    let info = ModelInfo { model_id: 0, layers: 8, heads: 8, head_dim: 64, keys_rotated: false };
    let planes = [plane(0.001), plane(0.5)].iter().flat_map(|plane| vec![plane.clone(); 16]).collect();
    Profile::new(info, planes).unwrap()
}

struct Context {
    profile: Profile,
    space: Space,
    tokens: Vec<u32>,
    layers: Vec<LayerKv>,
}

fn context() -> Context {
    let profile = profile();
    let space = Space::new("model", &profile, Grid { chunk: 500, tail: 100 }).unwrap();
    let rows = |seed: usize| (0..TOKENS * 512).map(|i| ((i * 31 + seed) as f32 * 0.7).sin()).collect();
    let layers = (0..8).map(|l| LayerKv { keys: rows(l), values: rows(l + 100) }).collect();
    Context { profile, space, tokens: (0..TOKENS as u32).collect(), layers }
}

impl Context {
    fn encode(&self, key: &ChunkKey) -> Vec<u8> {
        let rows: Vec<_> = self.layers.iter().map(LayerKv::rows).collect();
        let place = Place { first_token: key.tokens.start, ..Place::nhd(8, 64) };
        encode_chunk(&self.profile, key, &rows, &place).unwrap()
    }

    fn objects(&self) -> Vec<Vec<u8>> {
        let chunks = self.space.chunks(&self.tokens);
        chunks.iter().map(|key| self.encode(key)).collect()
    }

    fn put(&self, store: &KvStore, objects: &[Vec<u8>]) -> Vec<Put> {
        let chunks = self.space.chunks(&self.tokens);
        let put =
            |(key, object): (_, &Vec<u8>)| store.put_chunk(&self.space, key, object.clone().into()).unwrap();
        chunks.iter().zip(objects).map(put).collect()
    }

    /// Loads all chunks at both levels and compares every byte.
    fn check(&self, store: &KvStore, objects: &[Vec<u8>]) {
        let found = store.find(&self.space, &self.tokens).unwrap();
        assert_eq!(found.len(), objects.len());
        for level in 0..2 {
            let same = |arrival: kv_store::Arrival| {
                let object = codec_core::Chunk::parse(&objects[arrival.chunk]).unwrap();
                assert!(object.frame(level).unwrap() == arrival.frame, "chunk {}", arrival.chunk);
                Ok::<_, Error>(())
            };
            store.load(&self.space, &found, 2, |_| Encoding::Level(level), same).unwrap();
        }
    }
}

fn options() -> Options {
    Options { timeout: Duration::from_secs(30), ..Options::default() }
}

#[test]
fn caches_survive_a_server_that_is_killed() {
    let Some(weed) = weed() else { return };
    let folder = tempfile::tempdir().unwrap();
    let (context, root) = (context(), Path::from("a/b"));
    let objects = context.objects();
    assert!(objects[0].len() > 5 << 20, "{} bytes are one piece", objects[0].len());
    let server = Server::start(&weed, folder.path());
    let store = KvStore::new(AsyncStore::new(server.store(), root.clone(), options())).unwrap();
    assert_eq!(context.put(&store, &objects), [Put::Stored; 2]);
    assert_eq!(context.put(&store, &objects), [Put::Present; 2]);
    context.check(&store, &objects);
    server.kill();

    let quick =
        Options { retry: Duration::from_secs(3), timeout: Duration::from_secs(2), ..Options::default() };
    let server = Server::start(&weed, folder.path());
    let store = KvStore::new(AsyncStore::new(server.store(), root.clone(), options())).unwrap();
    context.check(&store, &objects);
    let listing = store.list(context.space.name()).unwrap();
    assert_eq!((listing.chunks.len(), listing.damaged.len(), listing.orphans.len()), (2, 0, 0));
    for chunk in &listing.chunks {
        store.verify(context.space.name(), chunk).unwrap();
    }

    for chunk in &listing.chunks {
        store.delete(context.space.name(), chunk.id()).unwrap();
    }
    assert!(store.find(&context.space, &context.tokens).unwrap().is_empty());
    let dead = KvStore::new(AsyncStore::new(server.store(), root, quick)).unwrap();
    server.kill();
    let start = Instant::now();
    let error = dead.find(&context.space, &context.tokens).unwrap_err();
    assert!(matches!(error, Error::Backend { .. } | Error::Timeout { .. }), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// The server keeps the first of several conditional writes; manifests rely on them.
#[test]
fn one_of_many_writers_is_first() {
    let Some(weed) = weed() else { return };
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&weed, folder.path());
    let (store, context) = (server.store(), Arc::new(context()));
    let object = context.objects().swap_remove(0);
    let key = context.space.chunks(&context.tokens).swap_remove(0);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let path = Path::from("once");
        let create = |i: u8| {
            let (store, path) = (store.clone(), path.clone());
            let create = PutMode::Create.into();
            async move { store.put_opts(&path, PutPayload::from(vec![i]), create).await.is_ok() }
        };
        let created = join_all((0..8).map(create)).await;
        assert_eq!(created.iter().filter(|&&created| created).count(), 1);
        let caches = AsyncStore::new(store, Path::default(), options());
        let puts = (0..4).map(|_| caches.put_chunk(&context.space, &key, object.clone().into()));
        let puts: Vec<Put> = join_all(puts).await.into_iter().map(Result::unwrap).collect();
        assert_eq!(puts.iter().filter(|&&put| put == Put::Stored).count(), 1);
        let listing = caches.list(context.space.name()).await.unwrap();
        assert_eq!((listing.chunks.len(), listing.orphans.len()), (1, 0));
    });
}

/// Seconds of [`many_clients`]: from the variable KV_LOAD_SECONDS, at most an hour; by default half a minute.
fn load_seconds() -> u64 {
    let Ok(seconds) = std::env::var("KV_LOAD_SECONDS") else { return 30 };
    let seconds = seconds.parse().ok().filter(|seconds| (1..=3600).contains(seconds));
    seconds.unwrap_or_else(|| panic!("KV_LOAD_SECONDS is 1 to 3600"))
}

/// 64 clients put, get and delete contexts with shared prefixes, without an error or a wrong byte; then the
/// rate of reading chunks, compared with reading whole objects of the same size.
#[test]
#[ignore = "long: 64 clients for half a minute, or KV_LOAD_SECONDS"]
fn many_clients() {
    const CLIENTS: u32 = 64;
    /// Contexts that a client has stored at once, and most bytes of all of them.
    const KEPT: usize = 5;
    const LIVE: usize = 2 << 30;
    let Some(weed) = weed() else { return };
    let folder = tempfile::tempdir().unwrap();
    let server = Server::start(&weed, folder.path());
    let (context, store) = (Arc::new(context()), server.store());
    let options = Options { timeout: Duration::from_secs(120), parallel: 4, ..Options::default() };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let limit = Duration::from_secs(load_seconds());
    runtime.block_on(async {
        // A tail of 100 tokens after 500 that all contexts share.
        let base = context.tokens[..600].to_vec();
        let tokens = move |client: u32, round: u32| {
            let mut tokens = base.clone();
            (tokens[598], tokens[599]) = (client, round);
            tokens
        };
        let objects: Vec<Vec<u8>> = {
            let chunks = context.space.chunks(&tokens(0, 0));
            chunks.iter().map(|key| context.encode(key)).collect()
        };
        assert!(objects[1].len() * CLIENTS as usize * (KEPT + 1) < LIVE, "{}", objects[1].len());
        let start = Instant::now();
        let clients = (0..CLIENTS).map(|client| {
            let caches = AsyncStore::new(store.clone(), Path::from("load"), options);
            let (context, objects, tokens) = (context.clone(), objects.clone(), tokens.clone());
            tokio::spawn(async move {
                let (space, mut kept, mut round) = (&context.space, VecDeque::new(), 0);
                while start.elapsed() < limit {
                    let tokens = tokens(client, round);
                    let keys = space.chunks(&tokens);
                    for (key, object) in keys.iter().zip(&objects) {
                        caches.put_chunk(space, key, object.clone().into()).await.unwrap();
                    }
                    assert_eq!(read(&caches, &context, &tokens, &objects).await, 600);
                    kept.push_back(tokens);
                    // Every second one at once, the others once there are too many.
                    let old = match round % 2 {
                        0 => kept.pop_back(),
                        _ if kept.len() > KEPT => kept.pop_front(),
                        _ => None,
                    };
                    if let Some(old) = old {
                        caches.delete(space.name(), space.chunks(&old)[1].id).await.unwrap();
                        assert_eq!(read(&caches, &context, &old, &objects).await, 500);
                    }
                    round += 1;
                }
                (round, kept.len())
            })
        });
        let clients: Vec<_> = clients.collect();
        // The server keeps the space of deleted objects until a vacuum frees it.
        let vacuum = tokio::task::spawn_blocking(move || {
            while start.elapsed() < limit {
                std::thread::sleep(Duration::from_secs(10).min(limit));
                server.vacuum();
            }
            server
        });
        let (mut rounds, mut kept) = (0, 0);
        for client in clients {
            let (client_rounds, client_kept) = client.await.unwrap();
            (rounds, kept) = (rounds + client_rounds, kept + client_kept);
        }
        let seconds = start.elapsed().as_secs_f64();
        let written = f64::from(rounds) * objects[1].len() as f64 / 1e9;
        eprintln!("{CLIENTS} clients, {rounds} contexts, {written:.1} GB written in {seconds:.1} s");
        let _server = vacuum.await.unwrap(); // until the end
        let caches = AsyncStore::new(store.clone(), Path::from("load"), Options::default());
        let listing = caches.list(context.space.name()).await.unwrap();
        assert_eq!(listing.chunks.len(), 1 + kept);
        assert!(listing.damaged.is_empty() && listing.orphans.is_empty());

        let (mut ours, mut raw) = (vec![], vec![]);
        let found = caches.find(&context.space, &context.tokens[..500]).await.unwrap();
        let len = found[0].sizes().next().unwrap();
        let path = Path::from("raw");
        store.put_opts(&path, vec![7; len as usize].into(), PutMode::Overwrite.into()).await.unwrap();
        for _ in 0..15 {
            let start = Instant::now();
            read(&caches, &context, &context.tokens[..500], &objects).await;
            ours.push(start.elapsed());
            let start = Instant::now();
            let bytes = store.get_opts(&path, Default::default()).await.unwrap().bytes().await.unwrap();
            assert_eq!(bytes.len() as u64, len);
            raw.push(start.elapsed());
        }
        ours.sort();
        raw.sort();
        let rate = |time: Duration| len as f64 / 1e6 / time.as_secs_f64();
        eprintln!("{len} bytes: a chunk {:.0} MB/s, a raw object {:.0} MB/s", rate(ours[7]), rate(raw[7]));
    });
}

/// Finds and loads a context at the first level, and compares every byte. Returns its tokens.
async fn read(caches: &AsyncStore, context: &Context, tokens: &[u32], objects: &[Vec<u8>]) -> usize {
    let found = caches.find(&context.space, tokens).await.unwrap();
    let arrivals = caches.load(&context.space, &found, 1, |_| Encoding::Level(0));
    let mut arrivals = std::pin::pin!(arrivals);
    let mut end = 0;
    while let Some(arrival) = arrivals.next().await {
        let arrival = arrival.unwrap();
        let object = codec_core::Chunk::parse(&objects[arrival.chunk]).unwrap();
        assert!(object.frame(0).unwrap() == arrival.frame);
        end = arrival.tokens.end;
    }
    end
}
