//! `kv store` with servers that fail: each answer is one line.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::process::Output;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use crate::support::kv::{kv, one_line, run};
use crate::support::s3::{bucket_is_missing, s3};

/// What a server answers to a request, given its first line: the status and the body.
type Answer = dyn Fn(&str) -> (&'static str, String) + Send;

/// A server for as long as the process runs. Returns its port.
fn serve(answer: Box<Answer>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let (mut request, mut part) = (vec![], [0; 65536]);
            let head = loop {
                let read = stream.read(&mut part).unwrap_or(0);
                request.extend(&part[..read]);
                let end = request.windows(4).position(|window| window == b"\r\n\r\n");
                if end.is_some() || read == 0 {
                    break end.unwrap_or(request.len());
                }
            };
            let text = String::from_utf8_lossy(&request[..head]).into_owned();
            let length = text.lines().find_map(|line| {
                let (name, value) = line.split_once(": ")?;
                name.eq_ignore_ascii_case("content-length").then(|| value.parse::<usize>().ok())?
            });
            // A client that is still sending may not read the answer.
            let mut left = length.unwrap_or(0).saturating_sub(request.len().saturating_sub(head + 4));
            while left > 0 {
                match stream.read(&mut part) {
                    Ok(read) if read > 0 => left = left.saturating_sub(read),
                    _ => break,
                }
            }
            let line = text.lines().next().unwrap_or_default();
            let (status, body) = answer(line);
            let body = if line.starts_with("HEAD") { String::new() } else { body };
            let length = format!("Content-Length: {}\r\nETag: \"x\"\r\nConnection: close", body.len());
            let _ = write!(stream, "HTTP/1.1 {status}\r\n{length}\r\n\r\n{body}");
        }
    });
    port
}

/// An error as S3 has it.
fn xml(code: &str) -> String {
    format!("<?xml version=\"1.0\"?>\n<Error>\n<Code>{code}</Code><Message>As you see</Message></Error>\n")
}

/// A server that gives every request the same answer: with this code, or with no body.
fn server(status: &'static str, code: Option<&'static str>) -> u16 {
    serve(Box::new(move |_| (status, code.map(xml).unwrap_or_default())))
}

/// A server with an empty bucket, which answers writes with this status, those of a new object with another.
fn empty(conditional: &'static str, write: &'static str) -> u16 {
    serve(Box::new(move |line| match line {
        // The manifests and profiles are written on a condition, the frames are not.
        put if put.starts_with("PUT") && put.contains("/data/") => (write, String::new()),
        put if put.starts_with("PUT") => (conditional, String::new()),
        list if list.contains("list-type=2") => (
            "200 OK",
            "<ListBucketResult><Name>caches</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>\
             </ListBucketResult>"
                .into(),
        ),
        _ => ("404 Not Found", xml("NoSuchKey")),
    }))
}

#[test]
fn what_a_server_says_is_one_line() {
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port(); // closed again
    let ls = |port: u16| {
        s3(&["store", "ls", "s3://caches/eu", "--kv-retry", "1"], &format!("http://127.0.0.1:{port}"))
    };
    for (case, port, what) in [
        ("dead", dead, "Connection refused"),
        ("403", server("403 Forbidden", Some("AccessDenied")), "403 Forbidden (AccessDenied: As you see)"),
        ("bucket", server("404 Not Found", Some("NoSuchBucket")), "404 Not Found (NoSuchBucket: As you see)"),
        ("silent", server("404 Not Found", None), "404 Not Found"),
    ] {
        let output = run(case, ls(port));
        one_line(case, &output, 2, what);
        let line = String::from_utf8(output.stderr).unwrap();
        let request = format!("kv: store: GET http://127.0.0.1:{port}/caches: ");
        assert!(line.starts_with(&request) && line.len() < 200 && !line.contains('<'), "{line}");
    }
}

