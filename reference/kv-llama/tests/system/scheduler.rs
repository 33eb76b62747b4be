//! Continuous batching over an engine that checks what it is asked for: requests come, are cancelled, and run
//! short of memory, and nothing is lost or out of order.

use std::cell::RefCell;
use std::rc::Rc;

use kv_llama::serve::{Client, Engine, Finish, Request, Scheduler, Token};
use kv_llama::{Rng, Sampling};

/// The token that ends a text.
const END: u32 = 0;

/// The token after a sequence: END once in a while.
fn after(tokens: &[u32]) -> u32 {
    let hash = tokens.iter().fold(7_u64, |hash, &token| Rng(hash ^ u64::from(token)).next_u64());
    (hash % 12) as u32
}

#[derive(Debug, PartialEq)]
enum Fault {
    Memory,
    Sequence,
}

/// Sequences in places, with room for `room` tokens together.
struct Fake {
    places: Vec<Vec<u32>>,
    in_prompt: Vec<bool>,
    room: usize,
    chunk: usize,
    begun: Rc<RefCell<Vec<u32>>>, // first tokens of prompts, when they first run
}

impl Fake {
    fn take(&self, more: usize) -> Result<(), Fault> {
        let held: usize = self.places.iter().map(Vec::len).sum();
        if held + more > self.room { Err(Fault::Memory) } else { Ok(()) }
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

    fn prefill(&mut self, place: usize, tokens: &[u32]) -> Result<usize, Fault> {
        assert!(self.places[place].is_empty() || self.in_prompt[place]);
        let part = &tokens[..tokens.len().min(self.chunk)];
        self.take(part.len())?;
        if self.places[place].is_empty() && !self.begun.borrow().contains(&part[0]) {
            self.begun.borrow_mut().push(part[0]);
        }
        self.places[place].extend(part);
        self.in_prompt[place] = part.len() < tokens.len();
        Ok(part.len())
    }

    fn step(&mut self, tokens: &[(usize, u32)]) -> Result<(), Fault> {
        let stepping: Vec<usize> = tokens.iter().map(|step| step.0).collect();
        let ready = |&place: &usize| !self.places[place].is_empty() && !self.in_prompt[place];
        assert_eq!(stepping, (0..self.places.len()).filter(ready).collect::<Vec<_>>());
        self.take(tokens.len())?;
        tokens.iter().for_each(|&(place, token)| self.places[place].push(token));
        Ok(())
    }

    fn logits(&mut self, place: usize) -> Result<Vec<f32>, Fault> {
        let mut logits = vec![0.0; 12];
        logits[self.most_likely(place)? as usize] = 1.0;
        Ok(logits)
    }

    /// A sequence that begins with 7 fails at 40 tokens.
    fn most_likely(&mut self, place: usize) -> Result<u32, Fault> {
        let tokens = &self.places[place];
        assert!(!tokens.is_empty() && !self.in_prompt[place]);
        if tokens[0] % 8 == 7 && tokens.len() >= 40 { Err(Fault::Sequence) } else { Ok(after(tokens)) }
    }

    fn end(&mut self, place: usize) -> Result<(), Fault> {
        self.places[place].clear();
        self.in_prompt[place] = false;
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
    let prompt: Vec<u32> =
        [100 + number].into_iter().chain((0..rng.below(30)).map(|_| 1 + rng.below(11) as u32)).collect();
    let most = 1 + rng.below(30);
    let sampling = [Sampling::GREEDY, Sampling::new(1e-3, 1.0, 3).unwrap()][rng.below(2)];
    Request { prompt, most, sampling, log_probabilities: [None, Some(2)][rng.below(2)] }
}

#[test]
fn nothing_is_lost_and_nothing_out_of_order() {
    for seed in 0..300 {
        let mut rng = Rng(seed);
        let (places, room, chunk) = (1 + rng.below(4), 20 + rng.below(150), 1 + rng.below(40));
        let begun = Rc::new(RefCell::new(vec![]));
        let engine = Fake {
            places: vec![vec![]; places],
            in_prompt: vec![false; places],
            room,
            chunk,
            begun: begun.clone(),
        };
        let mut scheduler = Scheduler::new(engine, vec![END]);
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
            assert_eq!(more, !scheduler.is_idle());
            if !more && to_come == 0 {
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
    let engine =
        || Fake { places: vec![vec![]], in_prompt: vec![false], room: 100, chunk: 8, begun: Rc::default() };
    let mut scheduler = Scheduler::new(engine(), vec![END]);
    for (prompt, most) in [(vec![], 1), (vec![1], 0), (vec![1; 60], 1), (vec![1], usize::MAX)] {
        let request = Request { prompt, most, sampling: Sampling::GREEDY, log_probabilities: None };
        assert!(scheduler.add(request, Reader(Rc::default())).is_err());
    }
    assert!(scheduler.is_idle() && !scheduler.round().unwrap());
}
