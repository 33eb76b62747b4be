//! `kv store` and `kv generate --kv` as commands: what they print, and what they refuse in one line.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use crate::support::kv::{kv, one_line, refused, run, text, usage_refused};

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn the_command_line_stores_and_loads() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (url, text, report) = (path("caches"), path("prompt.txt"), path("report.json"));
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    let prompt: String =
        std::fs::read_to_string(assets.join("sotu-heldout.txt")).unwrap()[30_000..31_500].into();
    std::fs::write(&text, &prompt).unwrap();
    let common = ["--kv-grid", "100/20", "--kv-levels", "cachegen:mode=lossless:rows=f16,cachegen:bits=2"];
    let output = |args: &[&str]| {
        let output = run("kv", kv(&[args, &common].concat()));
        let (out, err) =
            (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap());
        assert!(output.status.success(), "{args:?}: {err}");
        (out, err)
    };
    let generate = ["generate", &prompt, "--tokens", "8", "--device", "cpu"];
    let plain = run("kv", kv(&generate));
    let (first, err) = output(&[&generate[..], &["--kv", &url, "--kv-keep"]].concat());
    assert!(err.contains("kv: loaded 0 of ") && !err.contains(" 0 chunks stored"), "{err}");
    assert_eq!(first.as_bytes(), plain.stdout);
    let (second, err) = output(&[&generate[..], &["--kv", &url]].concat());
    assert!(err.contains("loaded ") && err.contains(" 0 chunks stored"), "{err}");
    assert_eq!(first, second);
    let adaptive = ["--kv", &url, "--kv-encoding", "adaptive", "--kv-slo", "30"];
    let (of_file, _) = output(&["generate", "-f", &text, "--tokens", "8", "--device", "cpu", "--kv", &url]);
    assert_eq!(first, of_file);
    let (third, err) = output(&[&generate[..], &adaptive, &["--json", &report]].concat());
    assert!(first == third && err.contains(" tokens recomputed"), "{err}"); // in time
    let json: serde_json::Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    assert_eq!(json["kv"]["loaded"], serde_json::json!([0, 0]));
    assert!(err.contains(&format!(", {} tokens recomputed", json["kv"]["recomputed"])), "{err} {json}");
    let folded = [&generate[..], &["--kv", &url, "--method", "zack"], &common].concat();
    refused("weights of the method", &folded, "on the CPU method zack");
    let (put, _) = output(&["store", "put", &url, "--text", &text, "--json", &report]);
    assert!(put.ends_with(": 0 new, 0 repaired\n"), "{put}");
    let (get, _) = output(&["store", "get", &url, "--text", &text, "--level", "1"]);
    assert!(get.contains(" tokens in ") && !get.contains(" 0 chunks"), "{get}");
    let inspect = |args: &[&str]| String::from_utf8(run("kv", kv(args)).stdout).unwrap();
    let listed = inspect(&["store", "ls", &url]);
    let rows: Vec<Vec<&str>> = listed.lines().map(|line| line.split_whitespace().collect()).collect();
    let [header, row] = &rows[..] else { panic!("{listed}") };
    assert!(header.starts_with(&["space", "contexts", "chunks", "tokens"]), "{listed}");
    let levels = "cachegen:mode=lossless:rows=f16,cachegen:bits=2";
    let about = ["0", "tiny-llama-12m", levels, "100/20"]; // nothing is damaged
    assert!(row[1] == "1" && row.ends_with(&about), "{listed}");
    let space = row[0];
    for manifest in std::fs::read_dir(folder.path().join("caches").join(space).join("chunks")).unwrap() {
        std::fs::write(manifest.unwrap().path(), "").unwrap();
    }
    let (computed, err) = output(&[&generate[..], &["--kv", &url]].concat());
    assert!(err.contains("loaded 0 of ") && err.contains(": is truncated: "), "{err}");
    assert_eq!(computed.as_bytes(), plain.stdout);
    assert_eq!(inspect(&["store", "rm", &url, space]), format!("{space} deleted\n"));
    assert_eq!(inspect(&["store", "ls", &url]), "nothing is stored there\n");
    let get = [&["store", "get", &url, "--text", &text], &common[..]].concat();
    refused("a deleted text", &get, "holds no beginning of this text");
}

