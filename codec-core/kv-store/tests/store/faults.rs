//! The store of caches over an object store that fails, by seeded schedules: no wrong data is returned, no
//! acknowledged write is lost, and no call exceeds its time limits.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use codec_core::{Encoding, FitOptions, ModelInfo, Place, PlaneBuf, Profile, Side};
use fastrand::Rng;
use futures_util::future::join_all;
use futures_util::{StreamExt, pin_mut};
use kv_store::{
    AsyncStore, Check, ChunkId, ChunkKey, Error, Grid, Options, ProfileId, Put, Space, StoredChunk,
    encode_chunk,
};
use kv_stream::LayerKv;
use object_store::path::Path;
use tokio::time::{Instant, timeout};

use crate::support::faulty::{Faults, Faulty};

const LEVELS: usize = 2;
const GRID: Grid = Grid { chunk: 10, tail: 5 };
const OPTIONS: Options = Options {
    retry: Duration::from_secs(30),
    on_outage: None,
    attempts: 4,
    timeout: Duration::from_secs(2),
    least_rate: 1 << 20,
    backoff: Duration::from_millis(50),
    most_backoff: Duration::from_secs(1),
    parallel: 4,
};
/// Longer than all attempts of a request with their backoff.
const REQUEST: Duration = Duration::from_secs(30 + 3);

fn profile() -> Profile {
    let rows: Vec<f32> = (0..80).map(|i| (i as f32).sin()).collect();
    let plane = PlaneBuf::fit(&rows, 8, None, &FitOptions::default()).unwrap();
    let info = ModelInfo { model_id: 0, layers: 1, heads: 2, head_dim: 4, keys_rotated: false };
    Profile::new(info, vec![plane; 2 * LEVELS]).unwrap()
}

/// A chunk of a context of one layer.
fn encode(profile: &Profile, key: &ChunkKey, layer: &LayerKv) -> Vec<u8> {
    let place = Place { first_token: key.tokens.start, ..Place::nhd(2, 4) };
    encode_chunk(profile, key, &[layer.rows()], &place).unwrap()
}

/// The objects offered for each chunk, and which of them were acknowledged.
#[derive(Default)]
struct Truth {
    objects: HashMap<ChunkId, Vec<Vec<u8>>>,
    acknowledged: HashSet<ChunkId>,
}

struct World {
    profile: Profile,
    space: Space,
    faulty: Arc<Faulty>,
    store: AsyncStore,
    truth: std::sync::Mutex<Truth>,
}

impl World {
    fn new(seed: u64, faults: Faults) -> Self {
        let profile = profile();
        let space = Space::new("model", &profile, GRID).unwrap();
        let faulty = Arc::new(Faulty::new(seed, faults));
        let store = AsyncStore::new(faulty.clone(), Path::from("root"), OPTIONS);
        Self { profile, space, faulty, store, truth: std::sync::Mutex::default() }
    }

    /// Stores a context as one writer would, up to the first error. Every writer has different rows.
    async fn write(&self, writer: u64, tokens: &[u32]) {
        let mut random = Rng::with_seed(writer);
        let rows = |random: &mut Rng| (0..tokens.len() * 8).map(|_| random.f32() * 4.0 - 2.0).collect();
        let layer = LayerKv { keys: rows(&mut random), values: rows(&mut random) };
        for key in self.space.chunks(tokens) {
            let object = encode(&self.profile, &key, &layer);
            self.truth.lock().unwrap().objects.entry(key.id).or_default().push(object.clone());
            let put = self.store.put_chunk(&self.space, &key, object.into()).await;
            match put {
                Ok(Put::Stored | Put::Repaired | Put::Present) => {
                    self.truth.lock().unwrap().acknowledged.insert(key.id);
                }
                Err(_) => break,
            }
        }
    }

    /// Loads the stored prefix of a context, and checks every frame; returns the number of tokens loaded.
    async fn read(&self, tokens: &[u32], level: usize) -> Result<usize, Error> {
        let found = self.store.find(&self.space, tokens).await?;
        let keys: Vec<_> = self.space.chunks(tokens);
        for (found, key) in found.iter().zip(&keys) {
            assert!(found.key() == key || found.key().tokens.len() < GRID.chunk, "another chunk is found");
        }
        let arrivals = self.store.load(&self.space, &found, 2, |_| Encoding::Level(level));
        pin_mut!(arrivals);
        let mut end = 0;
        while let Some(arrival) = arrivals.next().await {
            let arrival = arrival?;
            assert_eq!(arrival.tokens.start, end);
            end = arrival.tokens.end;
            self.check(&found[arrival.chunk], level, &arrival.frame);
        }
        Ok(end)
    }

