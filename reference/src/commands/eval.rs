//! `kv eval`: quality at several lengths, and retrieval by depth.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use comfy_table::{Table, presets};
use kv_llama::{FetchedPerStep, HeadFit};
use kv_methods::{Method, Place, calibrated};
use kv_model::{Rope, Tokenizer};
use kv_reference::compare;
use kv_reference::compare::{QUESTION_ROOM, Runner, check_room, run_start};
use kv_reference::eval::retrieval::{NO_WORDS, TaskMaker};
use kv_reference::eval::{RetrievalTask, window_perplexity};
use kv_reference::{Error, Result};
use serde::Serialize;

use super::{
    DeviceArgs, Files, JsonArgs, ModelArgs, Shown, Stdout, TextArgs, at_least_one, check_calibration,
    check_profile_has_effect, distinct, few_tokens, load, no_effect, print_error, progress, read_profile,
};

#[derive(Args)]
#[command(after_help = "Example:
  kv eval --methods dense,pqcache:ratio=0.1 --lengths 512,2048 --depths 0.1,0.9 --trials 4

Methods and their settings: kv methods")]
pub struct Eval {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Methods to evaluate
    #[arg(long, value_name = "LIST", default_value = "dense,int4,pqcache,million,hybrid,zack,cachegen")]
    methods: String,
    /// Prompt lengths in tokens
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "512,2048")]
    lengths: Vec<usize>,
    /// Depths of the facts to find, 0 the start of the prompt, 1 its end
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_value = "0.1,0.5,0.9")]
    depths: Vec<f64>,
    /// Pass keys, and recall lines, per length and depth; 0 for no retrieval
    #[arg(long, value_name = "N", default_value_t = 8)]
    trials: usize,
    /// Tokens to decode after each prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    decode: usize,
    /// Maximum windows of each length, from the start of the text, for the perplexity of exact attention on
    /// the CPU; 0 for none
    #[arg(long, value_name = "N", default_value_t = 4)]
    windows: usize,
    /// Maximum tokens to calibrate on, from the start of the text
    #[arg(long, value_name = "N", default_value_t = 4096)]
    calibration: usize,
    /// Use this profile (`kv calibrate`) and calibrate nothing
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Seed of the tasks
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Tokens per prefill chunk on a GPU [default: all]. Later chunks see earlier ones as the cache stores
    /// them
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    chunk: Option<NonZeroUsize>,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    json: JsonArgs,
}

/// One method at one length.
#[derive(Serialize)]
struct Row {
    name: String,
    setting: String,
    device: Place,
    length: usize,
    bits_per_value: f64,
    kv_bytes_per_token: f64,
    perplexity: f64,
    kl: f64,
    top1: f64,
    kl_by_position: Vec<f64>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    fits: Vec<HeadFit>,
    #[serde(flatten)]
    fetched: FetchedPerStep,
    needle: Vec<AtDepth>,
    recall: Vec<AtDepth>,
}

impl Row {
    fn misfits(&self) -> Option<String> {
        let method = format!("{} {}, {} tokens", self.name, self.setting.replace(':', " "), self.length);
        HeadFit::warning(&method, &self.fits)
    }
}

#[derive(Serialize)]
struct AtDepth {
    depth: f64,
    hits: usize,
    trials: usize,
}

#[derive(Serialize)]
struct Evaluation {
    model: String,
    text: String,
    decode: usize,
    calibration: usize,
    seed: u64,
    exact: Vec<Exact>,
    rows: Vec<Row>,
}

/// Perplexity of exact attention over non-overlapping windows of one length.
#[derive(Serialize)]
struct Exact {
    length: usize,
    windows: usize,
    perplexity: f64,
}

/// The options that give more tokens to calibrate on.
const MORE_TOKENS: &str =
    "a longer --text, a larger --calibration, smaller --lengths or --decode, or a --profile";

