//! Output of `kv`: closed or full standard output, atomic replacement of files, inputs that are never
//! overwritten.

use std::fs;
use std::path::Path;
use std::process::Stdio;

#[cfg(unix)]
use crate::support::kv::kv_after;
use crate::support::kv::{copy, finished, fixture, kv, one_line, refused, run, text};

/// Quick runs of the commands that print, each with its own output file.
fn commands(folder: &Path) -> Vec<(Vec<String>, Vec<String>)> {
    let gqa = text(&fixture("gqa")).to_owned();
    let file = |name: &str| text(&folder.join(name)).to_owned();
    let words = |line: &str| line.split(' ').map(|word| word.replace("GQA", &gqa)).collect::<Vec<_>>();
    let mut all = vec![];
    let mut add = |line: &str, outputs: &[(&str, &str)]| {
        let mut args = words(line);
        let mut files = vec![];
        for (flag, name) in outputs {
            args.extend([flag, file(name).as_str()].iter().filter(|x| !x.is_empty()).map(|&x| x.to_owned()));
            files.push(file(name));
        }
        all.push((args, files));
    };
    add("--help", &[]);
    add("--version", &[]);
    add("compare --help", &[]);
    add("logits --model GQA --tokens 1,2,3", &[("--json", "logits.json")]);
    add("generate We --tokens 4 --device cpu", &[("--json", "generate.json")]);
    add(
        "compare --context 96 --decode 4 --methods dense --device cpu",
        &[("--json", "compare.json"), ("--report", "compare.html")],
    );
    add(
        "eval --methods dense --lengths 300 --depths 0.5 --trials 1 --decode 2 --windows 1 --device cpu",
        &[("--json", "eval.json")],
    );
    add("calibrate --tokens 128 --methods cachegen", &[("", "profile"), ("--json", "calibrate.json")]);
    all
}

/// `kv` with a limit of a few hundred bytes on the files that it writes.
#[cfg(unix)]
fn limited(args: &[&str]) -> std::process::Command {
    kv_after("ulimit -f 1", args)
}

fn check_whole(file: &str) {
    let bytes = fs::read(file).unwrap();
    if file.ends_with(".json") {
        serde_json::from_slice::<serde_json::Value>(&bytes).unwrap();
    } else if file.ends_with(".html") {
        assert!(bytes.ends_with(b"</html>\n"));
    } else {
        assert!(!bytes.is_empty());
    }
}

