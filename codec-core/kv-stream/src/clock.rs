//! The clock of a link: the real one, or one that jumps.

use std::cell::Cell;
use std::rc::Rc;
use std::thread;
use std::time::{Duration, Instant};

/// Time, in seconds from any origin.
pub trait Clock {
    /// The time.
    fn now(&self) -> f64;
    /// Waits until `then`.
    fn sleep_until(&self, then: f64);
}

/// A clock that jumps to the time waited for. Clones show the same time.
#[derive(Clone, Debug, Default)]
pub struct SimulatedClock(Rc<Cell<f64>>);

impl Clock for SimulatedClock {
    fn now(&self) -> f64 {
        self.0.get()
    }

    fn sleep_until(&self, then: f64) {
        self.0.set(self.0.get().max(then));
    }
}

/// Seconds since an instant.
#[derive(Clone, Copy, Debug)]
pub struct RealClock(pub Instant);

impl Clock for RealClock {
    fn now(&self) -> f64 {
        self.0.elapsed().as_secs_f64()
    }

    fn sleep_until(&self, then: f64) {
        if let Ok(wait) = Duration::try_from_secs_f64(then - self.now()) {
            thread::sleep(wait);
        }
    }
}
