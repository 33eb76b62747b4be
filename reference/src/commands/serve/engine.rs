//! The engine's side: requests come in through a door, and tokens go out.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};

use kv_llama::serve::{Client, Engine, Finish, Request, Scheduler, Token};
use kv_reference::{Error, Result};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc as asynchronous};

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
}

/// A place in the queue, until it is dropped.
pub struct Ticket {
    _permit: OwnedSemaphorePermit,
}

/// Where requests arrive.
pub struct Inbox(Receiver<(Request, Port)>);

/// A door for `size` requests, and the inbox behind it.
pub fn door(size: u32) -> (Door, Inbox) {
    let (sender, receiver) = mpsc::channel();
    let room = Arc::new(Semaphore::new(size as usize));
    (Door { inbox: sender, room, size }, Inbox(receiver))
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
    /// Runs the requests on an engine, until nobody can send any more and all have ended.
    pub fn run<E: Engine>(self, engine: E, ends: Vec<u32>) -> Result<()>
    where
        Error: From<E::Error>,
    {
        let mut scheduler = Scheduler::new(engine, ends);
        loop {
            if scheduler.is_idle() {
                let Ok((request, port)) = self.0.recv() else { return Ok(()) };
                scheduler.add(request, port)?;
            }
            // Those that have come meanwhile; when nobody can send any more, the loop ends above.
            while let Ok((request, port)) = self.0.try_recv() {
                scheduler.add(request, port)?;
            }
            scheduler.round()?;
        }
    }
}
