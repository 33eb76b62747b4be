//! `kv compare`: every method over the same text and the same questions.

mod cpu;
#[cfg(feature = "cuda")]
mod gpu;
mod placed;
mod run;
mod runner;

use std::sync::Arc;

use kv_llama::{FetchedPerStep, HeadFit};
#[cfg(feature = "cuda")]
use kv_llama_gpu::ranks::Rank;
use kv_methods::{Method, Place, Profile, calibrated};
use kv_model::{Config, Model, Rope};
use serde::Serialize;

use crate::eval::retrieval::{NO_WORDS, TaskMaker};
use crate::{Error, Result};
pub use placed::Placed;
pub use run::Progress;
pub use runner::Runner;

/// Prompt tokens per pass key.
const NEEDLE_SPACE: usize = 64;
/// Maximum number of pass keys.
const NEEDLES: usize = 8;

/// Maximum tokens of a question and its answer.
pub const QUESTION_ROOM: usize = 96;

/// The sizes of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Tokens of the prompt.
    pub context: usize,
    /// Tokens decoded after it.
    pub decode: usize,
    /// Most tokens to calibrate on; they come before the prompt in the text.
    pub calibration: usize,
}

impl Sizes {
    /// The tokens that must fit after the prompt.
    #[must_use]
    pub fn room(&self) -> usize {
        self.decode.max(QUESTION_ROOM)
    }

    /// Where the prompt starts in a text of `text` tokens.
    ///
    /// # Errors
    /// [`Error::Argument`] for a text that is too short.
    pub fn start(&self, config: &Config, text: usize) -> Result<usize> {
        run_start(config, text, self.context + self.decode + 1, self.calibration, "--context")
    }
}

/// A GPU, or several among which the model is divided, for the methods that are implemented there.
#[cfg(feature = "cuda")]
pub struct OnGpu {
    /// The ranks of the model; one on a single GPU.
    pub ranks: Vec<Rank>,
    /// Tokens per prefill chunk. Later chunks attend to earlier ones as compressed.
    pub chunk: usize,
    /// Whether methods that GPUs do not support run on the CPU; otherwise they are rejected.
    pub others_on_cpu: bool,
}

/// No GPU.
#[cfg(not(feature = "cuda"))]
pub enum OnGpu {}

/// One row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Method.
    pub name: String,
    /// Its setting.
    pub setting: String,
    /// Where it ran: on the CPU with exact prefill and logits relative to the dense 32-bit cache, on a GPU
    /// with logits relative to its dense cache of the same 16-bit type.
    pub device: Place,
    /// Bits kept per element of the cache, including all per-sequence data.
    pub bits_per_value: f64,
    /// Bytes kept per token.
    pub kv_bytes_per_token: f64,
    /// Bytes of a 16-bit cache over bytes kept.
    pub ratio: f64,
    /// Perplexity of the decoded text.
    pub perplexity: f64,
    /// Mean divergence from the dense cache, in nats.
    pub kl: f64,
    /// Fraction of positions whose most likely token is the dense cache's.
    pub top1: f64,
    /// Fraction of the pass keys found; `None` without any.
    pub needle: Option<f64>,
    /// Number of pass keys asked for.
    pub needle_trials: usize,
    /// Wall time of a decode step, in milliseconds.
    pub ms_per_token: f64,
    /// Offloaded bytes per token, of which a step reads a part.
    pub offloaded_bytes_per_token: f64,
    /// Exact rows that a step reads.
    #[serde(flatten)]
    pub fetched: FetchedPerStep,
    /// Bytes per token of copies that could be recomputed.
    pub working_bytes_per_token: f64,
    /// Bytes that all sequences of the model share.
    pub shared_bytes: usize,
    /// Divergence at every decoded position, in nats.
    pub kl_by_position: Vec<f64>,
    /// How well codes that were fitted to a calibration text fit this one; on the CPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fits: Vec<HeadFit>,
}

impl Row {
    /// The method and all its settings, as a reader sees them.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{} {}", self.name, self.setting.replace(':', " ")).trim_end().to_owned()
    }

    /// A warning if codes do not fit the text.
    #[must_use]
    pub fn misfits(&self) -> Option<String> {
        HeadFit::warning(&self.title(), &self.fits)
    }
}

/// A finished comparison.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The model's name.
    pub model: String,
    /// The text's name.
    pub text: String,
    /// Tokens of the prompt.
    pub context: usize,
    /// Tokens decoded.
    pub decode: usize,
    /// Tokens calibrated on; 0 when a profile was given or none was needed.
    pub calibration: usize,
    /// Seed of the questions.
    pub seed: u64,
    /// Notes for the reader: that the profile has seen the text, why there are no pass keys, that nothing was
    /// compressed, which methods the GPU does not support, or that codes do not fit the text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// One row per method, in the order asked for.
    pub methods: Vec<Row>,
}

