//! `kv compare`: the table of methods.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use kv_methods::Method;
use kv_reference::compare::{Sizes, check_room, compare};
use kv_reference::report::{html, table};
use kv_reference::{Error, Result};

use super::{
    DeviceArgs, Files, JsonArgs, ModelArgs, Shown, Stdout, TextArgs, at_least_one, check_calibration,
    check_profile_has_effect, few_tokens, load, print_error, progress, read_profile,
};

#[derive(Args)]
#[command(after_help = "Example:
  kv compare --model MODEL --text FILE --context 4096 --methods dense,int4,million:k=64x8:v=64x8

Methods and their settings: kv methods")]
pub struct Compare {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Tokens of the prompt
    #[arg(long, value_name = "N", default_value_t = 2048)]
    context: usize,
    /// Tokens to decode after it
    #[arg(long, value_name = "N", default_value_t = 192)]
    decode: usize,
    /// Maximum tokens to calibrate on, from the text before the prompt
    #[arg(long, value_name = "N", default_value_t = 4096)]
    calibration: usize,
    /// Methods to compare [default: every method with a near-lossless and an aggressive setting; with
    /// --device cuda those that a GPU supports]
    #[arg(long, value_name = "LIST")]
    methods: Option<String>,
    /// Use this profile (`kv calibrate`) and calibrate nothing
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Seed of the pass keys
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
    /// Write one HTML page with the table and two charts
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
}

/// The options that give more tokens to calibrate on.
const MORE_TOKENS: &str =
    "a longer --text, a larger --calibration, a smaller --context or --decode, or a --profile";

impl Compare {
    const fn sizes(&self) -> Sizes {
        Sizes { context: self.context, decode: self.decode, calibration: self.calibration }
    }

    pub fn run(self, out: &mut Stdout) -> Result<()> {
        if self.context == 0 || self.decode == 0 {
            return Err(Error::argument("context and decode need at least one token"));
        }
        let methods = self.methods.as_deref().map(Method::parse_list).transpose()?;
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        self.text.add_to(&mut files);
        self.profile.iter().for_each(|path| files.reads("--profile", path));
        let json = files.writes("--json", self.json.json.clone())?;
        let report = files.writes("--report", self.report.clone())?;
        let checkpoint = self.model.open()?;
        let (config, sizes) = (&checkpoint.config, self.sizes());
        let chunk = self.chunk.map_or(self.context, NonZeroUsize::get);
        let placement = self.device.place(config, methods.as_deref(), chunk)?;
        placement.check_chunk(self.chunk)?;
        let methods = placement.placed.methods();
        check_profile_has_effect(self.profile.as_ref(), methods)?;
        check_room(&checkpoint.name, config, (self.context, sizes.room()), "--context")?;
        let profile = read_profile(self.profile.as_ref(), config, methods)?;
        let (name, tokens) = self.text.tokens(checkpoint.tokenizer()?)?;
        let start = sizes.start(config, tokens.len())?;
        few_tokens(check_calibration(start, methods, profile.as_ref()), MORE_TOKENS)?;
        let model = load(checkpoint)?;
        let profile = profile.map(|profile| profile.of(&model)).transpose()?;
        let bar = progress();
        let comparison = compare(
            &model,
            (&name, &tokens),
            &placement.placed,
            sizes,
            profile,
            self.seed,
            placement.gpu.as_ref(),
            &Shown(&bar),
        );
        let comparison = few_tokens(comparison, MORE_TOKENS)?;
        bar.finish_and_clear();
        for note in placement.note.iter().chain(&comparison.notes) {
            print_error(format_args!("kv: {note}\n"));
        }
        out.print(table(&comparison));
        json.write_json(&comparison)?;
        report.write(|_| Ok(html(&comparison)?.into_bytes()))
    }
}
