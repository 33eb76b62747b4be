//! sentencepiece's BPE: the two neighbours that make the best token merge, until none do.

use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, HashMap};

/// Tokens with scores.
pub(super) struct Sentencepiece {
    ids: HashMap<String, u32>,
    scores: Vec<f32>, // (tokens,)
    unknown: Option<u32>,
}

/// A part of the text: at first a character, later a token.
#[derive(Clone, Copy)]
struct Symbol {
    start: usize,
    end: usize, // equal to `start` once its left neighbour has taken it
    previous: Option<usize>,
    next: Option<usize>,
}

/// Two neighbours whose texts together are a token: the best score first, then the leftmost.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Pair {
    score: Score,
    left: Reverse<usize>,
    right: usize,
    len: usize, // bytes of both; a different length shows that one of them has changed since
}

/// A score in the order of numbers.
#[derive(PartialEq)]
struct Score(f32);

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Sentencepiece {
    /// `scores` has one entry a token.
    pub fn new(tokens: &[String], scores: Vec<f32>, unknown: Option<u32>) -> Self {
        Self { ids: tokens.iter().cloned().zip(0..).collect(), scores, unknown }
    }

    /// The tokens of a text whose spaces are already marked. What is no token is spelled in bytes; without tokens
    /// for bytes, an unknown stretch becomes one unknown token.
    pub fn encode(&self, text: &str, out: &mut Vec<u32>) {
        let mut was_unknown = false;
        for symbol in self.merged(text) {
            let piece = &text[symbol.start..symbol.end];
            let bytes = piece.bytes().map(|byte| self.ids.get(&format!("<0x{byte:02X}>")).copied());
            let tokens = match self.ids.get(piece) {
                Some(&id) => Some(vec![id]),
                None => bytes.collect(),
            };
            match tokens {
                Some(ref tokens) => out.extend(tokens),
                None if was_unknown => {}
                None => out.extend(self.unknown),
            }
            was_unknown = tokens.is_none();
        }
    }

    fn merged(&self, text: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol {
                start,
                end: start + c.len_utf8(),
                previous: i.checked_sub(1),
                next: Some(i + 1),
            })
            .collect();
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        let mut queue = BinaryHeap::new();
        let pair = |symbols: &[Symbol], left: usize, right: usize| {
            let whole = &text[symbols[left].start..symbols[right].end];
            let id = *self.ids.get(whole)?;
            let score = Score(self.scores[id as usize]);
            Some(Pair { score, left: Reverse(left), right, len: whole.len() })
        };
        queue.extend((1..symbols.len()).filter_map(|i| pair(&symbols, i - 1, i)));
        while let Some(Pair { left: Reverse(left), right, len, .. }) = queue.pop() {
            let (a, b) = (symbols[left], symbols[right]);
            if a.start == a.end || b.start == b.end || (a.end - a.start) + (b.end - b.start) != len {
                continue;
            }
            symbols[left] = Symbol { end: b.end, next: b.next, ..a };
            symbols[right].end = b.start;
            if let Some(next) = b.next {
                symbols[next].previous = Some(left);
            }
            queue.extend(a.previous.and_then(|previous| pair(&symbols, previous, left)));
            queue.extend(b.next.and_then(|next| pair(&symbols, left, next)));
        }
        symbols.retain(|symbol| symbol.start < symbol.end);
        symbols
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_score_merges_first_then_the_leftmost() {
        let encode = |tokens: &[(&str, f32)], text: &str| {
            let names: Vec<_> = tokens.iter().map(|(token, _)| (*token).to_owned()).collect();
            let scores = tokens.iter().map(|&(_, score)| score).collect();
            let unknown = names.iter().position(|token| token == "?").map(|id| id as u32);
            let mut out = vec![];
            Sentencepiece::new(&names, scores, unknown).encode(text, &mut out);
            out
        };
        let abc =
            |ab: f32, bc: f32| encode(&[("a", 0.0), ("b", 0.0), ("c", 0.0), ("ab", ab), ("bc", bc)], "abc");
        assert_eq!(abc(-1.0, -2.0), [3, 2]);
        assert_eq!(abc(-2.0, -1.0), [0, 4]);
        assert_eq!(abc(-1.0, -1.0), [3, 2]); // whichever comes first in the vocabulary
        assert_eq!(encode(&[("a", 0.0), ("aa", 0.0)], "aaaaa"), [1, 1, 0]);
        assert_eq!(encode(&[("a", 0.0), ("<0xC3>", 0.0), ("<0xA9>", 0.0)], "a\u{e9}"), [0, 1, 2]);
        assert_eq!(encode(&[("?", 0.0), ("a", 0.0)], "xyaxa"), [0, 1, 0, 1]);
        assert_eq!(encode(&[("a", 0.0)], "xax"), [0]);
        assert_eq!(encode(&[("a", f32::NAN)], ""), [0_u32; 0]);
    }
}
