//! The throughput of a transfer.

use std::collections::VecDeque;

/// Window in seconds over which the throughput of a transfer is measured.
const WINDOW: f64 = 50e-3;

/// The throughput over the last [`WINDOW`] of a transfer.
pub(super) struct Meter {
    begin: f64,                    // of the transfer
    samples: VecDeque<(f64, u64)>, // times and bytes received by then
    heard: f64,                    // time of the last byte
}

impl Meter {
    pub fn new(begin: f64) -> Self {
        Self { begin, samples: [(begin, 0)].into(), heard: begin }
    }

    /// Adds the bytes received so far; returns the seconds since the last byte. If they are fewer than
    /// before, a request was repeated, and the throughput is measured anew.
    pub fn add(&mut self, now: f64, received: u64) -> f64 {
        let last = self.samples.back().map_or(0, |last| last.1);
        if received != last {
            self.heard = now;
        }
        if received < last {
            self.samples.clear();
        }
        self.samples.push_back((now, received));
        while self.samples.get(1).is_some_and(|second| second.0 <= now - WINDOW) {
            self.samples.pop_front();
        }
        now - self.heard
    }

    /// Bytes per second of the window.
    pub fn rate(&self) -> Option<f64> {
        self.since(*self.samples.front()?)
    }

    /// Bytes per second of a whole transfer: of its last window, or since it began if that is more. A stall at
    /// its end says nothing about the next one.
    pub fn whole(&self) -> Option<f64> {
        let rates = [self.rate(), self.since((self.begin, 0))];
        rates.into_iter().flatten().reduce(f64::max)
    }

    /// Bytes per second since this sample; none if no byte came or no time passed.
    fn since(&self, first: (f64, u64)) -> Option<f64> {
        let last = self.samples.back()?;
        let rate = (last.1 - first.1) as f64 / (last.0 - first.0);
        (rate.is_finite() && rate > 0.0).then_some(rate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn throughput_is_of_the_last_window() {
        let mut meter = Meter::new(1.0);
        assert_eq!(meter.rate(), None);
        meter.add(1.01, 1_000);
        assert!((meter.rate().unwrap() - 1e5).abs() < 1.0);
        let mut repeated = Meter::new(0.0);
        repeated.add(0.01, 5_000);
        assert_eq!((repeated.add(0.02, 2_000), repeated.rate()), (0.0, None));
        repeated.add(0.03, 3_000);
        assert!((repeated.rate().unwrap() - 1e5).abs() < 1.0);
        for i in 2..=20 {
            meter.add(1.0 + 0.01 * f64::from(i), 1_000 + 100 * (i as u64 - 1));
        }
        assert!((meter.rate().unwrap() - 1e4).abs() < 1.0);
        assert!((meter.whole().unwrap() - 2_900.0 / 0.2).abs() < 1.0);
        assert!((meter.add(1.5, 2_900) - 0.3).abs() < 1e-9);
        assert_eq!(meter.rate(), None);
        assert!((meter.whole().unwrap() - 2_900.0 / 0.5).abs() < 1.0);
    }
}
