//! Special tokens in a text, by llama.cpp's rule.

/// A part of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    /// Text without special tokens; not empty.
    Text(&'a str),
    /// A special token.
    Token(u32),
}

/// Cuts a text at special tokens: at every occurrence of the first one, then of the second in what is left, and so
/// on. llama.cpp's order is that of descending length.
pub(super) fn cut<'a, 'b>(text: &'a str, special: impl Iterator<Item = (u32, &'b str)>) -> Vec<Part<'a>> {
    let mut parts = if text.is_empty() { vec![] } else { vec![Part::Text(text)] };
    for (id, token) in special.filter(|(_, token)| text.contains(token)) {
        parts = parts.into_iter().flat_map(|part| cut_at(part, id, token)).collect();
    }
    parts
}

fn cut_at<'a>(part: Part<'a>, id: u32, token: &str) -> Vec<Part<'a>> {
    let Part::Text(text) = part else { return vec![part] };
    let between = text.split(token).map(Part::Text);
    let mut parts: Vec<_> = between.flat_map(|part| [Part::Token(id), part]).skip(1).collect();
    parts.retain(|part| *part != Part::Text(""));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longer_tokens_are_found_first() {
        use Part::{Text, Token};
        let cut = |text| cut(text, [(0, "bcd"), (1, "ab"), (2, "b")].into_iter());
        assert_eq!(cut("abcd"), [Text("a"), Token(0)]);
        assert_eq!(cut("xabab b"), [Text("x"), Token(1), Token(1), Text(" "), Token(2)]);
        assert_eq!(cut("plain"), [Text("plain")]);
        assert_eq!(cut(""), []);
    }
}
