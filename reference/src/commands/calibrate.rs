//! `kv calibrate`: a profile from a text.

use std::path::PathBuf;

use clap::Args;
use kv_methods::{DEFAULT_METHODS, KindOfText, Method, calibrated_on};
use kv_model::Rope;
use kv_reference::{Error, Result};
use serde::Serialize;

use super::{
    CalibrationTextArgs, Files, JsonArgs, ModelArgs, Stdout, check_calibration, few_tokens, load, progress,
};

#[derive(Args)]
#[command(
    after_help = "Example:\n  kv calibrate million.profile --text prose.txt --text code.txt --methods million \
                  --tokens 8192\n  kv compare --text other.txt --methods million --profile million.profile\n\n\
                  On the same text kv compare and kv eval begin at token 4096 (--calibration) and may see calibration \
                  tokens.\n\nMethods and their settings: kv methods"
)]
pub struct Calibrate {
    /// Profile to write; an existing file is kept unless --replace is given
    #[arg(value_name = "FILE")]
    out: PathBuf,
    /// Replace FILE and lose all its entries, including those of other methods
    #[arg(long)]
    replace: bool,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: CalibrationTextArgs,
    /// Tokens to use, from the start of the text or of each of several [default: 4096, or all that the texts
    /// have and the model takes]
    #[arg(long, value_name = "N")]
    tokens: Option<usize>,
    /// Methods to prepare for [default: those of `kv compare`]
    #[arg(long, value_name = "LIST", default_value = DEFAULT_METHODS, hide_default_value = true)]
    methods: String,
    #[command(flatten)]
    json: JsonArgs,
}

/// Tokens to use, unless there are fewer.
const DEFAULT_TOKENS: usize = 4096;

/// Maximum positions of the tables: a configuration may claim any length.
const MOST_POSITIONS: usize = 1 << 17;

#[derive(Serialize)]
struct Summary<'a> {
    model: &'a str,
    model_hash: &'a str,
    texts: &'a [KindOfText],
    tokens: usize,
    entries: usize,
}

/// The options that give more tokens.
const MORE_TOKENS: &str = "a longer --text or more --tokens";

impl Calibrate {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let methods = Method::parse_list(&self.methods)?;
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        self.text.add_to(&mut files);
        files.writes("FILE", Some(self.out.clone()))?;
        let json = files.writes("--json", self.json.json)?;
        if !self.replace && self.out.exists() {
            let what = format!("{} exists: name a new file, or pass --replace", self.out.display());
            return Err(Error::Argument(what));
        }
        let checkpoint = self.model.open()?;
        let fitted = |method: &Method| method.fitted(&checkpoint.config);
        let methods = methods.iter().map(fitted).collect::<kv_methods::Result<Vec<_>>>()?;
        if !methods.iter().any(Method::needs_profile) {
            return Err(Error::argument("none of these methods needs a profile"));
        }
        self.tokens.map_or(Ok(()), |n| checkpoint.check_context(n))?;
        let most = self.tokens.unwrap_or(DEFAULT_TOKENS.min(checkpoint.config.max_seq_len));
        let text = self.text.read(checkpoint.tokenizer()?, most)?;
        let n = text.tokens.len();
        if let Some(asked) = self.tokens.filter(|&asked| asked > n) {
            return Err(Error::Argument(format!("--tokens {asked}: there are {n} tokens of text")));
        }
        few_tokens(check_calibration(n, &methods, None), MORE_TOKENS)?;
        let model = load(checkpoint)?;
        // The profile must hold for every position, not only those of the calibration tokens.
        let rope = Rope::new(&model.config, model.config.max_seq_len.min(MOST_POSITIONS).max(n));
        let bar = progress();
        bar.set_message(format!("calibrating {} methods on {n} tokens", methods.len()));
        let profile = calibrated_on(&model, &rope, &text, &methods);
        let profile = few_tokens(profile, MORE_TOKENS)?;
        bar.finish_and_clear();
        profile.save(&self.out, &model)?;
        let names: Vec<&str> = profile.kinds().iter().map(|kind| kind.name.as_str()).collect();
        out.print(format_args!(
            "{}: {} entries for {} from {n} tokens of {}\n",
            self.out.display(),
            profile.len(),
            model.name,
            names.join(", ")
        ));
        json.write_json(&Summary {
            model: &model.name,
            model_hash: &model.hash,
            texts: profile.kinds(),
            tokens: n,
            entries: profile.len(),
        })
    }
}
