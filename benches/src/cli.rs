//! Options and output that the benches of whole loops share.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytesize::ByteSize;
use clap::Args;
use comfy_table::{Table, presets};
use kv_device::Gpu;
use kv_llama_gpu::RANDOM_MODELS;
use kv_model::Model;
use kv_reference::{Error, Result};
use serde::Serialize;

/// The device of a bench.
#[derive(Args)]
pub struct DeviceArgs {
    /// Where to run: auto takes the first GPU, or the CPU if there is none
    #[arg(long, value_name = "auto|cpu|cuda[:N]", default_value = "auto")]
    device: String,
    /// Limit of GPU memory, such as 24GiB: more is an error [default: all]
    #[arg(long, value_name = "SIZE")]
    device_memory: Option<ByteSize>,
}

impl DeviceArgs {
    /// The GPU; none for the CPU.
    ///
    /// # Errors
    /// [`Error::Argument`] for another device, and those of opening a GPU that is named.
    pub fn gpu(&self) -> Result<Option<Arc<Gpu>>> {
        let limit =
            self.device_memory.map_or(usize::MAX, |limit| usize::try_from(limit.0).unwrap_or(usize::MAX));
        let open = |ordinal: usize| Gpu::open_within(ordinal, limit);
        let gpu = match self.device.as_str() {
            "auto" => open(0).ok(),
            "cpu" => None,
            "cuda" => Some(open(0)?),
            device => match device.strip_prefix("cuda:").and_then(|ordinal| ordinal.parse().ok()) {
                Some(ordinal) => Some(open(ordinal)?),
                None => return Err(Error::argument("--device must be auto, cpu, cuda or cuda:N")),
            },
        };
        Ok(gpu.map(Arc::new))
    }

    /// The GPU of a bench that runs nowhere else.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is none; as [`Self::gpu`].
    pub fn require_gpu(&self) -> Result<Arc<Gpu>> {
        self.gpu()?.ok_or_else(|| Error::argument("this bench times a GPU, and there is none (--device)"))
    }
}

/// The model of a bench.
#[derive(Args)]
pub struct ModelArgs {
    /// Hugging Face folder or GGUF file [default: the shipped tiny-llama-12m]
    #[arg(long, value_name = "DIR|FILE")]
    model: Option<PathBuf>,
    /// A model shape with hashed weights: llama-2-7b, llama-3.1-8b, llama-3.1-70b or llama-3.1-70b/8
    #[arg(long, value_name = "NAME", conflicts_with = "model")]
    random: Option<String>,
}

impl ModelArgs {
    /// The name of the shape, if there are no weights.
    ///
    /// # Errors
    /// [`Error::Argument`] for a name that is not of one.
    pub fn random(&self) -> Result<Option<&str>> {
        match self.random.as_deref() {
            Some(name) if !RANDOM_MODELS.contains(&name) => {
                let known = RANDOM_MODELS.join(", ");
                Err(Error::Argument(format!("--random: no random model `{name}`, only {known}")))
            }
            random => Ok(random),
        }
    }

    /// Loads the checkpoint.
    ///
    /// # Errors
    /// Those of [`Model::load`].
    pub fn load(&self) -> Result<Model> {
        Ok(Model::load(&self.model.clone().unwrap_or_else(|| asset("tiny-llama-12m")))?)
    }
}

/// A file for the result.
#[derive(Args)]
pub struct JsonArgs {
    /// Write the result as JSON
    #[arg(long, value_name = "FILE", global = true)]
    json: Option<PathBuf>,
}

impl JsonArgs {
    /// Writes the result, if a file is named.
    ///
    /// # Errors
    /// Those of writing it.
    pub fn write(&self, result: &impl Serialize) -> Result<()> {
        let Some(path) = &self.json else { return Ok(()) };
        let mut text = serde_json::to_vec_pretty(result).map_err(|e| Error::file(path, e))?;
        text.push(b'\n');
        std::fs::write(path, text).map_err(|e| Error::io(path, e))
    }
}

/// A file of the reference's assets: the model and text that are taken where none is named.
#[must_use]
pub fn asset(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../reference/assets").join(name)
}

/// A table for the terminal.
#[must_use]
pub fn table<const N: usize>(header: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_header(header).add_rows(rows);
    table.trim_fmt()
}

/// Rejects a number unless it is finite and `holds`: what it must be is `what`.
///
/// # Errors
/// [`Error::Argument`].
pub fn check_number(option: &str, value: f64, what: &str, holds: impl Fn(f64) -> bool) -> Result<()> {
    match value.is_finite() && holds(value) {
        true => Ok(()),
        false => Err(Error::Argument(format!("{option} must be {what}, not {value}"))),
    }
}
