//! The engine's side: requests come in through a door, and tokens go out.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use kv_llama::serve::{Client, Counts, Engine, Finish, Request, Scheduler, Token};
use kv_reference::{Error, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc as asynchronous, watch};

/// What happens to a request.
pub enum Event {
    /// The next token.
    Token(Token),
    /// The end, or what went wrong.
    End(std::result::Result<Finish, String>),
}

/// Lets as many requests in as may run and wait.
#[derive(Clone)]
pub struct Door {
    inbox: Sender<(Request, Port)>,
    room: Arc<Semaphore>,
    size: u32,
    counts: watch::Receiver<Counts>,
}

/// A place in the queue, until it is dropped.
pub struct Ticket {
    _permit: OwnedSemaphorePermit,
}

/// Where requests arrive, and what it is said to run of them.
pub struct Inbox {
    requests: Receiver<(Request, Port)>,
    counts: watch::Sender<Counts>,
}

/// A door for `size` requests, and the inbox behind it.
pub fn door(size: u32) -> (Door, Inbox) {
    let (inbox, requests) = mpsc::channel();
    let (counts, counted) = watch::channel(Counts::default());
    let room = Arc::new(Semaphore::new(size as usize));
    (Door { inbox, room, size, counts: counted }, Inbox { requests, counts })
}

impl Door {
    /// A place for a request, unless all are taken.
    pub fn enter(&self) -> Option<Ticket> {
        self.room.clone().try_acquire_owned().ok().map(|permit| Ticket { _permit: permit })
    }

    /// Hands a request to the engine. It ends when the receiver is dropped.
    pub fn send(&self, request: Request, ticket: Ticket) -> asynchronous::Receiver<Event> {
        // Room for all tokens and the end: the engine never waits.
        let (events, receiver) = asynchronous::channel(request.most.saturating_add(1));
        // If the engine has failed, nobody will send an event.
        let _ = self.inbox.send((request, Port { events, _ticket: ticket }));
        receiver
    }

    /// What runs after the last round. All other requests that have come in wait, also to be tokenized.
    pub fn counts(&self) -> Counts {
        let counts = *self.counts.borrow();
        let inside = (self.size as usize).saturating_sub(self.room.available_permits());
        Counts { waiting: inside.saturating_sub(counts.running), ..counts }
    }

    /// Waits until no request runs or waits.
    pub async fn wait_until_empty(&self) {
        let _ = self.room.acquire_many(self.size).await; // it is never closed
    }
}

/// The engine's end of a request.
struct Port {
    events: asynchronous::Sender<Event>,
    _ticket: Ticket,
}

impl<E> Client<E> for Port
where
    Error: From<E>,
{
    fn take(&mut self, token: Token) -> bool {
        self.events.try_send(Event::Token(token)).is_ok()
    }

    fn is_gone(&self) -> bool {
        self.events.is_closed()
    }

    fn end(self, end: std::result::Result<Finish, E>) {
        let end = end.map_err(|e| Error::from(e).to_string());
        let _ = self.events.try_send(Event::End(end)); // the client may be gone
    }
}

impl Inbox {
    /// Runs the requests on an engine, at most `chunk` tokens of prompts between two steps, until nobody can
    /// send any more and all have ended.
    pub fn run<E: Engine>(self, engine: E, ends: Vec<u32>, chunk: usize) -> Result<()>
    where
        Error: From<E::Error>,
    {
        let mut scheduler = Scheduler::new(engine, ends, chunk);
        loop {
            if scheduler.is_idle() {
                let Ok((request, port)) = self.requests.recv() else { return Ok(()) };
                scheduler.add(request, port)?;
            }
            // Those that have come meanwhile; when nobody can send any more, the loop ends above.
            while let Ok((request, port)) = self.requests.try_recv() {
                scheduler.add(request, port)?;
            }
            scheduler.round()?;
            self.counts.send_replace(scheduler.counts());
        }
    }
}
