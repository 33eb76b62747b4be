//! Prompts over a store: loaded caches give the same as computed ones, contexts share chunks, and damage
//! costs time, not answers.

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use codec_core::{Encoding, Profile};
use kv_llama::ops::log_softmax;
use kv_llama::{Decoder, prefill};
use kv_methods::{Method, calibrated};
use kv_model::{Model, Rope};
use kv_reference::eval::kl_divergence;
use kv_reference::stream::encoded::levels;
use kv_reference::stream::prompt::{Calculated, FillOptions, Filled, PromptStore, Step};
use kv_store::{Check, Grid, KvStore, Options, ProfileId, Space, unfinished};
use kv_stream::{Choice, ChunkFrame, LayerKv, Outcome, Speeds};

use crate::support::kv::{kv, one_line, refused, run};
use crate::support::shipped::shipped;

const GRID: Grid = Grid { chunk: 60, tail: 20 };

struct Setup {
    model: Arc<Model>,
    rope: Arc<Rope>,
    tokens: Vec<u32>,
    profile: Profile,
    space: Space,
}

/// The shipped model; a level that keeps every bit of rows of 16 bits, and a lossy one.
static SETUP: LazyLock<Setup> = LazyLock::new(|| {
    let (model, tokens) = shipped(20_000);
    let rope = Arc::new(Rope::new(&model.config, 2048));
    let methods = Method::parse_list("cachegen:mode=lossless:rows=f16,cachegen:bits=3").unwrap();
    let calibrated = calibrated(&model, &rope, &tokens[..1024], &methods).unwrap();
    let profile = levels(&methods, &model, &calibrated).unwrap();
    let space = Space::new(&model.hash, &profile, GRID).unwrap();
    let tokens = tokens[1024..1600].to_vec();
    Setup { model, rope, tokens, profile, space }
});

impl Setup {
    fn over<'a>(&'a self, store: &'a KvStore) -> PromptStore<'a> {
        PromptStore { store, space: &self.space, profile: &self.profile }
    }

    /// Fills a cache, and generates greedily.
    fn generate(
        &self,
        store: &KvStore,
        prompt: &[u32],
        keep: bool,
        encoding: &[Encoding],
    ) -> (Filled, Vec<u32>) {
        let method: Method = "dense".parse().unwrap();
        let mut cache = method.prepare(&self.model, &self.rope, &Default::default()).unwrap().cache;
        let mut decoder = Decoder::new(self.model.clone(), self.rope.clone());
        let stream = kv_stream::Options {
            choice: Choice::Given(encoding.to_vec()),
            batch: 1,
            timeout: 10.0,
            fall_back: true,
        };
        let options = FillOptions { stream, speeds: Speeds::UNKNOWN, chunk: 64, keep };
        let filled = self.over(store).fill(&mut decoder, cache.as_mut(), prompt, &options).unwrap();
        assert_eq!(cache.seq_len(), prompt.len());
        let mut logits = filled.logits.clone();
        let tokens = (0..12).map(|_| {
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap() as u32;
            logits = decoder.step(best, cache.as_mut()).unwrap().to_vec();
            best
        });
        let tokens = tokens.collect();
        (filled, tokens)
    }

    fn put(&self, store: &KvStore, tokens: &[u32]) -> usize {
        self.repair(store, tokens, Check::Length).stored
    }

    fn repair(&self, store: &KvStore, tokens: &[u32], check: Check) -> Calculated {
        self.over(store).calculate(&self.model, &self.rope, tokens, check, |_| ()).unwrap()
    }
}

fn memory() -> KvStore {
    KvStore::open("memory:///", Options::default()).unwrap()
}

fn bytes(filled: &Filled) -> u64 {
    filled.trace.as_ref().map_or(0, |trace| trace.bytes)
}

fn kl(a: &Filled, b: &Filled) -> f64 {
    kl_divergence(&log_softmax(&a.logits), &log_softmax(&b.logits))
}

const LEVEL: [[Encoding; 1]; 2] = [[Encoding::Level(0)], [Encoding::Level(1)]];

