//! Who runs, who waits, and who is put back.

use std::collections::VecDeque;

use super::{Client, Engine, Finish, Request, Token};
use crate::{Error, LogProbabilities, Sampler};

/// Runs requests on an engine with continuous batching: when a sequence ends, its place goes to the next
/// request while the others continue.
///
/// Requests begin in the order in which they came, and each gets its tokens in order. If memory is short, the
/// running request that came last is put back: its memory goes to the others, and it runs again when one of
/// them has ended, as a prompt with the tokens that it has got (the recomputation of vLLM, arXiv 2309.06180,
/// 4.5). So all that run came before all that wait.
pub struct Scheduler<E: Engine, C> {
    engine: E,
    ends: Vec<u32>,
    places: Vec<Option<Running<C>>>,
    waiting: VecDeque<Job<C>>,
    came: u64,      // number of requests so far
    is_short: bool, // of memory, until a sequence ends
}

/// A request and what has become of it.
struct Job<C> {
    number: u64,      // in the order in which they came
    tokens: Vec<u32>, // the prompt and what has followed it
    left: usize,      // tokens to generate
    log_probabilities: Option<usize>,
    sampler: Sampler,
    client: C,
}

/// A request in a place.
struct Running<C> {
    job: Job<C>,
    fed: usize,      // tokens that the engine has
    in_prompt: bool, // they do not end where the next token is chosen
}

impl<E: Engine, C: Client<E::Error>> Scheduler<E, C> {
    /// A scheduler of an engine whose places are empty, and of a model with these end tokens.
    pub fn new(engine: E, ends: Vec<u32>) -> Self {
        let places = (0..engine.places()).map(|_| None).collect();
        Self { engine, ends, places, waiting: VecDeque::new(), came: 0, is_short: false }
    }

    /// Adds a request, which begins when all that came before it have begun and a place is empty.
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty prompt, for no tokens to generate, and for more tokens together than a
    /// sequence may have.
    pub fn add(&mut self, request: Request, client: C) -> crate::Result<()> {
        let Request { prompt, most, sampling, log_probabilities } = request;
        let (together, capacity) = (prompt.len().saturating_add(most), self.engine.capacity());
        if prompt.is_empty() || most == 0 {
            return Err(Error::Argument("a request needs a prompt and a token to generate".into()));
        }
        if together > capacity {
            return Err(Error::Argument(format!("{together} tokens in a context of {capacity}")));
        }
        let sampler = Sampler::after(sampling, &prompt);
        let number = self.came;
        self.came += 1;
        self.waiting.push_back(Job {
            number,
            tokens: prompt,
            left: most,
            log_probabilities,
            sampler,
            client,
        });
        Ok(())
    }

    /// Runs a part of each prompt that has begun, and then a step of the others. Returns whether there is more
    /// to do.
    ///
    /// # Errors
    /// Those of the engine that end all sequences: the scheduler is then of no more use. What goes wrong in one
    /// sequence is told its client.
    pub fn round(&mut self) -> Result<bool, E::Error> {
        self.drop_gone()?;
        self.begin_waiting();
        self.prefill()?;
        self.step()?;
        Ok(!self.is_idle())
    }

