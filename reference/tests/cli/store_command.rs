//! `kv store` and `kv generate --kv` as commands: what they print, and what they refuse in one line.

use std::path::Path;

use crate::support::kv::{kv, refused, run, usage_refused};

#[test]
fn the_command_line_stores_and_loads() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (url, text, report) = (path("caches"), path("prompt.txt"), path("report.json"));
    let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    let prompt: String =
        std::fs::read_to_string(assets.join("sotu-heldout.txt")).unwrap()[30_000..31_500].into();
    std::fs::write(&text, &prompt).unwrap();
    let common = ["--kv-grid", "100/20", "--kv-levels", "cachegen:bits=8,cachegen:bits=2"];
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
    let about = ["0", "tiny-llama-12m", "cachegen:bits=8,cachegen:bits=2", "100/20"]; // nothing is damaged
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