#[test]
fn loaded_prompts_continue_as_computed_ones() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("file://{}/caches", folder.path().display());
    for (name, store) in [("memory", memory()), ("folder", KvStore::open(&url, Options::default()).unwrap())]
    {
        let prompt = &SETUP.tokens[..150];
        let (computed, tokens) = SETUP.generate(&store, prompt, false, &LEVEL[0]);
        assert_eq!((computed.prefix, computed.stored), (0, 0), "{name}");
        assert_eq!(SETUP.put(&store, prompt), 3, "{name}");
        let (fine, same) = SETUP.generate(&store, prompt, false, &LEVEL[0]);
        let outcomes = fine.trace.iter().flat_map(|trace| &trace.events).map(|event| &event.outcome);
        assert!(fine.prefix == 140 && outcomes.eq(&[const { Outcome::Loaded }; 3]), "{name}");
        assert!(kl(&computed, &fine) < 1e-4, "{name}: {}", kl(&computed, &fine));
        assert_eq!(tokens, same, "{name}");
        let (coarse, _) = SETUP.generate(&store, prompt, false, &LEVEL[1]);
        assert!(bytes(&coarse) < bytes(&fine) / 2, "{name}");
        assert!(kl(&computed, &coarse) < 0.1, "{name}: {}", kl(&computed, &coarse));
        // Text in place of any chunk is computed over the loaded chunks; for all chunks it is exact.
        let mixed = [Encoding::Level(0), Encoding::Text];
        let (mixed, same) = SETUP.generate(&store, prompt, false, &mixed);
        assert!(kl(&computed, &mixed) < 1e-4 && tokens == same, "{name}: {}", kl(&computed, &mixed));
        let (text, same) = SETUP.generate(&store, prompt, false, &[Encoding::Text]);
        let difference = computed.logits.iter().zip(&text.logits).map(|(a, b)| (a - b).abs());
        assert!(difference.fold(0.0, f32::max) < 1e-3 && tokens == same, "{name}");
    }
}

#[test]
fn every_layer_and_every_chunk_is_reported() {
    let (store, mut steps) = (memory(), vec![]);
    let (model, tokens) = (&SETUP.model, &SETUP.tokens[..180]);
    let report = |step| steps.push(step);
    SETUP.over(&store).calculate(model, &SETUP.rope, tokens, Check::Length, report).unwrap();
    let layers = model.config.n_layers;
    let expected = (0..layers).map(|l| Step::Layer(l, layers)).chain((0..3).map(|i| Step::Chunk(i, 3)));
    assert!(steps.iter().copied().eq(expected), "{steps:?}");
}

#[test]
fn contexts_share_chunks_and_the_longest_prefix_is_found() {
    let store = memory();
    let tokens = &SETUP.tokens;
    assert_eq!(SETUP.put(&store, &tokens[..180]), 3);
    assert_eq!(SETUP.put(&store, &tokens[..180]), 0);
    // A tail is not part of a longer one.
    assert_eq!(SETUP.put(&store, &tokens[..200]), 1);
    assert_eq!(SETUP.put(&store, &tokens[..220]), 1);
    let mut branch = tokens[..120].to_vec();
    branch.extend(&tokens[300..345]);
    // Two chunks exist; the tail of 40 tokens is new.
    assert_eq!(SETUP.put(&store, &branch), 1);
    let loaded = |prompt: &[u32]| SETUP.generate(&store, prompt, false, &LEVEL[0]).0.prefix;
    // Three contexts: that of 180 tokens is the beginning of the next one.
    let listing = store.list(SETUP.space.name()).unwrap();
    assert_eq!((listing.contexts(), listing.chunks.len()), (3, 6));
    assert_eq!(loaded(&tokens[..190]), 180);
    assert_eq!((loaded(&tokens[..215]), loaded(&tokens[..225])), (200, 220));
    assert_eq!(loaded(&tokens[..180]), 120); // the last token is always computed
    assert_eq!(loaded(&branch), 160);
    branch[130] += 1;
    assert_eq!(loaded(&branch), 120);
    branch[0] += 1;
    assert_eq!(loaded(&branch), 0);
    assert_eq!(loaded(&tokens[..5]), 0);
    // Without their beginning, chunks are not found.
    store.delete(SETUP.space.name(), SETUP.space.chunks(tokens)[0].id).unwrap();
    let listing = store.list(SETUP.space.name()).unwrap();
    assert_eq!((listing.contexts(), listing.chunks.len(), loaded(&tokens[..190])), (0, 5, 0));
}

