//! `kv generate`: continues a prompt.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use kv_llama::{Decoder, HeadFit, KvCache, Sampler, Sampling};
#[cfg(feature = "cuda")]
use kv_llama_gpu::ranks::Lockstep;
#[cfg(feature = "cuda")]
use kv_methods::Place;
use kv_methods::{Method, Prepared, Profile};
use kv_model::{Checkpoint, Message, Model, Rope, TextStream, files};
#[cfg(feature = "cuda")]
use kv_reference::compare::OnGpu;
use kv_reference::{Error, Result};
use serde::Serialize;

use super::cache::CacheArgs;
use super::chat::Chat;
use super::device::Placement;
#[cfg(feature = "store")]
use super::prefix::{KvArgs, PromptLoader};
use super::prefix::{Prefilled, Prefix};
use super::sampling::SamplingArgs;
use super::stop::StopStrings;
use super::{
    Files, JsonArgs, MOST_TEXT, ModelArgs, Stdout, check_profile_has_effect, load, no_effect, of_option,
    print_error, read_profile,
};

#[derive(Args)]
#[command(
    after_help = "Example:\n  kv generate \"We, the people\" --method pqcache:ratio=0.2 --tokens 32\n\n\
                  Methods and their settings: kv methods"
)]
pub struct Generate {
    /// Text to continue; - reads it from standard input
    #[arg(value_name = "PROMPT", required_unless_present = "file")]
    prompt: Option<String>,
    /// File with the text to continue, or - for standard input; trailing newlines are removed
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    cache: CacheArgs,
    /// Put the prompt into the model's chat template, as what the user says
    #[arg(long)]
    chat: bool,
    /// With --chat, what the system says first
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,
    /// Maximum tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    tokens: usize,
    /// End the text before this string; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    #[command(flatten)]
    sampling: SamplingArgs,
    #[cfg(feature = "store")]
    #[command(flatten)]
    kv: KvArgs,
    #[command(flatten)]
    json: JsonArgs,
}

/// Whether a path names standard input.
fn is_stdin(path: &Path) -> bool {
    ["-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"].iter().any(|name| path == Path::new(name))
}

#[derive(Serialize)]
struct Generated<'a> {
    prompt: &'a str,
    method: String,
    prompt_tokens: usize,
    prompt_seconds: f64, // from the tokens of the prompt to the logits after it
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<Prefix>,
    tokens: Vec<u32>,
    token_seconds: Vec<f64>, // the first is that of sampling after the prompt
    text: String,
}

impl Generate {
    pub fn run(mut self, out: &mut Stdout) -> Result<()> {
        let sampling = self.sampling.sampling()?;
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        self.file.iter().filter(|path| !is_stdin(path)).for_each(|path| files.reads("--file", path));
        self.cache.add_to(&mut files);
        #[cfg(feature = "store")]
        self.kv.add_to(&mut files)?;
        let json = files.writes("--json", self.json.json.clone())?;
        self.check_effects()?;
        let checkpoint = self.model.open()?;
        let placement = self.cache.place(&checkpoint)?;
        #[cfg(feature = "store")]
        self.kv.check(&self.cache.method)?;
        let profile = read_profile(self.cache.profile.as_ref(), &checkpoint.config, &self.methods()?)?;
        let (text, tokenizer) = (self.prompt()?, checkpoint.tokenizer()?);
        let (text, prompt) = match self.chat {
            true => {
                let text = self.chat_text(text, &checkpoint)?;
                let tokens = tokenizer.encode_chat(&text)?;
                (text, tokens)
            }
            false => {
                let tokens = tokenizer.encode(&text)?;
                (text, tokens)
            }
        };
        if prompt.is_empty() {
            return Err(Error::argument("the prompt is empty"));
        }
        if tokenizer.has_two_bos(&prompt)? {
            print_error("kv: the prompt begins with the BOS token twice: the tokenizer adds one\n");
        }
        let length = prompt.len().saturating_add(self.tokens);
        checkpoint.check_context(length)?;
        let model = load(checkpoint)?;
        let profile = profile.map(|profile| profile.of(&model)).transpose()?;
        let rope = Arc::new(CacheArgs::rope(&model.config, length));
        let profile = self.cache.calibrated(profile, &model, &rope)?;
        let notes: Vec<String> = placement.note.clone().into_iter().chain(placement.placed.notes()).collect();
        let Started { model, prefilled, mut next, misfits } =
            self.start(placement, model, rope, &profile, (&prompt, sampling))?;
        notes.iter().chain(&misfits).for_each(|note| print_error(format_args!("kv: {note}\n")));
        let (mut tokens, mut token_seconds, mut shown) = (vec![], vec![], String::new());
        let mut stream = TextStream::new(model.tokenizer()?);
        let mut stop = StopStrings::new(self.stop.clone());
        while tokens.len() < self.tokens {
            let begin = Instant::now();
            let token = next()?;
            if model.config.eos_tokens.contains(&token) {
                break;
            }
            tokens.push(token);
            token_seconds.push(begin.elapsed().as_secs_f64());
            let part = stop.push(&stream.push(token)?);
            shown.push_str(&part);
            out.print(part);
            // Nobody would see the rest.
            if stop.is_met() || out.has_failed() && self.json.json.is_none() {
                break;
            }
        }
        let rest = stop.finish(&stream.finish());
        shown.push_str(&rest);
        out.print(rest);
        out.print("\n");
        json.write_json(&Generated {
            prompt: &text,
            method: self.cache.method.spec(),
            prompt_tokens: prompt.len(),
            prompt_seconds: prefilled.seconds,
            kv: prefilled.prefix,
            tokens,
            token_seconds,
            text: shown,
        })
    }

