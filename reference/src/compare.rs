//! The main job: every method over the same text and the same questions.

use std::sync::Arc;

use indicatif::ProgressBar;
use serde::Serialize;

use crate::Profile;
use crate::cache::{FetchedPerStep, Footprint};
use crate::calibrate::Calibration;
use crate::eval::retrieval::{NO_WORDS, TaskMaker};
use crate::eval::{RetrievalTask, SharedPrompt, TextScores, answer_questions, score_text};
use crate::forward::Decoder;
use crate::method::{Method, Prepared};
use crate::model::{Model, Rope};
use crate::{Error, Result};

/// One pass key per this many tokens of the prompt.
const NEEDLE_SPACE: usize = 64;
/// Most pass keys.
const NEEDLES: usize = 8;

/// Most tokens that a question and its answer take.
const QUESTION_ROOM: usize = 96;

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

/// One row of the table.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// Method.
    pub name: String,
    /// Its setting.
    pub setting: String,
    /// Bits kept per element of the cache, including everything that only this sequence needs.
    pub bits_per_value: f64,
    /// Bytes that are kept per token.
    pub kv_bytes_per_token: f64,
    /// Bytes of a 16-bit cache over bytes kept.
    pub ratio: f64,
    /// Perplexity of the decoded text.
    pub perplexity: f64,
    /// Mean divergence from the dense cache, in nats.
    pub kl: f64,
    /// Fraction of positions whose most likely token is the dense cache's.
    pub top1: f64,
    /// Fraction of the pass keys that were found; none without any.
    pub needle: Option<f64>,
    /// Pass keys that were asked for.
    pub needle_trials: usize,
    /// Wall time of a decode step, in milliseconds.
    pub ms_per_token: f64,
    /// Exact bytes per token that are offloaded: a step reads some of them.
    pub offloaded_bytes_per_token: f64,
    /// What a step reads of exact rows.
    #[serde(flatten)]
    pub fetched: FetchedPerStep,
    /// Bytes per token of copies that could be made again.
    pub working_bytes_per_token: f64,
    /// Bytes that all sequences of the model share.
    pub shared_bytes: usize,
    /// Divergence at every decoded position, in nats.
    pub kl_by_position: Vec<f64>,
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
    /// Why there are no pass keys, where there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<&'static str>,
    /// One row per method, in the order asked for.
    pub methods: Vec<Row>,
}

/// The inputs that all methods share.
struct Bench<'a> {
    model: &'a Arc<Model>,
    rope: Arc<Rope>,
    profile: Profile,
    prompt: SharedPrompt,
    decoded: &'a [u32],
    needles: Option<(SharedPrompt, RetrievalTask)>,
    reference: Vec<Vec<f32>>, // logits of the dense 32-bit cache at every decoded position
}

/// Compares `methods` over `text` (its name and tokens): calibrates on its first part, unless a profile is
/// given, and runs the part after it.
///
/// # Errors
/// [`Error::Argument`] for a text or context that is too short; whatever loading, calibrating and running
/// return.
pub fn compare(
    model: &Arc<Model>,
    (text_name, text): (&str, &[u32]),
    methods: &[Method],
    sizes: Sizes,
    profile: Option<Profile>,
    seed: u64,
    progress: &ProgressBar,
) -> Result<Comparison> {
    let Sizes { context, decode, .. } = sizes;
    progress.set_length(3 + 2 * methods.len() as u64);
    let room = decode.max(QUESTION_ROOM);
    let methods: Vec<Method> =
        methods.iter().map(|method| method.fitted(&model.config)).collect::<Result<_>>()?;
    check_room(model, context, room)?;
    let start = run_start(model, text.len(), context + decode + 1, sizes.calibration)?;
    let calibrates = profile.is_none() && methods.iter().any(Method::needs_profile);
    let rope = Arc::new(Rope::new(&model.config, (context + room).max(start)));

    progress.set_message("calibrating");
    let profile = match profile {
        Some(profile) => profile,
        None => calibrated(model, &rope, &text[..start], &methods)?,
    };
    progress.inc(1);

    progress.set_message("dense prefill");
    let prompt = &text[start..][..context];
    let needles = (context / NEEDLE_SPACE).clamp(1, NEEDLES);
    let decoded = &text[start + context..][..decode + 1];
    let needles = TaskMaker::new(model.tokenizer()?, seed).map(|mut maker| -> Result<_> {
        let task = maker.needle(prompt, context, needles, None)?;
        Ok((SharedPrompt::run(model, &rope, &task.prompt)?, task))
    });
    let needles = needles.transpose()?;
    let note = needles.is_none().then_some(NO_WORDS);
    let prompt = SharedPrompt::run(model, &rope, prompt)?;
    progress.inc(1);
    progress.set_message("dense reference");
    let mut dense = prompt.fill(&"dense".parse()?, model, &rope, &profile)?;
    let mut decoder = Decoder::new(model.clone(), rope.clone());
    let reference = score_text(&mut decoder, dense.cache.as_mut(), decoded, None)?.logits;
    progress.inc(1);
    let bench = Bench { model, rope, profile, prompt, decoded, needles, reference };
    let rows = methods.iter().map(|method| bench.row(method, progress));
    Ok(Comparison {
        model: model.name.clone(),
        text: text_name.to_owned(),
        context,
        decode,
        calibration: if calibrates { start } else { 0 },
        seed,
        note,
        methods: rows.collect::<Result<_>>()?,
    })
}

