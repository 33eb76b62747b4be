//! `kv store` with servers that fail: each answer is one line.

use std::io::{Read, Write};
use std::net::TcpListener;

use crate::support::kv::{one_line, run};
use crate::support::s3::{bucket_is_missing, s3};

/// A server that gives every request the same answer, for as long as the process runs: with this code, or
/// with no body. Returns its port.
fn server(status: &'static str, code: Option<&'static str>) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            // Requests of these tests have no body, or a body whose rest may stay unread.
            let mut request = [0; 65536];
            let read = stream.read(&mut request).unwrap_or(0);
            let xml = |code| {
                format!(
                    "<?xml version=\"1.0\"?>\n<Error>\n<Code>{code}</Code><Message>As you see</Message></Error>\n"
                )
            };
            let says = code.filter(|_| !request[..read].starts_with(b"HEAD"));
            let body = says.map(xml).unwrap_or_default();
            let length = format!("Content-Length: {}\r\nConnection: close", body.len());
            let _ = write!(stream, "HTTP/1.1 {status}\r\n{length}\r\n\r\n{body}");
        }
    });
    port
}

#[test]
fn what_a_server_says_is_one_line() {
    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port(); // closed again
    let ls = |port: u16| s3(&["store", "ls", "s3://caches/eu"], &format!("http://127.0.0.1:{port}"));
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