#[test]
fn what_is_new_is_kept_when_asked() {
    let store = memory();
    let tokens = &SETUP.tokens;
    let (first, continued) = SETUP.generate(&store, &tokens[..100], true, &LEVEL[0]);
    assert_eq!((first.prefix, first.stored), (0, 2));
    let (again, same) = SETUP.generate(&store, &tokens[..100], true, &LEVEL[0]);
    // The tail of 40 ends the prompt, whose last token is computed.
    assert_eq!((again.prefix, again.stored), (60, 0));
    assert!(kl(&first, &again) < 1e-4 && continued == same);
    // A longer prompt does not make a chunk from a loaded tail.
    let (longer, _) = SETUP.generate(&store, &tokens[..150], true, &LEVEL[1]);
    assert_eq!((longer.prefix, longer.stored), (60, 2));
    assert_eq!(SETUP.generate(&store, &tokens[..150], false, &LEVEL[0]).0.prefix, 140);
}

#[test]
fn damage_costs_time_and_is_mended() {
    let folder = tempfile::tempdir().unwrap();
    let store = KvStore::open(folder.path().to_str().unwrap(), quick()).unwrap();
    let prompt = &SETUP.tokens[..190];
    SETUP.put(&store, prompt);
    let (whole, tokens) = SETUP.generate(&store, prompt, false, &LEVEL[0]);
    assert_eq!((whole.prefix, whole.damaged().count()), (180, 0));
    flip(&frames(folder.path(), prompt, 1));
    let (damaged, same) = SETUP.generate(&store, prompt, false, &LEVEL[0]);
    assert!(damaged.prefix == 180 && damaged.damaged().eq([1]));
    assert!(bytes(&damaged) > bytes(&whole) / 2);
    assert!(kl(&whole, &damaged) < 1e-4 && tokens == same);
    let (kept, _) = SETUP.generate(&store, prompt, true, &LEVEL[0]);
    assert_eq!((kept.prefix, kept.damaged().count(), kept.stored), (180, 1, 1));
    let (mended, same) = SETUP.generate(&store, prompt, false, &LEVEL[0]);
    assert_eq!((mended.prefix, mended.damaged().count()), (180, 0));
    assert!(kl(&whole, &mended) < 1e-4 && tokens == same);
}

/// Storing a context again repairs its frames: lost or truncated ones in any case, wrong bits if the frames
/// are read.
#[test]
fn what_is_stored_again_is_repaired() {
    let folder = tempfile::tempdir().unwrap();
    let store = KvStore::open(folder.path().to_str().unwrap(), quick()).unwrap();
    let prompt = &SETUP.tokens[..190];
    assert_eq!(SETUP.put(&store, prompt), 3);
    let (whole, _) = SETUP.generate(&store, prompt, false, &LEVEL[0]);
    let calculated = |stored, repaired| Calculated { stored, repaired };
    let wrong = || {
        std::fs::remove_file(frames(folder.path(), prompt, 0)).unwrap();
        let cut = std::fs::File::options().write(true).open(frames(folder.path(), prompt, 2)).unwrap();
        cut.set_len(1000).unwrap();
    };
    wrong();
    assert_eq!(SETUP.generate(&store, prompt, false, &LEVEL[0]).0.damaged().collect::<Vec<_>>(), [0, 2]);
    assert_eq!(SETUP.repair(&store, prompt, Check::Length), calculated(0, 2));
    assert_eq!(SETUP.repair(&store, prompt, Check::Digests), calculated(0, 0));
    flip(&frames(folder.path(), prompt, 1));
    assert_eq!(SETUP.repair(&store, prompt, Check::Length), calculated(0, 0));
    assert_eq!(SETUP.repair(&store, prompt, Check::Digests), calculated(0, 1));
    // Lost and new chunks at once; the second writer has nothing to do.
    wrong();
    assert_eq!(SETUP.repair(&store, &SETUP.tokens[..250], Check::Digests), calculated(1, 2));
    assert_eq!(SETUP.repair(&store, &SETUP.tokens[..250], Check::Digests), calculated(0, 0));
    let (mended, _) = SETUP.generate(&store, prompt, false, &LEVEL[0]);
    assert!(mended.damaged().count() == 0 && mended.logits == whole.logits);
}