/// A missing bucket is not an empty store, even if the server does not say what is missing.
#[test]
fn a_missing_bucket_is_one_line_that_names_it() {
    for code in [Some("NoSuchBucket"), None] {
        let endpoint = format!("http://127.0.0.1:{}", server("404 Not Found", code));
        let answer =
            code.map_or("404 Not Found".into(), |code| format!("404 Not Found ({code}: As you see)"));
        bucket_is_missing(&endpoint, "nowhere", &answer);
    }
}

/// `kv store put` of a hundred tokens with a small profile, over a server.
fn put(port: u16, more: &[&str]) -> Output {
    static PROFILE: LazyLock<(tempfile::TempDir, String)> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("profile").to_str().unwrap().to_owned();
        let calibrate = ["calibrate", &path, "--tokens", "128", "--methods", "cachegen:bits=2"];
        assert!(run("calibrate", kv(&calibrate)).status.success());
        (folder, path)
    });
    let args = ["store", "put", "s3://caches/eu", "--tokens", "100", "--kv-levels", "cachegen:bits=2"];
    let profile = ["--profile", &PROFILE.1, "--kv-grid", "100/100"];
    run("put", s3(&[&args[..], &profile, more].concat(), &format!("http://127.0.0.1:{port}")))
}

/// Writes that a server acknowledges and does not keep are not said to be stored.
#[test]
fn what_a_server_does_not_keep_is_an_error() {
    for conditional in ["200 OK", "409 Conflict", "412 Precondition Failed"] {
        for write in ["200 OK", "409 Conflict", "412 Precondition Failed"] {
            let output = put(empty(conditional, write), &["--kv-retry", "2"]);
            one_line(conditional, &output, 2, "the store said that it is stored, and does not hold it");
            assert!(output.stdout.is_empty());
        }
    }
}

/// A server with these objects, which acknowledges deletions and does none.
fn keeping(objects: Vec<String>) -> u16 {
    serve(Box::new(move |line| {
        let target = line.split(' ').nth(1).unwrap_or_default().replace("%2F", "/");
        let (path, query) = target.split_once('?').unwrap_or((&target, ""));
        if line.starts_with("POST") {
            let deleted = "<Deleted><Key>all</Key></Deleted>";
            return ("200 OK", format!("<DeleteResult>{deleted}</DeleteResult>"));
        }
        if !query.contains("list-type=2") {
            return match objects.iter().any(|object| path.strip_prefix("/caches/") == Some(object)) {
                true => ("200 OK", "not what was written".into()),
                false => ("404 Not Found", xml("NoSuchKey")),
            };
        }
        let prefix = query.split('&').find_map(|part| part.strip_prefix("prefix=")).unwrap_or_default();
        let entry = |object: &String| {
            let below = object.strip_prefix(prefix)?;
            Some(match below.split_once('/').filter(|_| query.contains("delimiter=")) {
                Some((folder, _)) => {
                    format!("<CommonPrefixes><Prefix>{prefix}{folder}/</Prefix></CommonPrefixes>")
                }
                None => format!(
                    "<Contents><Key>{object}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>\
                     <Size>20</Size></Contents>"
                ),
            })
        };
        let mut entries: Vec<String> = objects.iter().filter_map(entry).collect();
        entries.dedup();
        let entries = entries.concat();
        ("200 OK", format!("<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"))
    }))
}

/// What a server says is deleted, and holds, is not said to be deleted.
#[test]
fn what_a_server_does_not_delete_is_an_error() {
    let [space, chunk] = ["a", "b"].map(|digit| digit.repeat(64));
    let frames = "c".repeat(32);
    let objects = [format!("eu/{space}/chunks/{chunk}"), format!("eu/{space}/data/{chunk}/{frames}")];
    let endpoint = format!("http://127.0.0.1:{}", keeping(objects.to_vec()));
    let url = "s3://caches/eu";
    for (command, object) in [
        (&["store", "rm", url, &space][..], &objects[0]),
        (&["store", "rm", url, "--orphans", "1"], &objects[1]),
        (&["store", "verify", url, "--remove"], &objects[0]),
    ] {
        let output = run(command[1], s3(command, &endpoint));
        let what = format!("{object}: the store said that it is deleted, and still holds it");
        one_line(&command.join(" "), &output, 2, &what);
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(!stdout.contains("deleted\n") && !stdout.contains("removed"), "{command:?}: {stdout}");
    }
}