#[test]
fn wrong_stores_are_refused_in_one_line() {
    for (url, what) in [
        ("s3:///nowhere", "s3:///nowhere: "),
        ("s3://", "s3://: "),
        ("s3://", "s3://BUCKET/PATH"),
        ("gs://x/y", "s3://BUCKET/PATH"),
        ("tape://x/y", "tape://x/y: "),
        ("s3://my bucket/x", "s3://my bucket/x: is no URL: "),
        ("s3://user:secret@/x", "s3:///x: is no URL: empty host"),
        ("/dev/null/x", "/dev/null/x: "),
        ("file://host/x", "file://host/x: is no path"),
    ] {
        let args = ["store", "get", url, "--tokens", "100"];
        refused(url, &args, what);
    }
    let folder = tempfile::tempdir().unwrap();
    let url = folder.path().to_str().unwrap();
    let missing = folder.path().join("missing");
    let name = missing.to_str().unwrap();
    for args in [&["ls", name][..], &["verify", name], &["rm", name, "--orphans", "1"], &["get", name]] {
        refused("missing", &[&["store"], args].concat(), "no such folder");
    }
    assert!(!missing.exists());
    refused("empty", &["store", "get", url, "--tokens", "100"], "holds nothing");
    for command in ["put", "get"] {
        refused(
            "a short text",
            &["store", command, url, "--tokens", "10"],
            "a chunk has at least 100 tokens (--kv-grid), the text 10 tokens",
        );
    }
    let file = folder.path().join("file");
    std::fs::write(&file, "").unwrap();
    for command in ["put", "get", "ls", "verify"] {
        refused("a file", &["store", command, file.to_str().unwrap()], "file: is a file, not a folder");
        refused("no URL", &["store", command, ""], "the URL of a store is empty");
    }
    refused("memory", &["store", "ls", "memory:///"], "memory:///: the memory of this process");
    // Before a profile is read or made.
    let generate = ["generate", "x", "--profile", "/nowhere", "--kv"];
    let keep = [&generate[..], &["/dev/null/x", "--kv-keep"]].concat();
    refused("keep", &keep, "/dev/null/x: cannot be created: ");
    refused("read", &[&generate[..], &[name]].concat(), "there is no such folder");
    let twice = ["store", "get", url, "--kv-levels", "cachegen:bits=2,cachegen:bits=2"];
    let turned = ["store", "put", url, "--kv-levels", "cachegen:bits=4,cachegen:bits=2,cachegen:bits=3"];
    refused(
        "levels in the wrong order",
        &turned,
        "bits=2 is lossier than cachegen:mode=transform:bits=3, which follows",
    );
    let lossless = "cachegen:bits=4,cachegen:mode=lossless";
    refused(
        "loss before none",
        &["store", "put", url, "--kv-levels", lossless],
        "bits=4 is lossier than cachegen:mode=lossless",
    );
    refused("layers together", &["store", "put", url, "--kv-levels", "cachegen:over=3"], "no bitstream");
    refused("a level twice", &twice, "cachegen:mode=transform:bits=2 is given twice");
    refused("tokens", &["store", "get", url, "--tokens", "999999"], "--tokens 999999: the text has ");
    let levels = ["cachegen:bits=3"; 17].join(",");
    refused("many levels", &["store", "put", url, "--kv-levels", &levels], "17 levels");
    refused("levels", &["store", "get", url, "--kv-levels", "dense"], "no bitstream");
    refused("level", &["store", "get", url, "--level", "3"], "--level must be 0 to 2, not 3");
    refused("encoding", &["generate", "x", "--kv", url, "--kv-encoding", "fine"], "`fine` is neither");
    refused("level", &["generate", "x", "--kv", url, "--kv-encoding", "0,3"], "one of 3 levels");
    refused("slo", &["generate", "x", "--kv", url, "--kv-slo", "nan"], "--kv-slo");
    refused("slo of a level", &["generate", "x", "--kv", url, "--kv-slo", "1"], "--kv-encoding adaptive");
    for (option, value) in [("--kv-grid", "100/20"), ("--kv-levels", "cachegen:bits=2")] {
        usage_refused("no store", &["generate", "x", option, value], &["--kv <URL>"]);
    }
    refused("grid", &["store", "get", url, "--kv-grid", "10/3"], "chunk");
}