/// The file with the frames of a chunk that its manifest names.
fn frames(folder: &Path, prompt: &[u32], chunk: usize) -> PathBuf {
    let id = SETUP.space.chunks(prompt)[chunk].id.to_string();
    let frames = files(folder).into_iter().filter(|path| {
        let path = path.to_string_lossy();
        path.contains("/data/") && path.contains(&id)
    });
    // Frames that were replaced remain as an orphan.
    frames.max_by_key(|path| std::fs::metadata(path).unwrap().modified().unwrap()).unwrap()
}

fn flip(path: &Path) {
    let mut object = std::fs::read(path).unwrap();
    let middle = object.len() / 3;
    object[middle] ^= 1;
    std::fs::write(path, object).unwrap();
}

/// Calibration differs between machines in the last bits: the first profile is shared by all.
#[test]
fn the_first_profile_is_everybodys() {
    let folder = tempfile::tempdir().unwrap();
    let store = KvStore::open(folder.path().to_str().unwrap(), quick()).unwrap();
    let id = ProfileId::new(&SETUP.model.hash, "levels", &SETUP.tokens);
    assert_ne!(id, ProfileId::new(&SETUP.model.hash, "levels", &SETUP.tokens[1..]));
    let stored = || store.profile(id, || Err(kv_reference::Error::argument("made again")));
    assert!(stored().unwrap_err().to_string().contains("made again"));
    let made = store.profile(id, || kv_reference::Result::Ok(SETUP.profile.clone())).unwrap();
    let space = |profile: &Profile| Space::new(&SETUP.model.hash, profile, GRID).unwrap();
    assert_eq!(space(&made), SETUP.space);
    assert_eq!(space(&stored().unwrap()), SETUP.space);
    // A damaged one is made again.
    let path = folder.path().join("profiles").join(id.to_string());
    let mut object = std::fs::read(&path).unwrap();
    object[1000] ^= 1;
    std::fs::write(&path, object).unwrap();
    assert!(stored().is_err());
    assert!(store.stored_profile(id).unwrap_err().is_damage());
    let faulty = store.faulty_profiles().unwrap();
    assert!(faulty.len() == 1 && faulty[0].0 == id && faulty[0].1.is_damage(), "{faulty:?}");
    store.profile(id, || kv_reference::Result::Ok(SETUP.profile.clone())).unwrap();
    assert_eq!(space(&stored().unwrap()), SETUP.space);
}

/// A store that cannot be written or read costs the caches, not the answer.
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn a_store_that_fails_is_no_error_of_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let store = KvStore::open(folder.path().to_str().unwrap(), quick()).unwrap();
    let prompt = &SETUP.tokens[..70];
    let (first, tokens) = SETUP.generate(&store, prompt, true, &LEVEL[0]);
    assert!(first.stored == 1 && first.store_error.is_none());
    std::fs::remove_dir_all(folder.path()).unwrap();
    std::fs::write(folder.path(), "a file").unwrap();
    let (second, same) = SETUP.generate(&store, prompt, true, &LEVEL[0]);
    assert!(second.stored == 0 && second.store_error.is_some() && tokens == same);
    std::fs::remove_file(folder.path()).unwrap();
    std::fs::create_dir(folder.path()).unwrap();
}