/// Compares methods, placed for the model, over `text` (its name and tokens): calibrates on its first part,
/// unless a profile is given, and runs the next part.
///
/// # Errors
/// [`Error::Argument`] for a text or context that is too short; errors of calibrating and running.
#[allow(clippy::too_many_arguments)]
pub fn compare(
    model: &Arc<Model>,
    (text_name, text): (&str, &[u32]),
    placed: &Placed,
    sizes: Sizes,
    profile: Option<Profile>,
    seed: u64,
    gpu: Option<&OnGpu>,
    progress: &dyn Progress,
) -> Result<Comparison> {
    let (Sizes { context, decode, .. }, methods) = (sizes, placed.methods());
    progress.begin(1 + 2 * methods.len());
    let room = sizes.room();
    check_room(&model.name, &model.config, (context, room), "--context")?;
    let start = sizes.start(&model.config, text.len())?;
    let calibrates = profile.is_none() && methods.iter().any(Method::needs_profile);
    let rope = Arc::new(Rope::new(&model.config, (context + room).max(start)));

    let (prompt, decoded) = text[start..][..context + decode + 1].split_at(context);
    let count = (context / NEEDLE_SPACE).clamp(1, NEEDLES);
    let maker = TaskMaker::new(model.tokenizer()?, seed);
    let needles = maker.map(|mut maker| maker.needle(prompt, context, count, None)).transpose()?;

    progress.message("calibrating");
    let given = profile.as_ref();
    let overlap = given.and_then(|profile| profile.overlap(text, start));
    let beyond = given.and_then(|profile| profile.beyond(context + room));
    let profile = match profile {
        Some(profile) => {
            Method::check_profile(methods, &model.config, &profile)?;
            profile
        }
        None => calibrated(model, &rope, &text[..start], methods)?,
    };
    let exact: Vec<String> =
        methods.iter().filter(|method| method.keeps_exact(context + decode)).map(Method::spec).collect();
    let nothing = format!("nothing is compressed: sinks and window hold all tokens of {}", exact.join(", "));
    let no_words = needles.is_none().then(|| NO_WORDS.to_owned());
    let nothing = (!exact.is_empty()).then_some(nothing);
    let mut runner = Runner::new(model, rope, profile, placed, gpu);
    let notes = [overlap, beyond, no_words, nothing].into_iter().flatten().chain(placed.notes());
    progress.advance();

    let mut rows = runner.score(prompt, decoded, progress)?;
    if let Some(task) = needles {
        let trials = task.questions.len();
        for (row, hits) in rows.iter_mut().zip(runner.find(&task, progress)?) {
            (row.needle, row.needle_trials) = (Some(hits as f64 / trials as f64), trials);
        }
    }
    let notes = notes.chain(rows.iter().filter_map(Row::misfits)).collect();
    Ok(Comparison {
        model: model.name.clone(),
        text: text_name.to_owned(),
        context,
        decode,
        calibration: if calibrates { start } else { 0 },
        seed,
        notes,
        methods: rows,
    })
}

/// Rejects a prompt after which `room` more tokens do not fit in the context of the model of this name and
/// shape. `option` sets the prompt length.
///
/// # Errors
/// [`Error::Argument`], naming the options.
pub fn check_room(name: &str, config: &Config, (prompt, room): (usize, usize), option: &str) -> Result<()> {
    let needed = prompt.saturating_add(room);
    if needed > config.max_seq_len {
        return Err(Error::Argument(format!(
            "{needed} tokens ({prompt} of prompt, {room} after it) exceed the context of {} that {name} has: pass \
             a smaller {option} or --decode",
            config.max_seq_len
        )));
    }
    Ok(())
}

/// The start of a run over `run` of `text` tokens: after the calibration tokens, at most `limit` and the
/// model's context. It does not depend on whether anything is calibrated, so that all methods see the same
/// tokens, and a profile calibrated on the start of the text has not seen them. `option` sets the prompt
/// length.
///
/// # Errors
/// [`Error::Argument`] for a text that is too short.
pub fn run_start(config: &Config, text: usize, run: usize, limit: usize, option: &str) -> Result<usize> {
    match text.checked_sub(run) {
        Some(left) => Ok(left.min(limit).min(config.max_seq_len)),
        None => Err(Error::Argument(format!(
            "the text has {text} tokens, {run} are needed: pass a longer --text, or a smaller {option} or --decode"
        ))),
    }
}
