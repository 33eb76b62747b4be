//! Ranks as threads.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, mpsc};
use std::thread;

use kv_device::Gpu;

use super::{Communicator, Shard};
use crate::{Error, Result};

/// What a rank computes with.
#[derive(Clone)]
pub struct Rank {
    /// Its device.
    pub gpu: Arc<Gpu>,
    /// Its exchanges with the others.
    pub communicator: Arc<dyn Communicator>,
}

impl Rank {
    /// Its part of the model.
    #[must_use]
    pub fn shard(&self) -> Shard {
        self.communicator.shard()
    }
}

/// Runs `body` for every rank on a thread of its own, and returns what each has returned. The first rank that
/// fails or panics ends the exchanges of all others, so that none waits for it.
///
/// # Errors
/// [`Error::Rank`] with the error of the rank that failed first.
pub fn run<T, E>(ranks: Vec<Rank>, body: impl Fn(&Rank) -> std::result::Result<T, E> + Sync) -> Result<Vec<T>>
where
    T: Send,
    E: std::error::Error + Send + Sync + 'static,
{
    let communicators: Vec<_> = ranks.iter().map(|rank| rank.communicator.clone()).collect();
    let (sender, ends) = mpsc::channel();
    let mut results: Vec<Option<T>> = ranks.iter().map(|_| None).collect();
    thread::scope(|scope| {
        for rank in ranks {
            let (sender, body) = (sender.clone(), &body);
            scope.spawn(move || {
                let number = rank.shard().rank();
                let end = catch_unwind(AssertUnwindSafe(|| body(&rank)));
                drop(rank);
                // The receiver lives until all threads have ended.
                let _ = sender.send((number, end));
            });
        }
        drop(sender);
        let (mut failed, mut panicked) = (None, None);
        for (rank, end) in ends {
            match end {
                Ok(Ok(result)) => {
                    results[rank] = Some(result);
                    continue;
                }
                Ok(Err(error)) if failed.is_none() => {
                    failed = Some(Error::Rank { rank, source: Box::new(error) });
                }
                Ok(Err(_)) => {}
                Err(panic) => panicked = panicked.or(Some(panic)),
            }
            communicators.iter().for_each(|communicator| communicator.abort());
        }
        match (panicked, failed) {
            (Some(panic), _) => resume_unwind(panic),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(()),
        }
    })?;
    Ok(results.into_iter().flatten().collect())
}