impl Eval {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let methods = Method::parse_list(&self.methods)?;
        if let Some(depth) = self.depths.iter().find(|depth| !(0.0..=1.0).contains(*depth)) {
            return Err(Error::Argument(format!("--depths: {depth} is not from 0 to 1")));
        }
        if self.decode == 0 || self.lengths.is_empty() || self.lengths.contains(&0) {
            return Err(Error::argument("--lengths and --decode must be at least 1"));
        }
        distinct("--lengths", &self.lengths)?;
        distinct("--depths", &self.depths)?;
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        if self.trials == 0 && self.seed != 0 {
            return Err(no_effect("--seed", "with --trials 0"));
        }
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        self.text.add_to(&mut files);
        self.profile.iter().for_each(|path| files.reads("--profile", path));
        let json = files.writes("--json", self.json.json.clone())?;
        let checkpoint = self.model.open()?;
        let (config, room) = (&checkpoint.config, self.decode.max(QUESTION_ROOM));
        let chunk = self.chunk.map_or(longest, NonZeroUsize::get);
        let placement = self.device.place(config, Some(&methods), chunk)?;
        placement.check_chunk(self.chunk)?;
        let methods = placement.placed.methods();
        check_profile_has_effect(self.profile.as_ref(), methods)?;
        check_room(&checkpoint.name, config, (longest, room), "--lengths")?;
        let given = read_profile(self.profile.as_ref(), config, methods)?;
        let (name, tokens) = self.text.tokens(checkpoint.tokenizer()?)?;
        let run = longest + self.decode + 1;
        let start = run_start(config, tokens.len(), run, self.calibration, "--lengths")?;
        few_tokens(check_calibration(start, methods, given.as_ref()), MORE_TOKENS)?;
        // The tasks may not fit in a prompt.
        let tokenizer = checkpoint.tokenizer()?;
        let tasks = self.lengths.iter().map(|&length| self.tasks(tokenizer, &tokens[start..], length));
        let tasks = tasks.collect::<Result<Vec<_>>>()?;
        let model = load(checkpoint)?;
        let given = given.map(|profile| profile.of(&model)).transpose()?;
        let calibrates = given.is_none() && methods.iter().any(Method::needs_profile);
        if let Some(profile) = &given {
            let warnings = [profile.overlap(&tokens, start), profile.beyond(longest + room)];
            for warning in warnings.into_iter().flatten() {
                print_error(format_args!("kv: {warning}\n"));
            }
        }
        let rope = Arc::new(Rope::new(&model.config, (longest + room).max(start)));
        let bar = progress();
        bar.set_message("calibrating");
        let profile = match given {
            Some(profile) => profile,
            None => few_tokens(calibrated(&model, &rope, &tokens[..start], methods), MORE_TOKENS)?,
        };
        let prompts = 1 + 2 * self.depths.len(); // the text, and a needle and a recall task per depth
        bar.set_length((self.lengths.len() * prompts * methods.len()) as u64);
        let (mut exact, mut rows) = (vec![], vec![]);
        let mut runner =
            Runner::new(&model, rope.clone(), profile, &placement.placed, placement.gpu.as_ref());
        for (&length, tasks) in self.lengths.iter().zip(&tasks) {
            let windows = self.windows.min(tokens.len() / length);
            if windows > 0 {
                bar.set_message(format!("exact attention over {windows} windows of {length}"));
                let perplexity = window_perplexity(&model, &rope, &tokens, length, windows)?;
                exact.push(Exact { length, windows, perplexity });
            }
            rows.extend(self.rows(&mut runner, &tokens[start..], length, tasks, &Shown(&bar))?);
        }
        bar.finish_and_clear();
        let no_words = self.trials > 0 && TaskMaker::new(model.tokenizer()?, self.seed).is_none();
        let notes = placement
            .note
            .clone()
            .into_iter()
            .chain(placement.placed.notes())
            .chain(no_words.then(|| NO_WORDS.to_owned()))
            .chain(rows.iter().filter_map(Row::misfits));
        notes.for_each(|note| print_error(format_args!("kv: {note}\n")));
        for Exact { length, windows, perplexity } in &exact {
            out.print(format_args!(
                "exact attention, {windows} windows of {length} tokens: perplexity {perplexity:.3}\n"
            ));
        }
        if !exact.is_empty() {
            out.print("\n");
        }
        out.print(format_args!("{}\n", table(&rows)));
        let (model, seed, decode) = (model.name.clone(), self.seed, self.decode);
        let calibration = if calibrates { start } else { 0 };
        json.write_json(&Evaluation { model, text: name, decode, calibration, seed, exact, rows })
    }

    /// A needle and a recall task for every depth; none without trials or words.
    fn tasks(&self, tokenizer: &Tokenizer, tokens: &[u32], length: usize) -> Result<Vec<[RetrievalTask; 2]>> {
        let maker = TaskMaker::new(tokenizer, self.seed).filter(|_| self.trials > 0);
        let Some(mut maker) = maker else { return Ok(vec![]) };
        if self.trials > length {
            return Err(Error::Argument(format!(
                "--trials {}: a prompt of {length} tokens (--lengths) has no room for as many facts",
                self.trials
            )));
        }
        let tasks = self.depths.iter().map(|&depth| {
            let needle = maker.needle(tokens, length, self.trials, Some(depth));
            let both =
                needle.and_then(|needle| Ok([needle, maker.recall(tokens, length, self.trials, depth)?]));
            both.map_err(|e| match e {
                Error::Argument(what) => Error::Argument(format!("--trials {}: {what}", self.trials)),
                e => e,
            })
        });
        tasks.collect()
    }

    /// The rows of one length.
    fn rows(
        &self,
        runner: &mut Runner<'_>,
        tokens: &[u32],
        length: usize,
        tasks: &[[RetrievalTask; 2]],
        bar: &Shown<'_>,
    ) -> Result<Vec<Row>> {
        let scored = runner.score(&tokens[..length], &tokens[length..][..self.decode + 1], bar)?;
        let row = |row: compare::Row| Row {
            name: row.name,
            setting: row.setting,
            device: row.device,
            length,
            bits_per_value: row.bits_per_value,
            kv_bytes_per_token: row.kv_bytes_per_token,
            perplexity: row.perplexity,
            kl: row.kl,
            top1: row.top1,
            kl_by_position: row.kl_by_position,
            fits: row.fits,
            fetched: row.fetched,
            needle: vec![],
            recall: vec![],
        };
        let mut rows: Vec<Row> = scored.into_iter().map(row).collect();
        for (&depth, [needle, recall]) in self.depths.iter().zip(tasks) {
            let mut find = |task: &RetrievalTask| -> Result<Vec<AtDepth>> {
                let trials = task.questions.len();
                let at_depth = |hits| AtDepth { depth, hits, trials };
                Ok(runner.find(task, bar)?.into_iter().map(at_depth).collect())
            };
            let found = find(needle)?.into_iter().zip(find(recall)?);
            for (row, (needle, recall)) in rows.iter_mut().zip(found) {
                row.needle.push(needle);
                row.recall.push(recall);
            }
        }
        Ok(rows)
    }
}

fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    table.set_header([
        "method",
        "setting",
        "length",
        "bits/value",
        "perplexity",
        "KL",
        "top-1",
        "rows read",
        "hits",
        "needle at depth",
        "recall at depth",
    ]);
    let shown = |value: f64, text: String| if value > 0.0 { text } else { String::new() };
    for row in rows {
        let list = |found: &[AtDepth]| {
            let cells = found.iter().map(|at| format!("{}: {}/{}", at.depth, at.hits, at.trials));
            cells.collect::<Vec<_>>().join("  ")
        };
        table.add_row([
            row.name.clone(),
            row.setting.replace(':', " "),
            row.length.to_string(),
            format!("{:.2}", row.bits_per_value),
            format!("{:.3}", row.perplexity),
            format!("{:.5}", row.kl),
            format!("{:.1} %", 100.0 * row.top1),
            shown(row.fetched.rows, format!("{:.1}", row.fetched.rows)),
            shown(row.fetched.hit_rate, format!("{:.0} %", 100.0 * row.fetched.hit_rate)),
            list(&row.needle),
            list(&row.recall),
        ]);
    }
    table.trim_fmt()
}