#[test]
fn a_closed_standard_output_ends_quietly_and_files_are_written() {
    let folder = tempfile::tempdir().unwrap();
    for (args, files) in commands(folder.path()) {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = kv(&args).stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let output = finished(&args.join(" "), child);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && stderr.is_empty(), "{args:?}: {:?}: {stderr}", output.status);
        files.iter().for_each(|file| check_whole(file));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_standard_output_is_one_line_and_files_are_written() {
    let folder = tempfile::tempdir().unwrap();
    for (args, files) in commands(folder.path()) {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let child = kv(&args).stdout(full).stderr(Stdio::piped()).spawn().unwrap();
        one_line(&args.join(" "), &finished(&args.join(" "), child), 1, "standard output: ");
        files.iter().for_each(|file| check_whole(file));
    }
    for args in [&[][..], &["compress"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = finished("a full standard error", kv(args).stderr(full).spawn().unwrap());
        assert_eq!(output.status.code(), Some(2));
    }
}

/// Without an output there is nobody to tell, and files are written.
#[cfg(unix)]
#[test]
fn outputs_that_are_not_open_are_silent() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("logits.json");
    let gqa = fixture("gqa");
    let logits = ["logits", "--tokens", "1,2", "--model", text(&gqa), "--json", text(&json)];
    for line in ["exec >&-", "exec 2>&-", "exec <&- >&- 2>&-"] {
        for (args, code) in [(&logits[..], 0), (&["methods"], 0), (&["compress"], 2), (&["logits"], 2)] {
            let output = run(line, kv_after(line, args));
            assert_eq!(output.status.code(), Some(code), "{line}: {args:?}: {output:?}");
            assert!(line == "exec >&-" || output.stderr.is_empty(), "{line}: {args:?}: {output:?}");
        }
        check_whole(text(&json));
        fs::remove_file(&json).unwrap();
    }
}

/// Runs that end in an error, whatever files they were to write.
#[test]
fn a_run_that_fails_leaves_old_files() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old");
    fs::write(&old, "old").unwrap();
    let old_path = text(&old);
    let gqa = fixture("gqa");
    for args in [
        &["compare", "--model", "/nowhere", "--json", old_path][..],
        &["compare", "--model", "/nowhere", "--report", old_path],
        &["compare", "--text", "/nowhere", "--json", old_path],
        &["compare", "--profile", "/nowhere", "--json", old_path],
        &["eval", "--model", "/nowhere", "--json", old_path],
        &["generate", "We", "--model", "/nowhere", "--json", old_path],
        &["logits", "--model", text(&gqa), "--tokens", "96", "--json", old_path],
        &["calibrate", old_path],
        &["calibrate", old_path, "--replace", "--model", "/nowhere"],
        &["calibrate", old_path, "--replace", "--tokens", "3"],
        &["fetch", "no-name", "--json", old_path],
    ] {
        refused(&args.join(" "), args, "");
        assert_eq!(fs::read(&old).unwrap(), b"old", "{args:?}");
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_leaves_old_files() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old");
    fs::write(&old, "old").unwrap();
    for millis in [1, 20, 100, 400] {
        let mut child = kv(&["compare", "--json", text(&old)]).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(millis));
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(fs::read(&old).unwrap(), b"old", "after {millis} ms");
    }
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn a_full_disk_leaves_old_files() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old");
    fs::write(&old, "old").unwrap();
    // Writes beyond a limit of the file size fail as on a full disk.
    let gqa = fixture("gqa");
    let args = ["logits", "--tokens", "1,2,3,4", "--model", text(&gqa), "--json", text(&old)];
    let output = run("a full disk", limited(&args));
    one_line("a full disk", &output, 2, &format!("{}: File too large", text(&old)));
    assert_eq!(fs::read(&old).unwrap(), b"old");
    assert_eq!(folder.path().read_dir().unwrap().count(), 1);
}

/// A store that is full names the object, and costs a warning if a prompt was to be kept.
#[cfg(all(unix, feature = "store"))]
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn a_full_store_is_named_and_keeps_the_text() {
    let folder = tempfile::tempdir().unwrap();
    let levels = ["--kv-levels", "cachegen:bits=2", "--kv-grid", "20/20"];
    let put = [&["store", "put", text(folder.path()), "--tokens", "100"], &levels[..]].concat();
    one_line("put", &run("put", limited(&put)), 2, "kv: store: profiles/");
    let generate = ["generate", "We, the people", "--tokens", "4", "--device", "cpu"];
    let keep = [&generate[..], &["--kv", text(folder.path()), "--kv-keep"], &levels].concat();
    let (plain, kept) = (run("plain", kv(&generate)), run("keep", limited(&keep)));
    one_line("keep", &kept, 0, "File too large");
    assert_eq!(plain.stdout, kept.stdout);
}

#[test]
fn an_input_is_never_an_output() {
    let folder = copy("gqa");
    let path = |name: &str| text(&folder.path().join(name)).to_owned();
    let model = text(folder.path()).to_owned();
    for name in ["text.txt", "profile", "model.gguf"] {
        fs::write(path(name), name).unwrap();
    }
    let (words, profile, gguf) = (path("text.txt"), path("profile"), path("model.gguf"));
    let around = path("nowhere/../text.txt").replace("nowhere/..", "."); // another path of the same file
    let mut cases: Vec<Vec<&str>> = vec![
        vec!["compare", "--text", &words, "--json", &words],
        vec!["compare", "--text", &words, "--json", &around],
        vec!["compare", "--text", &words, "--report", &words],
        vec!["compare", "--profile", &profile, "--json", &profile],
        vec!["compare", "--model", &gguf, "--json", &gguf],
        vec!["eval", "--text", &words, "--json", &words],
        vec!["eval", "--profile", &profile, "--json", &profile],
        vec!["generate", "We", "--profile", &profile, "--json", &profile],
        vec!["logits", "--tokens", "1", "--model", &gguf, "--json", &gguf],
        vec!["calibrate", &words, "--text", &words],
        vec!["calibrate", &profile, "--json", &profile],
        vec!["calibrate", &gguf, "--model", &gguf],
    ];
    let weights = ["config.json", "model.safetensors"].map(path);
    cases.extend(
        weights.iter().map(|file| vec!["logits", "--tokens", "1", "--model", &model, "--json", file]),
    );
    let new = path("new");
    cases.push(vec!["compare", "--json", &new, "--report", &new]);
    #[cfg(unix)]
    let link = path("link");
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink(&words, &link).unwrap();
        cases.push(vec!["compare", "--text", &words, "--json", &link]);
        cases.push(vec!["compare", "--text", &link, "--json", &words]);
    }
    let before = folder_contents(folder.path());
    for args in &cases {
        refused(&args.join(" "), args, "would overwrite");
    }
    assert_eq!(folder_contents(folder.path()), before);
}

