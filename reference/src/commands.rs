//! The command line.

mod cache;
mod calibrate;
mod chat;
mod compare;
mod device;
mod eval;
mod fetch;
mod generate;
mod logits;
mod methods;
mod output;
mod prefix;
mod sampling;
#[cfg(feature = "serve")]
mod serve;
mod stop;
#[cfg(feature = "store")]
mod store;
mod text;
mod watchdog;

use std::fmt::Display;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use device::DeviceArgs;
use indicatif::{ProgressBar, ProgressStyle};
use kv_methods::{Calibration, Method, ProfileFile};
use kv_model::{Checkpoint, Config, Model};
use kv_reference::compare::Progress;
use kv_reference::{Error, Result};
use output::Files;
pub use output::{Stdout, print_error};
use text::{CalibrationTextArgs, MOST_TEXT, TextArgs, built_in_text};

/// A trained model over every kind of KV cache: what each saves, and what it costs
#[derive(Parser)]
#[command(
    name = "kv",
    version,
    after_help = "Example:\n  kv compare --context 1024 --methods dense,int4,million"
)]
pub struct Kv {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the model over every kind of cache and print what each saves and costs
    Compare(compare::Compare),
    /// Continue a prompt
    Generate(Box<generate::Generate>),
    /// Answer requests over HTTP, in the shape of OpenAI's API
    #[cfg(feature = "serve")]
    Serve(Box<serve::Serve>),
    /// Print the logits of every position, to check against other implementations
    Logits(logits::Logits),
    /// Perplexity, divergence and retrieval at several lengths and depths
    Eval(eval::Eval),
    /// Make a profile (codebooks, rotations, probability models) from a text
    Calibrate(calibrate::Calibrate),
    /// Get a model of the Hugging Face Hub
    Fetch(fetch::Fetch),
    /// List the methods with their settings
    Methods(methods::Methods),
    /// Keep caches in an object store: a folder, S3 and compatible servers
    #[cfg(feature = "store")]
    #[command(subcommand)]
    Store(store::Store),
}

impl Kv {
    /// Parses the arguments. Negative numbers are values, not options, so that the option's own check reports
    /// them.
    pub fn from_arguments() -> std::result::Result<Self, clap::Error> {
        fn take_negative_numbers(command: clap::Command) -> clap::Command {
            command
                .mut_args(|arg| match arg.get_action().takes_values() {
                    true => arg.allow_negative_numbers(true),
                    false => arg,
                })
                .mut_subcommands(take_negative_numbers)
        }
        let mut command = take_negative_numbers(Self::command());
        let matches = command.try_get_matches_from_mut(std::env::args_os())?;
        Self::from_arg_matches(&matches).map_err(|e| e.format(&mut command))
    }

    pub fn run(self, out: &mut Stdout) -> Result<()> {
        start_threads()?;
        match self.command {
            Command::Compare(command) => command.run(out),
            Command::Generate(command) => command.run(out),
            #[cfg(feature = "serve")]
            Command::Serve(command) => command.run(out),
            Command::Logits(command) => command.run(out),
            Command::Eval(command) => command.run(out),
            Command::Calibrate(command) => command.run(out),
            Command::Fetch(command) => command.run(out),
            Command::Methods(command) => command.run(out),
            #[cfg(feature = "store")]
            Command::Store(command) => command.run(out),
        }
    }
}

/// Starts the threads of parallel work, as many as `RAYON_NUM_THREADS` says. Started where they are first
/// needed, they panic if the system has no room for them. A thread whose signal stack finds no room ends the
/// process, so there is a limit to their number.
fn start_threads() -> Result<()> {
    const VARIABLE: &str = "RAYON_NUM_THREADS";
    const MOST: usize = 1024;
    let asked = std::env::var(VARIABLE).ok().and_then(|threads| threads.parse::<usize>().ok());
    if let Some(threads) = asked.filter(|&threads| threads > MOST) {
        return Err(Error::Argument(format!(
            "threads: {VARIABLE} is {threads}, and at most {MOST} are started"
        )));
    }
    rayon::ThreadPoolBuilder::new().build_global().map_err(Error::Threads)
}

/// The option that selects the model.
#[derive(Args)]
struct ModelArgs {
    /// Hugging Face folder or GGUF file [default: the shipped tiny-llama-12m]
    #[arg(long, value_name = "DIR|FILE")]
    model: Option<PathBuf>,
}

impl ModelArgs {
    fn path(&self) -> PathBuf {
        let shipped = || Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-llama-12m");
        self.model.clone().unwrap_or_else(shipped)
    }

