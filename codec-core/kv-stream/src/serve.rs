//! The loop of a stream: what is asked of the link next, and whether it is still the best.

use codec_core::{Decision, Encoding, Progress, StreamPolicy};

use crate::meter::Meter;
use crate::waiting::{Mean, Waiting};
use crate::{
    Choice, ChunkCost, Error, Event, Link, MOST_SECONDS, Options, Outcome, Payload, Receiver, RequestChunk,
    Result, Trace,
};

/// Seconds between two checks of a transfer in flight: the first comes soon, since the first transfer may
/// start without a known bandwidth, and recomputing a short context takes 20 ms.
const TICKS: (f64, f64) = (1e-3, 5e-3);

/// Seconds after which a receiver is offered the newly arrived bytes: some layers of a chunk at 100 Gbit/s.
const ARRIVING: f64 = 0.2e-3;

/// Share of another plan's delay for which it must have been better before a transfer is abandoned for it,
/// unless a deadline is ahead. A stall of the link, or of this machine's threads while others are busy, looks
/// like a slow link: the next bytes of a transfer that goes on correct that, while a recomputation is not
/// taken back.
const PATIENCE: f64 = 0.02;

/// Factor on the expected seconds of recomputations for plans with a deadline, until one has been measured.
/// The policy counts on half the throughput of a link for the same reason.
const UNMEASURED: f64 = 2.0;

/// Maximum chunks of a context. The work of a decision grows with their square.
pub const MOST_CHUNKS: usize = 1024;

/// Streams the contexts of requests that all arrive now.
///
/// Text goes to the request of a batch that has the fewest chunks, since early chunks are the cheapest to
/// recompute; levels go to the request that has the most, so that requests complete one after the other
/// rather than all at the end. Given encodings go by index: first chunk 0 of each request, then chunk 1.
///
/// # Errors
/// [`Error::Argument`] for chunks without levels or with different numbers of them, for given encodings that
/// do not exist, for a batch of 0, and for a timeout that is not above 0 or is above [`MOST_SECONDS`];
/// [`Error::Stalled`] and errors of the link, if [`Options::fall_back`] is off; [`Error::Cancelled`]; errors
/// of the receiver and of the policy.
pub fn serve(
    link: &mut dyn Link,
    receiver: &mut dyn Receiver,
    requests: &[Vec<ChunkCost>],
    options: &Options,
) -> Result<Trace> {
    check(requests, options)?;
    let mut stream = Stream {
        arrival: link.now(),
        link,
        receiver,
        options,
        measured: None,
        link_failed: false,
        events: vec![],
    };
    for (batch, requests) in requests.chunks(options.batch).enumerate() {
        let before = stream.events.len();
        stream.run(batch * options.batch, requests)?;
        for computed in stream.receiver.finish()? {
            let mut events = stream.events[before..].iter_mut();
            if let Some(event) = events.find(|event| event.is_of(computed.chunk)) {
                event.computed(&computed);
            }
        }
    }
    Ok(Trace::new(stream.arrival, requests.len(), stream.events))
}

fn check(requests: &[Vec<ChunkCost>], options: &Options) -> Result<()> {
    let mut chunks = requests.iter().flatten();
    let levels = chunks.next().map_or(0, |chunk| chunk.levels.len());
    if requests.iter().any(Vec::is_empty) || levels == 0 || chunks.any(|chunk| chunk.levels.len() != levels) {
        return Err(Error::Argument("every request needs chunks, all of them at the same levels".into()));
    }
    if let Some(chunks) = requests.iter().map(Vec::len).find(|&chunks| chunks > MOST_CHUNKS) {
        return Err(Error::Argument(format!("a context of {chunks} chunks, of at most {MOST_CHUNKS}")));
    }
    if options.batch == 0 {
        return Err(Error::Argument("a batch needs a request".into()));
    }
    if !(options.timeout > 0.0 && options.timeout <= MOST_SECONDS) {
        return Err(Error::Argument(format!("the timeout must be above 0 and at most {MOST_SECONDS} s")));
    }
    if let Choice::Given(given) = &options.choice {
        let missing = |encoding: &Encoding| matches!(encoding, Encoding::Level(level) if *level >= levels);
        if given.is_empty() || given.iter().any(missing) {
            return Err(Error::Argument(format!("encodings are `text` and levels below {levels}")));
        }
    }
    Ok(())
}

struct Stream<'a> {
    link: &'a mut dyn Link,
    receiver: &'a mut dyn Receiver,
    options: &'a Options,
    arrival: f64,          // of the requests
    measured: Option<f64>, // throughput of the last transfer, bytes per second
    link_failed: bool,
    events: Vec<Event>,
}

