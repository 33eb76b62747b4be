//! `kv fetch` with a stand-in for the Hub: interrupted, concurrent and repeated.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread::sleep;
use std::time::Duration;

use crate::support::kv::{finished, fixture, kv, one_line, run, text};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const FILES: [&str; 2] = ["config.json", "model.safetensors"];

/// A hub with one model, that of a fixture. Every 4 KiB of a file take `pause`.
struct Hub {
    endpoint: String,
}

impl Hub {
    fn start(pause: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                std::thread::spawn(move || answer(stream.unwrap(), pause));
            }
        });
        Self { endpoint }
    }

    fn fetch(&self, cache: &Path) -> Child {
        let mut command = kv(&["fetch", "org/name", "--cache", text(cache)]);
        command.env("HF_ENDPOINT", &self.endpoint).env("HF_HOME", cache);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }
}

/// Answers one request; a disconnected client is not an error.
fn answer(mut stream: TcpStream, pause: Duration) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let request = lines.next().unwrap().unwrap();
    let path = request.split(' ').nth(1).unwrap().to_owned();
    let mut first = None;
    for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
        if let Some(range) = line.to_lowercase().strip_prefix("range: bytes=") {
            first = Some(range.split_once('-').unwrap().0.parse::<usize>().unwrap());
        }
    }
    let mut respond = |status: &str, headers: &str, body: &[u8]| {
        let head = format!(
            "HTTP/1.1 {status}\r\ncontent-length: {}\r\nconnection: close\r\n{headers}\r\n",
            body.len()
        );
        let _ = stream.write_all(head.as_bytes());
        for piece in body.chunks(1 << 12) {
            if stream.write_all(piece).is_err() {
                break;
            }
            sleep(pause);
        }
    };
    if path.starts_with("/api/models/org/name") {
        let files = FILES.map(|name| format!(r#"{{"rfilename": "{name}"}}"#)).join(",");
        let info = format!(r#"{{"sha": "{COMMIT}", "siblings": [{files}]}}"#);
        respond("200 OK", "", info.as_bytes());
        return;
    }
    let Some(name) = FILES.iter().find(|&name| {
        ["main", COMMIT].iter().any(|revision| path == format!("/org/name/resolve/{revision}/{name}"))
    }) else {
        return respond("404 Not Found", "", b"");
    };
    let bytes = fs::read(fixture("gqa").join(name)).unwrap();
    let first = first.unwrap_or(0);
    if first >= bytes.len() {
        return respond("416 Range Not Satisfiable", "", b"");
    }
    // The request for a file's length asks for its first byte; all others ask for the rest of it.
    let headers = format!(
        "etag: \"{name}\"\r\nx-repo-commit: {COMMIT}\r\ncontent-range: bytes {first}-{}/{}\r\n",
        bytes.len() - 1,
        bytes.len()
    );
    respond("206 Partial Content", &headers, &bytes[first..]);
}

fn check(case: &str, child: Child) {
    let output = finished(case, child);
    assert!(output.status.success(), "{case}: {}", String::from_utf8_lossy(&output.stderr));
    let folder = PathBuf::from(String::from_utf8(output.stdout).unwrap().trim_end());
    for name in FILES {
        let wanted = fs::read(fixture("gqa").join(name)).unwrap();
        assert_eq!(fs::read(folder.join(name)).unwrap(), wanted, "{case}: {name}");
    }
}

#[test]
fn a_model_is_fetched_by_two_at_once_and_again() {
    let hub = Hub::start(Duration::from_millis(5));
    let cache = tempfile::tempdir().unwrap();
    let children = [hub.fetch(cache.path()), hub.fetch(cache.path()), hub.fetch(cache.path())];
    children.into_iter().for_each(|child| check("at once", child));
    check("again", hub.fetch(cache.path()));
}

#[test]
fn an_interrupted_fetch_does_not_block_the_next() {
    let (slow, fast) = (Hub::start(Duration::from_millis(20)), Hub::start(Duration::ZERO));
    for millis in [30, 150, 400] {
        let cache = tempfile::tempdir().unwrap();
        let mut child = slow.fetch(cache.path());
        sleep(Duration::from_millis(millis));
        child.kill().unwrap();
        child.wait().unwrap();
        check("after an interrupt", fast.fetch(cache.path()));
    }
}

/// The partial files of a download that was interrupted just before its end, and of one of a longer file.
#[test]
fn a_part_that_cannot_be_continued_is_fetched_again() {
    let hub = Hub::start(Duration::ZERO);
    let whole = fs::read(fixture("gqa").join(FILES[1])).unwrap();
    for part in [whole.clone(), [&whole[..], b"more"].concat()] {
        let cache = tempfile::tempdir().unwrap();
        let blobs = cache.path().join("hub/models--org--name/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join("model.part"), &part).unwrap(); // the etag with another extension
        check("a whole part", hub.fetch(cache.path()));
    }
}

#[test]
fn a_hub_that_refuses_is_one_line() {
    let cache = tempfile::tempdir().unwrap();
    let mut command = kv(&["fetch", "org/other", "--cache", text(cache.path())]);
    command.env("HF_ENDPOINT", Hub::start(Duration::ZERO).endpoint).env("HF_HOME", cache.path());
    one_line("another model", &run("another model", command), 2, "org/other");
}
