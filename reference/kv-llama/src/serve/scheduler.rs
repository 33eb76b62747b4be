//! Who runs, who waits, and who is put back.

use std::collections::VecDeque;

use super::{Client, Counts, Engine, Finish, Part, Request, Token};
use crate::{Error, LogProbabilities, Sampler};

/// Runs requests on an engine with continuous batching: when a sequence ends, its place goes to the next
/// request while the others continue.
///
/// Requests begin in the order in which they came, and each gets its tokens in order. A long prompt runs in
/// parts between the steps of the others (the chunked prefill of Sarathi-Serve, arXiv 2403.02310): a round
/// runs at most a chunk of prompt tokens, of one prompt or of several, the first ones first. A prompt is cut
/// at multiples of a chunk only, wherever the parts of others end, so that what a request gets does not
/// depend on them: see [`Decoder::prefill`](crate::Decoder::prefill) for what it changes.
///
/// If memory is short, the running request that came last is put back: its memory goes to the others, and it
/// runs again when one of them has ended, as a prompt with the tokens that it has got (the recomputation of
/// vLLM, arXiv 2309.06180, 4.5). So all that run came before all that wait.
pub struct Scheduler<E: Engine, C> {
    engine: E,
    ends: Vec<u32>,
    chunk: usize, // prompt tokens of a round, at most
    places: Vec<Option<Running<C>>>,
    waiting: VecDeque<Job<C>>,
    came: u64,      // number of requests so far
    put_back: u64,  // number of those that had begun
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
    /// A scheduler of an engine whose places are empty, and of a model with these end tokens. A round runs at
    /// most `chunk` tokens of prompts, at least one.
    pub fn new(engine: E, ends: Vec<u32>, chunk: usize) -> Self {
        let places = (0..engine.places()).map(|_| None).collect();
        let (waiting, chunk) = (VecDeque::new(), chunk.max(1));
        Self { engine, ends, chunk, places, waiting, came: 0, put_back: 0, is_short: false }
    }

    /// Adds a request, which begins when all that came before it have begun and a place is empty.
    ///
    /// # Errors
    /// [`Error::Argument`] for an empty prompt, for no tokens to generate, and for more tokens together than
    /// a sequence may have.
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

    /// Runs parts of prompts, and then a step of the sequences whose prompts have run. Returns whether there
    /// is more to do.
    ///
    /// # Errors
    /// Those of the engine that end all sequences: the scheduler is then of no more use. What goes wrong in
    /// one sequence is told its client.
    pub fn round(&mut self) -> Result<bool, E::Error> {
        self.drop_gone()?;
        self.prefill()?;
        self.step()?;
        Ok(!self.is_idle())
    }

    /// Whether nothing runs or waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.places.iter().all(Option::is_none)
    }

    /// What runs and what waits.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let running = || self.places.iter().flatten();
        Counts {
            running: running().count(),
            waiting: self.waiting.len(),
            tokens: running().map(|of| of.fed).sum(),
            put_back: self.put_back,
        }
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

    /// Runs the next parts of prompts.
    fn prefill(&mut self) -> Result<(), E::Error> {
        let mut most = usize::MAX;
        loop {
            let ends = self.next_parts(most)?;
            let parts = ends.iter().filter_map(|&(place, end)| {
                let Running { job, fed, .. } = self.places[place].as_ref()?;
                Some(Part { place, tokens: &job.tokens[*fed..end], is_last: end == job.tokens.len() })
            });
            let parts: Vec<Part<'_>> = parts.collect();
            if parts.is_empty() {
                return Ok(());
            }
            match self.engine.prefill(&parts) {
                Ok(()) => return ends.into_iter().try_for_each(|(place, end)| self.fed(place, end)),
                Err(e) if E::is_short_of_memory(&e) && self.make_room()? => {}
                Err(e) if ends.len() == 1 => self.fail(ends[0].0, e)?,
                // All of these end, and it is not known which of them failed: they run again one by one.
                Err(_) => {
                    most = 1;
                    self.put_back_from(ends[0].0)?;
                }
            }
        }
    }

    /// The places of the next parts of prompts, at most `most`, and where these parts end: as many tokens of
    /// the prompts that came first as run in a round. Requests that wait begin when there are fewer.
    fn next_parts(&mut self, most: usize) -> Result<Vec<(usize, usize)>, E::Error> {
        let mut in_prompt: Vec<(u64, usize)> = self.running().collect();
        in_prompt.retain(|&(_, place)| self.places[place].as_ref().is_some_and(|of| of.in_prompt));
        in_prompt.sort_unstable();
        let mut in_prompt = in_prompt.into_iter().map(|(_, place)| place);
        let (mut left, mut prompts, mut parts) = (self.chunk, vec![], vec![]);
        while left > 0 && parts.len() < most {
            let place = match in_prompt.next() {
                Some(place) => Some(place),
                None => self.begin(&prompts)?,
            };
            let Some(place) = place else { break };
            let Some(Running { job, fed, .. }) = &self.places[place] else { break };
            let whole = job.tokens.len();
            let end = match fed.saturating_add(left) {
                most if most < whole => most - most % self.chunk,
                _ => whole,
            };
            if end <= *fed {
                break;
            }
            left -= end - fed;
            prompts.push((place, whole));
            parts.push((place, end));
        }
        Ok(parts)
    }

    /// Gives an empty place to the request that has waited longest, unless memory is short or would be next
    /// to these prompts.
    fn begin(&mut self, prompts: &[(usize, usize)]) -> Result<Option<usize>, E::Error> {
        let (Some(place), Some(next)) = (self.places.iter().position(Option::is_none), self.waiting.front())
        else {
            return Ok(None);
        };
        if self.running().next().is_some() {
            let prompts = [prompts, &[(place, next.tokens.len())]].concat();
            if self.is_short || !self.engine.has_room(&prompts)? {
                return Ok(None);
            }
        }
        self.places[place] = self.waiting.pop_front().map(|job| Running { job, fed: 0, in_prompt: true });
        Ok(Some(place))
    }

    /// Notes that the engine has so many tokens of a prompt, and chooses the next one at its end.
    fn fed(&mut self, place: usize, end: usize) -> Result<(), E::Error> {
        let Some(Running { job, fed, .. }) = &mut self.places[place] else { return Ok(()) };
        *fed = end;
        if end == job.tokens.len() { self.choose(place) } else { Ok(()) }
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
                    if !self.make_room()? {
                        self.fail(tokens[0].0, e)?;
                    }
                }
                Err(e) => return Err(e),
            }
        }
    }

    /// Puts the running request that came last back, unless it runs alone. Returns whether it was.
    fn make_room(&mut self) -> Result<bool, E::Error> {
        let (Some((_, last)), true) = (self.running().max(), self.running().nth(1).is_some()) else {
            return Ok(false);
        };
        self.put_back(last)?;
        self.is_short = true;
        Ok(true)
    }

    /// Puts the request in a place back, and all that came after it.
    fn put_back_from(&mut self, place: usize) -> Result<(), E::Error> {
        let first = self.places[place].as_ref().map(|of| of.job.number);
        let mut after: Vec<_> = self.running().filter(|&(number, _)| Some(number) >= first).collect();
        after.sort_unstable();
        after.into_iter().rev().try_for_each(|(_, place)| self.put_back(place))
    }

    /// Puts the request in a place before those that wait.
    fn put_back(&mut self, place: usize) -> Result<(), E::Error> {
        if let Some(Running { job, fed, .. }) = self.leave(place)? {
            self.put_back += u64::from(fed > 0);
            self.waiting.push_front(job);
        }
        Ok(())
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