    /// Reads the header.
    fn open(&self) -> Result<Checkpoint> {
        let path = self.path();
        let missing = matches!(path.try_exists(), Ok(false));
        if self.model.is_none() && missing {
            let path = path.display();
            return Err(Error::Argument(format!(
                "the shipped model is not in {path}, where this kv was built: pass --model"
            )));
        }
        if self.model.is_some() && missing {
            let mut what = format!("--model: {}: no such file or folder", path.display());
            // A path of this form may be meant as a Hub name.
            if path.is_relative() && path.components().count() == 2 {
                what.push_str(&format!(
                    "; `kv fetch {}` gets a model of the Hugging Face hub",
                    path.display()
                ));
            }
            return Err(Error::Argument(what));
        }
        of_option("--model", Checkpoint::open(&path))
    }
}

/// Reads the weights of the checkpoint of `--model`.
fn load(checkpoint: Checkpoint) -> Result<Arc<Model>> {
    Ok(Arc::new(of_option("--model", checkpoint.load())?))
}

/// The profile of `--profile`, if it has the entries of the methods, which fit the model.
fn read_profile(path: Option<&PathBuf>, config: &Config, methods: &[Method]) -> Result<Option<ProfileFile>> {
    let file = path.map(|path| of_option("--profile", ProfileFile::read(path))).transpose()?;
    file.iter().try_for_each(|file| Method::check_profile(methods, config, file.profile()))?;
    Ok(file)
}

/// Rejects a number of calibration tokens that is too small, where methods without a profile need some.
fn check_calibration(tokens: usize, methods: &[Method], profile: Option<&ProfileFile>) -> Result<()> {
    match profile.is_none() && methods.iter().any(Method::needs_profile) {
        true => Ok(Calibration::check_tokens(tokens)?),
        false => Ok(()),
    }
}

/// Rejects a profile from which no method takes an entry.
fn check_profile_has_effect(profile: Option<&PathBuf>, methods: &[Method]) -> Result<()> {
    match profile.is_some() && !methods.iter().any(Method::needs_profile) {
        true => Err(no_effect("--profile", "on these methods, which need none")),
        false => Ok(()),
    }
}

/// Names the option in an error about a file that cannot be read.
fn of_option<T, E: Into<Error>>(option: &str, result: std::result::Result<T, E>) -> Result<T> {
    result.map_err(|e| match e.into() {
        e @ Error::Model(kv_model::Error::Io { .. }) => Error::Argument(format!("{option}: {e}")),
        e => e,
    })
}

/// Adds the options that help to an error about too few calibration tokens.
fn few_tokens<T, E: Into<Error>>(result: std::result::Result<T, E>, options: &str) -> Result<T> {
    result.map_err(|e| match e.into() {
        e @ Error::Methods(kv_methods::Error::FewTokens { .. }) => {
            Error::Argument(format!("{e}: pass {options}"))
        }
        e => e,
    })
}

/// Rejects a list with duplicates.
fn distinct<T: PartialEq + Display>(option: &str, values: &[T]) -> Result<()> {
    let twice = values.iter().enumerate().find(|(i, value)| values[..*i].contains(value));
    twice.map_or(Ok(()), |(_, value)| Err(Error::Argument(format!("{option}: {value} is given twice"))))
}

/// The error of an option that is without effect where it was given.
fn no_effect(option: &str, place: &str) -> Error {
    Error::Argument(format!("{option} has no effect {place}"))
}

/// Rejects a negative time.
#[cfg(feature = "store")]
fn check_seconds(option: &str, value: f64) -> Result<()> {
    match value.is_finite() && value >= 0.0 {
        true => Ok(()),
        false => Err(Error::Argument(format!("{option} must be a number of seconds from 0 on, not {value}"))),
    }
}

/// Parses a count of at least one.
fn at_least_one(text: &str) -> std::result::Result<NonZeroUsize, &'static str> {
    text.parse().map_err(|_| "must be a whole number from 1 on")
}

/// The option that writes the result as JSON.
#[derive(Args)]
struct JsonArgs {
    /// Write the result as JSON
    #[arg(long, value_name = "FILE", global = true)]
    json: Option<PathBuf>,
}

/// A progress bar; hidden if standard error is not a terminal.
fn progress() -> ProgressBar {
    let bar = ProgressBar::new(1);
    if let Ok(style) = ProgressStyle::with_template("{spinner} [{bar:30}] {pos}/{len} {msg} ({elapsed})") {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A bar that shows the progress of a comparison.
struct Shown<'a>(&'a ProgressBar);

impl Progress for Shown<'_> {
    fn begin(&self, steps: usize) {
        self.0.set_length(steps as u64);
    }

    fn message(&self, what: &str) {
        self.0.set_message(what.to_owned());
    }

    fn advance(&self) {
        self.0.inc(1);
    }
}

/// Formats a count: `1 chunk`, `2 chunks`.
#[cfg(feature = "store")]
fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}
