//! The options of `kv generate --kv`, and the prompt over their store.

use std::time::Instant;

use clap::Args;
use codec_core::{Plans, StreamPolicy};
use indicatif::HumanBytes;
use kv_llama::{Decoder, KvCache};
use kv_methods::{Method, Place, Profile};
use kv_model::{Model, Rope};
#[cfg(feature = "cuda")]
use kv_reference::device::StreamTarget;
use kv_reference::stream::encoded::{EncodedContext, SINKS};
use kv_reference::stream::prompt::{FillOptions, Filled};
use kv_reference::{Error, Result};
use kv_stream::{Choice, Options, Outcome, RESERVE, Speeds, Trace};

use super::super::store::{LevelArgs, NOTHING, OpenStore, RetryArgs};
use super::super::{DeviceArgs, Files, check_seconds, count, print_error};
use super::{Prefilled, Prefix};

/// A store of caches for a prompt.
#[derive(Args)]
#[command(
    mut_arg("kv_levels", |arg| arg.requires("kv")),
    mut_arg("kv_grid", |arg| arg.requires("kv")),
    mut_arg("kv_retry", |arg| arg.requires("kv")),
)]
pub struct KvArgs {
    /// Load the longest prefix of the prompt that this store holds: a folder, or s3://BUCKET/PATH
    #[arg(long, value_name = "URL")]
    kv: Option<String>,
    /// Encoding of each chunk, cycled: a level (0 is the least lossy) or `text` (recompute), such as 0,text,2;
    /// or `adaptive`: as fast and as lossless as the link and --kv-slo allow
    #[arg(long, value_name = "LIST", default_value = "0", requires = "kv")]
    kv_encoding: String,
    /// Deadline of an adaptive prefix in seconds; 0 for as soon as possible
    #[arg(long, value_name = "SECONDS", default_value_t = 0.0, requires = "kv")]
    kv_slo: f64,
    /// Store the missing chunks
    #[arg(long, requires = "kv")]
    kv_keep: bool,
    #[command(flatten)]
    levels: LevelArgs,
    #[command(flatten)]
    retry: RetryArgs,
}

/// An open store for a prompt.
pub struct PromptLoader {
    open: OpenStore,
    choice: Choice,
    slo: f64,
    keep: bool,
}

impl KvArgs {
    /// Adds the store to the files of a command.
    pub fn add_to(&self, files: &mut Files) -> Result<()> {
        self.kv.as_ref().map_or(Ok(()), |url| files.reads_store("--kv", url))
    }

    /// Rejects several devices: stored caches are of all heads.
    pub fn check_devices(&self, device: &DeviceArgs) -> Result<()> {
        match self.kv.is_some() && device.count() > 1 {
            true => Err(Error::argument("--kv: stored caches are of all heads: pass one device (--device)")),
            false => Ok(()),
        }
    }

    /// Rejects wrong options and, before the long work, a method whose caches are not those of the store, and
    /// a store that is not there or, to keep chunks, cannot be made.
    pub fn check(&self, method: &Method) -> Result<()> {
        let Some(url) = &self.kv else { return Ok(()) };
        self.choice()?;
        if method.place() == Place::Cpu && method.changes_weights() {
            return Err(Error::Argument(format!(
                "--kv: on the CPU method {} changes the weights, and with them the keys and values",
                method.spec()
            )));
        }
        Ok(kv_store::open(url, self.kv_keep).map(drop)?)
    }

    /// The encoding of each chunk.
    fn choice(&self) -> Result<Choice> {
        check_seconds("--kv-slo", self.kv_slo)?;
        let levels = self.levels.methods()?.len();
        let first_level = kv_stream::first_level(self.kv_slo, levels);
        let slo = self.kv_slo * (1.0 - RESERVE);
        let policy = StreamPolicy { slo, first_level, prior: None, plans: Plans::TextFirst };
        let choice = Choice::parse(&self.kv_encoding, levels, policy)
            .map_err(|e| Error::Argument(format!("--kv-encoding: {e}")))?;
        match self.kv_slo > 0.0 && matches!(choice, Choice::Given(_)) {
            true => Err(Error::argument("--kv-slo has no effect without --kv-encoding adaptive")),
            false => Ok(choice),
        }
    }

    /// The levels of the store, if one is named.
    pub fn levels(&self) -> Result<Vec<Method>> {
        self.kv.as_ref().map_or(Ok(vec![]), |_| self.levels.methods())
    }

    /// The store, if one is named. Without a profile its own is used.
    pub fn open(&self, model: &Model, profile: Option<&Profile>) -> Result<Option<PromptLoader>> {
        let Some(url) = &self.kv else { return Ok(None) };
        let choice = self.choice()?;
        let open = match OpenStore::new(url, model, profile, (&self.levels, &self.retry), self.kv_keep) {
            // The prompt needs no store.
            Err(Error::Store(e)) if e.is_damage() || e.is_failure() => {
                print_error(format_args!("kv: {e}; the prompt is computed\n"));
                return Ok(None);
            }
            open => open?,
        };
        if open.is_none() {
            print_error(format_args!("kv: {}; the prompt is computed\n", NOTHING));
        }
        Ok(open.map(|open| PromptLoader { open, choice, slo: self.kv_slo, keep: self.kv_keep }))
    }
}

