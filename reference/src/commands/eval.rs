use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use comfy_table::{Table, presets};
use kv_reference::compare::calibrated;
use kv_reference::eval::retrieval::TaskMaker;
use kv_reference::eval::{
    Prompt, RetrievalTask, TextScores, answer_questions, score_text, window_perplexity,
};
use kv_reference::forward::Decoder;
use kv_reference::method::{METHODS_HELP, Method, Prepared};
use kv_reference::model::{Model, Rope};
use kv_reference::{Error, Profile, Result};
use serde::Serialize;

use super::{JsonArgs, ModelArgs, TextArgs, progress};

#[derive(Args)]
#[command(after_help = METHODS_HELP)]
pub struct Eval {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Methods to evaluate
    #[arg(long, value_name = "LIST", default_value = "dense,int4,pqcache,million,zack,cachegen")]
    methods: String,
    /// Prompt lengths in tokens
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [512, 2048])]
    lengths: Vec<usize>,
    /// Depths of what is to be found, 0 the start of the prompt, 1 its end
    #[arg(long, value_name = "LIST", value_delimiter = ',', default_values_t = [0.1, 0.5, 0.9])]
    depths: Vec<f64>,
    /// Pass keys, and recall lines, per length and depth
    #[arg(long, value_name = "N", default_value_t = 8)]
    trials: usize,
    /// Tokens to decode after each prompt
    #[arg(long, value_name = "N", default_value_t = 128)]
    decode: usize,
    /// Windows of each length over which the perplexity of exact attention is taken, from the start of the text
    #[arg(long, value_name = "N", default_value_t = 4)]
    windows: usize,
    /// Most tokens to calibrate on, from the start of the text
    #[arg(long, value_name = "N", default_value_t = 4096)]
    calibration: usize,
    /// Use this profile (`kv calibrate`) and calibrate nothing
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// What the tasks are drawn from
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    #[command(flatten)]
    json: JsonArgs,
}

/// One method at one length.
#[derive(Serialize)]
struct Row {
    name: &'static str,
    setting: String,
    length: usize,
    bits_per_value: f64,
    perplexity: f64,
    kl: f64,
    top1: f64,
    needle: Vec<AtDepth>,
    recall: Vec<AtDepth>,
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

/// Exact attention over non-overlapping windows of one length.
#[derive(Serialize)]
struct Exact {
    length: usize,
    windows: usize,
    perplexity: f64,
}

/// What a length is evaluated on.
struct Prompts {
    text: Vec<u32>,
    decoded: Vec<u32>,
    needles: Vec<(f64, RetrievalTask)>, // with their depths
    recalls: Vec<(f64, RetrievalTask)>,
}

/// More than any question takes.
const QUESTION_ROOM: usize = 96;

impl Eval {
    pub fn run(self) -> Result<()> {
        let methods = Method::parse_list(&self.methods)?;
        if let Some(depth) = self.depths.iter().find(|depth| !(0.0..=1.0).contains(*depth)) {
            return Err(Error::Argument(format!("depth {depth} is outside 0..=1")));
        }
        if self.trials == 0 || self.decode == 0 || self.lengths.is_empty() || self.lengths.contains(&0) {
            return Err(Error::argument("lengths, trials and decode need at least one"));
        }
        let json = self.json.open()?;
        let model = self.model.load()?;
        let (name, tokens) = self.text.tokens(&model)?;
        let longest = self.lengths.iter().copied().max().unwrap_or(0);
        let room = self.decode.max(QUESTION_ROOM);
        model.check_context(longest.saturating_add(room))?;
        let given = self.profile.as_ref().map(|path| Profile::load(path, &model)).transpose()?;
        let calibrates = given.is_none() && methods.iter().any(Method::needs_profile);
        let left = tokens.len().saturating_sub(longest + self.decode + 1);
        let calibration =
            if calibrates { self.calibration.min(left).min(model.config.max_seq_len) } else { 0 };
        let rope = Arc::new(Rope::new(&model.config, (longest + room).max(calibration)));
        let bar = progress();
        bar.set_message("calibrating");
        let profile = match given {
            Some(profile) => profile,
            None => calibrated(&model, &rope, &tokens[..calibration], &methods)?,
        };
        bar.set_length((self.lengths.len() * methods.len()) as u64);
        let (mut exact, mut rows) = (vec![], vec![]);
        for &length in &self.lengths {
            let windows = self.windows.min(tokens.len() / length.max(1));
            bar.set_message(format!("exact attention over {windows} windows of {length}"));
            let perplexity = window_perplexity(&model, &rope, &tokens, length, windows)?;
            exact.push(Exact { length, windows, perplexity });
            let prompts = self.prompts(&model, &tokens[calibration..], length)?;
            let reference = reference(&model, &rope, &prompts, &profile)?;
            for method in &methods {
                bar.set_message(format!("{} at {length}", method.spec()));
                rows.push(row(&model, &rope, method, &profile, &prompts, &reference, length)?);
                bar.inc(1);
            }
        }
        bar.finish_and_clear();
        for Exact { length, windows, perplexity } in &exact {
            println!("exact attention, {windows} windows of {length} tokens: perplexity {perplexity:.3}");
        }
        println!("\n{}", table(&rows));
        let (model, seed, decode) = (model.name.clone(), self.seed, self.decode);
        json.write(&Evaluation { model, text: name, decode, calibration, seed, exact, rows })
    }

