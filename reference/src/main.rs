//! `kv`: a trained Llama over every kind of KV cache.

mod commands;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use commands::{Kv, Stdout, print_error};

/// Standard output could not be written; files were.
const OUTPUT_FAILED: u8 = 1;
/// Nothing was done, or not all.
const FAILED: u8 = 2;

fn main() -> ExitCode {
    let mut out = Stdout::default();
    match Kv::try_parse() {
        Ok(command) => {
            if let Err(e) = command.run(&mut out) {
                return fail(FAILED, &e.to_string());
            }
        }
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => out.print(e),
        Err(e) if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            print_error(e);
            return ExitCode::from(FAILED);
        }
        Err(e) => {
            let e = e.to_string();
            return fail(FAILED, e.lines().next().unwrap_or_default().trim_start_matches("error: "));
        }
    }
    match out.failure() {
        None => ExitCode::SUCCESS,
        Some(e) => fail(OUTPUT_FAILED, &format!("standard output: {e}")),
    }
}

/// One line on standard error, whatever the error holds: control characters are escaped, and the rest of a long text, such as
/// an argument, is cut.
fn fail(code: u8, what: &str) -> ExitCode {
    const LONGEST: usize = 2000; // characters
    let mut line = String::from("kv: ");
    for c in what.trim().chars().take(LONGEST) {
        match c {
            '\n' | '\t' => line.push(' '),
            c if c.is_control() => line.extend(c.escape_default()),
            c => line.push(c),
        }
    }
    if what.trim().chars().nth(LONGEST).is_some() {
        line.push_str("...");
    }
    print_error(line + "\n");
    ExitCode::from(code)
}