/// Tokens of a prompt with which an adaptive stream measures this machine's speeds of recomputing and
/// decoding.
const SAMPLE: usize = 512;

/// Depth in tokens at which recomputing is measured, at most: attention to cached tokens then takes much of the
/// time, and the copy of the cache stays small.
const SAMPLE_DEPTH: usize = 4096;

/// Seconds without a byte after which the rest of a prefix is recomputed.
const STALL: f64 = 10.0;

impl PromptLoader {
    /// Fills a cache with a prompt, and returns the logits after it. The seconds are without the one-time
    /// measurement of this machine's speeds for an adaptive stream.
    pub fn fill(
        &self,
        model: &Model,
        rope: &Rope,
        decoder: &mut Decoder,
        cache: &mut dyn KvCache,
        (prompt, chunk): (&[u32], usize),
    ) -> Result<(Vec<f32>, Prefilled)> {
        let sample = &prompt[..SAMPLE.min(prompt.len() / 2)];
        let speeds = match self.choice {
            Choice::Adaptive(_) if sample.len() > SINKS => {
                let planes = &self.open.profile;
                let encoded = EncodedContext::encode(model, rope, planes, sample, SAMPLE)?;
                let depth = SAMPLE_DEPTH.min(prompt.len() - sample.len());
                let prefill = encoded.recomputing(planes, decoder, cache, depth)?;
                Speeds { prefill, ..encoded.speeds() }
            }
            _ => Speeds::UNKNOWN,
        };
        let options = self.options(speeds, chunk);
        let begin = Instant::now();
        let filled = self.open.prompts().fill(decoder, cache, prompt, &options)?;
        let seconds = begin.elapsed().as_secs_f64();
        let prefix = self.report(prompt, &filled);
        Ok((filled.logits, Prefilled { seconds, prefix: Some(prefix) }))
    }

    /// The same on a GPU: the decoder has then chosen the token after the prompt.
    #[cfg(feature = "cuda")]
    pub fn fill_device(
        &self,
        decoder: &mut kv_llama_gpu::Decoder,
        (prompt, chunk): (&[u32], usize),
    ) -> Result<Prefilled> {
        if self.keep {
            return Err(Error::argument("--kv-keep runs on the CPU: pass --device cpu"));
        }
        let mut loader = decoder.loader(&self.open.profile)?;
        let speeds = match self.choice {
            Choice::Adaptive(_) => StreamTarget::speeds(decoder, &prompt[..prompt.len().min(SAMPLE_DEPTH)])?,
            Choice::Given(_) => Speeds::UNKNOWN,
        };
        let options = self.options(speeds, chunk);
        let begin = Instant::now();
        let filled = self.open.prompts().fill_device(decoder, &mut loader, prompt, &options)?;
        let seconds = begin.elapsed().as_secs_f64();
        let prefix = self.report(prompt, &filled);
        Ok(Prefilled { seconds, prefix: Some(prefix) })
    }

    fn options(&self, speeds: Speeds, chunk: usize) -> FillOptions {
        let stream = Options { choice: self.choice.clone(), batch: 1, timeout: STALL, fall_back: true };
        FillOptions { stream, speeds, chunk, keep: self.keep }
    }

    /// Reports how much of the prompt was loaded.
    fn report(&self, prompt: &[u32], filled: &Filled) -> Prefix {
        let levels = self.open.profile.levels();
        let (loaded, recomputed) = match &filled.trace {
            Some(trace) => trace.tokens(levels),
            None => (vec![0; levels], 0),
        };
        let events = filled.trace.iter().flat_map(|trace| &trace.events);
        let bytes = events.filter(|event| event.outcome == Outcome::Loaded).map(|event| event.bytes).sum();
        let seconds = filled.trace.as_ref().map_or(0.0, Trace::seconds);
        print_error(format_args!(
            "kv: loaded {} of {} ({}) in {seconds:.3} s{}{}, {} stored\n",
            loaded.iter().sum::<usize>(),
            count(prompt.len(), "token"),
            HumanBytes(bytes),
            if self.slo > 0.0 && seconds > self.slo { " (late)" } else { "" },
            recomputed_text(recomputed, filled.trace.as_ref()),
            count(filled.stored, "chunk")
        ));
        if let Some(e) = &filled.damage {
            print_error(format_args!("kv: {e}: what it stands for is computed\n"));
        }
        if let Some(e) = &filled.store_error {
            print_error(format_args!("kv: {e}\n"));
        }
        if filled.stored > 0
            && let Err(e) = self.open.describe()
        {
            print_error(format_args!("kv: {e}\n"));
        }
        Prefix { loaded, recomputed }
    }
}

/// The recomputed part of a prefix, and the first reason if it was not by choice.
fn recomputed_text(tokens: usize, trace: Option<&Trace>) -> String {
    let mut events = trace.iter().flat_map(|trace| &trace.events);
    let fault = events.find_map(|event| match &event.outcome {
        Outcome::Damaged(what) | Outcome::Failed(what) => Some(format!(" (chunk {}: {what})", event.chunk)),
        _ => None,
    });
    match tokens {
        0 => String::new(),
        tokens => format!(", {} recomputed{}", count(tokens, "token"), fault.unwrap_or_default()),
    }
}
