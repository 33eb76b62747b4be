//! Continuous batching over an engine that checks what it is asked for: requests come, are cancelled, and run
//! short of memory, and nothing is lost or out of order.

use std::cell::RefCell;
use std::rc::Rc;

use kv_llama::serve::{Client, Counts, Engine, Finish, Part, Request, Scheduler, Token};
use kv_llama::{Rng, Sampling};

/// The token that ends a text.
const END: u32 = 0;

/// A token of a prompt with which the parts of a call fail.
const FAILS: u32 = 99;

/// The token after a sequence: END once in a while.
fn after(tokens: &[u32]) -> u32 {
    let hash = tokens.iter().fold(7_u64, |hash, &token| Rng(hash ^ u64::from(token)).next_u64());
    (hash % 12) as u32
}

#[derive(Debug, PartialEq)]
enum Fault {
    Memory,
    Sequence,
    Parts,
}

/// Sequences in places, with room for `room` tokens together.
#[derive(Default)]
struct Fake {
    places: Vec<FakePlace>,
    room: usize,
    chunk: usize,
    begun: Rc<RefCell<Vec<u32>>>, // first tokens of prompts, when they first run
}

#[derive(Clone, Default)]
struct FakePlace {
    tokens: Vec<u32>,
    in_prompt: bool,
    has_part: bool, // since the last step
    must_end: bool,
}

impl Fake {
    fn new(places: usize, room: usize, chunk: usize) -> Self {
        Self { places: vec![FakePlace::default(); places], room, chunk, begun: Rc::default() }
    }

    fn held(&self) -> usize {
        self.places.iter().map(|place| place.tokens.len()).sum()
    }

    fn take(&self, more: usize) -> Result<(), Fault> {
        if self.held() + more > self.room { Err(Fault::Memory) } else { Ok(()) }
    }
}

impl Engine for Fake {
    type Error = Fault;

    fn places(&self) -> usize {
        self.places.len()
    }

    fn capacity(&self) -> usize {
        60
    }

    fn has_room(&mut self, prompts: &[(usize, usize)]) -> Result<bool, Fault> {
        let more: usize = prompts.iter().map(|&(place, whole)| whole - self.places[place].tokens.len()).sum();
        Ok(self.held() + more <= self.room)
    }

    fn prefill(&mut self, parts: &[Part<'_>]) -> Result<(), Fault> {
        let count: usize = parts.iter().map(|part| part.tokens.len()).sum();
        assert!((1..=self.chunk).contains(&count), "a part of no tokens, or more than a chunk");
        self.take(count)?;
        let fails = parts.iter().any(|part| part.tokens.contains(&FAILS));
        for &Part { place, tokens, is_last } in parts {
            let place = &mut self.places[place];
            assert!(!tokens.is_empty() && !place.must_end && (place.tokens.is_empty() || place.in_prompt));
            if place.tokens.is_empty() && !self.begun.borrow().contains(&tokens[0]) {
                self.begun.borrow_mut().push(tokens[0]);
            }
            place.tokens.extend(tokens);
            assert!(is_last || place.tokens.len().is_multiple_of(self.chunk), "cut by other prompts");
            (place.in_prompt, place.has_part, place.must_end) = (!is_last, true, fails);
        }
        if fails { Err(Fault::Parts) } else { Ok(()) }
    }

    fn step(&mut self, tokens: &[(usize, u32)]) -> Result<(), Fault> {
        let stepping: Vec<usize> = tokens.iter().map(|step| step.0).collect();
        let ready = |&at: &usize| !self.places[at].tokens.is_empty() && !self.places[at].in_prompt;
        assert_eq!(stepping, (0..self.places.len()).filter(ready).collect::<Vec<_>>());
        assert!(self.places.iter().all(|place| !place.must_end && (!place.in_prompt || place.has_part)));
        self.take(tokens.len())?;
        tokens.iter().for_each(|&(place, token)| self.places[place].tokens.push(token));
        self.places.iter_mut().for_each(|place| place.has_part = false);
        Ok(())
    }

    fn logits(&mut self, place: usize) -> Result<Vec<f32>, Fault> {
        let mut logits = vec![0.0; 12];
        logits[self.most_likely(place)? as usize] = 1.0;
        Ok(logits)
    }

    /// A sequence that begins with 7 fails at 40 tokens.
    fn most_likely(&mut self, place: usize) -> Result<u32, Fault> {
        let FakePlace { tokens, in_prompt, .. } = &self.places[place];
        assert!(!tokens.is_empty() && !in_prompt);
        if tokens[0] % 8 == 7 && tokens.len() >= 40 { Err(Fault::Sequence) } else { Ok(after(tokens)) }
    }

    fn end(&mut self, place: usize) -> Result<(), Fault> {
        self.places[place] = FakePlace::default();
        Ok(())
    }

    fn is_short_of_memory(fault: &Fault) -> bool {
        *fault == Fault::Memory
    }
}

/// What a client has got, and whether it has gone away.
#[derive(Default)]
struct Got {
    tokens: Vec<u32>,
    enough: Option<usize>, // tokens after which it wants no more
    gone: bool,
    end: Option<Result<Finish, Fault>>,
}

struct Reader(Rc<RefCell<Got>>);

impl Client<Fault> for Reader {
    fn take(&mut self, token: Token) -> bool {
        let mut got = self.0.borrow_mut();
        assert!(!got.gone && got.end.is_none());
        got.tokens.push(token.id);
        got.enough != Some(got.tokens.len())
    }

