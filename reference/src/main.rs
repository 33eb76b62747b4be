//! `kv`: a trained Llama over every kind of KV cache.

mod commands;

use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

fn main() -> ExitCode {
    let command = match commands::Kv::try_parse() {
        Ok(command) => command,
        Err(e) if matches!(e.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            print!("{e}");
            return ExitCode::SUCCESS;
        }
        Err(e) if e.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            eprint!("{e}");
            return ExitCode::from(2);
        }
        Err(e) => {
            return fail(e.to_string().lines().next().unwrap_or_default().trim_start_matches("error: "));
        }
    };
    match command.run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(&e.to_string()),
    }
}

/// One line and exit code 2, whatever the error holds.
fn fail(what: &str) -> ExitCode {
    let line: String = what.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    eprintln!("kv: {}", line.trim());
    ExitCode::from(2)
}
