//! `kv store`, and the options of a store for other commands.

mod inspect;

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Instant;

use clap::{Args, Subcommand};
use codec_core::Encoding;
use indicatif::{HumanBytes, ProgressBar};
use inspect::{Ls, Rm, Verify};
use kv_reference::cache::KvCache;
use kv_reference::compare::calibrated;
use kv_reference::forward::Decoder;
use kv_reference::method::Method;
use kv_reference::model::{Model, Rope};
use kv_reference::store::{Grid, KvStore, Options, PromptStore, Space, join_levels};
use kv_reference::{Error, Result};
use serde::Serialize;

use super::{Files, JsonArgs, ModelArgs, Stdout, TextArgs, load_profile, print_error, progress};

/// Levels of every chunk unless others are asked for.
const LEVELS: &str = "cachegen:bits=4,cachegen:bits=3,cachegen:bits=2";
/// Tokens of the shipped text that the levels are calibrated on, as `kv calibrate` does.
const CALIBRATION: usize = 4096;
/// Positions that they are calibrated for: a configuration may claim any length.
const MOST_POSITIONS: usize = 1 << 17;

#[derive(Subcommand)]
#[command(after_help = "Example:\n  kv store put /tmp/caches --text report.txt")]
pub enum Store {
    /// Compute the keys and values of a text and store them
    Put(Put),
    /// Fetch the longest stored prefix of a text, and say how long it took
    Get(Get),
    /// List what a store holds: a line for each model and profile
    Ls(Ls),
    /// Read all that a store holds and compare it with its digests
    Verify(Verify),
    /// Delete the caches of a model and profile, or what dead writers have left
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

/// What identifies the caches of a store besides the model.
#[derive(Args)]
struct LevelArgs {
    /// Levels of every chunk, the least lossy first: cachegen methods
    #[arg(long, value_name = "LIST", default_value = LEVELS)]
    kv_levels: String,
    /// Tokens of a chunk, and what the length of the last one is a multiple of
    #[arg(long, value_name = "CHUNK/TAIL", default_value = "1500/100")]
    kv_grid: GridArg,
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

/// A store of caches for a prompt.
#[derive(Args)]
pub struct KvArgs {
    /// Load the longest prefix of the prompt that this store holds: a folder, or s3://BUCKET/PATH
    #[arg(long, value_name = "URL")]
    kv: Option<String>,
    /// Level to load, 0 the least lossy
    #[arg(long, value_name = "N", default_value_t = 0, requires = "kv")]
    kv_level: usize,
    /// Store what was not there
    #[arg(long, requires = "kv")]
    kv_keep: bool,
    #[command(flatten)]
    levels: LevelArgs,
}

/// An open store with what its caches belong to.
pub struct OpenStore {
    store: KvStore,
    space: Space,
    profile: codec_core::Profile,
    level: usize,
    keep: bool,
}

impl KvArgs {
    /// The store, if one is named.
    pub fn open(&self, model: &Model, profile: Option<&Path>) -> Result<Option<OpenStore>> {
        let Some(url) = &self.kv else { return Ok(None) };
        let open = OpenStore::new(url, model, profile, &self.levels, self.kv_level)?;
        Ok(Some(OpenStore { keep: self.kv_keep, ..open }))
    }
}

impl OpenStore {
    fn new(url: &str, model: &Model, profile: Option<&Path>, args: &LevelArgs, level: usize) -> Result<Self> {
        let methods = Method::parse_list(&args.kv_levels)?;
        if level >= methods.len() {
            return Err(Error::Argument(format!("level {level} of {}", methods.len())));
        }
        let store = KvStore::open(url, Options::default())?;
        let profile = match profile {
            Some(path) => load_profile(path, model)?,
            None => calibrated_levels(model, &methods)?,
        };
        let planes = methods.iter().map(|method| method.codec_planes(&model.config, &profile));
        let profile = join_levels(&planes.collect::<Result<Vec<_>>>()?)?;
        let space = Space::new(&model.hash, &profile, args.kv_grid.0)?;
        Ok(Self { store, space, profile, level, keep: false })
    }

    fn prompts(&self) -> PromptStore<'_> {
        PromptStore { store: &self.store, space: &self.space, profile: &self.profile }
    }