/// A store with one small level, put by `kv` for a text of a few chunks.
struct Small {
    folder: tempfile::TempDir,
    text: PathBuf,
}

const LEVELS: [&str; 4] = ["--kv-grid", "100/20", "--kv-levels", "cachegen:bits=8"];

impl Small {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let text = folder.path().join("text");
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
        let all = std::fs::read_to_string(assets.join("sotu-heldout.txt")).unwrap();
        std::fs::write(&text, &all[30_000..31_500]).unwrap();
        Self { folder, text }
    }

    fn url(&self, name: &str) -> String {
        text(&self.folder.path().join(name)).to_owned()
    }

    fn on_text(&self, command: &str, url: &str, more: &[&str]) -> Output {
        let args: [&[&str]; 4] = [&["store", command, url, "--text", text(&self.text)], &LEVELS, more, &[]];
        run(command, kv(&args.concat()))
    }

    fn generate(&self, url: &str) -> (String, String) {
        let args = ["generate", "-f", text(&self.text), "--tokens", "6", "--device", "cpu", "--kv", url];
        let output = run("generate", kv(&[&args[..], &LEVELS].concat()));
        let texts = [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap());
        assert!(output.status.success(), "{}", texts[1]);
        texts.into()
    }

    /// The files of a store in a folder of this name.
    fn files(&self, url: &str, folder: &str) -> Vec<PathBuf> {
        let paths = |path: &Path| -> Vec<PathBuf> {
            path.read_dir().into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
        };
        let mut all = paths(Path::new(url));
        let mut files = vec![];
        while let Some(path) = all.pop() {
            match path.is_dir() {
                true => all.extend(paths(&path)),
                false => files.push(path),
            }
        }
        files.retain(|path| path.components().any(|part| part.as_os_str() == folder));
        files.sort();
        files
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&[&output.stdout[..], &output.stderr[..]].concat()).into_owned()
}

