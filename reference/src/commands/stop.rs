//! Strings that end a text.

/// Ends a text that comes in parts before the first complete one of several strings, which may lie across
/// parts. What may begin one of them is held back until more is known.
pub struct StopStrings {
    strings: Vec<String>,
    held: String,
    is_met: bool,
}

impl StopStrings {
    /// No text yet. None of the strings may be empty.
    pub const fn new(strings: Vec<String>) -> Self {
        Self { strings, held: String::new(), is_met: false }
    }

    /// Adds a part, and returns the text that no string can end any more.
    pub fn push(&mut self, part: &str) -> String {
        if self.is_met {
            return String::new();
        }
        self.held.push_str(part);
        // The string that is complete first, whatever the parts are.
        let found = self.strings.iter().filter_map(|string| {
            let start = self.held.find(string.as_str())?;
            Some((start + string.len(), start))
        });
        if let Some((_, start)) = found.min() {
            self.is_met = true;
            self.held.truncate(start);
            return std::mem::take(&mut self.held);
        }
        let kept = self.strings.iter().map(|string| self.begun(string)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        std::mem::replace(&mut self.held, rest)
    }

    /// Adds the last part, and returns all text that is left.
    pub fn finish(&mut self, part: &str) -> String {
        let mut text = self.push(part);
        text.push_str(&std::mem::take(&mut self.held));
        text
    }

    /// Whether the text has ended.
    pub const fn is_met(&self) -> bool {
        self.is_met
    }

    /// Bytes of the longest beginning of a string with which the text ends.
    fn begun(&self, string: &str) -> usize {
        let mut starts = string.char_indices().map(|(at, _)| at).rev();
        starts.find(|&at| self.held.ends_with(&string[..at])).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_in_any_parts_ends_before_the_first_string() {
        for (strings, text, expected) in [
            (&["\n\n"][..], "one\ntwo\n\nthree", "one\ntwo"),
            (&["abab", "ba"], "xaabab", "xaa"),
            (&["é!", "ée"], "caféée", "café"),
            (&["stop"], "no sto", "no sto"),
            (&["aab"], "aaaab", "aa"),
            (&[], "all of it", "all of it"),
        ] {
            for size in 1..=text.len() {
                let mut stop = StopStrings::new(strings.iter().map(|&string| string.into()).collect());
                let mut shown = String::new();
                let characters: Vec<char> = text.chars().collect();
                for part in characters.chunks(size) {
                    shown.push_str(&stop.push(&part.iter().collect::<String>()));
                    assert!(expected.starts_with(&shown), "{text}: {shown}");
                }
                assert_eq!(shown + &stop.finish(""), expected, "{text} in parts of {size}");
                assert_eq!(stop.is_met(), expected != text);
            }
        }
    }
}
