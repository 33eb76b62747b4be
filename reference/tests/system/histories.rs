//! Under every method of the registry, a cache attends after any history of prompts, appends, truncations and
//! clones as a cache does that has only seen the tokens that are left.

use std::sync::Arc;

use fastrand::Rng;
use kv_llama::{KvCache, WATCHED, prefill};
use kv_methods::{Prepared, method_examples};
use kv_model::{Model, Rope, RopeScaling};

use crate::caches::{Setup, setup_of};

struct Random(Rng);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0.usize(..n)
    }

    /// Consecutive tokens of a text of `len` tokens, without the first ones, which codes are not fitted to.
    fn run(&mut self, len: usize, n: usize) -> Vec<usize> {
        const FIRST: usize = 8;
        let first = FIRST + self.below(len - FIRST - n);
        (first..first + n).collect()
    }
}

/// Queries, keys and values of a text before RoPE, (tokens, heads * head_dim) of every layer: what caches of
/// any history are filled with.
struct Text {
    model: Arc<Model>,
    rope: Arc<Rope>,
    layers: Vec<[Vec<f32>; 3]>,
}

impl Text {
    fn of(s: &Setup, model: Arc<Model>) -> Self {
        let mut layers = vec![];
        prefill(&model, &s.rope, &s.tokens, &mut |_, rows| {
            layers.push([rows.q.to_vec(), rows.k.to_vec(), rows.v.to_vec()]);
            Ok(())
        })
        .unwrap();
        Self { model, rope: s.rope.clone(), layers }
    }

    /// Queries, keys or values of tokens in a layer.
    fn rows(&self, l: usize, side: usize, tokens: &[usize]) -> Vec<f32> {
        let dim = [self.model.config.q_dim(), self.model.config.kv_dim()][side.min(1)];
        tokens.iter().flat_map(|&t| &self.layers[l][side][t * dim..][..dim]).copied().collect()
    }

    /// Appends tokens: as a prompt, or one after the other.
    fn push(&self, cache: &mut dyn KvCache, tokens: &[usize], as_prompt: bool) {
        let q_dim = self.model.config.q_dim();
        let parts = if as_prompt { vec![tokens] } else { tokens.chunks(1).collect() };
        for tokens in parts {
            let pos = cache.seq_len();
            for l in 0..self.layers.len() {
                let [k, v] = [1, 2].map(|side| self.rows(l, side, tokens));
                if as_prompt {
                    let last = if cache.watches_all() { 0 } else { tokens.len().saturating_sub(WATCHED) };
                    let q = self.rope.layer(l).rotated(&self.rows(l, 0, &tokens[last..]), q_dim, pos + last);
                    cache.watch(l, &q);
                    cache.prefill(l, pos, &k, &v).unwrap();
                } else {
                    if cache.watches_all() {
                        cache.watch(l, &self.rope.layer(l).rotated(&self.rows(l, 0, tokens), q_dim, pos));
                    }
                    cache.append(l, pos, &k, &v).unwrap();
                }
            }
        }
    }

    /// Attention of the query of token `t` of the text, in the place of the last token: (layers, q_dim);
    /// `None` if that is an error.
    fn attend(&self, cache: &dyn KvCache, t: usize) -> Option<Vec<f32>> {
        let mut all = vec![];
        for l in 0..self.layers.len() {
            let q = self.rows(l, 0, &[t]);
            let q = self.rope.layer(l).rotated(&q, q.len(), cache.seq_len().saturating_sub(1));
            let mut out = vec![f32::NAN; q.len()];
            cache.attend(l, &q, &mut out).ok()?;
            all.extend(out);
        }
        Some(all)
    }