    /// Rejects options that the others leave without effect.
    fn check_effects(&self) -> Result<()> {
        let methods = vec![self.cache.method.clone()];
        #[cfg(feature = "store")]
        self.kv.check_devices(&self.cache.device)?;
        #[cfg(feature = "store")]
        let methods = [methods, self.kv.levels()?].concat();
        check_profile_has_effect(self.cache.profile.as_ref(), &methods)
    }

    /// The text of the prompt.
    fn prompt(&self) -> Result<String> {
        let (name, (mut text, more)) = match (&self.prompt, &self.file) {
            (Some(prompt), _) if prompt != "-" => return Ok(prompt.clone()),
            (None, Some(path)) if !is_stdin(path) => {
                (path.as_path(), of_option("--file", files::read_text_start(path, MOST_TEXT))?)
            }
            _ => (Path::new("standard input"), files::read_stdin_start(MOST_TEXT)?),
        };
        if more {
            return Err(Error::file(name, format!("has more than {MOST_TEXT} bytes")));
        }
        text.truncate(text.trim_end_matches('\n').len());
        Ok(text)
    }

    /// The text of a chat in which the user says `prompt`, up to where the model answers.
    fn chat_text(&self, prompt: String, checkpoint: &Checkpoint) -> Result<String> {
        let system = self.system.iter().map(|text| Message::new("system", text));
        let messages: Vec<_> = system.chain([Message::new("user", prompt)]).collect();
        let chat = Chat::of(checkpoint)?;
        let (text, left_out) = chat.text(&messages)?;
        match left_out {
            None => Ok(text),
            Some(message) => {
                let option = if message.role == "system" { "--system" } else { "the prompt" };
                Err(no_effect(option, &format!("with --chat: {}", chat.leaves_out())))
            }
        }
    }

    /// Runs the prompt.
    fn start(
        &self,
        placement: Placement,
        model: Arc<Model>,
        rope: Arc<Rope>,
        profile: &Profile,
        (prompt, sampling): (&[u32], Sampling),
    ) -> Result<Started> {
        #[cfg(feature = "store")]
        let kv = self.kv.open(&model, self.cache.profile.is_some().then_some(profile))?;
        #[cfg(not(feature = "cuda"))]
        drop(placement); // it has no GPU
        #[cfg(feature = "cuda")]
        if let Some(OnGpu { ranks, chunk, .. }) =
            placement.gpu.filter(|_| self.cache.method.place() == Place::Cuda)
        {
            let make = self.cache.device_decoder(&model, profile, (1, prompt.len() + self.tokens))?;
            let mut decoder = Lockstep::start(ranks, move |rank| {
                let mut decoder = make(rank)?;
                if sampling.is_plain() {
                    decoder.choose(sampling);
                }
                Result::Ok(decoder)
            })?;
            let fill = |decoder: &mut Lockstep<kv_llama_gpu::Decoder>| {
                #[cfg(feature = "store")]
                if let (Some(kv), Some(decoder)) = (&kv, decoder.as_alone()) {
                    return kv.fill_device(decoder, (prompt, chunk));
                }
                prefilled_on_device(decoder, (prompt, chunk))
            };
            let prefilled = fill(&mut decoder)?;
            let next = on_device(decoder, Sampler::after(sampling, prompt));
            return Ok(Started { model, prefilled, next, misfits: None });
        }
        #[cfg(feature = "store")]
        if let Some(kv) = &kv {
            return self.over_store(kv, model, rope, profile, (prompt, sampling));
        }
        let Prepared { model, mut cache } = self.cache.method.prepare(&model, &rope, profile)?;
        let mut decoder = Decoder::new(model.clone(), rope);
        let mut logits = vec![];
        let begin = Instant::now();
        for chunk in prompt.chunks(self.cache.chunk()) {
            logits = decoder.prefill(chunk, cache.as_mut())?.to_vec();
        }
        let prefilled = Prefilled { seconds: begin.elapsed().as_secs_f64(), prefix: None };
        let misfits = self.misfits(cache.as_ref());
        Ok(Started {
            model,
            prefilled,
            next: sampled(decoder, cache, logits, Sampler::after(sampling, prompt)),
            misfits,
        })
    }

