//! Special tokens in a text, by llama.cpp's rule.

use memchr::memmem::Finder;

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// Text without special tokens; not empty.
    Text(&'a str),
    /// A special token.
    Token(u32),
}

/// Cuts a text at special tokens: at every occurrence of the first one, then of the second in what is left,
/// and so on. llama.cpp's order is that of descending length. Tokens without a letter are nowhere.
///
/// # Cost
/// One pass over the text for each token, however many parts there are.
pub(super) fn cut<'a, 'b>(text: &'a str, special: impl Iterator<Item = (u32, &'b str)>) -> Vec<Part<'a>> {
    let (mut found, mut taken) = (vec![], vec![false; text.len()]);
    for (id, token) in special.filter(|(_, token)| !token.is_empty()) {
        let (finder, mut from) = (Finder::new(token), 0);
        while let Some(at) = finder.find(&text.as_bytes()[from..]) {
            let (start, end) = (from + at, from + at + token.len());
            from = match taken[start..end].iter().rposition(|&taken| taken) {
                None => {
                    taken[start..end].fill(true);
                    found.push((start, end, id));
                    end
                }
                // All that begins before the end of what is taken here overlaps it.
                Some(last) => {
                    let rest = &taken[start + last..];
                    rest.iter().position(|&taken| !taken).map_or(text.len(), |free| start + last + free)
                }
            };
        }
    }
    found.sort_unstable();
    let (mut parts, mut at) = (vec![], 0);
    for (start, end, id) in found {
        parts.extend([Part::Text(&text[at..start]), Part::Token(id)]);
        at = end;
    }
    parts.push(Part::Text(&text[at..]));
    parts.retain(|part| *part != Part::Text(""));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_tokens_are_found_first() {
        use Part::{Text, Token};
        let cut = |text| cut(text, [(0, "bcd"), (1, "ab"), (2, "b"), (3, "")].into_iter());
        assert_eq!(cut("abcd"), [Text("a"), Token(0)]);
        assert_eq!(cut("xabab b"), [Text("x"), Token(1), Token(1), Text(" "), Token(2)]);
        assert_eq!(cut("plain"), [Text("plain")]);
        assert_eq!(cut(""), []);
    }

    /// The rule, token by token and part by part.
    fn naive<'a>(text: &'a str, special: &[(u32, &str)]) -> Vec<Part<'a>> {
        let mut parts = vec![Part::Text(text)];
        for &(id, token) in special {
            let cut = |part| match part {
                Part::Text(text) => {
                    text.split(token).flat_map(|text| [Part::Token(id), Part::Text(text)]).skip(1).collect()
                }
                token => vec![token],
            };
            parts = parts.into_iter().flat_map(cut).collect();
        }
        parts.retain(|part| *part != Part::Text(""));
        parts
    }

    #[test]
    fn any_tokens_cut_any_text_by_the_rule() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut next = |end: usize| rng.usize(..end);
        let mut word = |longest: usize| -> String {
            (0..1 + next(longest)).map(|_| ["a", "b", "é", "\u{1f600}"][next(4)]).collect()
        };
        for _ in 0..5000 {
            let (text, tokens) = (word(24), [word(4), word(3), word(3), word(2), word(1)]);
            let special: Vec<(u32, &str)> = (0..).zip(tokens.iter().map(String::as_str)).collect();
            assert_eq!(cut(&text, special.iter().copied()), naive(&text, &special), "{text} at {special:?}");
        }
    }
}
