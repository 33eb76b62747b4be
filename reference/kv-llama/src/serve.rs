//! Continuous batching: requests that come and go at any time share the places of an engine.
//!
//! An [`Engine`] runs sequences, a [`Scheduler`] decides which, and a [`Client`] gets the tokens of a request.
//! Nothing here knows texts, threads or connections.
//!
//! # Examples
//! ```
//! use std::cell::RefCell;
//! use std::rc::Rc;
//! use std::sync::Arc;
//!
//! use kv_llama::serve::{Client, Finish, Request, Scheduler, Sequences, Token};
//! use kv_llama::{Decoder, Error, ExactCache, Result, Sampling};
//! use kv_model::{Model, Rope};
//!
//! struct Reader(Rc<RefCell<Vec<u32>>>);
//!
//! impl Client<Error> for Reader {
//!     fn take(&mut self, token: Token) -> bool {
//!         self.0.borrow_mut().push(token.id);
//!         true
//!     }
//!
//!     fn is_gone(&self) -> bool {
//!         false
//!     }
//!
//!     fn end(self, end: Result<Finish>) {
//!         assert_eq!(end.unwrap(), Finish::Length);
//!     }
//! }
//!
//! let model = Arc::new(Model::load("../assets/tiny-llama-12m".as_ref())?);
//! let rope = Arc::new(Rope::new(&model.config, 64));
//! let empty = Box::new(ExactCache::new(&model.config, &rope));
//! let engine = Sequences::new(Decoder::new(model, rope), empty, (2, 64));
//! let mut scheduler = Scheduler::new(engine, vec![], 16);
//! let texts: [Rc<RefCell<Vec<u32>>>; 3] = Default::default();
//! for (text, prompt) in texts.iter().zip([vec![11, 97], vec![5], vec![42, 7, 30]]) {
//!     let request = Request { prompt, most: 4, sampling: Sampling::GREEDY, log_probabilities: None };
//!     scheduler.add(request, Reader(text.clone()))?;
//! }
//! while scheduler.round()? {}
//! assert!(texts.iter().all(|text| text.borrow().len() == 4));
//! # Ok::<(), Error>(())
//! ```

mod scheduler;
mod sequences;

use crate::{LogProbabilities, Sampling};
pub use scheduler::Scheduler;
pub use sequences::Sequences;

/// Runs sequences, each in a place of its own. A place without a sequence is empty; its first prompt begins
/// one.
pub trait Engine {
    /// What can go wrong.
    type Error;

    /// Number of places.
    fn places(&self) -> usize;

    /// Tokens of a sequence, at most.
    fn capacity(&self) -> usize;

    /// Whether there is memory for these prompts next to all other sequences: the places and whole lengths of
    /// those that have begun or are about to. More may be short later, when sequences grow.
    ///
    /// # Errors
    /// An error ends all sequences.
    fn has_room(&mut self, prompts: &[(usize, usize)]) -> Result<bool, Self::Error>;

    /// Appends parts of prompts, of one or of several sequences, while the others wait.
    ///
    /// # Errors
    /// An error leaves the other sequences as they were; those with a part must [end](Self::end) unless
    /// [memory was short](Self::is_short_of_memory), which changes nothing. That of a single sequence is
    /// returned by [`Self::logits`].
    fn prefill(&mut self, parts: &[Part<'_>]) -> Result<(), Self::Error>;

    /// Appends a token to each of these sequences, which are all whose prompts have run. Each of those whose
    /// prompts have begun has got a part since the last step.
    ///
    /// # Errors
    /// An error ends all sequences, unless [memory was short](Self::is_short_of_memory), which changes
    /// nothing. That of a single sequence is returned by [`Self::logits`].
    fn step(&mut self, tokens: &[(usize, u32)]) -> Result<(), Self::Error>;

    /// Logits (vocab_size,) after the last token of a sequence. They are asked for once.
    ///
    /// # Errors
    /// What went wrong in this sequence.
    fn logits(&mut self, place: usize) -> Result<Vec<f32>, Self::Error>;

    /// The token with the largest logit, the first of equal ones, instead of all logits.
    ///
    /// # Errors
    /// As [`Self::logits`].
    fn most_likely(&mut self, place: usize) -> Result<u32, Self::Error>;

    /// Empties a place, which may be empty.
    ///
    /// # Errors
    /// An error ends all sequences.
    fn end(&mut self, place: usize) -> Result<(), Self::Error>;

    /// Whether an error says that there is no room for more tokens until other sequences end.
    fn is_short_of_memory(error: &Self::Error) -> bool;
}

/// Tokens of a prompt that run at once.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The place of its sequence.
    pub place: usize,
    /// The tokens, at least one.
    pub tokens: &'a [u32],
    /// Whether the prompt ends with them: then there are logits.
    pub is_last: bool,
}

/// A prompt to continue.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its tokens.
    pub prompt: Vec<u32>,
    /// Tokens to generate, at most.
    pub most: usize,
    /// How they are chosen.
    pub sampling: Sampling,
    /// Whether each comes with its log-probability, and with those of how many most likely tokens.
    pub log_probabilities: Option<usize>,
}

/// A generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// The token.
    pub id: u32,
    /// As asked for.
    pub log_probabilities: Option<LogProbabilities>,
}

/// What runs and what waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests in places.
    pub running: usize,
    /// Requests without one.
    pub waiting: usize,
    /// Tokens of the sequences in places.
    pub tokens: usize,
    /// How often a request that had begun was put back so far.
    pub put_back: u64,
}

/// Why a text ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model has ended it.
    Stop,
    /// It has as many tokens as were asked for.
    Length,
}

/// Whoever asked for a text. Nothing here may wait: all requests would.
pub trait Client<E> {
    /// Takes the next token, and returns whether it wants another one.
    fn take(&mut self, token: Token) -> bool;

    /// Whether it wants nothing any more: asked before each step, also while the request waits.
    fn is_gone(&self) -> bool;

    /// Takes the end of a text that it has not ended itself.
    fn end(self, end: Result<Finish, E>);
}
