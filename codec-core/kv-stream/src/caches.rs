//! Caches behind a link: chunks are added to them on a thread other than the link's.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use bytes::Bytes;

use crate::{
    ChunkCost, Clock, Computed, Error, Link, Options, Payload, RealClock, Receiver, RequestChunk, Result,
    Trace, serve,
};

/// Maximum chunks queued for decoding. Beyond that the link waits.
const QUEUE: usize = 2;

/// The destination of chunks, in order of arrival.
pub trait Caches {
    /// Maximum chunks that may begin before the oldest one has ended, to overlap their work; 0 for caches
    /// that hold a chunk when [`Self::begin`] returns.
    const AHEAD: usize = 0;

    /// Whether [`Self::arriving`] does anything.
    const TAKES_ARRIVING: bool = false;

    /// Offers the first bytes of a chunk in flight at a level. The chunk may still begin whole, at this level
    /// or another one, or as text.
    ///
    /// # Errors
    /// If the caches can accept no more.
    fn arriving(&mut self, _chunk: RequestChunk, _level: usize, _start: Bytes) -> Result<()> {
        Ok(())
    }

    /// Starts to add a chunk to its request's cache: decodes its bytes, or recomputes it.
    ///
    /// # Errors
    /// If the caches can accept no more, which ends the stream.
    fn begin(&mut self, chunk: RequestChunk, payload: Payload) -> Result<()>;

    /// Waits until the oldest chunk that has begun is in its cache. Returns the reason if its bytes could not
    /// be decoded and it was recomputed.
    ///
    /// # Errors
    /// Those of a recomputation.
    fn end(&mut self) -> Result<Option<String>> {
        Ok(None)
    }
}

/// A function that holds a chunk when it returns.
impl<F: FnMut(RequestChunk, Payload) -> Result<()>> Caches for F {
    fn begin(&mut self, chunk: RequestChunk, payload: Payload) -> Result<()> {
        self(chunk, payload)
    }
}

/// Passes chunks to a [`Worker`].
struct CacheReceiver<'a> {
    jobs: SyncSender<Job>,
    takes_arriving: bool,
    results: mpsc::Receiver<Result<Computed>>,
    costs: &'a [Vec<ChunkCost>],
    waiting: VecDeque<Expected>, // of every chunk that `finish` waits for
    done: Arc<AtomicUsize>,      // how many of them are done
    recomputed: Arc<Recomputed>, // by the thread
}

/// A job of the thread.
enum Job {
    Begin(RequestChunk, Payload),
    Arriving(RequestChunk, usize, Bytes),
}

/// The expected seconds of a chunk.
struct Expected {
    seconds: f64,
    is_text: bool,
}

/// The recomputations so far.
#[derive(Default)]
struct Recomputed(Mutex<Sums>);

/// Seconds, and the pace of the last one.
#[derive(Clone, Copy, Default)]
struct Sums {
    measured: f64,
    expected: f64,
    last: f64,
}

impl Recomputed {
    fn add(&self, measured: f64, expected: f64) {
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, last) = (*sums, measured / expected);
        *sums = Sums { measured: before.measured + measured, expected: before.expected + expected, last };
    }

    /// Measured over expected of all, or of the last one if that is more: the error of an expectation may grow
    /// with the depth in a context. None if nothing was measured.
    fn pace(&self) -> Option<f64> {
        let sums = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let pace = (sums.measured / sums.expected).max(sums.last);
        (pace.is_finite() && pace > 0.0).then_some(pace)
    }
}

impl<'a> CacheReceiver<'a> {
    /// A receiver and its worker for these caches; the worker runs on another thread than the link.
    fn pair<C: Caches>(clock: RealClock, costs: &'a [Vec<ChunkCost>]) -> (Self, Worker<'a>) {
        let (jobs, queue) = mpsc::sync_channel(QUEUE);
        let (answer, results) = mpsc::channel();
        let done = Arc::new(AtomicUsize::new(0));
        let recomputed = Arc::<Recomputed>::default();
        let worker =
            Worker { queue, answer, clock, costs, done: done.clone(), recomputed: recomputed.clone() };
        let takes_arriving = C::TAKES_ARRIVING;
        (Self { jobs, takes_arriving, results, costs, waiting: VecDeque::new(), done, recomputed }, worker)
    }
}

/// Adds the chunks of a [`CacheReceiver`] to caches.
struct Worker<'a> {
    queue: mpsc::Receiver<Job>,
    answer: mpsc::Sender<Result<Computed>>,
    clock: RealClock,
    costs: &'a [Vec<ChunkCost>],
    done: Arc<AtomicUsize>,
    recomputed: Arc<Recomputed>,
}

