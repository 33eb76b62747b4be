//! `kv fetch`: a model of the Hugging Face Hub.

#[cfg(feature = "fetch")]
mod hub;

use std::path::{Path, PathBuf};

use clap::Args;
use kv_reference::{Error, Result};
use serde::Serialize;

use super::{Files, JsonArgs, Stdout};

#[derive(Args)]
#[command(
    after_help = "Example:\n  kv fetch HuggingFaceTB/SmolLM2-135M-Instruct\n\nPrints the path to pass as --model."
)]
pub struct Fetch {
    /// A Llama-family model, named as on the hub: its config, tokenizer and safetensors are fetched
    #[arg(value_name = "ORG/NAME")]
    id: String,
    /// Folder to keep models in [default: kv-reference in the user's cache folder]
    #[arg(long, value_name = "DIR")]
    cache: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Serialize)]
struct Fetched<'a> {
    model: &'a Path,
}

impl Fetch {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let json = Files::default().writes("--json", self.json.json)?;
        check_id(&self.id)?;
        let cache = match self.cache {
            Some(cache) => cache,
            None => user_cache()?.join("kv-reference"),
        };
        let model = fetch(&cache, &self.id)?;
        out.print(format_args!("{}\n", model.display()));
        json.write_json(&Fetched { model: &model })
    }
}

#[cfg(feature = "fetch")]
use hub::fetch;

#[cfg(not(feature = "fetch"))]
fn fetch(_: &Path, _: &str) -> Result<PathBuf> {
    Err(kv_model::Error::Feature { what: "`kv fetch`", feature: "fetch" }.into())
}

fn user_cache() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".cache")))
        .or_else(|| set("LOCALAPPDATA"))
        .ok_or_else(|| Error::argument("no cache folder is known here: give one with --cache"))
}

/// Rejects names that are not `ORG/NAME` by the Hub's rules: the name becomes part of a URL and of a path.
fn check_id(id: &str) -> Result<()> {
    let is_name = |name: &str| {
        let (first, last) = (name.chars().next(), name.chars().last());
        let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let edge = |c: Option<char>| c.is_some_and(|c| inner(c) && !matches!(c, '.' | '-'));
        name.len() <= 96
            && edge(first)
            && edge(last)
            && name.chars().all(inner)
            && !name.contains("..")
            && !name.contains("--")
    };
    match id.split_once('/') {
        Some((org, name)) if is_name(org) && is_name(name) => Ok(()),
        _ => Err(Error::Argument(format!("`{id}` is not ORG/NAME"))),
    }
}
