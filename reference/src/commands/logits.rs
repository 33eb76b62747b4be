//! `kv logits`: the logits of every position.

use clap::Args;
use kv_llama::{logits, prefill};
use kv_model::Rope;
use kv_reference::{Error, Result};
use serde::Serialize;

use super::{Files, JsonArgs, ModelArgs, Stdout, load};

#[derive(Args)]
#[command(after_help = "Example:\n  kv logits --model MODEL --tokens 1,17,42 --json logits.json")]
pub struct Logits {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids, separated by commas
    #[arg(long, value_name = "LIST", value_delimiter = ',', required_unless_present = "text")]
    tokens: Vec<u32>,
    /// Text to take the tokens of instead
    #[arg(long, conflicts_with = "tokens")]
    text: Option<String>,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Serialize)]
struct Output<'a> {
    model: &'a str,
    tokens: &'a [u32],
    logits: Vec<&'a [f32]>, // (tokens, vocab_size)
}

impl Logits {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let mut files = Files::default();
        files.reads("--model", &self.model.path());
        let json = files.writes("--json", self.json.json)?;
        let checkpoint = self.model.open()?;
        let tokens = match &self.text {
            Some(text) => checkpoint.tokenizer()?.encode(text)?,
            None => self.tokens,
        };
        if tokens.is_empty() {
            return Err(Error::argument("there are no tokens: --text is empty"));
        }
        checkpoint.check_tokens(&tokens)?;
        checkpoint.check_context(tokens.len())?;
        let model = load(checkpoint)?;
        let rope = Rope::new(&model.config, tokens.len());
        let hidden = prefill(&model, &rope, &tokens, &mut |_, _| Ok(()))?;
        let all = logits(&model, &hidden)?;
        let rows: Vec<&[f32]> = all.chunks_exact(model.config.vocab_size).collect();
        for (position, row) in rows.iter().enumerate() {
            let best = kv_llama::ops::argmax(row);
            out.print(format_args!("position {position}: most likely token {best}, logit {}\n", row[best]));
        }
        json.write_json(&Output { model: &model.name, tokens: &tokens, logits: rows })
    }
}