/// A chunk that has begun.
struct Begun {
    chunk: RequestChunk,
    start: f64,
    is_text: bool,
    damaged: Option<String>, // in transfer
}

impl Worker<'_> {
    /// Adds chunks to `caches` until the receiver is dropped, or they can accept no more.
    fn run<C: Caches>(self, mut caches: C) {
        if let Err(e) = self.add_all(&mut caches) {
            // The receiver may be gone; it then has an error of its own.
            let _ = self.answer.send(Err(e));
        }
    }

    fn add_all<C: Caches>(&self, caches: &mut C) -> Result<()> {
        let mut begun = VecDeque::new();
        loop {
            // While chunks are in flight, another one begins only if it has already arrived.
            let next = match begun.len() {
                0 => self.queue.recv().ok(),
                n if n <= C::AHEAD => self.queue.try_recv().ok(),
                _ => None,
            };
            match next {
                Some(Job::Begin(chunk, payload)) => {
                    let damaged = match &payload {
                        Payload::Damaged(what) => Some(what.clone()),
                        Payload::Text | Payload::Level(..) => None,
                    };
                    let (start, is_text) = (self.clock.now(), !payload.is_level());
                    begun.push_back(Begun { chunk, start, is_text, damaged });
                    caches.begin(chunk, payload)?;
                    continue;
                }
                Some(Job::Arriving(chunk, level, start)) => {
                    caches.arriving(chunk, level, start)?;
                    continue;
                }
                None => {}
            }
            let Some(Begun { chunk, start, is_text, damaged }) = begun.pop_front() else { return Ok(()) };
            let damaged = caches.end()?.or(damaged);
            let end = self.clock.now();
            if is_text {
                self.recomputed.add(end - start, self.costs[chunk.request][chunk.index].recompute);
            }
            self.done.fetch_add(1, Ordering::Release);
            if self.answer.send(Ok(Computed { chunk, start, end, damaged })).is_err() {
                return Ok(());
            }
        }
    }
}

