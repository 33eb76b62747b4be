//! What can go wrong with files and models.

use std::fmt;
use std::path::{Path, PathBuf};

/// An error, with a one-line message for the user.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The contents of a file are invalid or unsupported.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// An argument is wrong.
    #[error("{0}")]
    Argument(String),
    /// This build lacks an optional feature.
    #[error("{what} needs a build with `--features {feature}`")]
    Feature {
        /// What needs it.
        what: &'static str,
        /// The feature of this crate.
        feature: &'static str,
    },
}

/// The result of every call that can fail.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// An error about a file's contents. A parser's message may quote the file, so it is truncated.
    pub fn file(path: &Path, what: impl ToString) -> Self {
        let mut what = what.to_string();
        if let Some((end, _)) = what.char_indices().nth(LONGEST_MESSAGE) {
            what.truncate(end);
            what.push_str("...");
        }
        Self::File { path: path.to_owned(), what }
    }

    /// A file that could not be read or written.
    pub fn io(path: &Path, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), source }
    }

    /// A wrong argument.
    pub fn argument(what: impl Into<String>) -> Self {
        Self::Argument(what.into())
    }
}

/// Characters of a message about a file.
const LONGEST_MESSAGE: usize = 400;

/// A name from a file, for a message: in backquotes, truncated to 80 characters, control characters escaped.
pub(crate) struct Quoted<'a>(pub &'a str);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const LONGEST: usize = 80;
        let mut chars = self.0.chars();
        let shown = chars
            .by_ref()
            .take(LONGEST)
            .map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() });
        let (shown, cut) = (shown.collect::<String>(), if chars.next().is_some() { "..." } else { "" });
        write!(f, "`{shown}{cut}`")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_names_are_cut_and_control_characters_escaped() {
        assert_eq!(Quoted("model.norm").to_string(), "`model.norm`");
        assert_eq!(Quoted("a\x1b[31m\n").to_string(), "`a\\u{1b}[31m\\n`");
        assert_eq!(Quoted(&"\u{e9}".repeat(81)).to_string(), format!("`{}...`", "\u{e9}".repeat(80)));
        let error = Error::file(Path::new("a"), "\u{e9}".repeat(1_000_000));
        assert!(error.to_string().chars().count() < 500);
    }
}
