//! `kv store`, and the store of a model's caches.

mod inspect;

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use codec_core::Encoding;
use indicatif::{HumanBytes, ProgressBar};
use inspect::{Ls, Rm, Verify};
use kv_methods::{Method, Profile, calibrated_on};
use kv_model::{Model, Rope};
use kv_reference::stream::encoded::levels;
use kv_reference::stream::prompt::{Calculated, PromptStore, Step};
use kv_reference::{Error, Result};
use kv_store::{Check, Grid, KvStore, Options, ProfileId, Space};
use serde::Serialize;

use super::{
    Files, JsonArgs, ModelArgs, Stdout, TextArgs, built_in_text, count, load, print_error, progress,
    read_profile,
};

/// Default levels of every chunk.
const LEVELS: &str = "cachegen:bits=4,cachegen:bits=3,cachegen:bits=2";
/// Tokens of the built-in texts that the levels are calibrated on, as `kv calibrate` does.
const CALIBRATION: usize = 4096;
/// Positions that the levels are calibrated for: a configuration may claim any length.
const MOST_POSITIONS: usize = 1 << 17;

#[derive(Subcommand)]
#[command(after_help = "Example:\n  kv store put /tmp/caches --text report.txt")]
pub enum Store {
    /// Compute the keys and values of a text and then store them: nothing is stored before all are computed
    Put(Put),
    /// Fetch the longest stored prefix of a text, and say how long it took
    Get(Get),
    /// List what a store holds: a line for each model and profile
    Ls(Ls),
    /// Read all that a store holds and compare it with its digests
    Verify(Verify),
    /// Delete the caches of a model and profile, or the orphans of dead writers
    Rm(Rm),
}

impl Store {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        match self {
            Self::Put(command) => command.run(out),
            Self::Get(command) => command.run(out),
            Self::Ls(command) => command.run(out),
            Self::Verify(command) => command.run(out),
            Self::Rm(command) => command.run(out),
        }
    }
}

/// What to say of a store that was never written for a model.
pub const NOTHING: &str =
    "the store holds nothing for this model and these levels (`kv store ls` says what it holds)";

/// How long a store may be away.
#[derive(Args)]
pub struct RetryArgs {
    /// How long the store may be away or silent before the command gives it up
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    kv_retry: Duration,
}

impl RetryArgs {
    fn options(&self) -> Options {
        let on_outage = |e: &kv_store::Error, left: Duration| {
            print_error(format_args!("kv: {e}; trying for {} s more (--kv-retry)\n", left.as_secs()));
        };
        Options { retry: self.kv_retry, on_outage: Some(on_outage), ..Options::default() }
    }
}

/// Parses a time of at most a day.
fn seconds(text: &str) -> std::result::Result<Duration, &'static str> {
    let time = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.filter(|&time| time <= Duration::from_secs(86400))
        .ok_or("must be a number of seconds from 0 to 86400")
}

/// The identity of the caches of a store, besides the model.
#[derive(Args)]
pub struct LevelArgs {
    /// Levels of every chunk, the least lossy first: cachegen methods
    #[arg(long, value_name = "LIST", default_value = LEVELS)]
    kv_levels: String,
    /// Tokens of a chunk, and the granule of the last one's length
    #[arg(long, value_name = "CHUNK/TAIL", default_value = "1500/100")]
    kv_grid: GridArg,
}

impl LevelArgs {
    /// The levels as methods.
    pub fn methods(&self) -> Result<Vec<Method>> {
        self.kv_grid.0.check()?;
        let methods = Method::parse_list(&self.kv_levels)?;
        check_levels(&methods)?;
        Ok(methods)
    }
}

/// Rejects levels that no profile holds, and levels out of order.
fn check_levels(methods: &[Method]) -> Result<()> {
    let refused = |what: String| Err(Error::Argument(format!("--kv-levels: {what}")));
    if !(1..=codec_core::MAX_LEVELS).contains(&methods.len()) {
        return refused(format!("{} levels, not 1 to {}", methods.len(), codec_core::MAX_LEVELS));
    }
    for (i, method) in methods.iter().enumerate() {
        if !method.has_bitstream() {
            let spec = method.spec();
            return Err(Error::Argument(format!("method {spec} has no bitstream of single layers")));
        }
        if methods[..i].contains(method) {
            return refused(format!("{} is given twice", method.spec()));
        }
        if let Some(lossier) = methods[..i].iter().find(|before| before.is_lossier_than(method)) {
            return refused(format!(
                "{} is lossier than {}, which follows it: pass the least lossy first",
                lossier.spec(),
                method.spec()
            ));
        }
    }
    Ok(())
}

#[derive(Clone, Copy)]
struct GridArg(Grid);

