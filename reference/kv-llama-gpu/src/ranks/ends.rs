//! How a call ends that all ranks make.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// How long the other ranks may take to end as well after one has failed, and again once their exchanges have
/// been ended.
const PATIENCE: Duration = Duration::from_secs(2);

/// The number of a rank, and how its call has ended: with a panic, an error or a result.
pub(super) type End<R, E> = (usize, thread::Result<Result<R, E>>);

/// The rank that failed first.
pub(super) struct Failed<E> {
    pub rank: usize,
    /// Its error, or its panic.
    pub cause: thread::Result<E>,
    /// Whether all ranks have failed, each by itself: none has exchanged what another has not.
    pub alike: bool,
}

/// Waits until a call of `count` ranks has ended, and returns their results in the order of the ranks. When
/// one has failed and the others do not end, `abort` must end their exchanges; those that hang all the same
/// are not waited for.
pub(super) fn wait<R, E>(
    ends: &Receiver<End<R, E>>,
    count: usize,
    abort: impl Fn(),
) -> Result<Vec<R>, Failed<E>> {
    let mut results: Vec<Option<R>> = (0..count).map(|_| None).collect();
    let (mut failures, mut aborted) = (0, false);
    let mut first: Option<(usize, thread::Result<E>)> = None;
    let mut deadline = Instant::now();
    loop {
        let end = match first {
            None => ends.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(_) => ends.recv_timeout(deadline.saturating_duration_since(Instant::now())),
        };
        let (rank, cause) = match end {
            Ok((rank, Ok(Ok(result)))) => {
                results[rank] = Some(result);
                continue;
            }
            Ok((rank, Ok(Err(error)))) => (rank, Ok(error)),
            Ok((rank, Err(panic))) => (rank, Err(panic)),
            Err(RecvTimeoutError::Timeout) if !aborted => {
                abort();
                (aborted, deadline) = (true, Instant::now() + PATIENCE);
                continue;
            }
            Err(_) => break,
        };
        failures += 1;
        if first.is_none() {
            deadline = Instant::now() + PATIENCE;
            first = Some((rank, cause));
        }
    }
    let Some((rank, cause)) = first else { return Ok(results.into_iter().flatten().collect()) };
    let alike = failures == count && !aborted;
    if !alike {
        abort();
    }
    Err(Failed { rank, cause, alike })
}
