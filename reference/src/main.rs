//! `kv`: a trained model over every kind of KV cache.

mod commands;

use std::process::ExitCode;

use clap::error::ErrorKind;
use commands::{Kv, Stdout, print_error};

/// Standard output could not be written, but files were.
const OUTPUT_FAILED: u8 = 1;
/// The command failed, entirely or in part.
const FAILED: u8 = 2;

fn main() -> ExitCode {
    #[cfg(unix)]
    ignore_sigxfsz();
    let mut out = Stdout::default();
    match Kv::from_arguments() {
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
        Err(e) => return refuse(&e),
    }
    match out.failure() {
        None => ExitCode::SUCCESS,
        Some(e) => fail(OUTPUT_FAILED, &format!("standard output: {e}")),
    }
}

/// Makes a write beyond the limit of a file's size (`ulimit -f`) an error, which names the file. By default
/// the signal ends the process.
#[cfg(unix)]
fn ignore_sigxfsz() {
    // SAFETY: `SIG_IGN` installs no handler.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Prints one line on standard error, whatever the message contains.
fn fail(code: u8, what: &str) -> ExitCode {
    print_error(format_args!("kv: {}\n", printable(&what.replace('\n', " "))));
    ExitCode::from(code)
}

/// Prints clap's message: the wrong argument, a suggestion, and the usage.
fn refuse(e: &clap::Error) -> ExitCode {
    let what = e.to_string();
    print_error(format_args!("kv: {}\n", printable(what.trim_start_matches("error: "))));
    ExitCode::from(FAILED)
}

/// Text for standard error: control characters are escaped, and a long text, such as an argument, is
/// truncated.
fn printable(what: &str) -> String {
    const LONGEST: usize = 2000; // characters
    let mut text = String::new();
    for c in what.trim().chars().take(LONGEST) {
        match c {
            '\t' => text.push(' '),
            '\n' => text.push(c),
            c if c.is_control() => text.extend(c.escape_default()),
            c => text.push(c),
        }
    }
    if what.trim().chars().nth(LONGEST).is_some() {
        text.push_str("...");
    }
    text
}
