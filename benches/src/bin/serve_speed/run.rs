//! A run: requests come in real time, and the scheduler does what it can.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::{Duration, Instant};

use kv_llama::Sampling;
use kv_llama::serve::{Client, Engine, Finish, Request, Scheduler, Token};
use kv_reference::{Error, Result};

use super::requests::{Planned, arrivals};
use super::statistics::Record;

/// Whoever waits for an answer.
pub struct Reader {
    record: Rc<RefCell<Record>>,
    start: Instant,
    stop: Rc<Cell<bool>>, // nobody waits any more
}

impl<E> Client<E> for Reader
where
    Error: From<E>,
{
    fn take(&mut self, token: Token) -> bool {
        let mut record = self.record.borrow_mut();
        if record.tokens.is_empty() {
            record.first = self.start.elapsed().as_secs_f64();
        }
        record.tokens.push(token.id);
        true
    }

    fn is_gone(&self) -> bool {
        self.stop.get()
    }

    fn end(self, end: std::result::Result<Finish, E>) {
        let mut record = self.record.borrow_mut();
        match end {
            Ok(_) => record.end = Some(self.start.elapsed().as_secs_f64()),
            Err(e) => record.failure = Some(Error::from(e).to_string()),
        }
    }
}

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// Each when the one before has its answer.
    OneByOne,
    /// So many a second.
    Poisson(f64),
}

/// What happened in a run.
pub struct Run {
    /// What the requests that came have got.
    pub records: Vec<Record>,
    /// Seconds until the last of them had ended.
    pub seconds: f64,
    /// Most sequences that ran at once.
    pub largest_batch: usize,
    /// Most tokens that they had.
    pub most_tokens: usize,
    /// How often one was put back.
    pub put_back: u64,
}

/// Runs requests on an engine without sequences, and leaves it so. Those that have not come after `patience`
/// do not come; those without an answer after twice as long lose it.
///
/// # Errors
/// [`Error::Argument`] for requests that are too long; errors of the engine.
pub fn run<E: Engine>(
    scheduler: &mut Scheduler<E, Reader>,
    requests: &[Planned],
    arrivals_of: Arrivals,
    patience: Duration,
) -> Result<Run>
where
    Error: From<E::Error>,
{
    let times = match arrivals_of {
        Arrivals::OneByOne => vec![0.0; requests.len()],
        Arrivals::Poisson(rate) => arrivals(requests, rate),
    };
    let come = times.partition_point(|&time| time <= patience.as_secs_f64());
    let (mut waiting, mut records) = (requests[..come].iter().zip(times).peekable(), vec![]);
    let (start, stop) = (Instant::now(), Rc::new(Cell::new(false)));
    let put_back = scheduler.counts().put_back;
    let (mut largest_batch, mut most_tokens) = (0, 0);
    loop {
        let now = start.elapsed();
        if now > 2 * patience {
            stop.set(true);
        }
        let is_next = |time: f64, idle: bool| match arrivals_of {
            Arrivals::OneByOne => idle && now <= patience,
            Arrivals::Poisson(_) => time <= now.as_secs_f64(),
        };
        while let Some((request, time)) = waiting.next_if(|(_, time)| is_next(*time, scheduler.is_idle())) {
            let came = if arrivals_of == Arrivals::OneByOne { now.as_secs_f64() } else { time };
            let record = Rc::new(RefCell::new(Record { came, ..Record::default() }));
            records.push(record.clone());
            let reader = Reader { record, start, stop: stop.clone() };
            let (prompt, most) = (request.prompt.clone(), request.answer);
            let sampling = Sampling::GREEDY;
            scheduler.add(Request { prompt, most, sampling, log_probabilities: None }, reader)?;
        }
        if scheduler.is_idle() {
            match waiting.peek() {
                Some((_, time)) if arrivals_of != Arrivals::OneByOne && !stop.get() => {
                    std::thread::sleep(Duration::from_secs_f64((time - now.as_secs_f64()).max(0.0)));
                    continue;
                }
                _ => break,
            }
        }
        scheduler.round()?;
        let counts = scheduler.counts();
        (largest_batch, most_tokens) = (largest_batch.max(counts.running), most_tokens.max(counts.tokens));
    }
    Ok(Run {
        seconds: start.elapsed().as_secs_f64(),
        records: records.into_iter().map(|record| record.take()).collect(),
        largest_batch,
        most_tokens,
        put_back: scheduler.counts().put_back - put_back,
    })
}
