//! Long prompts come in between the steps of other sequences, on the CPU.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use kv_llama::serve::{Client, Engine, Finish, Part, Request, Scheduler, Sequences, Token};
use kv_llama::{Decoder, Error, ExactCache, Result, Sampling};
use kv_model::{Model, Rope};

const CHUNK: usize = 512;
const LONG: usize = 8192;

/// What a request has got: tokens, each with the round in which it came.
#[derive(Default)]
struct Got {
    tokens: RefCell<Vec<(u32, usize)>>,
    gone: Cell<bool>,
    ended: Cell<bool>,
}

struct Reader {
    got: Rc<Got>,
    rounds: Rc<Cell<usize>>,
}

impl Client<Error> for Reader {
    fn take(&mut self, token: Token) -> bool {
        self.got.tokens.borrow_mut().push((token.id, self.rounds.get()));
        true
    }

    fn is_gone(&self) -> bool {
        self.got.gone.get()
    }

    fn end(self, end: Result<Finish>) {
        assert_eq!(end.unwrap(), Finish::Length);
        self.got.ended.set(true);
    }
}

/// A scheduler of two places over a tiny model, and what its requests get.
struct Served {
    scheduler: Scheduler<Sequences, Reader>,
    rounds: Rc<Cell<usize>>,
    vocab: usize,
}

/// Empty places over a tiny model, and its vocabulary.
fn engine(places: usize) -> (Sequences, usize) {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/parity/fixtures/gqa");
    let model = Arc::new(Model::load(&fixture).unwrap());
    let (capacity, vocab) = (LONG + 64, model.config.vocab_size);
    let rope = Arc::new(Rope::new(&model.config, capacity));
    let empty = Box::new(ExactCache::new(&model.config, &rope));
    (Sequences::new(Decoder::new(model, rope), empty, (places, capacity)), vocab)
}

impl Served {
    fn new(places: usize) -> Self {
        let (engine, vocab) = engine(places);
        Self { scheduler: Scheduler::new(engine, vec![], CHUNK), rounds: Rc::default(), vocab }
    }

    /// Adds a request with a prompt of `length` tokens.
    fn ask(&mut self, length: usize, most: usize) -> Rc<Got> {
        let prompt = (0..length).map(|i| ((7 * i + length) % self.vocab) as u32).collect();
        let got = Rc::new(Got::default());
        let reader = Reader { got: got.clone(), rounds: self.rounds.clone() };
        let request = Request { prompt, most, sampling: Sampling::GREEDY, log_probabilities: None };
        self.scheduler.add(request, reader).unwrap();
        got
    }

    fn round(&mut self) -> bool {
        let more = self.scheduler.round().unwrap();
        self.rounds.set(self.rounds.get() + 1);
        more
    }
}

fn tokens(got: &Got) -> Vec<u32> {
    assert!(got.ended.get());
    got.tokens.borrow().iter().map(|&(token, _)| token).collect()
}

fn rounds(got: &Got) -> Vec<usize> {
    got.tokens.borrow().iter().map(|&(_, round)| round).collect()
}

/// Sequences that decode get a token in every round, the long prompt its first one after as many rounds as it
/// has chunks, and all what they get alone.
#[test]
fn a_long_prompt_costs_others_a_chunk_a_round() {
    let lengths = [(20, 40), (33, 40), (LONG, 10), (5, 8)];
    let mut served = Served::new(4);
    let early: Vec<Rc<Got>> = lengths[..2].iter().map(|&(length, most)| served.ask(length, most)).collect();
    served.round();
    let late: Vec<Rc<Got>> = lengths[2..].iter().map(|&(length, most)| served.ask(length, most)).collect();
    while served.round() {}
    for got in &early {
        assert_eq!(rounds(got)[1..], (0..39).collect::<Vec<_>>(), "one in each round");
    }
    let chunks = LONG / CHUNK;
    assert_eq!(rounds(&late[0])[0], chunks, "the first of its rounds is round 1");
    assert!(rounds(&late[1])[0] >= chunks, "prompts run in the order in which they came");
    for (&(length, most), got) in lengths.iter().zip(early.iter().chain(&late)) {
        let mut alone = Served::new(1);
        let expected = alone.ask(length, most);
        while alone.round() {}
        assert_eq!(tokens(got), tokens(&expected), "{length} tokens");
    }
}

/// A client that leaves while its prompt runs frees its place and what it held at once.
#[test]
fn a_prompt_that_is_cancelled_frees_its_place() {
    let mut served = Served::new(2);
    let goes_on = served.ask(20, 30);
    let leaves = served.ask(LONG, 10);
    let comes = served.ask(40, 5);
    (0..4).for_each(|_| assert!(served.round()));
    let before = served.scheduler.counts();
    assert_eq!((before.running, before.waiting), (2, 1));
    assert!(before.tokens > 3 * CHUNK);
    leaves.gone.set(true);
    served.round();
    let after = served.scheduler.counts();
    assert_eq!((after.running, after.waiting, after.tokens), (2, 0, 20 + 5 + 40 + 1));
    assert!(leaves.tokens.borrow().is_empty() && !leaves.ended.get());
    while served.round() {}
    assert_eq!((tokens(&goes_on).len(), tokens(&comes).len()), (30, 5));
    assert_eq!((served.scheduler.counts().running, served.scheduler.counts().tokens), (0, 0));
}

#[test]
fn places_that_are_not_there_are_errors() {
    let (mut engine, _) = engine(2);
    let part = Part { place: 2, tokens: &[1], is_last: true };
    let errors = [
        engine.prefill(&[part]).unwrap_err(),
        engine.step(&[(2, 1)]).unwrap_err(),
        engine.logits(2).unwrap_err(),
        engine.most_likely(2).unwrap_err(),
        engine.end(2).unwrap_err(),
    ];
    assert!(errors.iter().all(|error| error.to_string() == "place 2 of 2"), "{errors:?}");
    assert_eq!(engine.step(&[(1, 1)]).unwrap_err().to_string(), "place 1 is empty");
}