/// Damage is named by its object, also that of one that is too long to be read.
#[test]
fn objects_that_are_too_long_are_named_and_mended() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().to_str().unwrap();
    let store = KvStore::open(url, quick()).unwrap();
    let prompt = &SETUP.tokens[..70];
    SETUP.put(&store, prompt);
    let (space, id) = (SETUP.space.name(), SETUP.space.chunks(prompt)[0].id);
    store.describe(space, "about").unwrap();
    let profile = ProfileId::new("model", "levels", &[]);
    store.profile(profile, || kv_reference::Result::Ok(SETUP.profile.clone())).unwrap();
    let objects = [(format!("{space}/about"), 1 << 20), (format!("{space}/chunks/{id}"), 1 << 30)];
    let profile_object = (format!("profiles/{profile}"), (1 << 30) + 1);
    for (object, len) in objects.iter().chain([&profile_object]) {
        let file = std::fs::File::options().write(true).open(folder.path().join(object)).unwrap();
        file.set_len(*len).unwrap(); // a hole
    }
    let output = run("verify", kv(&["store", "verify", url]));
    let stdout = String::from_utf8(output.stdout).unwrap();
    for (object, len) in &objects {
        assert!(stdout.contains(&format!("damaged: {object}: is {len} B long, of at most ")), "{stdout}");
    }
    let what = "2 damaged objects: --remove deletes what is damaged; 1 damaged profile: `kv store put` with ";
    refused("damage", &["store", "verify", url], what);
    refused(
        "a profile that stays",
        &["store", "verify", url, "--remove"],
        "kv: 1 damaged profile: `kv store put` ",
    );
    let error = store.stored_profile(profile).unwrap_err();
    assert!(error.is_damage() && error.to_string().starts_with(&profile_object.0), "{error}");
    store.profile(profile, || kv_reference::Result::Ok(SETUP.profile.clone())).unwrap();
    store.describe(space, "about").unwrap();
    SETUP.put(&store, prompt);
    let output = run("verify", kv(&["store", "verify", url]));
    let stdout = String::from_utf8(output.stdout).unwrap();
    let last = stdout.lines().last().unwrap();
    assert!(
        output.status.success() && last.starts_with("verified ") && last.ends_with(", no damage"),
        "{stdout}"
    );
}

/// A store that can only be read serves what it holds, and a prompt that was to be kept costs a warning.
#[cfg(unix)]
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn a_store_that_is_only_read_is_no_error_of_a_prompt_to_keep() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().to_str().unwrap();
    let grid = ["--kv-grid", "20/20", "--kv-levels", "cachegen:bits=8", "--device", "cpu"];
    let words =
        "We, the people of the United States, in order to form a more perfect union, establish justice";
    let generate = |prompt: &str| {
        let keep = ["generate", prompt, "--tokens", "4", "--kv", url, "--kv-keep"];
        let output = run("generate", kv(&[&keep[..], &grid].concat()));
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{stderr}");
        stderr
    };
    assert!(generate(words).contains("kv: loaded 0 of "));
    let all = || std::iter::once(folder.path().to_owned()).chain(folders(folder.path()));
    let mode = |mode| {
        all().for_each(|path| std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap())
    };
    mode(0o555);
    // The superuser may write whatever the mode says.
    let is_enforced = tempfile::tempfile_in(folder.path()).is_err();
    let (known, longer) = (generate(words), generate(&format!("{words} {words}")));
    let put = run("put", kv(&["store", "put", url, "--tokens", "200"]));
    mode(0o755);
    assert!(!known.contains("loaded 0 of "), "{known}");
    assert!(!longer.contains("loaded 0 of "), "{longer}");
    if is_enforced {
        assert!(known.lines().count() == 1 && longer.lines().count() == 2, "{known}{longer}");
        assert!(longer.contains("Permission denied"), "{longer}");
        one_line("put", &put, 2, "cannot be written to: Permission denied");
    }
}

/// The folders in a folder, at any depth.
#[cfg(unix)]
fn folders(folder: &Path) -> Vec<PathBuf> {
    let paths = folder.read_dir().unwrap().map(|entry| entry.unwrap().path());
    paths.filter(|path| path.is_dir()).flat_map(|path| [folders(&path), vec![path]].concat()).collect()
}

