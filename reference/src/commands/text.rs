//! The texts of the commands: one to run over, one or several to calibrate on.

use std::path::{Path, PathBuf};

use clap::Args;
use kv_methods::CalibrationText;
use kv_model::{Tokenizer, files};
use kv_reference::Result;

use super::{Files, of_option, print_error};

/// Maximum bytes of a text to use: about two million tokens, for which the tokenizer takes about a gigabyte.
pub const MOST_TEXT: usize = 8 << 20;

/// The State of the Union addresses: prose without line breaks in its paragraphs.
const SPEECHES: (&str, &str) = ("sotu-heldout.txt", include_str!("../../assets/sotu-heldout.txt"));

/// The texts, one of each kind, on which methods without a profile are calibrated; part of the binary.
const BUILT_IN: [(&str, &str); 7] = [
    SPEECHES,
    ("lines.txt", include_str!("../../assets/calibration/lines.txt")),
    ("code.txt", include_str!("../../assets/calibration/code.txt")),
    ("json.txt", include_str!("../../assets/calibration/json.txt")),
    ("tables.txt", include_str!("../../assets/calibration/tables.txt")),
    ("dialogue.txt", include_str!("../../assets/calibration/dialogue.txt")),
    ("scripts.txt", include_str!("../../assets/calibration/scripts.txt")),
];

/// The first `n` tokens of the built-in texts, fewer if they have not so many.
pub fn built_in_text(tokenizer: &Tokenizer, n: usize) -> Result<CalibrationText> {
    let encoded = |(name, text): (&str, &str)| Ok((name.to_owned(), tokenizer.encode(text)?));
    Ok(mixed(&BUILT_IN.into_iter().map(encoded).collect::<Result<Vec<_>>>()?, n))
}

fn mixed(texts: &[(String, Vec<u32>)], n: usize) -> CalibrationText {
    let texts: Vec<(&str, &[u32])> =
        texts.iter().map(|(name, tokens)| (name.as_str(), &tokens[..])).collect();
    CalibrationText::mixed(&texts, n)
}

/// The name of a file and its tokens.
fn read(path: &Path, tokenizer: &Tokenizer) -> Result<(String, Vec<u32>)> {
    let (text, more) = of_option("--text", files::read_text_start(path, MOST_TEXT))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    if more {
        print_error(format_args!("kv: of {name} the first {} MiB are used\n", MOST_TEXT >> 20));
    }
    Ok((name, tokenizer.encode(&text)?))
}

/// The option that selects the text.
#[derive(Args)]
pub struct TextArgs {
    /// Text to run over [default: the shipped State of the Union addresses]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
}

impl TextArgs {
    /// Adds the text to the files of a command.
    pub fn add_to(&self, files: &mut Files) {
        self.text.iter().for_each(|path| files.reads("--text", path));
    }

    /// The text's name and its tokens.
    pub fn tokens(&self, tokenizer: &Tokenizer) -> Result<(String, Vec<u32>)> {
        let Some(path) = &self.text else {
            let (name, text) = SPEECHES;
            return Ok((name.to_owned(), tokenizer.encode(text)?));
        };
        read(path, tokenizer)
    }
}

/// The option that selects the texts to calibrate on.
#[derive(Args)]
pub struct CalibrationTextArgs {
    /// Text to calibrate on; several (--text A --text B) are taken in turns, in equal shares of the tokens
    /// [default: the built-in texts: speeches, prose in lines, code, JSON, tables, dialogue, other scripts]
    #[arg(long, value_name = "FILE")]
    text: Vec<PathBuf>,
}

impl CalibrationTextArgs {
    /// Adds the texts to the files of a command.
    pub fn add_to(&self, files: &mut Files) {
        self.text.iter().for_each(|path| files.reads("--text", path));
    }

    /// The first `n` tokens of the texts together, fewer if they have not so many.
    pub fn read(&self, tokenizer: &Tokenizer, n: usize) -> Result<CalibrationText> {
        if self.text.is_empty() {
            return built_in_text(tokenizer, n);
        }
        let texts = self.text.iter().map(|path| read(path, tokenizer)).collect::<Result<Vec<_>>>()?;
        Ok(mixed(&texts, n))
    }
}
