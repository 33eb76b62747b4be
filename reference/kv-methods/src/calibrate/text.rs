//! Texts of several kinds as one text to calibrate on.

/// Tokens that each text has in its turn.
const TURN: usize = 128;

/// Tokens to calibrate on, from one text or from texts of several kinds.
///
/// What is fitted to one kind of text may lose quality on another: the kinds are taken in turns of 128 tokens,
/// in equal shares, so that each of them is at positions all over the calibration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CalibrationText {
    /// The tokens, in the order in which the model runs over them.
    pub tokens: Vec<u32>,
    pub(crate) kinds: Vec<Kind>,
}

/// The part of one text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Kind {
    pub name: String,
    pub tokens: Vec<u32>, // the first ones of the text
}

impl CalibrationText {
    /// All tokens of one text.
    #[must_use]
    pub fn plain(name: &str, tokens: &[u32]) -> Self {
        Self::mixed(&[(name, tokens)], tokens.len())
    }

    /// The first tokens of each of `texts` (name, tokens), at most `n` in all, in equal shares; a text that has
    /// fewer leaves the rest of its share to the others.
    #[must_use]
    pub fn mixed(texts: &[(&str, &[u32])], n: usize) -> Self {
        let shares = shares(&texts.iter().map(|(_, tokens)| tokens.len()).collect::<Vec<_>>(), n);
        let parts = texts.iter().zip(shares).map(|((name, tokens), share)| (*name, &tokens[..share]));
        let parts: Vec<(&str, &[u32])> = parts.filter(|(_, tokens)| !tokens.is_empty()).collect();
        let turns = parts.iter().map(|(_, tokens)| tokens.len().div_ceil(TURN)).max().unwrap_or(0);
        let turn = |i: usize| parts.iter().filter_map(move |(_, tokens)| tokens.chunks(TURN).nth(i));
        Self {
            tokens: (0..turns).flat_map(turn).flatten().copied().collect(),
            kinds: parts
                .iter()
                .map(|(name, tokens)| Kind { name: (*name).into(), tokens: tokens.to_vec() })
                .collect(),
        }
    }
}

/// Parts of `lens` of at most `n` in all, as equal as they can be; earlier ones take the remainder.
fn shares(lens: &[usize], n: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..lens.len()).collect();
    order.sort_by_key(|&i| (lens[i], std::cmp::Reverse(i))); // a short text's rest is for those after it
    let (mut shares, mut left) = (vec![0; lens.len()], n);
    for (done, &i) in order.iter().enumerate() {
        shares[i] = lens[i].min(left / (lens.len() - done));
        left -= shares[i];
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_equal_where_texts_are_long_enough() {
        for (lens, n, expected) in [
            (&[100, 100, 100][..], 10, &[4, 3, 3][..]),
            (&[2, 100, 100], 10, &[2, 4, 4]),
            (&[100, 2, 3], 100, &[95, 2, 3]),
            (&[100, 0], 7, &[7, 0]),
            (&[3, 4], 100, &[3, 4]),
            (&[], 5, &[]),
        ] {
            assert_eq!(shares(lens, n), expected, "{lens:?} {n}");
        }
    }

    #[test]
    fn texts_take_turns() {
        let (a, b): (Vec<u32>, Vec<u32>) = ((0..1000).collect(), (1000..1200).collect());
        let mixed = CalibrationText::mixed(&[("a", &a), ("b", &b), ("none", &[])], 600);
        let parts: Vec<(&str, usize)> =
            mixed.kinds.iter().map(|kind| (kind.name.as_str(), kind.tokens.len())).collect();
        assert_eq!(parts, [("a", 400), ("b", 200)]);
        let expected: Vec<u32> =
            (0..128).chain(1000..1128).chain(128..256).chain(1128..1200).chain(256..400).collect();
        assert_eq!(mixed.tokens, expected);
        assert_eq!(CalibrationText::plain("a", &a).tokens, a);
        assert_eq!(CalibrationText::mixed(&[], 9), CalibrationText::default());
    }
}
