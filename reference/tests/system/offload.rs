//! Exact rows in files: the same results as in memory, and errors if a file fails.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use kv_llama::{Decoder, KvCache};
use kv_methods::{Error, Method};
use kv_model::RopeScaling;

use crate::caches::{Setup, setup_of};
use crate::support::kv;

/// Methods with offloaded rows.
const METHODS: [&str; 6] = [
    "pqcache:ratio=0.3:code=4x4:window=4",
    "pqcache:ratio=0.3:code=4x4:window=4:offloaded=int8:batch=3",
    "pqcache:ratio=0.5:code=4x4:window=4:exact=f32:exact-layers=1",
    "hybrid:k=4x6:v=2x6:rows=0.1:window=4:exact=bf16",
    "hybrid:k=4x6:v=2x6:rows=0.3:window=4:offloaded=int8",
    "hybrid:k=4x6:v=2x6:rows=auto:window=4",
];

fn setup() -> Setup {
    setup_of("gqa", &METHODS, RopeScaling::None)
}

impl Setup {
    fn cache(&self, method: &str) -> Box<dyn KvCache> {
        self.prepare(method).cache
    }

    fn decoder(&self) -> Decoder {
        Decoder::new(self.model.clone(), self.rope.clone())
    }

    /// Appends the tokens up to position `end`, the first `at_once` of them as a prompt.
    fn run(&self, cache: &mut dyn KvCache, at_once: usize, end: usize) -> kv_methods::Result<Vec<f32>> {
        let (mut decoder, mut logits, start) = (self.decoder(), vec![], cache.seq_len());
        if at_once > 0 {
            logits.extend(decoder.prefill(&self.tokens[start..start + at_once], cache)?);
        }
        for &token in &self.tokens[start + at_once..end] {
            logits.extend(decoder.step(token, cache)?);
        }
        Ok(logits)
    }
}

/// The method with its rows in files in `folder`.
fn offloaded(method: &str, folder: &Path, rule: &str) -> String {
    format!("{method}:offload={}{rule}", folder.display())
}

fn entries(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

#[test]
fn results_are_the_same_in_files_and_at_every_capacity() {
    let (s, folder) = (setup(), tempfile::tempdir().unwrap());
    for method in METHODS {
        let mut cache = s.cache(method);
        let expected = s.run(cache.as_mut(), 100, 150).unwrap();
        let (asked, held) = (cache.fetched(), cache.footprint());
        assert_eq!((asked.hits, asked.loaded_bytes, held.working), (0, 0, 0));
        let row_bytes = asked.bytes / asked.rows;
        let mut most = 0;
        for (rule, tokens) in [
            ("", 4096),
            (":cache=0", 0),
            (":cache=7:block=8", 0),
            (":cache=8:block=8:k-cache=1", 8),
            (":cache=24:block=8:k-cache=2:evict=lru", 24),
            (":cache=24:block=8:k-cache=9", 24),
            (":cache=30:block=1:k-cache=4", 30),
            (":cache=4000:block=3:k-cache=4000", 4000),
            (":cache=96:block=8:k-cache=0", 0),
        ] {
            let mut cache = s.cache(&offloaded(method, folder.path(), rule));
            assert_eq!(s.run(cache.as_mut(), 100, 150).unwrap(), expected, "{method}{rule}");
            let (fetched, footprint) = (cache.fetched(), cache.footprint());
            assert_eq!((fetched.attentions, fetched.rows), (asked.attentions, asked.rows), "{method}{rule}");
            assert_eq!(fetched.bytes, (fetched.rows - fetched.hits) * row_bytes, "{method}{rule}");
            assert_eq!((footprint.kept, footprint.offloaded), (held.kept, held.offloaded), "{method}{rule}");
            // Blocks, and the misses of a step among at most 142 tokens.
            let heads = 4;
            assert!(footprint.working <= heads * (tokens + 142) * row_bytes as usize, "{method}{rule}");
            assert!(rule.is_empty() || (tokens == 0) == (fetched.hits == 0), "{method}{rule}: {fetched:?}");
            most = most.max(fetched.hits);
        }
        assert!(most > asked.rows / 4, "{method}: at most {most} hits of {} rows", asked.rows);
    }
    assert_eq!(entries(folder.path()), 0);
}

#[test]
fn any_order_of_steps_chunks_truncations_and_copies_is_as_in_memory() {
    let (s, folder) = (setup(), tempfile::tempdir().unwrap());
    let mut rng = fastrand::Rng::with_seed(1);
    let mut random = |n: usize| rng.usize(..n);
    for method in METHODS {
        let disk = offloaded(method, folder.path(), ":cache=24:block=8:k-cache=2");
        let mut caches = vec![(s.cache(method), s.cache(&disk))];
        for (memory, disk) in &mut caches {
            assert_eq!(s.run(memory.as_mut(), 60, 60).unwrap(), s.run(disk.as_mut(), 60, 60).unwrap());
        }
        for _ in 0..40 {
            let (i, count) = (random(caches.len()), caches.len());
            let (memory, disk) = &mut caches[i];
            let len = memory.seq_len();
            match random(6) {
                0 if count < 4 => {
                    let copy = (memory.clone_box(), disk.clone_box());
                    caches.push(copy);
                }
                1 if count > 1 => drop(caches.swap_remove(i)),
                2 => {
                    let len = len - random(len.min(30)).min(len - 8);
                    memory.truncate(len).unwrap();
                    disk.truncate(len).unwrap();
                }
                action => {
                    let n = 1 + random(6).min(255 - len.min(254));
                    let (at_once, end) = (if action == 3 { n } else { 0 }, (len + n).min(256));
                    if len + n <= 256 {
                        let expected = s.run(memory.as_mut(), at_once, end).unwrap();
                        assert_eq!(
                            s.run(disk.as_mut(), at_once, end).unwrap(),
                            expected,
                            "{method} at {len}"
                        );
                    }
                }
            }
        }
    }
    assert_eq!(entries(folder.path()), 0);
}

#[test]
fn a_folder_that_takes_no_files_is_refused_before_the_work() {
    let (s, folder) = (setup(), tempfile::tempdir().unwrap());
    let (nowhere, file) = (folder.path().join("nowhere"), folder.path().join("file"));
    std::fs::write(&file, b"old").unwrap();
    for path in [&nowhere, &file] {
        for method in ["pqcache", "hybrid"] {
            let method: Method = offloaded(method, path, "").parse().unwrap();
            let error = method.fitted(&s.model.config).unwrap_err();
            let named = format!("offload={}: ", path.display());
            assert!(matches!(&error, Error::Argument(what) if what.starts_with(&named)), "{error}");
        }
        let output =
            kv::run("a folder", kv::kv(&["generate", "We", "--method", &offloaded("pqcache", path, "")]));
        kv::one_line("a folder", &output, 2, &path.display().to_string());
    }
    assert_eq!(std::fs::read(&file).unwrap(), b"old");
    assert_eq!(entries(folder.path()), 1);
}

#[test]
fn a_write_that_fails_loses_no_token() {
    let (s, folder) = (setup(), tempfile::tempdir().unwrap());
    let rows = folder.path().join("rows");
    for method in METHODS {
        std::fs::create_dir(&rows).unwrap();
        let mut cache = s.cache(&offloaded(method, &rows, ":cache=24:block=8:k-cache=2"));
        let mut expected = s.cache(method);
        s.run(cache.as_mut(), 60, 60).unwrap();
        s.run(expected.as_mut(), 60, 60).unwrap();
        // A clone reads the same files, so the next tokens need new files, for which the folder no longer
        // exists.
        let copy = cache.clone_box();
        std::fs::remove_dir(&rows).unwrap();
        for _ in 0..2 {
            let error = s.run(cache.as_mut(), 0, 64).unwrap_err();
            assert!(
                matches!(&error, Error::Model(kv_model::Error::Io { path, .. }) if *path == rows),
                "{error}"
            );
            let len = cache.seq_len();
            cache.truncate(len).unwrap();
        }
        std::fs::create_dir(&rows).unwrap();
        let again = s.run(cache.as_mut(), 0, 90).unwrap();
        let straight = s.run(expected.as_mut(), 0, 90).unwrap();
        assert_eq!(again, straight[straight.len() - again.len()..], "{method}");
        drop((cache, copy));
        assert_eq!(entries(&rows), 0);
        std::fs::remove_dir(&rows).unwrap();
    }
}

/// The open unlinked files of `folder`.
#[cfg(target_os = "linux")]
fn open_files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap().map(|entry| entry.unwrap().path());
    let of_folder = |fd: &PathBuf| std::fs::read_link(fd).is_ok_and(|target| target.starts_with(folder));
    entries.filter(of_folder).collect()
}