    fn prompts(&self, model: &Model, tokens: &[u32], length: usize) -> Result<Prompts> {
        if tokens.len() < length + self.decode + 1 {
            let what = format!(
                "{} tokens are left of the text, {} are needed",
                tokens.len(),
                length + self.decode + 1
            );
            return Err(Error::Argument(what));
        }
        let mut maker = TaskMaker::new(model.tokenizer()?, self.seed)?;
        let (mut needles, mut recalls) = (vec![], vec![]);
        for &depth in &self.depths {
            needles.push((depth, maker.needle(tokens, length, self.trials, Some(depth))?));
            recalls.push((depth, maker.recall(tokens, length, self.trials, depth)?));
        }
        let text = tokens[..length].to_vec();
        Ok(Prompts { text, decoded: tokens[length..][..self.decode + 1].to_vec(), needles, recalls })
    }
}

fn reference(
    model: &Arc<Model>,
    rope: &Arc<Rope>,
    prompts: &Prompts,
    profile: &Profile,
) -> Result<TextScores> {
    let Prepared { model, mut cache } = "dense".parse::<Method>()?.prepare(model, rope, profile)?;
    Prompt::run(&model, rope, &prompts.text)?.fill(cache.as_mut())?;
    score_text(&mut Decoder::new(model, rope.clone()), cache.as_mut(), &prompts.decoded, None)
}

fn row(
    base: &Arc<Model>,
    rope: &Arc<Rope>,
    method: &Method,
    profile: &Profile,
    prompts: &Prompts,
    reference: &TextScores,
    length: usize,
) -> Result<Row> {
    let filled = |tokens: &[u32]| -> Result<Prepared> {
        let Prepared { model, mut cache } = method.prepare(base, rope, profile)?;
        Prompt::run(&model, rope, tokens)?.fill(cache.as_mut())?;
        Ok(Prepared { model, cache })
    };
    let Prepared { model, mut cache } = filled(&prompts.text)?;
    let mut decoder = Decoder::new(model.clone(), rope.clone());
    let scores = score_text(&mut decoder, cache.as_mut(), &prompts.decoded, Some(&reference.logits))?;
    let values = (cache.seq_len() * model.config.kv_values_per_token()) as f64;
    let mut found = |tasks: &[(f64, RetrievalTask)]| -> Result<Vec<AtDepth>> {
        let found = tasks.iter().map(|(depth, task)| {
            let hits = answer_questions(&mut decoder, filled(&task.prompt)?.cache.as_ref(), task)?;
            Ok(AtDepth { depth: *depth, hits, trials: task.questions.len() })
        });
        found.collect()
    };
    Ok(Row {
        name: method.name,
        setting: method.setting.clone(),
        length,
        bits_per_value: 8.0 * cache.footprint().kept as f64 / values,
        perplexity: scores.divergence.perplexity(),
        kl: scores.divergence.kl(),
        top1: scores.divergence.top1(),
        needle: found(&prompts.needles)?,
        recall: found(&prompts.recalls)?,
    })
}

fn table(rows: &[Row]) -> Table {
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
        "needle at depth",
        "recall at depth",
    ]);
    for row in rows {
        let list = |found: &[AtDepth]| {
            let cells = found.iter().map(|at| format!("{}: {}/{}", at.depth, at.hits, at.trials));
            cells.collect::<Vec<_>>().join("  ")
        };
        table.add_row([
            row.name.to_owned(),
            row.setting.replace(':', " "),
            row.length.to_string(),
            format!("{:.2}", row.bits_per_value),
            format!("{:.3}", row.perplexity),
            format!("{:.5}", row.kl),
            format!("{:.1} %", 100.0 * row.top1),
            list(&row.needle),
            list(&row.recall),
        ]);
    }
    table
}
