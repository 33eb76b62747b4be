//! The binary under test, and models to run it on.

#![allow(dead_code)] // not every test needs every helper

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Much longer than any run takes, even on a busy machine.
const LONGEST: Duration = Duration::from_secs(300);

pub fn kv(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kv"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Waits for a process, which is killed if it takes too long.
pub fn finished(case: &str, mut child: Child) -> Output {
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > LONGEST {
            child.kill().unwrap();
            panic!("{case}: still running after {LONGEST:?}");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.wait_with_output().unwrap()
}

/// Runs a command with both outputs captured.
pub fn run(case: &str, mut command: Command) -> Output {
    finished(case, command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
}

/// Checks for one line on standard error that says `what`, and an exit code.
pub fn one_line(case: &str, output: &Output, code: i32, what: &str) {
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{case}: {stderr}");
    assert_eq!(stderr.lines().count(), 1, "{case}: {stderr}");
    assert!(stderr.starts_with("kv: ") && stderr.contains(what), "{case}: {stderr}");
    assert!(stderr.len() < 5000, "{case}: a line of {} bytes", stderr.len());
}

/// Runs `kv` and checks that it rejects its arguments with a complete message: the reason, which contains all
/// of `what`, and where to read more.
pub fn usage_refused(case: &str, args: &[&str], what: &[&str]) {
    let output = run(case, kv(args));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{case}: {stderr}");
    assert!(stderr.starts_with("kv: ") && stderr.contains("--help"), "{case}: {stderr}");
    for what in what {
        assert!(stderr.contains(what), "{case}: {stderr}");
    }
    assert!(stderr.len() < 5000, "{case}: a message of {} bytes", stderr.len());
}

/// Runs `kv` and checks that it rejects its input with one line that contains `what`.
pub fn refused(case: &str, args: &[&str], what: &str) {
    one_line(case, &run(case, kv(args)), 2, what);
}

/// `kv` in a shell after `line`, which sets a limit or closes an output.
#[cfg(unix)]
pub fn kv_after(line: &str, args: &[&str]) -> Command {
    let mut command = Command::new("sh");
    let script = format!("{line} && exec \"$0\" \"$@\"");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_kv")]).args(args).stdin(Stdio::null());
    command
}

/// The same with at most `mib` MiB of address space. A failed allocation would end the process with SIGABRT.
#[cfg(unix)]
pub fn refused_within(case: &str, mib: usize, args: &[&str], what: &str) {
    one_line(case, &run(case, kv_after(&format!("ulimit -v {}", mib * 1024), args)), 2, what);
}

pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/parity/fixtures").join(name)
}

/// A copy of a fixture folder, to be modified.
pub fn copy(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fixture(name).read_dir().unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}