impl FromStr for GridArg {
    type Err = &'static str;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let (chunk, tail) = text.split_once('/').ok_or("is not CHUNK/TAIL, such as 1500/100")?;
        let tokens = |text: &str| text.parse().map_err(|_| "is not CHUNK/TAIL, such as 1500/100");
        Ok(Self(Grid { chunk: tokens(chunk)?, tail: tokens(tail)? }))
    }
}

impl fmt::Display for GridArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.0.chunk, self.0.tail)
    }
}

/// An open store and the space of its caches.
pub struct OpenStore {
    store: KvStore,
    space: Space,
    /// The codec's planes at every level.
    pub profile: codec_core::Profile,
    about: String, // description of the space
}

impl OpenStore {
    /// The store; none if it is opened only to read and was never written for this model and these levels.
    pub fn new(
        url: &str,
        model: &Model,
        profile: Option<&Profile>,
        (args, retry): (&LevelArgs, &RetryArgs),
        write: bool,
    ) -> Result<Option<Self>> {
        let methods = args.methods()?;
        let store = match write {
            true => KvStore::open(url, retry.options())?,
            false => KvStore::open_existing(url, retry.options())?,
        };
        let profile = match profile {
            Some(profile) => levels(&methods, model, profile)?,
            None => match shared_levels(&store, model, &methods, write)? {
                Some(profile) => profile,
                None => return Ok(None),
            },
        };
        let space = Space::new(&model.hash, &profile, args.kv_grid.0)?;
        let about = format!("{} {} {}", model.name, args.kv_levels, args.kv_grid);
        Ok(Some(Self { store, space, profile, about }))
    }

    /// Writes the description of the space, which `kv store ls` shows.
    pub fn describe(&self) -> Result<()> {
        Ok(self.store.describe(self.space.name(), &self.about)?)
    }

    /// The store of prompts.
    pub fn prompts(&self) -> PromptStore<'_> {
        PromptStore { store: &self.store, space: &self.space, profile: &self.profile }
    }
}

/// The levels that the store holds for this model; if it holds none and is to be written, they are calibrated
/// on the built-in texts.
fn shared_levels(
    store: &KvStore,
    model: &Model,
    methods: &[Method],
    write: bool,
) -> Result<Option<codec_core::Profile>> {
    let text = built_in_text(model.tokenizer()?, CALIBRATION.min(model.config.max_seq_len))?;
    let n = text.tokens.len();
    let recipe: Vec<String> = methods.iter().map(Method::spec).collect();
    let id = ProfileId::new(&model.hash, &recipe.join(","), &text.tokens);
    if !write {
        return Ok(store.stored_profile(id)?);
    }
    let profile = store.profile(id, || {
        let rope = Rope::new(&model.config, model.config.max_seq_len.min(MOST_POSITIONS).max(n));
        let bar = progress();
        bar.set_message(format!("calibrating {} on {}", count(methods.len(), "level"), count(n, "token")));
        let profile = calibrated_on(model, &rope, &text, methods);
        let profile = profile.map_err(Error::from).and_then(|profile| levels(methods, model, &profile));
        bar.finish_and_clear();
        profile
    })?;
    Ok(Some(profile))
}

/// The store, the model and the text of `kv store put` and `get`.
#[derive(Args)]
struct ContextArgs {
    /// A folder, or s3://BUCKET/PATH with the settings of the environment (AWS_ACCESS_KEY_ID and others)
    #[arg(value_name = "URL")]
    url: String,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Tokens to use, from the start of the text [default: all that the model takes]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Use this profile (`kv calibrate`); without one the store's, which is first calibrated on the shipped
    /// text
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    levels: LevelArgs,
    #[command(flatten)]
    retry: RetryArgs,
}

impl ContextArgs {
    fn open(&self, write: bool) -> Result<(std::sync::Arc<Model>, Vec<u32>, Option<OpenStore>)> {
        let methods = self.levels.methods()?;
        if write {
            kv_store::check_writable(&self.url)?;
        }
        let checkpoint = self.model.open()?;
        let (_, mut tokens) = self.text.tokens(checkpoint.tokenizer()?)?;
        let most = checkpoint.config.max_seq_len;
        match self.tokens {
            Some(n) if n > tokens.len() => {
                let text = count(tokens.len(), "token");
                return Err(Error::Argument(format!("--tokens {n}: the text has {text}")));
            }
            Some(n) => checkpoint.check_context(n)?,
            None if tokens.len() > most => print_error(format_args!(
                "kv: the text has {}, of which the model takes the first {most}\n",
                count(tokens.len(), "token")
            )),
            None => {}
        }
        tokens.truncate(self.tokens.unwrap_or(most));
        let least = self.levels.kv_grid.0.tail;
        if tokens.len() < least {
            let tokens = count(tokens.len(), "token");
            return Err(Error::Argument(format!(
                "a chunk has at least {least} tokens (--kv-grid), the text {tokens}"
            )));
        }
        let profile = read_profile(self.profile.as_ref(), &checkpoint.config, &methods)?;
        let model = load(checkpoint)?;
        let profile = profile.map(|profile| profile.of(&model)).transpose()?;
        let args = (&self.levels, &self.retry);
        let store = OpenStore::new(&self.url, &model, profile.as_ref(), args, write)?;
        Ok((model, tokens, store))
    }