    /// The same in f64 over exact rows.
    fn exact(&self, held: &[usize], t: usize) -> Vec<f32> {
        let config = &self.model.config;
        let (dim, last) = (config.head_dim, held.len() - 1);
        let mut all = vec![];
        for l in 0..self.layers.len() {
            let rope = self.rope.layer(l);
            let q = rope.rotated(&self.rows(l, 0, &[t]), config.q_dim(), last);
            let keys = rope.rotated(&self.rows(l, 1, held), config.kv_dim(), 0);
            let values = self.rows(l, 2, held);
            let first = config.attention[l].first_visible(last);
            for (head, q) in q.chunks_exact(dim).enumerate() {
                let part = |rows: &[f32], t: usize| -> Vec<f64> {
                    let at = t * config.kv_dim() + head / config.gqa_group() * dim;
                    rows[at..][..dim].iter().map(|&x| x.into()).collect()
                };
                let score = |t: usize| {
                    let products = part(&keys, t).into_iter().zip(q).map(|(k, &q)| k * f64::from(q));
                    (products.sum::<f64>() / (dim as f64).sqrt()).exp()
                };
                let weights: Vec<f64> = (first..held.len()).map(score).collect();
                let (mut out, sum) = (vec![0.0; dim], weights.iter().sum::<f64>());
                for (t, weight) in (first..).zip(weights) {
                    out.iter_mut().zip(part(&values, t)).for_each(|(out, v)| *out += weight / sum * v);
                }
                all.extend(out.into_iter().map(|x| x as f32));
            }
        }
        all
    }
}

fn distance(a: &[f32], b: &[f32]) -> f32 {
    let largest = a.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    a.iter().zip(b).fold(0.0_f32, |m, (x, y)| m.max(if y.is_nan() { f32::INFINITY } else { (x - y).abs() }))
        / largest
}

/// The most tokens of a history.
const MOST: usize = 130;

/// Numbers of tokens at a time: around those that leave a window together, and around blocks of codes.
const COUNTS: [usize; 14] = [0, 1, 1, 1, 2, 4, 5, 9, 10, 11, 31, 32, 33, 60];

/// A cache with the tokens that it holds.
struct History<'a> {
    method: &'a str,
    text: &'a Text,
    cache: Box<dyn KvCache>,
    held: Vec<usize>,
    /// The error of attention that the method makes without truncations.
    loss: f32,
    /// Whether it drops tokens for good: steps then attend to some only, and which depends on the history.
    drops: bool,
    log: Vec<String>,
}

impl History<'_> {
    fn push(&mut self, tokens: &[usize], as_prompt: bool) {
        self.log.push(format!("{} {}", if as_prompt { "prompt" } else { "append" }, tokens.len()));
        self.text.push(self.cache.as_mut(), tokens, as_prompt);
        self.held.extend(tokens);
    }

    /// Goes back to `len` tokens. If that is refused, nothing has changed.
    fn truncate(&mut self, len: usize) {
        let before = self.text.attend(self.cache.as_ref(), 100);
        match self.cache.truncate(len) {
            Ok(()) => {
                self.log.push(format!("truncate {len}"));
                self.held.truncate(len);
            }
            Err(kv_llama::Error::Cache { .. }) => {
                assert!(
                    self.drops && len < self.held.len(),
                    "{} refuses {len} after {:?}",
                    self.method,
                    self.log
                );
                assert_eq!(
                    self.text.attend(self.cache.as_ref(), 100),
                    before,
                    "{} {:?}",
                    self.method,
                    self.log
                );
            }
            Err(e) => panic!("{} {:?}: {e}", self.method, self.log),
        }
    }

    /// A step that fails after its first layer, as on a NaN, and goes back.
    fn interrupt(&mut self, random: &mut Random) {
        let n = COUNTS[random.below(COUNTS.len())].max(1);
        let tokens = random.run(200, n);
        let [k, v] = [1, 2].map(|side| self.text.rows(0, side, &tokens));
        self.cache.prefill(0, self.held.len(), &k, &v).unwrap();
        self.log.push(format!("interrupted by {}", tokens.len()));
        let len = if random.below(2) == 0 { self.held.len() } else { random.below(self.held.len() + 1) };
        self.cache.truncate(len).unwrap();
        self.log.push(format!("back to {len}"));
        self.held.truncate(len);
    }

    /// A clone goes its own way.
    fn branch(&mut self, random: &mut Random) {
        let before = self.text.attend(self.cache.as_ref(), 7);
        let mut copy = self.cache.clone_box();
        assert_eq!(self.text.attend(copy.as_ref(), 7), before, "{} {:?}", self.method, self.log);
        let run = random.run(200, 40);
        match random.below(3) {
            0 => copy.truncate(self.held.len() / 2).unwrap_or(()), // refused by what drops tokens
            1 => self.text.push(copy.as_mut(), &run, true),
            _ => self.text.push(copy.as_mut(), &run, false),
        }
        assert_eq!(self.text.attend(self.cache.as_ref(), 7), before, "{} {:?}", self.method, self.log);
        self.cache = self.cache.clone_box();
        self.log.push("clone".into());
    }

    fn check(&self, query: usize) {
        let Self { method, text, held, log, .. } = self;
        assert_eq!(self.cache.seq_len(), held.len(), "{method} {log:?}");
        let Some(out) = text.attend(self.cache.as_ref(), query) else {
            assert!(held.is_empty(), "{method} attends to nothing after {log:?}");
            return;
        };
        assert!(!held.is_empty() && out.iter().all(|x| x.is_finite()), "{method} {log:?}");
        if !self.drops {
            let error = distance(&text.exact(held, query), &out);
            assert!(error <= 4e-3 + 3.0 * self.loss, "{method}: {error}, loss {}, {log:?}", self.loss);
        }
    }
}

