//! The threads that operations run on.
//!
//! They are not rayon's global ones: those are gone in a process that `fork` has made, and whoever waits for
//! them waits forever. These are started again in each process.

use std::process;
use std::sync::atomic::{AtomicPtr, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Result};

struct Pool {
    process: u32,
    threads: ThreadPool,
}

static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());

/// The pool of this process. It is never freed.
fn pool() -> Result<&'static ThreadPool> {
    let current = POOL.load(Ordering::Acquire);
    // SAFETY: the pointer is null or that of a leaked box, which nobody changes.
    if let Some(pool) = unsafe { current.as_ref() }
        && pool.process == process::id()
    {
        return Ok(&pool.threads);
    }
    // As many as rayon takes: RAYON_NUM_THREADS, or one for each core.
    let threads = ThreadPoolBuilder::new().thread_name(|i| format!("kvcodes-{i}")).build();
    let threads = threads.map_err(|e| Error::argument(format!("no threads can be started: {e}")))?;
    let made = Box::into_raw(Box::new(Pool { process: process::id(), threads }));
    match POOL.compare_exchange(current, made, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: as above; `made` is now leaked.
        Ok(_) => Ok(unsafe { &(*made).threads }),
        Err(_) => {
            // Another thread was faster. SAFETY: nobody else has seen `made`.
            drop(unsafe { Box::from_raw(made) });
            pool()
        }
    }
}

/// Runs a long operation on the pool.
pub fn run<T: Send>(operation: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    pool()?.install(operation)
}

/// Runs a part of a decode step: on this thread if the pool has no more than one, since the way there and
/// back takes longer than some steps.
pub fn run_step<T: Send>(operation: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let pool = pool()?;
    if pool.current_num_threads() == 1 { operation() } else { pool.install(operation) }
}

/// Something with threads of its own, which are gone in a process made by `fork`.
pub struct Opened<T> {
    process: u32,
    inner: T,
}

impl<T> Opened<T> {
    pub fn new(inner: T) -> Self {
        Self { process: process::id(), inner }
    }

    /// It, in the process that opened it; calls in another one would wait forever.
    pub fn get(&self) -> Result<&T> {
        match self.process == process::id() {
            true => Ok(&self.inner),
            false => Err(Error::store("the store was opened before `fork`: open it again in this process")),
        }
    }
}
