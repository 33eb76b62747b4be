//! `kv compare`: the table of methods.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::Args;
use kv_reference::compare::{Sizes, compare};
use kv_reference::method::{DEFAULT_METHODS, Method};
use kv_reference::report::{html, table};
use kv_reference::{Error, Result};

use super::{
    DeviceArgs, Files, JsonArgs, ModelArgs, Shown, Stdout, TextArgs, at_least_one, check_profile_has_effect,
    few_tokens, load_profile, print_error, progress,
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
    /// Methods to compare [default: every method with a near-lossless and an aggressive setting]
    #[arg(long, value_name = "LIST", default_value = DEFAULT_METHODS, hide_default_value = true)]
    methods: String,
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

impl Compare {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        if self.context == 0 || self.decode == 0 {
            return Err(Error::argument("context and decode need at least one token"));
        }
        let methods = Method::parse_list(&self.methods)?;
        let (gpu, note) = self.device.gpu_for(self.chunk, self.context)?;
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        self.text.add_to(&mut files);
        self.profile.iter().for_each(|path| files.reads("--profile", path));
        let json = files.writes("--json", self.json.json)?;
        let report = files.writes("--report", self.report)?;
        check_profile_has_effect(self.profile.as_ref(), &methods)?;
        let model = self.model.load()?;
        let profile = self.profile.map(|path| load_profile(&path, &model)).transpose()?;
        let (name, tokens) = self.text.tokens(&model)?;
        let sizes = Sizes { context: self.context, decode: self.decode, calibration: self.calibration };
        let bar = progress();
        let comparison = compare(
            &model,
            (&name, &tokens),
            &methods,
            sizes,
            profile,
            self.seed,
            gpu.as_ref(),
            &Shown(&bar),
        );
        let comparison = few_tokens(
            comparison,
            "a longer --text, a larger --calibration, a smaller --context or --decode, or a --profile",
        )?;
        bar.finish_and_clear();
        for note in note.iter().chain(&comparison.notes) {
            print_error(format_args!("kv: {note}\n"));
        }
        out.print(table(&comparison));
        json.write_json(&comparison)?;
        report.write(|_| Ok(html(&comparison)?.into_bytes()))
    }
}
