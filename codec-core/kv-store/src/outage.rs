//! The time that a store may be away.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// Time without failures after which an outage is reported.
const QUIET: Duration = Duration::from_secs(2);

/// A budget of time in which requests fail, shared by all requests to a store.
///
/// Time in which several requests fail counts once. Time that passes without failures is regained, so that a
/// long command survives several outages, while many objects that cannot be read cost one budget in all.
#[derive(Debug)]
pub(crate) struct Outage {
    budget: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    left: Duration, // at `counted`
    counted: Instant,
    is_reported: bool,
}

/// The rest of a budget after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rest {
    pub left: Duration,
    /// Whether the outage has just become long enough to be reported.
    pub is_news: bool,
}

impl Outage {
    pub fn new(budget: Duration) -> Self {
        let state = State { left: budget, counted: Instant::now(), is_reported: false };
        Self { budget, state: Mutex::new(state) }
    }

    /// The time left at `now`.
    pub fn left(&self, now: Instant) -> Duration {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.left + now.saturating_duration_since(state.counted)).min(self.budget)
    }

    /// Counts the time from `start` to `now`, in which a request failed, unless another failure has.
    pub fn count(&self, start: Instant, now: Instant) -> Rest {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let start = start.max(state.counted);
        let before = (state.left + (start - state.counted)).min(self.budget);
        state.left = before.saturating_sub(now.saturating_duration_since(start));
        state.counted = state.counted.max(now);
        state.is_reported &= before < self.budget;
        let is_news = !state.is_reported && self.budget - state.left >= QUIET && !state.left.is_zero();
        state.is_reported |= is_news;
        Rest { left: state.left, is_news }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[tokio::test(start_paused = true)]
    async fn failures_at_the_same_time_count_once_and_time_without_any_is_regained() {
        let (outage, begin) = (Outage::new(s(60)), Instant::now());
        let at = |seconds| begin + s(seconds);
        let rest = |left, is_news| Rest { left: s(left), is_news };
        assert_eq!(outage.count(at(10), at(20)), rest(50, true));
        assert_eq!(outage.count(at(10), at(20)), rest(50, false)); // another request at the same time
        assert_eq!(outage.count(at(15), at(25)), rest(45, false));
        assert_eq!((outage.left(at(25)), outage.left(at(35)), outage.left(at(99))), (s(45), s(55), s(60)));
        assert_eq!(outage.count(at(35), at(36)), rest(54, false));
        // A new outage is reported again, unless it is short.
        assert_eq!(outage.count(at(100), at(101)), rest(59, false));
        assert_eq!(outage.count(at(101), at(103)), rest(57, true));
        assert_eq!(outage.count(at(103), at(200)), rest(0, false));
        assert_eq!(outage.count(at(201), at(202)), rest(0, false));
        assert_eq!(Outage::new(s(0)).count(at(0), at(1)).left, s(0));
    }
}
