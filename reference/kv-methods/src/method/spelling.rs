//! Suggestions for misspelt names.

/// The closest name within two edits of `written`, if any, ignoring case.
pub(super) fn similar<'a>(written: &str, names: &[&'a str]) -> Option<&'a str> {
    const EDITS: usize = 2;
    let written: Vec<char> = written.chars().take(32).flat_map(char::to_lowercase).collect();
    let distances = names.iter().map(|name| (edit_distance(&written, name), *name));
    distances.min().filter(|&(distance, name)| distance <= EDITS.min(name.len() / 2)).map(|(_, name)| name)
}

/// Levenshtein distance.
fn edit_distance(a: &[char], b: &str) -> usize {
    let mut row: Vec<usize> = (0..=a.len()).collect(); // distances of all prefixes of `a` to a prefix of `b`
    for (j, b) in b.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], j + 1);
        for (i, &a) in a.iter().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[i + 1];
            row[i + 1] = replaced.min(diagonal + 1).min(row[i] + 1);
        }
    }
    row[a.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_nearly_right_are_suggested() {
        let names = ["dense", "int4", "int8", "million", "zack"];
        for (written, meant) in [
            ("densee", Some("dense")),
            ("MILLION", Some("million")),
            ("milion", Some("million")),
            ("zak", Some("zack")),
            ("int", Some("int4")),
            ("zipcache", None),
            ("", None),
            ("x", None),
        ] {
            assert_eq!(similar(written, &names), meant, "{written}");
        }
        let distance = |a: &str, b| edit_distance(&a.chars().collect::<Vec<_>>(), b);
        assert_eq!((distance("kitten", "sitting"), distance("", "abc"), distance("abc", "")), (3, 3, 3));
    }
}