/// Streams contexts into caches, which run on this thread, over a link, which runs on another one: see
/// [`serve`].
///
/// # Errors
/// As there.
pub fn serve_into<C: Caches>(
    link: &mut (impl Link + Send),
    caches: C,
    clock: RealClock,
    requests: &[Vec<ChunkCost>],
    options: &Options,
) -> Result<Trace> {
    let (mut receiver, worker) = CacheReceiver::pair::<C>(clock, requests);
    thread::scope(|scope| {
        let serving = scope.spawn(move || serve(link, &mut receiver, requests, options));
        worker.run(caches);
        serving.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl Receiver for CacheReceiver<'_> {
    fn submit(&mut self, _: f64, chunk: RequestChunk, payload: Payload) -> Result<()> {
        let cost = &self.costs[chunk.request][chunk.index];
        let is_text = !payload.is_level();
        self.waiting
            .push_back(Expected { seconds: if is_text { cost.recompute } else { cost.decode }, is_text });
        match self.jobs.send(Job::Begin(chunk, payload)) {
            Ok(()) => Ok(()),
            // The thread reports its error before it ends.
            Err(_) => self.finish().and(Err(Error::ReceiverEnded)),
        }
    }

    fn takes_arriving(&self) -> bool {
        self.takes_arriving
    }

    fn arriving(&mut self, chunk: RequestChunk, level: usize, start: Bytes) -> Result<()> {
        match self.jobs.try_send(Job::Arriving(chunk, level, start)) {
            // More bytes will be offered next time, or the whole chunk.
            Ok(()) | Err(TrySendError::Full(_)) => Ok(()),
            Err(TrySendError::Disconnected(_)) => self.finish().and(Err(Error::ReceiverEnded)),
        }
    }

    fn backlog(&self, _: f64, pace: f64) -> f64 {
        let waiting = self.waiting.iter().skip(self.done.load(Ordering::Acquire));
        waiting.map(|expected| expected.seconds * if expected.is_text { pace } else { 1.0 }).sum()
    }

    fn pace(&self) -> Option<f64> {
        self.recomputed.pace()
    }

    fn finish(&mut self) -> Result<Vec<Computed>> {
        let results =
            (0..self.waiting.len()).map(|_| self.results.recv().map_err(|_| Error::ReceiverEnded)?);
        let computed = results.collect::<Result<_>>()?;
        self.waiting.clear();
        self.done.store(0, Ordering::Release);
        Ok(computed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use codec_core::Encoding;

    use super::*;
    use crate::{Choice, Event, Outcome, ShapedLink, Source};

    /// Chunks of a thousand bytes.
    struct Chunks;

    impl Source for Chunks {
        fn bytes(&self, _: RequestChunk, _: usize) -> Result<u64> {
            Ok(1000)
        }

        fn read(&self, _: RequestChunk, _: usize) -> Result<Bytes> {
            Ok(vec![0; 1000].into())
        }
    }

    /// Caches that take two chunks ahead, and fail at one.
    #[derive(Default)]
    struct Ahead {
        begun: usize,
        ended: usize,
        begin_fails: Option<usize>,
        end_fails: Option<usize>,
    }

    impl Caches for &mut Ahead {
        const AHEAD: usize = 2;

        fn begin(&mut self, chunk: RequestChunk, _: Payload) -> Result<()> {
            assert_eq!(chunk.index, self.begun);
            if self.begin_fails == Some(chunk.index) {
                return Err(Error::Caches("begin".into()));
            }
            self.begun += 1;
            assert!(self.begun - self.ended <= 3);
            Ok(())
        }

        fn end(&mut self) -> Result<Option<String>> {
            if self.end_fails == Some(self.ended) {
                return Err(Error::Caches("end".into()));
            }
            self.ended += 1;
            Ok((self.ended == 4).then(|| "damage".into()))
        }
    }

    fn stream(caches: &mut Ahead) -> Result<Trace> {
        stream_at("10", caches)
    }

    fn stream_at(gbps: &str, caches: impl Caches) -> Result<Trace> {
        let cost = ChunkCost { tokens: 10, levels: vec![1000], decode: 0.0, recompute: 0.0 };
        let clock = RealClock(Instant::now());
        let mut link = ShapedLink::new(clock, Chunks, gbps.parse()?, 0.0);
        let choice = Choice::Given(vec![Encoding::Level(0)]);
        let options = Options { choice, batch: 1, timeout: 1.0, fall_back: true };
        serve_into(&mut link, caches, clock, &[vec![cost; 12]], &options)
    }

    #[test]
    fn the_pace_is_that_of_all_recomputations_or_of_a_slower_last_one() {
        let recomputed = Recomputed::default();
        assert_eq!(recomputed.pace(), None);
        let after = |measured, expected| {
            recomputed.add(measured, expected);
            recomputed.pace()
        };
        assert_eq!([after(2.0, 1.0), after(4.0, 1.0), after(0.0, 1.0)], [Some(2.0), Some(4.0), Some(2.0)]);
        assert_eq!(Recomputed(Mutex::new(Sums { measured: 1.0, ..Sums::default() })).pace(), None);
    }

    #[test]
    fn chunks_begin_ahead_and_end_in_order() {
        let mut caches = Ahead::default();
        let trace = stream(&mut caches).unwrap();
        assert_eq!((caches.begun, caches.ended, trace.events.len()), (12, 12, 12));
        let damaged = |event: &Event| matches!(event.outcome, Outcome::Damaged(_));
        assert_eq!(trace.events.iter().position(damaged), Some(3));
    }

    /// Caches that record the arrived bytes of a chunk before it begins.
    #[derive(Default)]
    struct Noting(Vec<Vec<usize>>);

    impl Caches for &mut Noting {
        const AHEAD: usize = 0;
        const TAKES_ARRIVING: bool = true;

        fn arriving(&mut self, chunk: RequestChunk, _: usize, start: Bytes) -> Result<()> {
            self.0.resize(chunk.index + 1, vec![]);
            self.0[chunk.index].push(start.len());
            Ok(())
        }

        fn begin(&mut self, chunk: RequestChunk, payload: Payload) -> Result<()> {
            assert!(matches!(payload, Payload::Level(0, bytes) if bytes.len() == 1000));
            assert_eq!(chunk.index + 1, self.0.len());
            Ok(())
        }

        fn end(&mut self) -> Result<Option<String>> {
            Ok(None)
        }
    }

    #[test]
    fn caches_get_what_has_arrived_before_the_whole_chunk() {
        let mut caches = Noting::default();
        stream_at("0.0004", &mut caches).unwrap(); // 20 ms a chunk
        for starts in &caches.0 {
            assert!(starts.len() > 1 && starts.is_sorted() && starts.iter().all(|&len| len < 1000));
        }
    }

    #[test]
    fn caches_that_fail_end_the_stream_with_their_error() {
        for at in [0, 5, 11] {
            let begin = stream(&mut Ahead { begin_fails: Some(at), ..Ahead::default() }).unwrap_err();
            let end = stream(&mut Ahead { end_fails: Some(at), ..Ahead::default() }).unwrap_err();
            assert_eq!((begin.to_string(), end.to_string()), ("begin".into(), "end".into()));
        }
    }
}