#[cfg(feature = "store")]
#[test]
fn an_output_is_outside_of_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    fs::create_dir_all(store.join("space")).unwrap();
    let about = store.join("space/about");
    fs::write(&about, "about").unwrap();
    let (url, about) = (text(&store), text(&about));
    let (file_url, new) = (format!("file://{url}"), store.join("new.json"));
    for args in [
        &["store", "ls", url][..],
        &["store", "ls", &file_url],
        &["store", "verify", url],
        &["store", "put", url],
        &["store", "get", url],
        &["generate", "We", "--kv", url],
    ] {
        for output in [about, text(&new)] {
            let args = [args, &["--json", output]].concat();
            refused(&args.join(" "), &args, "is in the folder that ");
        }
    }
    assert!(!new.exists() && fs::read(about).unwrap() == b"about");
}

fn folder_contents(folder: &Path) -> Vec<(std::path::PathBuf, Vec<u8>)> {
    let mut files: Vec<_> = folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

#[test]
fn an_output_that_cannot_be_written_is_refused_before_the_work() {
    let folder = tempfile::tempdir().unwrap();
    let inner = text(folder.path());
    for path in ["/nowhere/at/all", inner, ""] {
        // The model does not exist either: an error about the output shows that the output was checked first.
        for args in [
            &["compare", "--model", "/no-model", "--json", path][..],
            &["compare", "--model", "/no-model", "--report", path],
            &["eval", "--model", "/no-model", "--json", path],
            &["generate", "We", "--model", "/no-model", "--json", path],
            &["logits", "--tokens", "1", "--model", "/no-model", "--json", path],
            &["calibrate", path, "--model", "/no-model"],
            &["fetch", "no-name", "--json", path],
        ] {
            let output = run("", kv(args));
            if path.is_empty() {
                assert_eq!(output.status.code(), Some(2), "{args:?}"); // refused with the usage
            } else {
                one_line(&args.join(" "), &output, 2, path);
            }
            assert!(!String::from_utf8_lossy(&output.stderr).contains("no-"), "{args:?}");
        }
    }
}

#[cfg(unix)]
#[test]
fn pipes_devices_and_folders_are_no_files() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for path in [text(&pipe), "/dev/null", "/dev/zero", text(folder.path())] {
        let is_folder = path == text(folder.path());
        for args in [
            &["compare", "--text", path][..],
            &["compare", "--profile", path],
            &["compare", "--json", path],
            &["compare", "--report", path],
            &["calibrate", path],
            &["fetch", "a/b", "--json", path],
        ] {
            refused(&args.join(" "), args, if is_folder { "is a folder" } else { "is a pipe or a device" });
        }
        if !is_folder {
            refused("a model", &["compare", "--model", path], "is a pipe or a device");
            for name in ["config.json", "model.safetensors", "tokenizer.json"] {
                let model = copy("gqa");
                let _ = fs::remove_file(model.path().join(name));
                std::os::unix::fs::symlink(path, model.path().join(name)).unwrap();
                let args = ["logits", "--tokens", "1", "--model", text(model.path())];
                refused(name, &args, "is a pipe or a device");
            }
        }
    }
}