#[test]
fn files_of_killed_writers_are_swept() {
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().to_str().unwrap();
    let store = KvStore::open(url, quick()).unwrap();
    SETUP.put(&store, &SETUP.tokens[..70]);
    let before = files(folder.path());
    let space = SETUP.space.name();
    let others = [folder.path().join("notes#1"), folder.path().join("mine/notes#1")];
    std::fs::create_dir_all(folder.path().join("mine")).unwrap();
    others.iter().for_each(|path| std::fs::write(path, "mine").unwrap());
    let names = ["profiles/0123#1".to_owned(), format!("{space}/chunks/0123#7"), format!("{space}/about#1")];
    std::fs::create_dir_all(folder.path().join("profiles")).unwrap();
    names.iter().for_each(|name| std::fs::write(folder.path().join(name), "half").unwrap());
    let found = unfinished(url).unwrap();
    assert!(found.len() == 3 && found.iter().all(|file| file.bytes == 4), "{found:?}");
    // They are shown, and a store with them is sound.
    let verify = run("verify", kv(&["store", "verify", url]));
    let shown = String::from_utf8(verify.stdout).unwrap();
    assert!(verify.status.success() && shown.contains("`kv store rm URL --orphans "), "{shown}");
    names.iter().for_each(|name| assert!(shown.contains(&format!("orphan: {name} (4 B)\n")), "{shown}"));
    let ls = run("ls", kv(&["store", "ls", url]));
    let (out, err) = (String::from_utf8(ls.stdout).unwrap(), String::from_utf8(ls.stderr).unwrap());
    let row: Vec<&str> = out.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(row[6..9], ["2", "8", "B"], "{out}");
    assert!(err.starts_with("kv: 1 file of interrupted writes of profiles"), "{err}");
    let sweep = |hours: &str| {
        let output = run("rm", kv(&["store", "rm", url, "--orphans", hours]));
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!((sweep("1"), unfinished(url).unwrap().len()), ("0 orphans deleted\n".into(), 3));
    assert_eq!((sweep("0"), unfinished(url).unwrap().len()), ("3 orphans deleted\n".into(), 0));
    assert!(others.iter().all(|path| path.exists()));
    std::fs::remove_file(&others[0]).unwrap();
    std::fs::remove_dir_all(folder.path().join("mine")).unwrap();
    assert_eq!(files(folder.path()), before);
    // A deleted space leaves none.
    std::fs::write(folder.path().join(&names[1]), "half").unwrap();
    assert!(run("rm", kv(&["store", "rm", url, &space.to_string()])).status.success());
    assert!(files(folder.path()).is_empty());
    assert!(unfinished("memory:///").unwrap().is_empty());
}

/// Every fault is named, and none hides another.
#[cfg(unix)]
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn all_faults_are_named() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().to_str().unwrap();
    let store = KvStore::open(url, quick()).unwrap();
    let prompt = &SETUP.tokens[..190];
    SETUP.put(&store, prompt);
    let chunks = SETUP.space.chunks(prompt);
    let manifest = |i: usize| format!("{}/chunks/{}", SETUP.space.name(), chunks[i].id);
    std::fs::write(folder.path().join(manifest(2)), "").unwrap();
    // A space before it and one after it whose names cannot be listed.
    let unlisted = ["0", "f"].map(|digit| format!("{}/chunks", digit.repeat(64)));
    for chunks in &unlisted {
        std::fs::create_dir_all(folder.path().join(chunks)).unwrap();
        symlink("loop", folder.path().join(chunks).join("loop")).unwrap();
    }
    let profile = ProfileId::new("model", "levels", &[]);
    std::fs::create_dir_all(folder.path().join("profiles")).unwrap();
    std::fs::write(folder.path().join(format!("profiles/{profile}")), "").unwrap();
    let locked = |mode| {
        let file = folder.path().join(manifest(1));
        std::fs::set_permissions(&file, PermissionsExt::from_mode(mode)).unwrap();
        std::fs::read(file).is_err() // the superuser may read whatever the mode says
    };
    let is_locked = locked(0);
    let (ls, verify) = (run("ls", kv(&["store", "ls", url])), run("verify", kv(&["store", "verify", url])));
    let rm = run("rm", kv(&["store", "rm", url, "--orphans", "0"]));
    locked(0o644);
    let lines = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    let (out, err) = (lines(ls.stdout), lines(ls.stderr));
    assert!(ls.status.success() && out.lines().count() == 4, "{out}");
    let row = out.lines().find(|line| line.contains(&SETUP.space.name().to_string())).unwrap();
    let row: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(row[1..4], if is_locked { ["1", "1", "60"] } else { ["1", "2", "120"] }, "{out}");
    let shown = lines(verify.stdout);
    for text in [&err, &shown] {
        assert!(text.contains(&format!("damaged: {}: is truncated\n", manifest(2))), "{text}");
        unlisted.iter().for_each(|path| assert!(text.contains(&format!("unreadable: {path}: ")), "{text}"));
        assert_eq!(text.contains(&format!("unreadable: {}: ", manifest(1))), is_locked, "{text}");
    }
    assert!(shown.contains(&format!("damaged profile, whose caches are not found: profiles/{profile}: ")));
    let unreadable = 2 + usize::from(is_locked);
    let counts = format!("{unreadable} unreadable objects");
    let end = lines(verify.stderr);
    assert!(verify.status.code() == Some(2) && end.ends_with(&format!("; {counts}\n")), "{end}");
    assert!(end.starts_with("kv: 1 damaged object: ") && end.contains("; 1 damaged profile: "), "{end}");
    // The frames of an unreadable manifest are no orphans; those of the damaged one are.
    assert_eq!(lines(rm.stdout), "1 orphan deleted\n");
    assert!(rm.status.code() == Some(2) && lines(rm.stderr).contains(&counts));
    refused("remove", &["store", "verify", url, "--remove"], "; 2 unreadable objects");
    let listing = store.list(SETUP.space.name()).unwrap();
    assert!(listing.damaged.is_empty() && listing.unreadable.is_empty() && listing.chunks.len() == 2);
}