/// How a transfer ended.
enum Transfer {
    Arrived(Payload),
    Abandoned(Box<Decision>),
    Failed(Error),
}

impl Stream<'_> {
    /// Streams one batch, whose first request has the index `first`.
    fn run(&mut self, first: usize, requests: &[Vec<ChunkCost>]) -> Result<()> {
        let mut waiting = Waiting { requests, next: vec![0; requests.len()] };
        let mut again = None; // the choice for the chunk whose transfer was abandoned
        loop {
            let next = match again.take() {
                None => self.choose(&waiting)?,
                again => again,
            };
            let Some((request, decision)) = next else { return Ok(()) };
            let id = RequestChunk { request: first + request, index: waiting.next[request] };
            let now = self.link.now();
            let mut event = Event::new(id, waiting.chunk(request), &decision, now - self.arrival);
            let Encoding::Level(level) = decision.encoding else {
                self.receiver.submit(now, id, Payload::Text)?;
                self.events.push(event);
                waiting.next[request] += 1;
                continue;
            };
            let transfer = self.transfer(id, level, &waiting.means(request), &mut event)?;
            event.arrived = self.link.now() - self.arrival;
            match transfer {
                Transfer::Arrived(payload) => {
                    self.receiver.submit(self.link.now(), id, payload)?;
                    waiting.next[request] += 1;
                }
                Transfer::Abandoned(other) => {
                    event.outcome = Outcome::Abandoned;
                    again = Some((request, *other));
                }
                Transfer::Failed(e) if self.options.fall_back && !matches!(e, Error::Cancelled) => {
                    event.outcome = Outcome::Failed(e.to_string());
                    self.link_failed = true;
                }
                Transfer::Failed(e) => return Err(e),
            }
            self.events.push(event);
        }
    }

    /// The request whose next chunk is streamed, and the decision; none when all are complete.
    fn choose(&self, waiting: &Waiting<'_>) -> Result<Option<(usize, Decision)>> {
        let (Some(emptiest), Some(fullest)) = (waiting.emptiest(), waiting.fullest()) else {
            return Ok(None);
        };
        let (policy, pace) = (self.policy(), self.pace());
        let means = waiting.means(emptiest);
        let sizes: Vec<_> = means.iter().map(|mean| mean.sizes(pace)).collect();
        let mut decision = policy.decide(&sizes, self.progress(pace))?;
        if let Choice::Given(given) = &self.options.choice {
            decision.encoding = given[waiting.next[emptiest] % given.len()];
        }
        if self.link_failed {
            decision.encoding = Encoding::Text;
        }
        let by_index = decision.encoding == Encoding::Text || matches!(self.options.choice, Choice::Given(_));
        Ok(Some((if by_index { emptiest } else { fullest }, decision)))
    }

    /// The policy; for given encodings one that only estimates delays.
    fn policy(&self) -> StreamPolicy {
        match self.options.choice {
            Choice::Adaptive(policy) => policy,
            Choice::Given(_) => {
                StreamPolicy { slo: 0.0, first_level: 0, prior: None, plans: codec_core::Plans::Uniform }
            }
        }
    }

    /// The factor on the expected seconds of recomputations. Without a deadline there is no margin.
    fn pace(&self) -> f64 {
        let unmeasured = if self.policy().slo > 0.0 { UNMEASURED } else { 1.0 };
        self.receiver.pace().unwrap_or(unmeasured)
    }

    fn progress(&self, pace: f64) -> Progress {
        let now = self.link.now();
        let (elapsed, computing) = (now - self.arrival, self.receiver.backlog(now, pace));
        Progress { measured: self.measured, elapsed, computing }
    }

    /// Transfers a chunk, the first of `chunks` for one of its requests, unless another choice or the timeout
    /// comes first.
    fn transfer(
        &mut self,
        id: RequestChunk,
        level: usize,
        chunks: &[Mean],
        event: &mut Event,
    ) -> Result<Transfer> {
        let total = event.level_bytes;
        let begin = self.link.now();
        let mut meter = Meter::new(begin);
        let mut best = begin; // when no plan was known to be better
        if let Err(e) = self.link.start(id, level) {
            return Ok(Transfer::Failed(e));
        }
        let mut tick = TICKS.0;
        loop {
            let wait = self.wait(id, level, total, self.link.now() + tick);
            tick = TICKS.1.min(2.0 * tick);
            let received = match wait {
                Ok(received) => received.min(total),
                Err(e) => return Ok(self.failed(e)),
            };
            event.bytes = received;
            let now = self.link.now();
            let idle = meter.add(now, received);
            let rate = if received == total { meter.whole() } else { meter.rate() };
            self.measured = rate.or(self.measured);
            if received == total {
                return Ok(match self.link.take() {
                    Ok(bytes) => Transfer::Arrived(Payload::Level(level, bytes)),
                    Err(e @ Error::Damage(_)) if self.options.fall_back => {
                        Transfer::Arrived(Payload::Damaged(e.to_string()))
                    }
                    Err(e) => self.failed(e),
                });
            }
            if idle > self.options.timeout {
                return Ok(self.failed(Error::Stalled { chunk: id.index, received, total, idle }));
            }
            let better = match self.options.choice {
                Choice::Adaptive(policy) if received > 0 => {
                    let pace = self.pace();
                    let sizes: Vec<_> = chunks.iter().map(|mean| mean.sizes(pace)).collect();
                    policy.reconsider(&sizes, level, total - received, self.progress(pace))?
                }
                _ => None,
            };
            let Some(decision) = better else {
                best = now;
                continue;
            };
            if decision.remaining > 0.0 || now - best >= PATIENCE * decision.delay.unwrap_or(0.0) {
                self.link.cancel();
                return Ok(Transfer::Abandoned(Box::new(decision)));
            }
        }
    }

    /// Waits until a transfer of `total` bytes has ended or the clock reaches `until`, and offers the arrived
    /// bytes to the receiver; returns the bytes received so far.
    fn wait(&mut self, id: RequestChunk, level: usize, total: u64, until: f64) -> Result<u64> {
        while self.receiver.takes_arriving()
            && let Some(start) = self.link.arrived()?
        {
            self.receiver.arriving(id, level, start)?;
            let now = self.link.now();
            let received = self.link.wait(until.min(now + ARRIVING))?;
            if received >= total || now >= until {
                return Ok(received);
            }
        }
        self.link.wait(until)
    }

    fn failed(&mut self, e: Error) -> Transfer {
        self.link.cancel();
        Transfer::Failed(e)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::{Computed, ShapedLink, SimulatedClock, Source};

    /// Chunks of one byte.
    struct Ones;

    impl Source for Ones {
        fn bytes(&self, _: RequestChunk, _: usize) -> Result<u64> {
            Ok(1)
        }

        fn read(&self, _: RequestChunk, _: usize) -> Result<Bytes> {
            Ok(vec![1].into())
        }
    }

    /// A receiver that has measured this pace.
    struct Paced(Option<f64>, Vec<Payload>);

    impl Receiver for Paced {
        fn submit(&mut self, _: f64, _: RequestChunk, payload: Payload) -> Result<()> {
            self.1.push(payload);
            Ok(())
        }

        fn backlog(&self, _: f64, pace: f64) -> f64 {
            pace * self.1.iter().filter(|payload| **payload == Payload::Text).count() as f64
        }

        fn pace(&self) -> Option<f64> {
            self.0
        }

        fn finish(&mut self) -> Result<Vec<Computed>> {
            Ok(vec![])
        }
    }

    /// Four chunks that take 1 s each to recompute, and no time to transfer.
    #[test]
    fn a_recomputation_that_was_never_measured_may_take_twice_as_long() {
        let chunks = |pace, slo| {
            let mut receiver = Paced(pace, vec![]);
            let mut link = ShapedLink::new(SimulatedClock::default(), Ones, "1".parse().unwrap(), 0.0);
            let policy =
                StreamPolicy { slo, first_level: 0, prior: Some(1e9), plans: codec_core::Plans::TextFirst };
            let choice = Choice::Adaptive(policy);
            let options = Options { choice, batch: 1, timeout: 1.0, fall_back: false };
            let cost = ChunkCost { tokens: 10, levels: vec![1], decode: 0.0, recompute: 1.0 };
            serve(&mut link, &mut receiver, &[vec![cost; 4]], &options).unwrap();
            receiver.1.iter().filter(|payload| **payload == Payload::Text).count()
        };
        for (slo, measured, unmeasured) in [(4.5, 4, 2), (9.0, 4, 4), (3.5, 3, 1), (0.0, 0, 0)] {
            assert_eq!((chunks(Some(1.0), slo), chunks(None, slo)), (measured, unmeasured), "{slo} s");
        }
        assert_eq!(chunks(Some(3.0), 9.5), 3);
    }
}