/// A profile from `tokens` with the entries that `methods` need.
///
/// # Errors
/// What gathering and calibrating return.
pub fn calibrated(model: &Model, rope: &Rope, tokens: &[u32], methods: &[Method]) -> Result<Profile> {
    let mut profile = Profile::default();
    if methods.iter().any(Method::needs_profile) {
        let samples = Calibration::gather(model, rope, tokens)?;
        methods.iter().try_for_each(|method| method.calibrate(model, rope, &samples, &mut profile))?;
    }
    Ok(profile)
}

/// Refuses prompts that leave the model's context no room for `room` more tokens.
///
/// # Errors
/// [`Error::Argument`], naming the options.
pub fn check_room(model: &Model, prompt: usize, room: usize) -> Result<()> {
    let needed = prompt.saturating_add(room);
    if needed > model.config.max_seq_len {
        return Err(Error::Argument(format!(
            "{needed} tokens ({prompt} of prompt, {room} after it) exceed the context of {} that {} has: pass a smaller \
             --context (--lengths) or --decode",
            model.config.max_seq_len, model.name
        )));
    }
    Ok(())
}

/// Where in a text of `text` tokens a run over `run` of them starts: after the tokens to calibrate on, at
/// most `limit` and the model's context. It does not depend on whether something is calibrated, so that all
/// methods see the same tokens, and a profile that was made from the start of the text has not seen them.
///
/// # Errors
/// [`Error::Argument`] for a text that is too short.
pub fn run_start(model: &Model, text: usize, run: usize, limit: usize) -> Result<usize> {
    match text.checked_sub(run) {
        Some(left) => Ok(left.min(limit).min(model.config.max_seq_len)),
        None => Err(Error::Argument(format!(
            "the text has {text} tokens, {run} are needed: pass a longer --text, or less to prefill (--context, --lengths) or \
             to --decode"
        ))),
    }
}

impl Bench<'_> {
    fn row(&self, method: &Method, progress: &ProgressBar) -> Result<Row> {
        progress.set_message(method.spec());
        let fill = |prompt: &SharedPrompt| prompt.fill(method, self.model, &self.rope, &self.profile);
        let Prepared { model, mut cache } = fill(&self.prompt)?;
        let mut decoder = Decoder::new(model.clone(), self.rope.clone());
        let scores = score_text(&mut decoder, cache.as_mut(), self.decoded, Some(&self.reference))?;
        let (tokens, footprint, fetched) = (cache.seq_len() as f64, cache.footprint(), cache.fetched());
        progress.inc(1);
        let needles = self.needles.as_ref().map(|(prompt, task)| -> Result<_> {
            Ok((answer_questions(&mut decoder, fill(prompt)?.cache.as_ref(), task)?, task.questions.len()))
        });
        let needles = needles.transpose()?;
        progress.inc(1);

        let Footprint { kept, offloaded, working, shared } = footprint;
        let values = tokens * model.config.kv_values_per_token() as f64;
        let TextScores { divergence, ms_per_token, .. } = scores;
        Ok(Row {
            name: method.name.to_owned(),
            setting: method.setting.clone(),
            bits_per_value: 8.0 * kept as f64 / values,
            kv_bytes_per_token: kept as f64 / tokens,
            ratio: 2.0 * values / kept as f64,
            perplexity: divergence.perplexity(),
            kl: divergence.kl(),
            top1: divergence.top1(),
            needle: needles.map(|(hits, trials)| hits as f64 / trials as f64),
            needle_trials: needles.map_or(0, |(_, trials)| trials),
            ms_per_token,
            offloaded_bytes_per_token: offloaded as f64 / tokens,
            fetched: fetched.per_step(model.config.n_layers * model.config.n_kv_heads),
            working_bytes_per_token: working as f64 / tokens,
            shared_bytes: shared,
            kl_by_position: divergence.kl_by_position().to_vec(),
        })
    }
}