    /// As [`Self::start`], with the prompt over a store of caches.
    #[cfg(feature = "store")]
    fn over_store(
        &self,
        kv: &PromptLoader,
        model: Arc<Model>,
        rope: Arc<Rope>,
        profile: &Profile,
        (prompt, sampling): (&[u32], Sampling),
    ) -> Result<Started> {
        let Prepared { model, mut cache } = self.cache.method.prepare(&model, &rope, profile)?;
        let mut decoder = Decoder::new(model.clone(), rope.clone());
        let chunk = self.cache.chunk().min(prompt.len());
        let (logits, prefilled) = kv.fill(&model, &rope, &mut decoder, cache.as_mut(), (prompt, chunk))?;
        let misfits = self.misfits(cache.as_ref());
        Ok(Started {
            model,
            prefilled,
            next: sampled(decoder, cache, logits, Sampler::after(sampling, prompt)),
            misfits,
        })
    }

    /// A warning if the method's codes do not fit the prompt.
    fn misfits(&self, cache: &dyn KvCache) -> Option<String> {
        HeadFit::warning(&self.cache.method.spec(), &cache.fits())
    }

    /// All methods that take entries of the profile: that of the cache, and the levels of the store.
    fn methods(&self) -> Result<Vec<Method>> {
        let methods = [self.cache.method.clone()];
        #[cfg(feature = "store")]
        let methods = methods
            .into_iter()
            .chain(self.kv.levels()?.into_iter().filter(|level| *level != self.cache.method));
        Ok(methods.into_iter().collect())
    }
}

/// A prompt that has been run.
struct Started {
    model: Arc<Model>, // for decoding
    prefilled: Prefilled,
    next: Next,
    misfits: Option<String>,
}

/// The next token: at first the one after the prompt.
type Next = Box<dyn FnMut() -> Result<u32>>;

/// Samples tokens from `logits` after a prompt, then from those of each step.
fn sampled(
    mut decoder: Decoder,
    mut cache: Box<dyn KvCache>,
    mut logits: Vec<f32>,
    mut sampler: Sampler,
) -> Next {
    let mut last = None;
    Box::new(move || {
        if let Some(token) = last {
            logits = decoder.step(token, cache.as_mut())?.to_vec();
        }
        let token = sampler.sample(&logits);
        last = Some(token);
        Ok(token)
    })
}

/// Runs a prompt on a GPU.
#[cfg(feature = "cuda")]
fn prefilled_on_device(
    decoder: &mut Lockstep<kv_llama_gpu::Decoder>,
    (prompt, chunk): (&[u32], usize),
) -> Result<Prefilled> {
    let (begin, prompts) = (Instant::now(), [prompt.to_vec()]);
    decoder.call(move |decoder| {
        decoder.prefill(&prompts, chunk)?;
        decoder.next_tokens() // waits
    })?;
    Ok(Prefilled { seconds: begin.elapsed().as_secs_f64(), prefix: None })
}

/// Tokens after a prompt on a GPU, which samples them itself if it can.
#[cfg(feature = "cuda")]
fn on_device(mut decoder: Lockstep<kv_llama_gpu::Decoder>, mut sampler: Sampler) -> Next {
    let (is_plain, mut last) = (sampler.sampling().is_plain(), None);
    Box::new(move || {
        if let Some(token) = last {
            decoder.call(move |decoder| {
                if !is_plain {
                    decoder.feed(&[token])?;
                }
                decoder.step()
            })?;
        }
        let token = match is_plain {
            true => decoder.call(|decoder| decoder.next_tokens())?[0],
            false => sampler.sample(&decoder.call(|decoder| decoder.logits())?),
        };
        last = Some(token);
        Ok(token)
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        generate: Generate,
    }

    #[test]
    fn a_memory_limit_makes_hybrid_the_default() {
        let method = |options: &str| {
            let line = format!("generate prompt {options}");
            Line::try_parse_from(line.split_whitespace()).unwrap().generate.cache.method.spec()
        };
        let spec = |text: &str| text.parse::<Method>().unwrap().spec();
        assert_eq!(method(""), spec("dense:dtype=f16"));
        assert_eq!(method("--device-memory 24GiB"), spec("hybrid"));
        assert_eq!(method("--device-memory 24GiB --method dense"), spec("dense"));
    }
}