    /// A frame must be one that a writer has offered for this chunk.
    fn check(&self, chunk: &StoredChunk, level: usize, frame: &[u8]) {
        let truth = self.truth.lock().unwrap();
        let offered = truth.objects.get(&chunk.key().id).map_or(&[][..], Vec::as_slice);
        let is = |object: &Vec<u8>| codec_core::Chunk::parse(object).unwrap().frame(level).unwrap() == frame;
        assert!(offered.iter().any(is), "a frame that nobody has written for this chunk");
    }
}

/// Contexts that share prefixes: each begins as one of the earlier ones.
fn contexts(random: &mut Rng) -> Vec<Vec<u32>> {
    let mut contexts: Vec<Vec<u32>> = vec![];
    for _ in 0..2 + random.u64(..4) {
        let mut tokens = match contexts.len() {
            0 => vec![],
            n => contexts[random.usize(..n)].clone(),
        };
        tokens.truncate(random.usize(..=tokens.len()));
        let more = 5 + random.u64(..30);
        tokens.extend((0..more).map(|_| random.u32(..3)));
        contexts.push(tokens);
    }
    contexts
}

/// Concurrent writers, some of which die, and readers, while the store fails; then readers while it does not.
async fn schedule(seed: u64) {
    let mut random = Rng::with_seed(seed);
    let faults = Faults::draw(&mut random);
    let world = World::new(seed, faults);
    let contexts = contexts(&mut random);
    let mut tasks: Vec<std::pin::Pin<Box<dyn Future<Output = ()> + '_>>> = vec![];
    for (i, tokens) in contexts.iter().enumerate() {
        for writer in 0..1 + random.u64(..3) {
            let world = &world;
            let name = seed.wrapping_mul(1000) + 10 * i as u64 + writer;
            let life = match random.u64(..3) {
                0 => Duration::from_millis(random.u64(..20_000)),
                _ => Duration::from_secs(1_000_000),
            };
            tasks.push(Box::pin(async move {
                // Dying means being dropped at any moment.
                let _ = timeout(life, world.write(name, tokens)).await;
            }));
        }
        for _ in 0..random.u64(..3) {
            let (world, wait, level) = (&world, random.u64(..10_000), random.usize(..2));
            tasks.push(Box::pin(async move {
                tokio::time::sleep(Duration::from_millis(wait)).await;
                let (start, chunks) = (Instant::now(), world.space.chunks(tokens).len() as u32 + 2);
                let _ = world.read(tokens, level).await;
                // Requests of one reader may wait for those of all others.
                let limit = REQUEST * 3 * chunks * 40;
                assert!(start.elapsed() <= limit, "a reader waits {:?}", start.elapsed());
            }));
        }
    }
    join_all(tasks).await;
    world.faulty.heal();
    for tokens in &contexts {
        let keys = world.space.chunks(tokens);
        let stored = {
            let truth = world.truth.lock().unwrap();
            keys.iter()
                .take_while(|key| truth.acknowledged.contains(&key.id))
                .last()
                .map_or(0, |key| key.tokens.end)
        };
        let read = world.read(tokens, 0).await;
        assert!(read.as_ref().is_ok_and(|&n| n >= stored), "{stored} tokens were acknowledged: {read:?}");
        // A second writer completes the chunks of dead ones.
        world.write(seed, tokens).await;
        let end = keys.last().map_or(0, |key| key.tokens.end);
        assert_eq!(world.read(tokens, 1).await.unwrap(), end);
    }
}