    /// Fills a cache with a prompt, and returns the logits after it.
    pub fn fill(
        &self,
        decoder: &mut Decoder,
        cache: &mut dyn KvCache,
        prompt: &[u32],
        chunk: usize,
    ) -> Result<Vec<f32>> {
        let level = Encoding::Level(self.level);
        let filled = self.prompts().fill(decoder, cache, prompt, chunk, self.keep, |_| level)?;
        let bytes = filled.chunks.iter().map(|(_, transfer)| transfer.bytes).sum();
        let damaged = if filled.damaged == 0 { "" } else { ", then a damaged chunk" };
        print_error(format_args!(
            "kv: {} of {} tokens loaded at level {} ({}){damaged}, {} chunks stored\n",
            filled.loaded,
            prompt.len(),
            self.level,
            HumanBytes(bytes),
            filled.stored
        ));
        Ok(filled.logits)
    }
}

/// The levels from the shipped text. They must be the same for every prompt: they name the caches.
fn calibrated_levels(model: &Model, methods: &[Method]) -> Result<kv_reference::Profile> {
    let (_, tokens) = TextArgs { text: None }.tokens(model)?;
    let n = CALIBRATION.min(tokens.len()).min(model.config.max_seq_len);
    let rope = Rope::new(&model.config, model.config.max_seq_len.min(MOST_POSITIONS).max(n));
    let bar = progress();
    bar.set_message(format!("calibrating {} levels on {n} tokens", methods.len()));
    let profile = calibrated(model, &rope, &tokens[..n], methods);
    bar.finish_and_clear();
    profile
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
    /// Use this profile (`kv calibrate`); without one the levels are calibrated on the shipped text
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    #[command(flatten)]
    levels: LevelArgs,
}

impl ContextArgs {
    fn open(&self, level: usize) -> Result<(std::sync::Arc<Model>, Vec<u32>, OpenStore)> {
        let model = self.model.load()?;
        let (_, mut tokens) = self.text.tokens(&model)?;
        tokens.truncate(self.tokens.unwrap_or(usize::MAX).min(model.config.max_seq_len));
        let store = OpenStore::new(&self.url, &model, self.profile.as_deref(), &self.levels, level)?;
        Ok((model, tokens, store))
    }

    fn files(&self) -> Files {
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        files.reads("--text", &self.text.path());
        self.profile.iter().for_each(|path| files.reads("--profile", path));
        files
    }
}

#[derive(Args)]
#[command(after_help = "Example:\n  kv store put /tmp/caches --text report.txt --tokens 6000")]
pub struct Put {
    #[command(flatten)]
    context: ContextArgs,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Serialize)]
struct PutReport {
    tokens: usize,
    chunks: usize,
    stored: usize,
}

impl Put {
    fn run(self, out: &mut Stdout) -> Result<()> {
        let json = self.context.files().writes("--json", self.json.json.clone())?;
        let (model, tokens, open) = self.context.open(0)?;
        let chunks = open.space.chunks(&tokens);
        let end = chunks.last().map_or(0, |chunk| chunk.tokens.end);
        let rope = Rope::new(&model.config, end);
        let bar = progress();
        bar.set_message(format!("computing {end} tokens"));
        let stored = open.prompts().calculate(&model, &rope, &tokens, |i, n| {
            bar.set_length(n as u64);
            bar.set_position(i as u64 + 1);
            bar.set_message("chunks stored");
        })?;
        bar.finish_and_clear();
        let n = chunks.len();
        out.print(format_args!("{end} of {} tokens in {n} chunks, {stored} of them new\n", tokens.len()));
        json.write_json(&PutReport { tokens: end, chunks: n, stored })
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
        let json = self.context.files().writes("--json", self.json.json.clone())?;
        let (_, tokens, open) = self.context.open(self.level)?;
        let found = open.store.find(&open.space, &tokens)?;
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
        let (held, seconds) =
            (found.last().map_or(0, |chunk| chunk.key().tokens.end), start.elapsed().as_secs_f64());
        out.print(format_args!(
            "{held} of {} tokens in {} chunks: {} in {seconds:.3} s\n",
            tokens.len(),
            found.len(),
            HumanBytes(bytes)
        ));
        json.write_json(&GetReport { tokens: held, chunks: found.len(), bytes, seconds })
    }
}

/// A bar of bytes with their rate; nothing where standard error is no terminal.
fn transfer_bar(bytes: u64) -> ProgressBar {
    let bar = progress();
    bar.set_length(bytes);
    let template = "{spinner} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} ({elapsed})";
    if let Ok(style) = indicatif::ProgressStyle::with_template(template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}