#[test]
fn a_cache_of_any_history_attends_as_a_fresh_one() {
    let folder = tempfile::tempdir().unwrap();
    let on_disk = ["pqcache:ratio=1:code=4x2:block=8:", "hybrid:k=8/8:v=8/8:rows=1:block=8:"]
        .map(|method| format!("{method}exact=f32:window=4:offload={}", folder.path().display()));
    let mut methods: Vec<&str> = method_examples().collect();
    methods.extend(on_disk.iter().map(String::as_str));
    let s = setup_of("mqa-wide-heads", &methods, RopeScaling::None);
    let plain = Text::of(&s, s.prepare("dense").model);
    for method in methods {
        let Prepared { model, .. } = s.prepare(method);
        let folded = (!Arc::ptr_eq(&model, &plain.model)).then(|| Text::of(&s, model));
        let text = folded.as_ref().unwrap_or(&plain);
        let mut random = Random(Rng::with_seed(11));
        // A prompt that its window does not hold.
        let drops = {
            let mut cache = s.prepare(method).cache;
            text.push(cache.as_mut(), &random.run(200, 120), true);
            cache.truncate(30).is_err()
        };
        let fresh = |loss| {
            let cache = s.prepare(method).cache;
            History { method, text, cache, held: vec![], loss, drops, log: vec![] }
        };
        let loss = |random: &mut Random, [prompt, appended]: [usize; 2]| {
            let mut fresh = fresh(0.0);
            fresh.push(&random.run(200, prompt), true);
            fresh.push(&random.run(200, appended), false);
            let mut of_query = || {
                let query = random.below(200);
                distance(&text.exact(&fresh.held, query), &text.attend(fresh.cache.as_ref(), query).unwrap())
            };
            (0..12).map(|_| of_query()).fold(0.0, f32::max)
        };
        let dropped = loss(&mut random, [120, 10]);
        assert!(!drops || dropped > 0.05, "{method} refuses truncations, and loses {dropped}");
        let loss = [[60, 50], [33, 50], [10, 10], [3, 12], [60, 50], [0, 14]]
            .map(|counts| loss(&mut random, counts))
            .into_iter()
            .fold(0.0, f32::max);
        // Back to every length, and on: as a cache that never held more.
        for len in [0, 2, 5, 30, 55, 59, 60, 61, 80, 93, 97, 99, 100] {
            let [mut history, mut straight] = [fresh(loss), fresh(loss)];
            history.push(&random.run(200, 60), true);
            history.push(&random.run(200, 40), false);
            history.truncate(len);
            let prompt = history.held.len().min(60);
            history.push(&random.run(200, 10), false);
            straight.push(&history.held[..prompt], true);
            straight.push(&history.held[prompt..], false);
            let query = random.below(200);
            history.check(query);
            let [again, expected] =
                [&history, &straight].map(|of| text.attend(of.cache.as_ref(), query).unwrap());
            // Tokens that come back from codes to the window were exact in the other cache.
            let most = 4e-3 + if drops && loss > 0.1 { 0.0 } else { 3.0 * loss };
            let error = distance(&expected, &again);
            assert!(error <= most, "{method} at {len}: {error}, loss {loss}");
        }
        for _ in 0..4 {
            let mut history = fresh(loss);
            for _ in 0..12 {
                match random.below(6) {
                    0 => history.truncate(random.below(history.held.len() + 1)),
                    1 => history.branch(&mut random),
                    2 if !history.drops => history.interrupt(&mut random),
                    _ => {
                        let n = COUNTS[random.below(COUNTS.len())].min(MOST - history.held.len());
                        history.push(&random.run(200, n), random.below(2) == 0);
                    }
                }
                history.check(random.below(200));
            }
        }
    }
}