/// The profile of another model in the place of a store's is believed by no command, and `put` makes the
/// store's own again, so that the chunks are found as before.
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn a_foreign_profile_is_not_believed() {
    let small = Small::new();
    let (a, b) = (small.url("a"), small.url("b"));
    let other = small.folder.path().join("other");
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-llama-12m");
    std::fs::create_dir(&other).unwrap();
    for entry in shipped.read_dir().unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, other.join(path.file_name().unwrap())).unwrap();
    }
    let weights = other.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    let end = bytes.len();
    bytes[end - 200_000..].chunks_exact_mut(2).for_each(|x| x[0] ^= 0x40);
    std::fs::write(&weights, bytes).unwrap();
    for (url, model) in [(&a, &shipped), (&b, &other)] {
        let output = small.on_text("put", url, &["--model", text(model)]);
        assert!(said(&output).contains(" new, 0 repaired"), "{}", said(&output));
    }
    let (before, _) = small.generate(&a);
    let [own] = &small.files(&a, "profiles")[..] else { panic!("one profile") };
    let [foreign] = &small.files(&b, "profiles")[..] else { panic!("one profile") };
    let (kept, spaces) = (std::fs::read(own).unwrap(), small.files(&a, "chunks"));
    std::fs::copy(foreign, own).unwrap();
    let what = "is the profile of another model or of other levels";
    let (same, said_by_generate) = small.generate(&a);
    assert_eq!(same, before);
    assert!(said_by_generate.contains(what) && said_by_generate.contains("; the prompt is computed"));
    one_line("get", &small.on_text("get", &a, &[]), 2, what);
    let verify = run("verify", kv(&["store", "verify", &a]));
    assert!(verify.status.code() == Some(2) && said(&verify).contains(what), "{}", said(&verify));
    let put = small.on_text("put", &a, &[]);
    assert!(said(&put).contains(": 0 new, 0 repaired"), "{}", said(&put));
    assert_eq!((std::fs::read(own).unwrap(), small.files(&a, "chunks")), (kept, spaces));
    // The chunks and the line of the other model's space in this one.
    let copied = |folder: &str| {
        let (to, from) = (&small.files(&a, folder)[0], &small.files(&b, folder)[0]);
        let own = std::fs::read(to).unwrap();
        std::fs::copy(from, to).unwrap();
        let (ls, verify) = (run("ls", kv(&["store", "ls", &a])), run("verify", kv(&["store", "verify", &a])));
        assert!(ls.status.success() && verify.status.code() == Some(2), "{}", said(&verify));
        for output in [ls, verify] {
            assert!(said(&output).contains("damaged: "), "{folder}: {}", said(&output));
        }
        assert_eq!(small.generate(&a).0, before, "{folder}");
        std::fs::write(to, own).unwrap();
    };
    ["chunks", "about"].into_iter().for_each(copied);
    assert!(run("verify", kv(&["store", "verify", &a])).status.success());
}

/// A pipe or a device in the place of an object is an error at once.
#[cfg(unix)]
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn only_regular_files_are_opened() {
    use std::os::unix::fs::symlink;
    let small = Small::new();
    let url = small.url("a");
    assert!(small.on_text("put", &url, &[]).status.success());
    let (before, _) = small.generate(&url);
    for (i, folder) in ["chunks", "data", "profiles", "about"].into_iter().enumerate() {
        let path = &small.files(&url, folder)[0];
        let own = std::fs::read(path).unwrap();
        for device in [false, true] {
            std::fs::remove_file(path).unwrap();
            match device {
                true => symlink("/dev/zero", path).unwrap(),
                false => assert!(Command::new("mkfifo").arg(path).status().unwrap().success()),
            }
            let start = Instant::now();
            let put = small.on_text("put", &url, &["--verify"]);
            let get = small.on_text("get", &url, &[]);
            let (ls, verify) =
                (run("ls", kv(&["store", "ls", &url])), run("verify", kv(&["store", "verify", &url])));
            let (same, err) = small.generate(&url);
            assert!(start.elapsed() < Duration::from_secs(150), "{folder}: {:?}", start.elapsed());
            assert_eq!(same, before, "{folder}: {err}");
            let what = "is a pipe or a device, not a regular file";
            // Frames that cannot be opened may also be listed, with no bytes.
            let names_it = |output: &Output| {
                said(output).contains(what)
                    || (i == 1 && said(output).contains(": is 0 B long, where it must be "))
            };
            assert!(verify.status.code() == Some(2) && names_it(&verify), "{}", said(&verify));
            // Chunks and lines that cannot be read are not believed to be missing.
            assert!(i == 3 || (put.status.code() == Some(2) && said(&put).contains(what)), "{}", said(&put));
            assert!(i == 3 || (get.status.code() == Some(2) && said(&get).contains(what)), "{}", said(&get));
            assert!(ls.status.success() && (i == 2 || names_it(&ls)), "{}", said(&ls));
        }
        std::fs::remove_file(path).unwrap();
        std::fs::write(path, own).unwrap();
    }
    assert!(run("verify", kv(&["store", "verify", &url])).status.success());
}