    fn files(&self) -> Result<Files> {
        let mut files = Files::default();
        files.reads_store("URL", &self.url)?;
        files.reads("--model", &self.model.path());
        self.text.add_to(&mut files);
        self.profile.iter().for_each(|path| files.reads("--profile", path));
        Ok(files)
    }
}

#[derive(Args)]
#[command(after_help = "Example:\n  kv store put /tmp/caches --text report.txt --tokens 6000")]
pub struct Put {
    #[command(flatten)]
    context: ContextArgs,
    /// Read the stored frames and compare them with their digests. Without this option, put repairs missing
    /// and short frames and does not see wrong bits
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Serialize)]
struct PutReport {
    tokens: usize,
    chunks: usize,
    stored: usize,
    repaired: usize,
}

impl Put {
    fn run(self, out: &mut Stdout) -> Result<()> {
        let json = self.context.files()?.writes("--json", self.json.json.clone())?;
        let (model, tokens, open) = self.context.open(true)?;
        let open = open.ok_or_else(|| Error::argument("a store that is written has levels"))?;
        let chunks = open.space.chunks(&tokens);
        let end = chunks.last().map_or(0, |chunk| chunk.tokens.end);
        let rope = Rope::new(&model.config, end);
        // Before the long work: a store that cannot be written says so.
        open.describe()?;
        let bar = progress();
        bar.set_message(format!("computing {}", count(end, "token")));
        let check = if self.verify { Check::Digests } else { Check::Length };
        let done = |step| {
            let (i, n, what) = match step {
                Step::Layer(l, layers) => (l, layers, format!("layers of {} computed", count(end, "token"))),
                Step::Chunk(i, chunks) => (i, chunks, "chunks stored".to_owned()),
            };
            bar.set_length(n as u64);
            bar.set_position(i as u64 + 1);
            bar.set_message(what);
        };
        let Calculated { stored, repaired } =
            open.prompts().calculate(&model, &rope, &tokens, check, done)?;
        bar.finish_and_clear();
        out.print(format_args!(
            "{end} of {} in {}: {stored} new, {repaired} repaired\n",
            count(tokens.len(), "token"),
            count(chunks.len(), "chunk"),
        ));
        json.write_json(&PutReport { tokens: end, chunks: chunks.len(), stored, repaired })
    }
}

#[derive(Args)]
#[command(after_help = "Example:\n  kv store get /tmp/caches --text report.txt --tokens 6000 --level 1")]
pub struct Get {
    #[command(flatten)]
    context: ContextArgs,
    /// Level to fetch, 0 the least lossy
    #[arg(long, value_name = "N", default_value_t = 0)]
    level: usize,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Serialize)]
struct GetReport {
    tokens: usize,
    chunks: usize,
    bytes: u64,
    seconds: f64,
}

impl Get {
    fn run(self, out: &mut Stdout) -> Result<()> {
        let json = self.context.files()?.writes("--json", self.json.json.clone())?;
        let levels = self.context.levels.methods()?.len();
        if self.level >= levels {
            return Err(Error::Argument(format!("--level must be 0 to {}, not {}", levels - 1, self.level)));
        }
        let (_, tokens, open) = self.context.open(false)?;
        let Some(open) = open else {
            return Err(Error::argument(NOTHING));
        };
        let found = open.store.find(&open.space, &tokens)?;
        let Some(held) = found.last().map(|chunk| chunk.key().tokens.end) else {
            return Err(Error::argument(
                "the store holds no beginning of this text; `kv store verify` says what is damaged",
            ));
        };
        let total = found.iter().filter_map(|chunk| chunk.sizes().nth(self.level)).sum();
        let bar = transfer_bar(total);
        let (mut bytes, start) = (0, Instant::now());
        open.store.load(
            &open.space,
            &found,
            2,
            |_| Encoding::Level(self.level),
            |arrival| {
                bytes += arrival.transfer.bytes;
                bar.set_position(bytes);
                Ok::<_, Error>(())
            },
        )?;
        bar.finish_and_clear();
        let seconds = start.elapsed().as_secs_f64();
        out.print(format_args!(
            "{held} of {} in {}: {} in {seconds:.3} s\n",
            count(tokens.len(), "token"),
            count(found.len(), "chunk"),
            HumanBytes(bytes)
        ));
        json.write_json(&GetReport { tokens: held, chunks: found.len(), bytes, seconds })
    }
}

/// A progress bar of bytes with their rate; hidden if standard error is not a terminal.
fn transfer_bar(bytes: u64) -> ProgressBar {
    let bar = progress();
    bar.set_length(bytes);
    let template = "{spinner} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} ({elapsed})";
    if let Ok(style) = indicatif::ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