    /// Whether nothing runs or waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.places.iter().all(Option::is_none)
    }

    /// The numbers of the running requests and their places.
    fn running(&self) -> impl Iterator<Item = (u64, usize)> {
        self.places.iter().enumerate().filter_map(|(place, of)| Some((of.as_ref()?.job.number, place)))
    }

    /// Drops requests whose clients are gone.
    fn drop_gone(&mut self) -> Result<(), E::Error> {
        self.waiting.retain(|job| !job.client.is_gone());
        for place in 0..self.places.len() {
            if self.places[place].as_ref().is_some_and(|running| running.job.client.is_gone()) {
                self.leave(place)?;
            }
        }
        Ok(())
    }

    /// Gives empty places to waiting requests.
    fn begin_waiting(&mut self) {
        if self.is_short && self.running().next().is_some() {
            return;
        }
        for place in self.places.iter_mut().filter(|place| place.is_none()) {
            let Some(job) = self.waiting.pop_front() else { break };
            *place = Some(Running { job, fed: 0, in_prompt: true });
        }
    }

    /// Runs the next part of every prompt, in the order in which they came.
    fn prefill(&mut self) -> Result<(), E::Error> {
        let mut order: Vec<(u64, usize)> = self.running().collect();
        order.sort_unstable();
        for (_, place) in order {
            // One that came before it may have put it back.
            while let Some(Running { job, fed, in_prompt: true }) = &mut self.places[place] {
                match self.engine.prefill(place, &job.tokens[*fed..]) {
                    Ok(count) => {
                        *fed += count;
                        if *fed >= job.tokens.len() {
                            self.choose(place)?;
                        }
                        break;
                    }
                    Err(e) if E::is_short_of_memory(&e) && self.put_back()? => {}
                    Err(e) => self.fail(place, e)?,
                }
            }
        }
        Ok(())
    }

    /// A step of the sequences whose prompts have run.
    fn step(&mut self) -> Result<(), E::Error> {
        loop {
            let stepping = self.places.iter().enumerate().filter_map(|(place, of)| {
                let Running { job, in_prompt, .. } = of.as_ref()?;
                Some((place, *job.tokens.last().filter(|_| !in_prompt)?))
            });
            let tokens: Vec<(usize, u32)> = stepping.collect();
            if tokens.is_empty() {
                return Ok(());
            }
            match self.engine.step(&tokens) {
                Ok(()) => {
                    self.places.iter_mut().flatten().filter(|of| !of.in_prompt).for_each(|of| of.fed += 1);
                    return tokens.into_iter().try_for_each(|(place, _)| self.choose(place));
                }
                Err(e) if E::is_short_of_memory(&e) => {
                    if !self.put_back()? {
                        self.fail(tokens[0].0, e)?;
                    }
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Puts the running request that came last back, unless it runs alone. Returns whether it was.
    fn put_back(&mut self) -> Result<bool, E::Error> {
        let (Some((_, last)), true) = (self.running().max(), self.running().nth(1).is_some()) else {
            return Ok(false);
        };
        if let Some(Running { job, .. }) = self.leave(last)? {
            self.waiting.push_front(job);
        }
        self.is_short = true;
        Ok(true)
    }

    /// Chooses the next token of a sequence and gives it to its client.
    fn choose(&mut self, place: usize) -> Result<(), E::Error> {
        let Some(Running { job, in_prompt, .. }) = &mut self.places[place] else { return Ok(()) };
        *in_prompt = false;
        let token = match job.next(&mut self.engine, place) {
            Ok(token) => token,
            Err(e) => return self.fail(place, e),
        };
        if self.ends.contains(&token.id) {
            return self.finish(place, Finish::Stop);
        }
        job.tokens.push(token.id);
        job.left -= 1;
        let is_last = job.left == 0;
        match job.client.take(token) {
            true if is_last => self.finish(place, Finish::Length),
            true => Ok(()),
            false => self.leave(place).map(drop),
        }
    }

    fn finish(&mut self, place: usize, finish: Finish) -> Result<(), E::Error> {
        if let Some(Running { job, .. }) = self.leave(place)? {
            job.client.end(Ok(finish));
        }
        Ok(())
    }

    fn fail(&mut self, place: usize, e: E::Error) -> Result<(), E::Error> {
        if let Some(Running { job, .. }) = self.leave(place)? {
            job.client.end(Err(e));
        }
        Ok(())
    }

    /// Empties a place.
    fn leave(&mut self, place: usize) -> Result<Option<Running<C>>, E::Error> {
        self.engine.end(place)?;
        self.is_short = false;
        Ok(self.places[place].take())
    }
}

impl<C> Job<C> {
    /// The token after the last one of its sequence.
    fn next<E: Engine>(&mut self, engine: &mut E, place: usize) -> Result<Token, E::Error> {
        if self.sampler.sampling().is_greedy() && self.log_probabilities.is_none() {
            return Ok(Token { id: engine.most_likely(place)?, log_probabilities: None });
        }
        let logits = engine.logits(place)?;
        let id = self.sampler.sample(&logits);
        let log_probabilities = self.log_probabilities.map(|n| LogProbabilities::of(&logits, id, n));
        Ok(Token { id, log_probabilities })
    }
}