    fn is_gone(&self) -> bool {
        self.0.borrow().gone
    }

    fn end(self, end: Result<Finish, Fault>) {
        let mut got = self.0.borrow_mut();
        assert!(!got.gone && got.end.is_none());
        got.end = Some(end);
    }
}

/// The tokens and the end of a request that runs alone.
fn alone(request: &Request, room: usize) -> (Vec<u32>, Result<Finish, Fault>) {
    let mut tokens = request.prompt.clone();
    let said = |tokens: &[u32]| tokens[request.prompt.len()..].to_vec();
    if tokens.contains(&FAILS) {
        return (vec![], Err(Fault::Parts));
    }
    loop {
        if tokens.len() > room {
            return (said(&tokens), Err(Fault::Memory));
        }
        if tokens[0] % 8 == 7 && tokens.len() >= 40 {
            return (said(&tokens), Err(Fault::Sequence));
        }
        match after(&tokens) {
            END => return (said(&tokens), Ok(Finish::Stop)),
            token => tokens.push(token),
        }
        if tokens.len() == request.prompt.len() + request.most {
            return (said(&tokens), Ok(Finish::Length));
        }
    }
}

/// A request whose prompt begins with its number.
fn request(rng: &mut Rng, number: u32) -> Request {
    let mut prompt: Vec<u32> =
        [100 + number].into_iter().chain((0..rng.below(20)).map(|_| 1 + rng.below(11) as u32)).collect();
    if rng.below(8) == 0 {
        prompt.push(FAILS);
    }
    let most = 1 + rng.below(30);
    let sampling = [Sampling::GREEDY, Sampling::new(1e-3, 1.0, 3).unwrap()][rng.below(2)];
    Request { prompt, most, sampling, log_probabilities: [None, Some(2)][rng.below(2)] }
}

#[test]
fn nothing_is_lost_and_nothing_out_of_order() {
    for seed in 0..300 {
        let mut rng = Rng(seed);
        let (places, room, chunk) = (1 + rng.below(4), 22 + rng.below(150), 1 + rng.below(40));
        let engine = Fake::new(places, room, chunk);
        let begun = engine.begun.clone();
        let mut scheduler = Scheduler::new(engine, vec![END], chunk);
        let mut all: Vec<(Request, Rc<RefCell<Got>>)> = vec![];
        let mut to_come = 12;
        for rounds in 0.. {
            assert!(rounds < 3000, "seed {seed}: it does not end");
            while to_come > 0 && rng.below(3) == 0 {
                to_come -= 1;
                let request = request(&mut rng, all.len() as u32);
                let enough = (rng.below(6) == 0).then(|| 1 + rng.below(5));
                let got = Rc::new(RefCell::new(Got { enough, ..Got::default() }));
                scheduler.add(request.clone(), Reader(got.clone())).unwrap();
                all.push((request, got));
            }
            if rng.below(20) == 0 && !all.is_empty() {
                let leaves = rng.below(all.len());
                let mut got = all[leaves].1.borrow_mut();
                got.gone = got.end.is_none();
            }
            let more = scheduler.round().unwrap();
            let counts = scheduler.counts();
            assert_eq!(more, counts.running + counts.waiting > 0);
            assert!(counts.tokens <= room && counts.running <= places);
            if !more && to_come == 0 {
                assert_eq!(counts, Counts { put_back: counts.put_back, ..Counts::default() });
                break;
            }
        }
        assert!(begun.borrow().is_sorted(), "seed {seed}: {:?}", begun.borrow());
        for (i, (request, got)) in all.iter().enumerate() {
            let (tokens, end) = alone(request, room);
            let got = got.borrow();
            let is_cut = got.gone || got.enough == Some(got.tokens.len());
            assert!(tokens.starts_with(&got.tokens), "seed {seed}, request {i}");
            assert!(
                is_cut || (&got.tokens, got.end.as_ref()) == (&tokens, Some(&end)),
                "seed {seed}, request {i}"
            );
        }
    }
}

#[test]
fn requests_that_cannot_run_are_refused() {
    let mut scheduler = Scheduler::new(Fake::new(1, 100, 8), vec![END], 8);
    for (prompt, most) in [(vec![], 1), (vec![1], 0), (vec![1; 60], 1), (vec![1], usize::MAX)] {
        let request = Request { prompt, most, sampling: Sampling::GREEDY, log_probabilities: None };
        assert!(scheduler.add(request, Reader(Rc::default())).is_err());
    }
    assert!(scheduler.is_idle() && !scheduler.round().unwrap());
}

/// A prompt that does not fit next to the others does not begin, so that none is put back.
#[test]
fn a_prompt_begins_when_there_is_room_for_all_of_it() {
    let mut scheduler = Scheduler::new(Fake::new(4, 71, 8), vec![], 8);
    for _ in 0..8 {
        let request =
            Request { prompt: vec![8; 31], most: 5, sampling: Sampling::GREEDY, log_probabilities: None };
        scheduler.add(request, Reader(Rc::default())).unwrap();
    }
    let mut most = 0;
    while scheduler.round().unwrap() {
        most = most.max(scheduler.counts().running);
    }
    assert_eq!((most, scheduler.counts().put_back), (2, 0));
}
