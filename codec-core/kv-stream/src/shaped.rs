//! A link of a given bandwidth, on the real clock or a simulated one.

use bytes::Bytes;

use crate::{Bandwidth, Clock, Error, Link, RequestChunk, Result};

/// The source of a shaped link's chunks.
pub trait Source {
    /// Bytes of a chunk at a level.
    ///
    /// # Errors
    /// For a chunk or a level that does not exist.
    fn bytes(&self, chunk: RequestChunk, level: usize) -> Result<u64>;

    /// The chunk itself; empty if only time is simulated.
    ///
    /// # Errors
    /// As [`Self::bytes`].
    fn read(&self, chunk: RequestChunk, level: usize) -> Result<Bytes>;
}

/// A link over which the bytes of a source arrive at a given bandwidth.
pub struct ShapedLink<C, S> {
    clock: C,
    source: S,
    bandwidth: Bandwidth,
    latency: f64, // seconds from a request to its first byte
    transfer: Option<Running>,
}

struct Running {
    chunk: RequestChunk,
    level: usize,
    total: f64,    // bytes
    received: f64, // bytes by `at`
    at: f64,
}

/// Less than a byte: the residue of rounded times.
const ROUNDING: f64 = 0.5;

impl<C: Clock, S: Source> ShapedLink<C, S> {
    /// A link with `latency` seconds between a request and its first byte.
    pub const fn new(clock: C, source: S, bandwidth: Bandwidth, latency: f64) -> Self {
        Self { clock, source, bandwidth, latency, transfer: None }
    }
}

impl<C: Clock, S: Source> Link for ShapedLink<C, S> {
    fn now(&self) -> f64 {
        self.clock.now()
    }

    fn start(&mut self, chunk: RequestChunk, level: usize) -> Result<()> {
        let total = self.source.bytes(chunk, level)? as f64;
        let at = self.clock.now() + self.latency;
        self.transfer = Some(Running { chunk, level, total, received: 0.0, at });
        Ok(())
    }

    fn wait(&mut self, until: f64) -> Result<u64> {
        let Self { clock, bandwidth, transfer: Some(running), .. } = self else {
            return Err(Error::NoTransfer);
        };
        loop {
            let now = clock.now();
            let mut next = running.at; // when the rate changes or the transfer ends
            while running.at <= now {
                let (rate, holds) = bandwidth.at(running.at);
                let left = running.total - running.received;
                // Infinite at a rate of 0; later than `at`, despite rounding.
                next = holds.min((running.at + left / rate).next_up());
                let reached = next.min(now);
                running.received += rate * (reached - running.at);
                if running.total - running.received < ROUNDING {
                    return Ok(running.total as u64);
                }
                running.at = reached;
                if reached == now {
                    break;
                }
            }
            if now >= until {
                return Ok(running.received as u64);
            }
            clock.sleep_until(next.min(until));
        }
    }

    fn arrived(&self) -> Result<Option<Bytes>> {
        let &Running { chunk, level, received, .. } = self.transfer.as_ref().ok_or(Error::NoTransfer)?;
        let bytes = self.source.read(chunk, level)?;
        Ok(Some(bytes.slice(..bytes.len().min(received as usize))))
    }

    fn cancel(&mut self) {
        self.transfer = None;
    }

    fn take(&mut self) -> Result<Bytes> {
        let Running { chunk, level, .. } = self.transfer.take().ok_or(Error::NoTransfer)?;
        self.source.read(chunk, level)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SimulatedClock;

    struct Sevens(u64);

    impl Source for Sevens {
        fn bytes(&self, _: RequestChunk, _: usize) -> Result<u64> {
            Ok(self.0)
        }

        fn read(&self, _: RequestChunk, _: usize) -> Result<Bytes> {
            Ok(vec![7; self.0 as usize].into())
        }
    }

    const CHUNK: RequestChunk = RequestChunk { request: 0, index: 0 };

    #[test]
    fn bytes_arrive_at_the_rate_of_the_moment() {
        let clock = SimulatedClock::default();
        let steps = Bandwidth::Steps(vec![(0.0, 100.0), (2.0, 0.0), (3.0, 400.0)]);
        let mut link = ShapedLink::new(clock.clone(), Sevens(500), steps, 0.5);
        link.start(CHUNK, 0).unwrap();
        assert_eq!((link.wait(0.25).unwrap(), clock.now()), (0, 0.25));
        assert_eq!((link.wait(1.5).unwrap(), clock.now()), (100, 1.5));
        assert_eq!((link.wait(2.5).unwrap(), clock.now()), (150, 2.5));
        assert_eq!(link.wait(9.0).unwrap(), 500);
        assert!((clock.now() - (3.0 + 350.0 / 400.0)).abs() < 1e-9);
        assert_eq!(link.take().unwrap().len(), 500);
        assert!(link.take().is_err() && link.wait(10.0).is_err());
        // At a rate of 0 only the clock advances.
        let mut link = ShapedLink::new(clock.clone(), Sevens(1), "0".parse().unwrap(), 0.0);
        link.start(CHUNK, 0).unwrap();
        assert_eq!((link.wait(1e6).unwrap(), clock.now()), (0, 1e6));
    }
}
