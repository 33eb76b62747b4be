//! A limit for work that cannot be stopped: the process ends with a message.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::print_error;

/// The most that work may take.
#[derive(Clone, Copy)]
pub struct Limits {
    /// Wall time.
    pub time: Duration,
    /// Bytes by which the memory of the process grows, where the system says how many it has (Linux).
    pub memory: u64,
}

/// How often the work is looked at: it touches a few hundred megabytes in that time.
const INTERVAL: Duration = Duration::from_millis(20);

/// The exit code of a command that failed.
const FAILED: i32 = 2;

/// Does the work. If it exceeds the limits, the process prints `refusal` and ends.
pub fn watched<T>(limits: Limits, refusal: String, work: impl FnOnce() -> T) -> T {
    let (working, done) = channel::<()>();
    let (start, before) = (Instant::now(), resident_memory());
    // Without a thread there is no limit: the work most often needs none.
    let _ = thread::Builder::new().spawn(move || {
        while done.recv_timeout(INTERVAL) == Err(RecvTimeoutError::Timeout) {
            if start.elapsed() > limits.time || resident_memory().saturating_sub(before) > limits.memory {
                print_error(format_args!("kv: {refusal}\n"));
                std::process::exit(FAILED);
            }
        }
    });
    let result = work();
    drop(working); // ends the thread
    result
}

/// Bytes of the process that are in memory; 0 where the system does not say.
fn resident_memory() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kilobytes = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.split_whitespace().next());
    kilobytes.and_then(|number| number.parse::<u64>().ok()).map_or(0, |number| 1024 * number)
}