#[cfg(target_os = "linux")]
#[test]
fn a_file_that_is_cut_is_an_error_and_no_wrong_token() {
    let (s, folder) = (setup(), tempfile::tempdir().unwrap());
    let folder = folder.path().canonicalize().unwrap();
    for method in METHODS {
        let mut cache = s.cache(&offloaded(method, &folder, ":cache=24:block=8:k-cache=2"));
        s.run(cache.as_mut(), 60, 70).unwrap();
        let files = open_files(&folder);
        assert!(!files.is_empty());
        for fd in files {
            std::fs::OpenOptions::new().write(true).open(fd).unwrap().set_len(8).unwrap();
        }
        for _ in 0..3 {
            let error = s.run(cache.as_mut(), 0, 80).unwrap_err();
            assert!(error.to_string().contains("has been cut"), "{method}: {error}");
            assert!(error.to_string().contains(&folder.display().to_string()), "{method}: {error}");
            let len = cache.seq_len();
            cache.truncate(len).unwrap();
        }
        drop(cache);
        assert!(open_files(&folder).is_empty());
    }
}

#[cfg(unix)]
#[test]
fn a_full_disk_is_one_line_that_names_the_folder() {
    let folder = tempfile::tempdir().unwrap();
    let method = offloaded("pqcache:window=4", folder.path(), "");
    let prompt = "We, the people of the United States, in order to form a more perfect union. ".repeat(4);
    // A file-size limit emulates a full disk: the same system call fails.
    let script = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
    let kv = kv::kv(&["generate", &prompt, "--device", "cpu", "--method", &method]);
    let mut limited = std::process::Command::new("sh");
    limited.args(["-c", script, "sh"]).arg(kv.get_program()).args(kv.get_args()).stdin(Stdio::null());
    let output = kv::run("a full disk", limited);
    kv::one_line("a full disk", &output, 2, &folder.path().display().to_string());
    assert_eq!(entries(folder.path()), 0);
}

#[test]
fn a_run_that_is_killed_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let method = offloaded("pqcache:ratio=0.5:window=4", folder.path(), "");
    let prompt = "We, the people of the United States, in order to form a more perfect union. ".repeat(4);
    let args = ["generate", &prompt, "--device", "cpu", "--method", &method, "--tokens", "3000"];
    let mut run = kv::kv(&args).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    // After its first byte of text, the rows of the prompt are in files.
    std::io::Read::read_exact(run.stdout.as_mut().unwrap(), &mut [0]).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    run.kill().unwrap();
    run.wait().unwrap();
    assert_eq!(entries(folder.path()), 0);
}