/// Without a model: rows from the store, each level chosen by the rate of the previous transfers.
#[test]
fn chunks_are_loaded_and_decoded_as_rows() {
    let store = memory();
    let tokens = &SETUP.tokens[..140];
    SETUP.put(&store, tokens);
    let mut exact = vec![];
    prefill(&SETUP.model, &SETUP.rope, tokens, &mut |_, activations| {
        exact.push([activations.k.to_vec(), activations.v.to_vec()]);
        Ok(())
    })
    .unwrap();
    let found = store.find(&SETUP.space, tokens).unwrap();
    let (mut rates, mut decoded) = (vec![], 0);
    let choose = |choice: &kv_store::LoadProgress<'_>| {
        rates.push(choice.last.and_then(|transfer| transfer.throughput()));
        Encoding::Level(0)
    };
    let channels = SETUP.profile.info().channels();
    let loaded = store.load(&SETUP.space, &found, 1, choose, |arrival| {
        let range = arrival.tokens.start * channels..arrival.tokens.end * channels;
        let frame = ChunkFrame::parse(&SETUP.profile, &arrival.frame, &arrival.tokens, 0)?;
        for (layer, exact) in exact.iter().enumerate() {
            let LayerKv { keys, values } = frame.layer(layer)?;
            for (rows, exact) in [keys, values].into_iter().zip(exact) {
                let exact = &exact[range.clone()];
                let square = |x: f32| f64::from(x).powi(2);
                let error: f64 = rows.iter().zip(exact).map(|(a, b)| square(a - b)).sum();
                let size: f64 = exact.iter().map(|&x| square(x)).sum();
                assert!(rows.len() == exact.len() && error < 1e-3 * size, "{error} of {size}");
            }
            decoded += arrival.tokens.len();
        }
        kv_reference::Result::Ok(())
    });
    loaded.unwrap();
    assert_eq!(decoded, 140 * exact.len());
    assert!(rates.len() == 3 && rates[0].is_none() && rates[2].is_some_and(|rate| rate > 0.0));
}

/// Few and short waits, for stores that fail at once.
fn quick() -> Options {
    let [retry, backoff] = [1000, 1].map(std::time::Duration::from_millis);
    Options { retry, attempts: 2, backoff, ..Options::default() }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

#[test]
fn calls_from_tokio_and_cancelled_calls_return() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let store = memory();
        SETUP.put(&store, &SETUP.tokens[..70]);
        assert_eq!(SETUP.generate(&store, &SETUP.tokens[..70], false, &LEVEL[0]).0.prefix, 60);
        store.cancel().cancel();
        let error = store.find(&SETUP.space, &SETUP.tokens).unwrap_err();
        assert_eq!(error.to_string(), "cancelled");
    });
}