/// A server without conditional writes cannot hold a store; the error says what it lacks.
#[test]
fn a_server_without_conditional_writes_is_named_with_what_it_lacks() {
    let endpoint = format!("http://127.0.0.1:{}", empty("501 Not Implemented", "200 OK"));
    let args = ["store", "put", "s3://caches/eu", "--tokens", "100", "--kv-levels", "cachegen:bits=2"];
    let output = run("501", s3(&[&args[..], &["--kv-grid", "100/100"]].concat(), &endpoint));
    one_line(
        "501",
        &output,
        2,
        "AmazonS3(caches): the server has no conditional writes (PUT with `If-None-Match: *`)",
    );
}

/// A server that accepts and never answers costs the time of `--kv-retry`, in all commands.
#[test]
fn a_silent_server_costs_one_budget() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://127.0.0.1:{}", listener.local_addr().unwrap().port());
    std::thread::spawn(move || {
        let _open: Vec<_> = listener.incoming().collect();
    });
    let url = "s3://caches/eu";
    for command in [
        &["store", "ls", url][..],
        &["store", "verify", url],
        &["store", "rm", url, "--orphans", "1"],
        &["store", "get", url, "--tokens", "100"],
        &["store", "put", url, "--tokens", "100"],
    ] {
        let start = Instant::now();
        let output = run("silent", s3(&[command, &["--kv-retry", "1.5"]].concat(), &endpoint));
        one_line(command[1], &output, 2, "no answer from AmazonS3(caches), which may be away for 1.5s");
        assert!(start.elapsed() < Duration::from_secs(40), "{command:?}: {:?}", start.elapsed());
    }
    let generate = ["generate", "We", "--tokens", "1", "--device", "cpu", "--kv", url, "--kv-retry", "1.5"];
    let output = run("generate", s3(&generate, &endpoint));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.lines().count() == 1, "{stderr}");
    assert!(stderr.contains("no answer from AmazonS3(caches)"), "{stderr}");
}

/// A server that is away when the command begins is waited for, and the user is told.
#[test]
fn a_server_that_comes_back_is_used() {
    let begin = Instant::now();
    let port = serve(Box::new(move |line| match begin.elapsed() < Duration::from_secs(5) {
        true => ("503 Slow Down", xml("SlowDown")),
        false if line.contains("list-type=2") => (
            "200 OK",
            "<ListBucketResult><Name>caches</Name><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated>\
             </ListBucketResult>"
                .into(),
        ),
        false => ("404 Not Found", xml("NoSuchKey")),
    }));
    let output = run("ls", s3(&["store", "ls", "s3://caches/eu"], &format!("http://127.0.0.1:{port}")));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && output.stdout == b"nothing is stored there\n", "{stderr}");
    assert!(stderr.lines().count() <= 1, "{stderr}");
    assert!(
        stderr.is_empty() || (stderr.contains("SlowDown") && stderr.contains("(--kv-retry)")),
        "{stderr}"
    );
}

/// However much a server says, it is one line of bounded length.
#[test]
fn a_long_answer_is_cut() {
    for (status, retry) in
        [("403 Forbidden", "60"), ("503 Service Unavailable", "0"), ("400 Bad Request", "60")]
    {
        for body in [
            "word ".repeat(4000),
            format!("<Error><Code>No</Code><Message>{}</Message>", "word ".repeat(4000)),
        ] {
            let body = move |_: &str| (status, body.clone());
            let endpoint = format!("http://127.0.0.1:{}", serve(Box::new(body)));
            let output = run(status, s3(&["store", "ls", "s3://caches/eu", "--kv-retry", retry], &endpoint));
            one_line(status, &output, 2, status);
            assert!(output.stderr.len() < 300, "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