fn run(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
        let runtime = runtime.unwrap();
        let run = std::panic::AssertUnwindSafe(|| runtime.block_on(schedule(seed)));
        let result = std::panic::catch_unwind(run);
        if let Err(panic) = result {
            eprintln!("schedule {seed} fails");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn random_schedules() {
    run(0..300);
}

#[test]
#[ignore = "long: 10,000 schedules"]
fn many_random_schedules() {
    std::thread::scope(|scope| {
        for seeds in [300..5_300, 5_300..10_300] {
            scope.spawn(|| run(seeds));
        }
    });
}

/// Every object in turn is truncated, damaged, swapped with each other one, or lost: a reader gets an error
/// or a shorter prefix.
#[tokio::test(start_paused = true)]
async fn objects_that_are_not_what_was_written() {
    let world = World::new(1, Faults::default());
    let tokens: Vec<u32> = (0..25).collect();
    let other: Vec<u32> = (10..35).collect();
    world.write(1, &tokens).await;
    world.write(2, &other).await;
    assert_eq!((world.read(&tokens, 0).await.unwrap(), world.read(&other, 1).await.unwrap()), (25, 25));
    let objects = world.faulty.objects().await;
    assert_eq!(objects.len(), 2 * 2 * 3);
    for (path, bytes) in &objects {
        let mut wrong: Vec<Vec<u8>> =
            objects.iter().filter(|(p, _)| p != path).map(|(_, b)| b.clone()).collect();
        wrong.extend((0..10).map(|tenth| bytes[..bytes.len() * tenth / 10].to_vec()));
        wrong.push([&bytes[..], &[0]].concat());
        for bit in (0..8 * bytes.len()).step_by(bytes.len() / 20 * 8 + 3) {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            wrong.push(damaged);
        }
        for wrong in wrong {
            world.faulty.set(path, Some(wrong)).await;
            for (tokens, level) in [(&tokens, 0), (&other, 1), (&tokens, 1)] {
                // `read` checks every frame.
                match world.read(tokens, level).await {
                    Ok(_) => {}
                    Err(e) => assert!(e.is_damage(), "{e}"),
                }
            }
        }
        world.faulty.set(path, None).await;
        for tokens in [&tokens, &other] {
            match world.read(tokens, 0).await {
                Ok(_) => {}
                Err(e) => assert!(matches!(e, Error::Missing { .. }), "{e}"),
            }
        }
        world.faulty.set(path, Some(bytes.clone())).await;
    }
}

/// Any changed byte of any object is found by listing and verifying.
#[tokio::test(start_paused = true)]
async fn every_changed_byte_is_found() {
    let world = World::new(1, Faults::default());
    let space = world.space.name();
    world.write(1, &(0..20).collect::<Vec<u32>>()).await;
    world.store.describe(space, "a model").await.unwrap();
    let is_sound = async || {
        let listing = world.store.list(space).await.unwrap();
        let mut sound = listing.damaged.is_empty() && world.store.about(space).await.is_ok();
        for chunk in &listing.chunks {
            sound &= world.store.verify(space, chunk).await.is_ok();
        }
        sound
    };
    assert!(is_sound().await);
    for (path, bytes) in world.faulty.objects().await {
        for at in (0..bytes.len()).filter(|at| *at < 128 || at % 37 == 0) {
            let mut changed = bytes.to_vec();
            changed[at] ^= 4;
            world.faulty.set(&path, Some(changed)).await;
            assert!(!is_sound().await, "byte {at} of {path}");
        }
        world.faulty.set(&path, Some(bytes)).await;
    }
    assert!(is_sound().await);
}

/// An object that the store refuses to serve is named and hides no other, nor do its frames become orphans.
#[tokio::test(start_paused = true)]
async fn unreadable_objects_are_listed() {
    let world = World::new(1, Faults::default());
    let space = world.space.name();
    world.write(1, &(0..30).collect::<Vec<u32>>()).await;
    for (path, _) in world.faulty.objects().await {
        world.faulty.refuse(Some(&path));
        let listing = world.store.list(space).await.unwrap();
        let mut unreadable = listing.unreadable;
        for chunk in &listing.chunks {
            if let Err(e) = world.store.verify(space, chunk).await {
                unreadable.push(world.store.isolate(e).await.unwrap());
            }
        }
        assert!(unreadable.len() == 1 && unreadable[0].to_string().starts_with(path.as_ref()), "{path}");
        assert!(listing.chunks.len() >= 2 && listing.damaged.is_empty() && listing.orphans.is_empty());
    }
    world.faulty.refuse(None);
    // A store that is gone is an error.
    world.faulty.change(Faults { hang: 1.0, ..Faults::default() });
    let start = Instant::now();
    assert!(world.store.list(space).await.unwrap_err().is_failure());
    assert!(start.elapsed() <= 2 * REQUEST, "{:?}", start.elapsed());
}

/// A damaged chunk is replaced, and then read.
#[tokio::test(start_paused = true)]
async fn damaged_chunks_can_be_replaced() {
    let world = World::new(1, Faults::default());
    let tokens: Vec<u32> = (0..20).collect();
    world.write(1, &tokens).await;
    for (path, bytes) in world.faulty.objects().await {
        world.faulty.set(&path, Some(bytes[1..].to_vec())).await;
    }
    // Manifests that cannot be read are written again by any writer.
    assert_eq!(world.read(&tokens, 0).await.unwrap(), 0);
    world.write(2, &tokens).await;
    assert_eq!(world.read(&tokens, 0).await.unwrap(), 20);
    // Damaged frames are known only to their reader.
    for (path, _) in world.faulty.objects().await {
        if path.to_string().contains("/data/") {
            world.faulty.set(&path, Some(vec![])).await;
        }
    }
    assert!(world.read(&tokens, 0).await.unwrap_err().is_damage());
    let layer = LayerKv { keys: vec![1.0; 160], values: vec![1.0; 160] };
    for key in world.space.chunks(&tokens) {
        let object = encode(&world.profile, &key, &layer);
        world.truth.lock().unwrap().objects.entry(key.id).or_default().push(object.clone());
        world.store.replace_chunk(&world.space, &key, object.into()).await.unwrap();
    }
    assert_eq!(world.read(&tokens, 0).await.unwrap(), 20);
}

/// A store that never answers is given up after the time of all attempts, and one that is full rejects only
/// writes.
#[tokio::test(start_paused = true)]
async fn limits_hold() {
    let tokens: Vec<u32> = (0..20).collect();
    let world = World::new(1, Faults { hang: 1.0, ..Faults::default() });
    let start = Instant::now();
    let error = world.read(&tokens, 0).await.unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert!(start.elapsed() <= REQUEST, "{:?}", start.elapsed());

    let world = World::new(1, Faults::default());
    world.write(1, &tokens).await;
    world.store.describe(world.space.name(), "a model").await.unwrap();
    world.faulty.change(Faults { full: 1.0, ..Faults::default() });
    world.store.describe(world.space.name(), "another").await.unwrap(); // has its line: nothing is written
    assert_eq!(world.store.about(world.space.name()).await.unwrap().as_deref(), Some("a model"));
    let more: Vec<u32> = (0..30).collect();
    world.write(2, &more).await;
    assert_eq!(world.read(&more, 0).await.unwrap(), 20);
    world.faulty.heal();
    world.write(2, &more).await;
    assert_eq!(world.read(&more, 0).await.unwrap(), 30);
}

#[tokio::test(start_paused = true)]
async fn deleted_chunks_are_gone() {
    let world = World::new(1, Faults::default());
    let tokens: Vec<u32> = (0..30).collect();
    world.write(1, &tokens).await;
    let keys = world.space.chunks(&tokens);
    world.store.delete(world.space.name(), keys[1].id).await.unwrap();
    world.store.delete(world.space.name(), keys[1].id).await.unwrap();
    assert_eq!(world.read(&tokens, 0).await.unwrap(), 10);
    assert_eq!(world.faulty.objects().await.len(), 4);
    world.write(2, &tokens).await;
    assert_eq!(world.read(&tokens, 0).await.unwrap(), 30);
}

/// A store that is away for less than its budget costs time, not the rows: again and again, and with many
/// requests at once. One that is away for longer is an error within the budget, in all requests together.
#[tokio::test(start_paused = true)]
async fn a_store_may_be_away_for_a_while() {
    let tokens: Vec<u32> = (0..40).collect();
    let world = World::new(1, Faults::default());
    for down in [Faults { unavailable: 1.0, ..Faults::default() }, Faults { hang: 1.0, ..Faults::default() }]
    {
        for end in [10, 20, 30, 40] {
            world.faulty.change(down);
            let back = async {
                tokio::time::sleep(Duration::from_secs(20)).await;
                world.faulty.heal();
            };
            let start = Instant::now();
            futures_util::future::join(world.write(end, &tokens[..end as usize]), back).await;
            assert_eq!(world.read(&tokens, 0).await.unwrap(), end as usize);
            assert!(start.elapsed() < Duration::from_secs(24), "{:?}", start.elapsed());
            tokio::time::sleep(Duration::from_secs(60)).await; // the store works: the budget is whole again
        }
        for key in world.space.chunks(&tokens) {
            world.store.delete(world.space.name(), key.id).await.unwrap();
        }
    }
    world.write(1, &tokens).await;
    world.faulty.change(Faults { hang: 1.0, ..Faults::default() });
    let start = Instant::now();
    for i in 0..3 {
        let error = world.read(&tokens, 0).await.unwrap_err();
        assert!(matches!(&error, Error::Timeout { server, .. } if server == "a store that fails"), "{error}");
        assert!(error.to_string().contains("30s"), "{error}");
        assert!(start.elapsed() <= REQUEST + Duration::from_secs(5 * i), "{:?}", start.elapsed());
    }
    world.faulty.heal();
    assert_eq!(world.read(&tokens, 0).await.unwrap(), 40);
}

/// What a store acknowledges and does not hold is an error that names the object.
#[tokio::test(start_paused = true)]
async fn writes_are_read_back() {
    let tokens: Vec<u32> = (0..10).collect();
    let claims = Faults { claims_all: true, forgets: true, ..Faults::default() };
    for faults in [Faults { forgets: true, ..Faults::default() }, claims] {
        let world = World::new(1, faults);
        let key = world.space.chunks(&tokens).swap_remove(0);
        let layer = LayerKv { keys: vec![1.0; 80], values: vec![1.0; 80] };
        let object: Vec<u8> = encode(&world.profile, &key, &layer);
        let (space, store) = (&world.space, &world.store);
        let id = ProfileId::new("model", "levels", &[]);
        for error in [
            store.put_chunk(space, &key, object.clone().into()).await.map(drop),
            store.replace_chunk(space, &key, object.into()).await,
            store.describe(space.name(), "a model").await,
            store.put_profile(id, &world.profile).await.map(drop),
        ] {
            let error = error.unwrap_err();
            assert!(matches!(&error, Error::NotKept { path } if path.starts_with("root/")), "{error}");
            assert!(error.is_failure() && !error.is_damage());
        }
    }
    // A server that claims that all exists, and keeps what is overwritten, is usable.
    let world = World::new(1, Faults { claims_all: true, ..Faults::default() });
    world.write(1, &tokens).await;
    assert_eq!(world.read(&tokens, 0).await.unwrap(), 10);
    let world = World::new(1, Faults { lacks_conditions: true, ..Faults::default() });
    let error = world.store.describe(world.space.name(), "a model").await.unwrap_err();
    assert!(matches!(error, Error::NoConditions { .. }), "{error}");
    assert!(error.to_string().contains("If-None-Match"), "{error}");
}

/// What a store says is deleted, and holds, is an error that names the object.
#[tokio::test(start_paused = true)]
async fn deletions_are_looked_up() {
    let tokens: Vec<u32> = (0..30).collect();
    let world = World::new(1, Faults::default());
    let (space, store) = (world.space.name(), &world.store);
    world.write(1, &tokens).await;
    store.describe(space, "a model").await.unwrap();
    let keys = world.space.chunks(&tokens);
    world.faulty.set(&Path::from(format!("root/{space}/chunks/{}", keys[0].id)), None).await;
    let orphans = store.list(space).await.unwrap().orphans;
    assert_eq!(orphans.len(), 1);
    world.faulty.change(Faults { keeps_deleted: true, ..Faults::default() });
    let kept = world.faulty.objects().await;
    for error in [
        store.delete(space, keys[1].id).await,
        store.delete_space(space).await,
        store.delete_about(space).await,
        store.sweep(&orphans, Duration::ZERO).await.map(drop),
    ] {
        let error = error.unwrap_err();
        let Error::NotDeleted { path } = &error else { panic!("{error}") };
        assert!(kept.iter().any(|(kept, _)| kept.as_ref() == path), "{path}");
        assert!(error.is_failure() && !error.is_damage());
    }
    // A listing that lags behind the deletions is none.
    world.faulty.change(Faults { lists_late: true, ..Faults::default() });
    assert_eq!(store.sweep(&orphans, Duration::ZERO).await.unwrap(), 1);
    store.delete_space(space).await.unwrap();
    assert!(world.faulty.objects().await.is_empty());
}

/// Every object in the place of every other one of its kind, of the same model and of another one: no reader
/// believes it, listing and verifying name it, and writing again mends it.
#[tokio::test(start_paused = true)]
async fn foreign_objects_are_found() {
    let world = World::new(1, Faults::default());
    let other = Space::new("another model", &world.profile, GRID).unwrap();
    let (tokens, more): (Vec<u32>, Vec<u32>) = ((0..20).collect(), (20..40).collect());
    let layer = |seed: usize| {
        let rows = |seed: usize| (0..320).map(|i| ((i * 7 + seed) as f32).sin()).collect();
        LayerKv { keys: rows(seed), values: rows(seed + 1) }
    };
    let mut objects_of = vec![];
    for (i, (space, tokens)) in
        [(&world.space, &tokens), (&world.space, &more), (&other, &tokens)].into_iter().enumerate()
    {
        for key in space.chunks(tokens) {
            let object = encode(&world.profile, &key, &layer(i));
            world.truth.lock().unwrap().objects.entry(key.id).or_default().push(object.clone());
            world.store.put_chunk(space, &key, object.clone().into()).await.unwrap();
            objects_of.push((*space, key, object));
        }
        world.store.describe(space.name(), &format!("model {}", space.name())).await.unwrap();
    }
    let coarse =
        Profile::new(*world.profile.info(), vec![world.profile.plane(0, 0, Side::Keys).unwrap().clone(); 2]);
    let profiles = [
        ("model", world.profile.clone()),
        ("another model", world.profile.clone()),
        ("levels", coarse.unwrap()),
    ];
    for (name, profile) in &profiles {
        world.store.put_profile(ProfileId::new(name, "", &[]), profile).await.unwrap();
    }
    // Names of the faults that listing, verifying, descriptions and profiles have.
    let faults = async || {
        let mut faults = vec![];
        for space in [&world.space, &other] {
            let listing = world.store.list(space.name()).await.unwrap();
            for chunk in &listing.chunks {
                faults.extend(world.store.verify(space.name(), chunk).await.err().map(|e| e.to_string()));
            }
            faults.extend(listing.damaged.iter().map(|(_, e)| e.to_string()));
            match world.store.about(space.name()).await {
                Ok(about) => assert!(about.is_none_or(|about| about == format!("model {}", space.name()))),
                Err(e) => faults.push(e.to_string()),
            }
        }
        faults.extend(world.store.faulty_profiles().await.unwrap().iter().map(|(_, e)| e.to_string()));
        faults
    };
    assert_eq!(faults().await, [""; 0]);
    let kind = |path: &Path| {
        let kinds = ["/chunks/", "/data/", "/about", "/profiles/"];
        kinds.into_iter().position(|kind| path.as_ref().contains(kind)).unwrap()
    };
    let objects = world.faulty.objects().await;
    let mut swapped = 0;
    for (path, bytes) in &objects {
        for (from, foreign) in objects.iter().filter(|(from, _)| from != path && kind(from) == kind(path)) {
            world.faulty.set(path, Some(foreign.clone())).await;
            let found = faults().await;
            assert!(found.len() == 1 && found[0].starts_with(path.as_ref()), "{from} in {path}: {found:?}");
            for (i, tokens) in [&tokens, &more].into_iter().enumerate() {
                for level in [0, 1] {
                    let read = world.read(tokens, level).await; // checks every frame
                    assert!(read.as_ref().err().is_none_or(Error::is_damage), "context {i}: {read:?}");
                }
            }
            for (name, profile) in &profiles {
                let id = ProfileId::new(name, "", &[]);
                match world.store.profile(id).await {
                    Ok(stored) => assert!(stored.as_ref() == Some(profile)),
                    Err(e) => {
                        assert!(e.is_damage() && e.to_string().contains("another model or of other levels"))
                    }
                }
                assert!(world.store.put_profile(id, profile).await.unwrap() == *profile);
            }
            for (space, key, object) in &objects_of {
                let chunk = world.store.stat(space, key.clone()).await.unwrap();
                let is_damaged = match chunk {
                    None => true,
                    Some(chunk) => {
                        !world.store.damaged(space, &[chunk], Check::Digests).await.unwrap().is_empty()
                    }
                };
                if is_damaged {
                    world.store.replace_chunk(space, key, object.clone().into()).await.unwrap();
                }
            }
            for space in [&world.space, &other] {
                world.store.describe(space.name(), &format!("model {}", space.name())).await.unwrap();
            }
            assert_eq!(faults().await, [""; 0], "{from} in {path}");
            for (path, _) in world.faulty.objects().await {
                if !objects.iter().any(|(old, _)| *old == path) {
                    world.faulty.set(&path, None).await;
                }
            }
            for (path, bytes) in &objects {
                world.faulty.set(path, Some(bytes.clone())).await;
            }
            swapped += 1;
        }
        assert_eq!(world.faulty.objects().await.iter().find(|(p, _)| p == path).unwrap().1, *bytes);
    }
    assert_eq!(swapped, 6 * 5 + 6 * 5 + 2 + 3 * 2);
}
