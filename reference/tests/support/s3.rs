//! The command with S3 servers.

use std::process::Command;

use super::kv::{kv, one_line, run};

/// `kv` with the address of a server, and keys.
pub fn s3(args: &[&str], endpoint: &str) -> Command {
    let mut command = kv(args);
    command.env("AWS_ENDPOINT", endpoint).env("AWS_ALLOW_HTTP", "true").env("AWS_REGION", "us-east-1");
    command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
    command
}

/// Checks that every command reports in one line that the server has no such bucket: `answer` is the server's
/// text.
pub fn bucket_is_missing(endpoint: &str, bucket: &str, answer: &str) {
    let url = format!("s3://{bucket}/eu");
    let what = format!("GET {endpoint}/{bucket}: {answer}");
    for args in [&["store", "ls", &url][..], &["store", "verify", &url], &["store", "get", &url]] {
        one_line(args[1], &run(args[1], s3(args, endpoint)), 2, &what);
    }
    // A prompt needs no store.
    let generate = ["generate", "We", "--tokens", "1", "--device", "cpu", "--kv", &url];
    let output = run("generate", s3(&generate, endpoint));
    let stderr = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<_> = stderr.lines().filter(|line| line.contains(bucket)).collect();
    assert!(output.status.success() && lines.len() == 1, "{stderr}");
    assert!(lines[0].starts_with(&format!("kv: {what}")), "{stderr}");
    assert!(lines[0].ends_with("; the prompt is computed"), "{stderr}");
}
